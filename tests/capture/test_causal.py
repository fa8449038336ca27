"""Masks that are made of constants are computed and compared; all others stay."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

import dcompile
from dcompile.capture.causal import ATTENTION, replace_constant_masks

OWN_MASKING = "attention calls were given a causal mask as a tensor; the kernel's own causal masking takes its place"

S = 12


def qkv(keys=S, requires_grad=False):
    torch.manual_seed(0)
    return [torch.randn(2, 3, n, 8, requires_grad=requires_grad) for n in (S, keys, keys)]


def rewritten(function, *args, dynamic=False):
    """The arguments (mask, is_causal) of each attention call after the pass, the number of nodes, and its notes."""
    seen = []

    def backend(gm, _inputs):
        notes = replace_constant_masks(gm)
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
    assert notes == [f"1 {OWN_MASKING}"]


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
    return attention(q, k, v, attn_mask=mask | torch.eye(S, dtype=torch.bool))


def a_bias_beside(q, k, v):
    return attention(q, k, v, attn_mask=torch.zeros(S, S).masked_fill(torch.ones(S, S).triu(1) == 1, -1e4))


@pytest.mark.parametrize(
    ("function", "keys"),
    [(lower_right, S + 4), (window, S), (one_element_off, S), (filled_in_place, S), (a_bias_beside, S)],
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


def test_unknown_sizes_stay():
    ((mask, _),), _, _ = rewritten(by_comparison, *qkv(), dynamic=True)
    assert mask is not None


def test_one_mask_for_several_calls_that_is_also_returned():
    def function(q, k, v):
        mask = torch.ones(S, S, dtype=torch.bool).tril()
        return attention(attention(q, k, v, attn_mask=mask), k, v, attn_mask=mask), mask

    calls, nodes, notes = rewritten(function, *qkv())
    assert calls == [(None, True)] * 2 and nodes == 3 + 2 + 2 + 1, "the mask itself is still made"
    assert notes == [f"2 {OWN_MASKING}"]


def test_compiled_gradients_and_receipt():
    inputs, own = qkv(requires_grad=True), qkv(requires_grad=True)
    compiled = dcompile.compile(by_comparison)
    by_comparison(*inputs).square().sum().backward()
    compiled(*own).square().sum().backward()
    for theirs, ours in zip(inputs, own, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert "note: 1 attention calls were given a causal mask" in str(dcompile.receipt(compiled))


def test_kernels_aten_leaves_the_call_as_it_is():
    compiled = dcompile.compile(by_comparison, options={"kernels": "aten"})
    assert torch.equal(compiled(*qkv()), by_comparison(*qkv()))
    assert "mask" not in str(dcompile.receipt(compiled))
