"""Masks that are made of comparisons of positions are followed and replaced; all others stay."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

import dcompile
from dcompile.capture.passes.dynamo.captured_nodes import ATTENTION
from dcompile.capture.passes.dynamo.causal_mask import recognize_causal_masks

OWN_MASKING = "attention calls were given a causal mask as a tensor; the kernel's own causal masking takes its place"

S = 12


def qkv(keys=S, requires_grad=False):
    torch.manual_seed(0)
    return [torch.randn(2, 3, n, 8, requires_grad=requires_grad) for n in (S, keys, keys)]


def rewritten(function, *args, dynamic=False):
    """The arguments (mask, is_causal) of each attention call after the pass, the number of nodes, and its notes."""
    seen = []

    def backend(gm, _inputs):
        notes = [*recognize_causal_masks(gm).notes]
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
        notes.append([*recognize_causal_masks(gm).notes])
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
