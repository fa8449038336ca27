"""Masks that are windows, prefixes, padding or documents: found by how they are made, and skipped where it pays."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import dcompile
from dcompile.capture.passes.dynamo import skip_masked_attention as skipping
from dcompile.capture.passes.dynamo.captured_nodes import ATTENTION
from dcompile.capture.passes.dynamo.causal_mask import recognize_causal_masks
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
from dcompile.capture.passes.dynamo.skip_masked_attention import skip_masked_attention
from tests.traits import change_cpu

S, WINDOW = 320, 24


def positions(q, k):
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])


def window(q, k, v, given):
    rows, columns = positions(q, k)
    return attention(q, k, v, attn_mask=(columns <= rows) & (columns > rows - WINDOW))


def window_of_triangles(q, k, v, given):
    ones = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    return attention(q, k, v, attn_mask=ones.tril() & ones.triu(-WINDOW + 1))


def both_sides(q, k, v, given):
    rows, columns = positions(q, k)
    return attention(q, k, v, attn_mask=(rows - columns).abs() < WINDOW)


def added(q, k, v, given):
    rows, columns = positions(q, k)
    mask = torch.zeros(q.shape[-2], k.shape[-2]).masked_fill((columns > rows) | (columns <= rows - WINDOW), -torch.inf)
    return attention(q, k, v, attn_mask=mask.to(q.dtype))


def least_number(q, k, v, given):
    """As Hugging Face's models add their mask to scores."""
    rows, columns = positions(q, k)
    allowed = (columns <= rows) & (columns > rows - WINDOW)
    mask = torch.where(allowed, torch.zeros((), dtype=q.dtype), torch.finfo(q.dtype).min)
    return attention(q, k, v, attn_mask=mask)


def padding(q, k, v, given):
    """As transformers makes it, from a mask of ones and zeros."""
    batch, rows, columns = (torch.arange(n) + 0 for n in (q.shape[0], q.shape[2], k.shape[2]))
    batch, rows, columns = batch[:, None, None, None], rows[None, None, :, None], columns[None, None, None, :]
    allowed = batch.new_ones((), dtype=torch.bool) & (columns <= rows)
    allowed = allowed & given.to(dtype=torch.bool)[batch, columns].to(rows.device)
    return attention(q, k, v, attn_mask=allowed.expand(-1, -1, q.shape[2], k.shape[2]))


def windowed_padding(q, k, v, given):
    rows, columns = positions(q, k)
    mask = (columns <= rows) & (columns > rows - WINDOW) & given[:, None, None, :].bool()
    return attention(q, k, v, attn_mask=mask)


def lengths(q, k, v, given):
    rows, columns = positions(q, k)
    return attention(q, k, v, attn_mask=(columns <= rows) & (columns < given.sum(-1)[:, None, None, None]))


def documents(q, k, v, given):
    """As transformers tells packed sequences apart, by positions that start again."""
    packed = (torch.diff(given, prepend=given[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    rows, columns = positions(q, k)
    mask = (columns <= rows) & (packed[:, None, :, None] == packed[:, None, None, :])
    return attention(q, k, v, attn_mask=mask)


def prefix(q, k, v, given):
    rows, columns = positions(q, k)
    return attention(q, k, v, attn_mask=(columns <= rows) | (columns < given[:, :1, None, None]))


KINDS = {
    window: "causal, window", window_of_triangles: "causal, window", both_sides: "causal, window",
    added: "causal, window", least_number: "causal, window", padding: "causal, padding",
    windowed_padding: "causal, window, padding", lengths: "prefix, causal", documents: "causal, documents",
}  # fmt: skip


def inputs(dtype=torch.float32, heads=2, length=S):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 16).to(dtype).requires_grad_() for _ in range(3))
    ones = torch.ones(2, length, dtype=torch.int64)
    ones[0, length - 40 :] = 0
    return q, k, v, ones


def given(function, length=S):
    """The function's last argument: positions of packed sequences, or a mask of ones and zeros."""
    ones = inputs(length=length)[3]
    if function is documents:
        return torch.stack([torch.arange(length) % 100, torch.arange(length) % 150])
    return ones * 200 if function is prefix else ones


def rewritten(function, *args, dynamic=False):
    """What the pass leaves: targets of calls, the number of nodes, and its notes. Results are checked."""
    seen = []

    def backend(gm, _inputs):
        recognize_causal_masks(gm)
        report = skip_masked_attention(gm)
        nest = NestedGraphs(gm)
        for graph in nest.graphs:
            graph.graph.lint()
        calls = [getattr(node.target, "__name__", str(node.target)) for node in nest.nodes() if _attends(node)]
        seen.append((calls, len(gm.graph.nodes), [*report.notes]))
        return gm.forward

    torch._dynamo.reset()
    expected = function(*args)
    for tensor in args[:3] if dynamic else ():
        torch._dynamo.mark_static(tensor, 1)
        torch._dynamo.mark_static(tensor, 3)
    found = torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    error = 2e-2 if args[0].dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, expected, atol=error, rtol=error)
    assert len(seen) == 1
    return seen[0]


def _attends(node):
    return node.op == "call_function" and ("attend" in getattr(node.target, "__name__", "") or node.target is ATTENTION)


@pytest.fixture
def always(monkeypatch):
    """Every call gains: blocks cost nothing."""
    monkeypatch.setattr(skipping, "CALL_US", 0.0)
    monkeypatch.setattr(skipping, "MIN_FLEX_GAIN_US", 0.0)
    monkeypatch.setattr(skipping, "MAX_PART", 0.999)


@pytest.fixture
def flex(monkeypatch):
    """The CPU has FlexAttention's kernels."""
    change_cpu(monkeypatch, masked_attention="flex", is_host=False)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("function", KINDS, ids=lambda f: f.__name__)
def test_recognized_on_cpus(function):
    q, k, v, _ = inputs()
    calls, _, notes = rewritten(function, q, k, v, given(function))
    assert calls == ["attend"]
    assert notes == [
        f"for speed: 1 attention calls skip what their mask ({KINDS[function]}) forbids: "
        "blocks of queries read the keys in their reach"
    ]


@pytest.mark.usefixtures("always", "flex")
@pytest.mark.parametrize("function", [padding, documents, lengths], ids=lambda f: f.__name__)
def test_recognized_for_flex_attention(function):
    q, k, v, _ = inputs(torch.bfloat16)
    calls, _, notes = rewritten(function, q, k, v, given(function))
    assert calls == ["attend_in_blocks"]
    assert notes == [
        f"for speed: 1 attention calls skip what their mask ({KINDS[function]}) forbids: "
        "FlexAttention's kernel computes them"
    ]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("function", [windowed_padding, added], ids=lambda f: f.__name__)
def test_sizes_may_be_symbols(function):
    q, k, v, _ = inputs()
    assert rewritten(function, q, k, v, given(function), dynamic=True)[0] == ["attend"]


@pytest.mark.usefixtures("always", "flex")
def test_symbolic_sizes_leave_the_mask_of_flex_attention():
    q, k, v, _ = inputs(torch.bfloat16)
    calls, _, notes = rewritten(window, q, k, v, given(window), dynamic=True)
    assert calls == ["scaled_dot_product_attention"]
    assert any("since sizes are symbols" in note for note in notes)


@pytest.mark.usefixtures("always")
def test_what_made_the_mask_is_gone():
    q, k, v, ones = inputs()
    _, nodes, _ = rewritten(window, q, k, v, ones)
    assert nodes == 5, "three inputs, the call, the output"


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("reentrant", [False, True])
def test_bodies_get_what_the_mask_reads(reentrant):
    def function(q, k, v, given):
        rows, columns = positions(q, k)
        mask = (columns <= rows) & given[:, None, None, :].bool()
        for _ in range(2):
            q = checkpoint(lambda q: attention(q, k, v, attn_mask=mask), q, use_reentrant=reentrant)
        return q

    q, k, v, ones = inputs()
    calls, _, notes = rewritten(function, q, k, v, ones)
    assert calls == ["attend"] * 2 and len(notes) == 1


@pytest.mark.usefixtures("always", "flex")
def test_layers_share_tables_and_heads():
    def function(q, k, v, given):
        rows, columns = positions(q, k)
        mask = (columns <= rows) & (columns > rows - WINDOW)
        k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 4, S, 16) for x in (k, v))
        for _ in range(2):
            q = attention(q, k, v, attn_mask=mask)
        return q

    q, *_ = inputs(torch.bfloat16, heads=4)
    _, k, v, ones = inputs(torch.bfloat16, heads=2)
    calls, nodes, _ = rewritten(function, q, k, v, ones)
    assert calls == ["attend_in_blocks"] * 2
    assert nodes == 3 + 1 + 8 + 2 + 1, "inputs, the tables and their eight parts, two calls, the output"


def unknown(q, k, v, given):
    return attention(q, k, v, attn_mask=(q[0, 0] @ k[0, 0].T) > 0)


def bias(q, k, v, given):
    rows, columns = positions(q, k)
    return attention(q, k, v, attn_mask=((columns - rows) * 0.1).to(q.dtype))


def least_number_of_padding(q, k, v, given):
    mask = torch.where(given[:, None, None, :].bool(), torch.zeros((), dtype=q.dtype), torch.finfo(q.dtype).min)
    rows, columns = positions(q, k)
    return attention(q, k, v, attn_mask=torch.where(columns <= rows, mask, torch.finfo(q.dtype).min))


def written(q, k, v, given):
    rows, columns = positions(q, k)
    seen = given.bool()
    mask = (columns <= rows) & seen[:, None, None, :]
    seen.zero_()
    return attention(q, k, v, attn_mask=mask)


LEFT = {
    unknown: "it is a tensor that the model is given, or that an operation without a rule makes",
    bias: "its elements are not known from how it is made",
    least_number_of_padding: "it adds the least finite number, and a row may have no allowed key",
    written: "it is a tensor that the model is given, or that an operation without a rule makes",
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_others_stay_with_a_price(function, monkeypatch):
    monkeypatch.setattr(skipping, "MIN_NOTED_US", 0.0)
    q, k, v, ones = inputs()
    calls, _, (note,) = rewritten(function, q, k, v, ones)
    assert calls == [ATTENTION.__name__]
    assert note.startswith("1 attention calls keep their mask as a tensor of 0.") and LEFT[function] in note
    assert int(note.rpartition(" for ")[2].partition(" us")[0]) > 100


def test_a_price_is_that_of_all_pairs_and_of_reading_the_mask(monkeypatch):
    left = skipping._LeftMasks()
    left.add("it is odd", skipping._Costs(with_mask=2e-3, in_blocks=1e-3, mask_bytes=3 << 20), times=2)
    left.add("it is cheap", skipping._Costs(with_mask=1e-6, in_blocks=1e-6, mask_bytes=1), times=1)
    assert [*left.notes()] == [
        "2 attention calls keep their mask as a tensor of 3.0 MiB, since it is odd; "
        "they compute all pairs, for 4000 us of a step by the cost model"
    ]


def test_a_wide_window_stays_a_mask():
    """Where most pairs are allowed, and where there are few, blocks do not pay."""

    def wide(q, k, v, given):
        rows, columns = positions(q, k)
        return attention(q, k, v, attn_mask=(rows - columns).abs() < S - 20)

    q, k, v, ones = inputs()
    assert rewritten(wide, q, k, v, ones)[::2] == ([ATTENTION.__name__], [])
    q, k, v, ones = inputs(length=32)
    assert rewritten(window, q, k, v, ones)[0] == [ATTENTION.__name__]


@pytest.mark.usefixtures("always")
def test_dropout_stays_with_the_library():
    def function(q, k, v, given):
        rows, columns = positions(q, k)
        mask = (columns <= rows) & (columns > rows - WINDOW)
        return attention(q, k, v, attn_mask=mask, dropout_p=0.5) * 0

    q, k, v, ones = inputs()
    calls, _, notes = rewritten(function, q, k, v, ones)
    assert calls == [ATTENTION.__name__] and "since attention has dropout" in notes[0]


def test_compiled_gradients_and_receipt():
    """A long window pays by itself."""
    torch.manual_seed(0)
    theirs = [torch.randn(1, 2, 1024, 32, requires_grad=True) for _ in range(3)]
    ours = [tensor.detach().clone().requires_grad_() for tensor in theirs]
    compiled = dcompile.compile(window)
    window(*theirs, None).square().sum().backward()
    compiled(*ours, None).square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4)
    receipt = dcompile.receipt(compiled)
    assert (
        "1 attention calls skip what their mask (causal, window) forbids" in receipt.details() and not receipt.fallbacks
    )
    assert receipt.graphs_uncacheable == 0


@pytest.mark.usefixtures("always", "flex")
def test_flex_attention_in_a_compiled_graph():
    torch.manual_seed(0)
    theirs = [torch.randn(1, 2, 256, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    ours = [tensor.detach().clone().requires_grad_() for tensor in theirs]
    ones = torch.ones(1, 256, dtype=torch.int64)
    ones[:, 200:] = 0
    compiled = dcompile.compile(windowed_padding)
    windowed_padding(*theirs, ones).square().sum().backward()
    compiled(*ours, ones).square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=0.1, rtol=0.02)
    assert "FlexAttention's kernel computes them" in dcompile.receipt(compiled).details()


@pytest.mark.usefixtures("always")
def test_distributed_tensors_stay_with_the_library():
    """Of a tensor that wraps others, as a DTensor does, operators of dcompile's know nothing."""
    reports = []

    def backend(gm, _inputs):
        reports.append(skip_masked_attention(gm))
        return gm.forward

    torch._dynamo.reset()
    wrapped = [TwoTensor(x.detach(), x.detach()) for x in inputs()[:3]]
    torch.compile(window, backend=backend)(*wrapped, None)
    assert [report.changes for report in reports] == [0]
    assert "since queries and keys are distributed tensors" in reports[0].notes[0]
