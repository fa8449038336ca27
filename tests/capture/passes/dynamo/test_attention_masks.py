"""Masks made of comparisons of positions become is_causal, or are skipped where it pays; all others stay."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import dcompile
from dcompile.capture.passes.dynamo import attention_masks as skipping
from dcompile.capture.passes.dynamo.attention_masks import (
    BLOCK_MASK,
    recognize_causal_masks,
    skip_masked_attention,
    specialize_block_sizes,
)
from dcompile.capture.passes.dynamo.captured_nodes import ATTENTION
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
from dcompile.codegen.lower.elements import ElementTracer
from dcompile.compat.flex import SIDES
from tests.pass_inputs.graphs import sparse_attention
from tests.traits import change_cpu

OWN_MASKING = "attention calls were given a causal mask as a tensor; the kernel's own causal masking takes its place"

S = 12


def qkv(keys=S, requires_grad=False):
    torch.manual_seed(0)
    return [torch.randn(2, 3, n, 8, requires_grad=requires_grad) for n in (S, keys, keys)]


def rewritten(function, *args, dynamic=False):
    """The arguments (mask, is_causal) of each attention call after the pass, the number of nodes, and its notes."""
    seen = []

    def backend(gm, _inputs):
        notes = [*recognize_causal_masks(gm, ElementTracer).notes]
        gm.graph.lint()
        calls = [node for node in gm.graph.nodes if node.target is ATTENTION]
        seen.append(
            ([(c.kwargs.get("attn_mask"), c.kwargs.get("is_causal")) for c in calls], len(gm.graph.nodes), notes)
        )
        return gm.forward

    torch._dynamo.reset()
    expected = function(*args)
    torch.testing.assert_close(torch.compile(function, backend=backend, dynamic=dynamic)(*args), expected)
    assert len(seen) == 1
    return seen[0]


def by_tril(q, k, v):
    return attention(q, k, v, attn_mask=torch.ones(S, S, dtype=torch.bool).tril())


def by_comparison(q, k, v):
    """As Hugging Face's models do it."""
    rows, columns = torch.arange(q.shape[-2]) + 0, torch.arange(k.shape[-2]) + 0
    mask = columns[None, None, None, :] <= rows[None, None, :, None]
    return attention(q, k, v, attn_mask=(mask & torch.ones((), dtype=torch.bool)).expand(2, -1, -1, -1))


def by_packing(q, k, v):
    """As Hugging Face's models ask whether several sequences were packed into a row, when nothing says so."""
    positions = torch.arange(q.shape[-2])[None].expand(2, -1)
    packed = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    at, rows, columns = torch.arange(2)[:, None, None, None], torch.arange(S)[:, None], torch.arange(S)
    mask = columns <= rows
    return attention(q, k, v, attn_mask=mask & packed[at, rows].__eq__(packed[at, columns]))


def by_addition(q, k, v):
    mask = torch.full((S, S), torch.finfo(torch.float32).min)
    return attention(q, k, v, attn_mask=torch.triu(mask, diagonal=1)[None, None])


def by_infinity(q, k, v):
    return attention(q, k, v, attn_mask=torch.zeros(S, S).masked_fill(torch.ones(S, S).triu(1) == 1, -torch.inf))


@pytest.mark.parametrize(
    "function", [by_tril, by_comparison, by_packing, by_addition, by_infinity], ids=lambda f: f.__name__
)
def test_causal(function):
    calls, nodes, notes = rewritten(function, *qkv())
    assert calls == [(None, True)]
    assert nodes == 5, "three inputs, the call, the output: what made the mask is gone"
    assert notes == [f"for speed: 1 {OWN_MASKING}"]


def test_more_keys_than_queries_count_from_the_upper_left():
    def function(q, k, v):
        return attention(q, k, v, attn_mask=torch.ones(S, S + 4, dtype=torch.bool).tril())

    assert rewritten(function, *qkv(S + 4))[0] == [(None, True)]


def test_a_mask_that_allows_everything_goes():
    def function(q, k, v):
        return attention(q, k, v, attn_mask=torch.zeros(S, S))

    assert rewritten(function, *qkv())[0] == [(None, False)]


def lower_right(q, k, v):
    return attention(q, k, v, attn_mask=torch.ones(S, S + 4, dtype=torch.bool).tril(4))


def window(q, k, v):
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    return attention(q, k, v, attn_mask=mask & torch.ones(S, S, dtype=torch.bool).triu(-3))


def one_element_off(q, k, v):
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    mask[3, 5] = True
    return attention(q, k, v, attn_mask=mask)


def filled_in_place(q, k, v):
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    view = mask[2:]
    view.logical_not_()
    return attention(q, k, v, attn_mask=mask)


def seen_before_it_is_filled(q, k, v):
    mask = torch.ones(S, S, dtype=torch.bool)
    view = mask[:, 3:]
    mask.tril_()
    return attention(q, k, v, attn_mask=mask) * view.any()


def filled_where_it_is_no_longer_read(q, k, v):
    mask = torch.ones(S, S, dtype=torch.bool).tril(3)
    result = attention(q, k, v, attn_mask=mask)
    mask.tril_()
    return result * mask[0, 2]


def a_bias_beside(q, k, v):
    return attention(q, k, v, attn_mask=torch.zeros(S, S).masked_fill(torch.ones(S, S).triu(1) == 1, -1e4))


@pytest.mark.parametrize(
    ("function", "keys"),
    [
        (lower_right, S + 4),
        (window, S),
        (one_element_off, S),
        (filled_in_place, S),
        (seen_before_it_is_filled, S),
        (filled_where_it_is_no_longer_read, S),
        (a_bias_beside, S),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_everything_else_stays(function, keys):
    ((mask, causal),), _, notes = rewritten(function, *qkv(keys))
    assert mask is not None and not causal and notes == []


def test_padding_stays():
    def function(q, k, v, padding):
        mask = torch.ones(S, S, dtype=torch.bool).tril() & padding[:, None, None, :]
        return attention(q, k, v, attn_mask=mask)

    ((mask, causal),), _, _ = rewritten(function, *qkv(), torch.ones(2, S, dtype=torch.bool))
    assert mask is not None and not causal


def by_the_inputs_sizes(q, k, v):
    mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(diagonal=0)
    return attention(q, k, v, attn_mask=torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf))


def by_vmap(q, k, v):
    """As Hugging Face's models did it before transformers 5."""
    rows, columns = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
    inner = torch.vmap(lambda row, column: column <= row, in_dims=(None, 0))
    return attention(q, k, v, attn_mask=torch.vmap(inner, in_dims=(0, None))(rows, columns))


def by_vmap_of_packed_rows(q, k, v):
    """As they do for masks of a user's own, which compute with one position at a time."""
    packed = (torch.arange(S)[None].expand(2, -1) * 0).cumsum(-1)

    def allowed(at, row, column):
        same = torch.ops.aten.index(packed, [at, row]).__eq__(torch.ops.aten.index(packed, [at, column]))
        return row.new_ones((), dtype=torch.bool) & same & (column <= row)

    for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
        allowed = torch.vmap(allowed, in_dims=dims)
    return attention(q, k, v, attn_mask=allowed(torch.arange(2), torch.arange(S), torch.arange(S))[:, None])


def by_a_part_of_a_square(q, k, v):
    square = torch.full((2 * k.shape[-2], 2 * k.shape[-2]), -torch.inf).triu(1)
    return attention(q, k, v, attn_mask=square[None, None, : q.shape[-2], : k.shape[-2]])


def by_all_that_is_attended(q, k, v):
    """Positions counted from a padding mask that the model makes itself, and all of it is True."""
    padding = torch.ones(q.shape[0], q.shape[-2], dtype=torch.int64)
    positions = padding.cumsum(-1) - 1
    mask = positions[:, None, :, None] >= torch.arange(k.shape[-2])
    return attention(q, k, v, attn_mask=mask & padding[:, None, None, :].bool())


def by_filling_in_place(q, k, v):
    """As PyTorch's documentation does it, and Hugging Face's models did for years."""
    mask = torch.full((q.shape[-2], k.shape[-2]), torch.finfo(q.dtype).min)
    position = torch.arange(mask.size(-1))
    mask.masked_fill_(position < (position + 1).view(mask.size(-1), 1), 0)
    return attention(q, k, v, attn_mask=mask[None, None].to(q.dtype))


def by_changing_several_times(q, k, v):
    mask = torch.empty(q.shape[-2], k.shape[-2]).fill_(-torch.inf)
    mask.triu_(1)
    return attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        by_filling_in_place,
        by_changing_several_times,
        by_comparison,
        by_packing,
        by_the_inputs_sizes,
        by_vmap,
        by_vmap_of_packed_rows,
        by_a_part_of_a_square,
        by_all_that_is_attended,
    ],
    ids=lambda f: f.__name__,
)
def test_sizes_may_be_symbols(function, dynamic):
    assert rewritten(function, *qkv(), dynamic=dynamic)[0] == [(None, True)]


@pytest.mark.parametrize("function", [by_changing_several_times, by_filling_in_place], ids=lambda f: f.__name__)
def test_nothing_is_left_of_a_constant_that_was_changed(function):
    assert rewritten(function, *qkv())[1] == 5, "three inputs, the call, the output"


def one_ahead(q, k, v):
    mask = torch.arange(k.shape[-2])[None] <= torch.arange(q.shape[-2])[:, None] + 1
    return attention(q, k, v, attn_mask=mask)


def without_itself(q, k, v):
    mask = torch.arange(k.shape[-2])[None] < torch.arange(q.shape[-2])[:, None] + (q.shape[-2] - k.shape[-2])
    return attention(q, k, v, attn_mask=mask | (torch.arange(k.shape[-2]) == 0))


def the_other_way(q, k, v):
    mask = torch.arange(k.shape[-2])[None] >= torch.arange(q.shape[-2])[:, None]
    return attention(q, k, v, attn_mask=mask)


def at_the_end(q, k, v):
    mask = torch.arange(k.shape[-2])[None] <= torch.arange(q.shape[-2])[:, None] + (k.shape[-2] - q.shape[-2])
    return attention(q, k, v, attn_mask=mask)


def half_a_window(q, k, v):
    distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    return attention(q, k, v, attn_mask=(distance >= 0) & (distance < q.shape[-2] // 2))


def documents(q, k, v):
    rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return attention(q, k, v, attn_mask=(rows >= columns) & (rows // 4 == columns // 4))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function",
    [one_ahead, without_itself, the_other_way, at_the_end, half_a_window, documents],
    ids=lambda f: f.__name__,
)
def test_what_is_nearly_causal_stays(function, dynamic):
    ((mask, causal),), _, notes = rewritten(function, *qkv(S + 4), dynamic=dynamic)
    assert mask is not None and not causal and notes == []


@torch.compiler.allow_in_graph
def tril(mask):
    """Not torch's."""
    return mask.triu()


def test_a_namesake_of_an_operation_is_not_known():
    def function(q, k, v):
        return attention(q, k, v, attn_mask=tril(torch.ones(S, S, dtype=torch.bool)))

    ((mask, _),), _, notes = rewritten(function, *qkv())
    assert mask is not None and notes == []


def test_a_mask_of_the_end_is_causal_where_as_many_keys_as_queries_are_known_to_be():
    assert rewritten(at_the_end, *qkv())[0] == [(None, True)]


def test_elements_of_long_masks_are_not_computed():
    notes = []

    def backend(gm, _inputs):
        notes.append([*recognize_causal_masks(gm, ElementTracer).notes])
        return lambda *given: (given[0],)

    torch._dynamo.reset()
    inputs = [torch.empty(1, 1, 1, 8).expand(1, 1, 1 << 20, 8) for _ in range(3)]
    torch.compile(by_the_inputs_sizes, backend=backend)(*inputs)
    assert notes == [[f"for speed: 1 {OWN_MASKING}"]], "of 2**40 elements"


def test_one_mask_for_several_calls_that_is_also_returned():
    def function(q, k, v):
        mask = torch.ones(S, S, dtype=torch.bool).tril()
        return attention(attention(q, k, v, attn_mask=mask), k, v, attn_mask=mask), mask

    calls, nodes, notes = rewritten(function, *qkv())
    assert calls == [(None, True)] * 2 and nodes == 3 + 2 + 2 + 1, "the mask itself is still made"
    assert notes == [f"for speed: 2 {OWN_MASKING}"]


def test_compiled_gradients_and_receipt():
    inputs, own = qkv(requires_grad=True), qkv(requires_grad=True)
    compiled = dcompile.compile(by_comparison)
    by_comparison(*inputs).square().sum().backward()
    compiled(*own).square().sum().backward()
    for theirs, ours in zip(inputs, own, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    receipt = dcompile.receipt(compiled)
    note = "note: for speed: 1 attention calls were given a causal mask"
    assert note in receipt.details() and "causal" not in str(receipt)


def test_kernels_aten_leaves_the_call_as_it_is():
    compiled = dcompile.compile(by_comparison, options={"kernels": "aten"})
    assert torch.equal(compiled(*qkv()), by_comparison(*qkv()))
    assert "mask" not in str(dcompile.receipt(compiled))


LENGTH, WINDOW = 320, 24


def positions(q, k):
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])


def sliding_window(q, k, v, given):
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


def packed_documents(q, k, v, given):
    """As transformers tells packed sequences apart, by positions that start again."""
    packed = (torch.diff(given, prepend=given[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    rows, columns = positions(q, k)
    mask = (columns <= rows) & (packed[:, None, :, None] == packed[:, None, None, :])
    return attention(q, k, v, attn_mask=mask)


def mapped(allowed, *lengths):
    """As transformers maps a function of one pair over batch, heads, queries and keys, before version 5."""
    for place in (3, 2, 1, 0):
        allowed = torch.vmap(allowed, in_dims=tuple(0 if n == place else None for n in range(4)))
    return allowed(*map(torch.arange, lengths))


def mapped_padding(q, k, v, given):
    seen = given.bool()

    def allowed(batch, head, row, column):
        return (column <= row) & (column > row - WINDOW) & torch.ops.aten.index(seen, [batch, column])

    return attention(q, k, v, attn_mask=mapped(allowed, q.shape[0], 1, q.shape[2], k.shape[2]))


def mapped_documents(q, k, v, given):
    packed = (torch.diff(given, prepend=given[:, :1] - 1, dim=-1) != 1).cumsum(-1)

    def allowed(batch, head, row, column):
        same = torch.ops.aten.index(packed, [batch, row]) == torch.ops.aten.index(packed, [batch, column])
        return same & (column <= row)

    return attention(q, k, v, attn_mask=mapped(allowed, q.shape[0], 1, q.shape[2], k.shape[2]))


def chunks(q, k, v, given):
    rows, columns = positions(q, k)
    return attention(q, k, v, attn_mask=(columns <= rows) & (rows // 64 == columns // 64))


def joined_parts(q, k, v, given):
    rows, columns = positions(q, k)
    window = (columns <= rows) & (columns > rows - WINDOW)
    mask = torch.cat((window[:, :WINDOW], window[:, WINDOW:]), dim=1)
    return attention(q, k, v, attn_mask=mask.flip(0).flip(0))


def prefix(q, k, v, given):
    rows, columns = positions(q, k)
    return attention(q, k, v, attn_mask=(columns <= rows) | (columns < given[:, :1, None, None]))


KINDS = {
    sliding_window: "causal, window", window_of_triangles: "causal, window", both_sides: "causal, window",
    added: "causal, window", least_number: "causal, window", padding: "causal, padding",
    windowed_padding: "causal, window, padding", lengths: "prefix, causal", packed_documents: "causal, documents",
    mapped_padding: "causal, window, padding", mapped_documents: "causal, documents", chunks: "causal, documents",
    joined_parts: "causal, window",
}  # fmt: skip


def inputs(dtype=torch.float32, heads=2, length=LENGTH):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 16).to(dtype).requires_grad_() for _ in range(3))
    ones = torch.ones(2, length, dtype=torch.int64)
    ones[0, length - 40 :] = 0
    return q, k, v, ones


def given(function, length=LENGTH):
    """The function's last argument: positions of packed sequences, or a mask of ones and zeros."""
    ones = inputs(length=length)[3]
    if function in (packed_documents, mapped_documents):
        return torch.stack([torch.arange(length) % 100, torch.arange(length) % 150])
    return ones * 200 if function is prefix else ones


def after_skipping(function, *args, dynamic=False):
    """What the pass leaves: targets of calls, the number of nodes, and its notes. Results are checked."""
    seen = []

    def backend(gm, _inputs):
        recognize_causal_masks(gm, ElementTracer)
        report = skip_masked_attention(gm, ElementTracer)
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
    calls, _, notes = after_skipping(function, q, k, v, given(function))
    assert calls == ["attend"]
    assert notes == [
        f"for speed: 1 attention calls skip what their mask ({KINDS[function]}) forbids: "
        "blocks of queries read the keys in their reach"
    ]


@pytest.mark.usefixtures("always", "flex")
@pytest.mark.parametrize("function", [padding, packed_documents, lengths], ids=lambda f: f.__name__)
def test_recognized_for_flex_attention(function):
    q, k, v, _ = inputs(torch.bfloat16)
    calls, _, notes = after_skipping(function, q, k, v, given(function))
    assert calls == ["attend_in_blocks"]
    assert notes == [
        f"for speed: 1 attention calls skip what their mask ({KINDS[function]}) forbids: "
        "FlexAttention's kernel computes them"
    ]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("function", [windowed_padding, added], ids=lambda f: f.__name__)
def test_sizes_of_skipped_masks_may_be_symbols(function):
    q, k, v, _ = inputs()
    assert after_skipping(function, q, k, v, given(function), dynamic=True)[0] == ["attend"]


@pytest.mark.usefixtures("always", "flex")
def test_symbolic_sizes_leave_the_mask_of_flex_attention():
    q, k, v, _ = inputs(torch.bfloat16)
    calls, _, notes = after_skipping(sliding_window, q, k, v, given(sliding_window), dynamic=True)
    assert calls == ["scaled_dot_product_attention"]
    assert any("since sizes are symbols" in note for note in notes)


@pytest.mark.usefixtures("always")
def test_what_made_the_mask_is_gone():
    q, k, v, ones = inputs()
    _, nodes, _ = after_skipping(sliding_window, q, k, v, ones)
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
    calls, _, notes = after_skipping(function, q, k, v, ones)
    assert calls == ["attend"] * 2 and len(notes) == 1


@pytest.mark.usefixtures("always", "flex")
def test_layers_share_tables_and_heads():
    def function(q, k, v, given):
        rows, columns = positions(q, k)
        mask = (columns <= rows) & (columns > rows - WINDOW)
        k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 4, LENGTH, 16) for x in (k, v))
        for _ in range(2):
            q = attention(q, k, v, attn_mask=mask)
        return q

    q, *_ = inputs(torch.bfloat16, heads=4)
    _, k, v, ones = inputs(torch.bfloat16, heads=2)
    calls, nodes, _ = after_skipping(function, q, k, v, ones)
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
    calls, _, (note,) = after_skipping(function, q, k, v, ones)
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
        return attention(q, k, v, attn_mask=(rows - columns).abs() < LENGTH - 20)

    q, k, v, ones = inputs()
    assert after_skipping(wide, q, k, v, ones)[::2] == ([ATTENTION.__name__], [])
    q, k, v, ones = inputs(length=32)
    assert after_skipping(sliding_window, q, k, v, ones)[0] == [ATTENTION.__name__]


@pytest.mark.usefixtures("always")
def test_dropout_stays_with_the_library():
    def function(q, k, v, given):
        rows, columns = positions(q, k)
        mask = (columns <= rows) & (columns > rows - WINDOW)
        return attention(q, k, v, attn_mask=mask, dropout_p=0.5) * 0

    q, k, v, ones = inputs()
    calls, _, notes = after_skipping(function, q, k, v, ones)
    assert calls == [ATTENTION.__name__] and "since attention has dropout" in notes[0]


def test_compiled_gradients_and_receipt_of_skipped_masks():
    """A long window pays by itself."""
    torch.manual_seed(0)
    theirs = [torch.randn(1, 2, 1024, 32, requires_grad=True) for _ in range(3)]
    ours = [tensor.detach().clone().requires_grad_() for tensor in theirs]
    compiled = dcompile.compile(sliding_window)
    sliding_window(*theirs, None).square().sum().backward()
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
        reports.append(skip_masked_attention(gm, ElementTracer))
        return gm.forward

    torch._dynamo.reset()
    wrapped = [TwoTensor(x.detach(), x.detach()) for x in inputs()[:3]]
    torch.compile(sliding_window, backend=backend)(*wrapped, None)
    assert [report.changes for report in reports] == [0]
    assert "since queries and keys are distributed tensors" in reports[0].notes[0]


def test_sides_become_numbers_with_a_guard():
    gm = sparse_attention(64)
    (side,) = [node.meta["example_value"] for node in gm.graph.nodes if "example_value" in node.meta]
    assert specialize_block_sizes(gm).changes == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention)
    assert call.args[BLOCK_MASK][SIDES] == (64, 64)
    assert len(side.node.shape_env.guards) == 1, "another side is another graph"
    assert specialize_block_sizes(gm).changes == 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_other_sides_and_lengths_give_eagers_results():
    def causal(b, h, q, k):
        return q >= k

    compiled = dcompile.compile(
        lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask), dynamic=True, options={"receipt": False}
    )
    for length, side in ((256, 64), (384, 64), (256, 128)):
        mask = create_block_mask(causal, None, None, length, length, device="cpu", BLOCK_SIZE=side)
        q, k, v = (torch.randn(2, 2, length, 16) for _ in range(3))
        with torch.no_grad():
            torch.testing.assert_close(compiled(q, k, v, mask), flex_attention(q, k, v, block_mask=mask))
