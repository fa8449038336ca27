"""Attention under a predicate on CPUs: values and gradients are those of the mask as a tensor."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as attention

from dcompile import compat
from dcompile.ir.index import var
from dcompile.ir.predicate import Predicate
from dcompile.operators import attention_ops
from tests.attention_masks import LENGTH, Q, both, masks, operands

SCALE = 0.3
MASKS = masks()


def results(function, inputs, grad):
    found = function(*inputs)
    return [found.detach(), *torch.autograd.grad(found, inputs, grad.to(found.dtype))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKS)
def test_values_and_gradients_are_as_near_to_float64_as_eagers(name, dtype):
    predicate, reads, mask = MASKS[name]
    inputs = operands(dtype)
    grad = torch.randn(inputs[0].shape, dtype=torch.float64)

    def dense(q, k, v):
        return attention(q, k, v, attn_mask=mask, scale=SCALE)

    def ours(q, k, v):
        return attention_ops.attend(q, k, v, reads, [], str(predicate), SCALE)

    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact, eager, found = results(dense, wide, grad), results(dense, inputs, grad), results(ours, inputs, grad)
    for mine, theirs, true in zip(found, eager, exact, strict=True):
        near = torch.finfo(dtype).eps * true.abs().max() * 4
        assert (mine - true).abs().max() <= 1.5 * (theirs - true).abs().max() + near
    assert found[0].stride() == dense(*inputs).stride()


def test_no_mask_and_no_scores_of_all_pairs(monkeypatch):
    """What ATen's kernel is called with: keys in a window's reach, and those of a document."""
    sizes, aten = [], compat.attention.attend_on_cpu

    def counted(query, key, value, mask, scale):
        sizes.append(key.shape[2])
        return aten(query, key, value, mask, scale)

    monkeypatch.setattr(compat.attention, "attend_on_cpu", counted)
    for name, expected in (
        ("window", [256, 63 + 44]),
        ("documents", [256, 300 - 210, 256, 300 - 220]),
        ("padding", [256, 280, 300 - 270]),  # none for the first block of the second row, which is padded
    ):
        sizes.clear()
        predicate, reads, _ = MASKS[name]
        attention_ops.attend(*operands(), reads, [], str(predicate), SCALE)
        assert sizes == expected, name


def test_results_are_laid_out_as_traced():
    predicate, reads, _ = MASKS["documents"]
    ops, how = torch.ops.dcompile_attention, ([], str(predicate), SCALE)
    given = [tensor.detach().transpose(1, 2).contiguous().transpose(1, 2) for tensor in operands()]
    mode = FakeTensorMode()
    for function, inputs in (
        (lambda *args: ops.forward(*args[:3], [*args[3:]], *how), (*given, *reads)),
        (lambda *args: ops.backward(*args[:6], [*args[6:]], *how),
         (given[0], *ops.forward(*given, reads, *how), *given, *reads)),
    ):  # fmt: skip
        with mode:
            traced = function(*map(mode.from_tensor, inputs))
        for one, other in zip(function(*inputs), traced, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_sizes_are_arguments():
    """As many keys more than queries as a run says: queries are the last positions."""
    keys = operands(length=400)
    query = operands()[0]
    predicate = Predicate(both(Q + var("s0") - var("s1") - var("k")), sizes=("s0", "s1"))
    found = attention_ops.attend(query, keys[1], keys[2], [], [400, LENGTH], str(predicate), SCALE)
    mask = torch.ones(LENGTH, 400, dtype=torch.bool).tril(100)
    torch.testing.assert_close(found, attention(query, keys[1], keys[2], attn_mask=mask, scale=SCALE))


def test_terms_that_are_subtracted_are_compared_instead():
    greatest = torch.iinfo(torch.int64).max
    values = {"z0": torch.tensor([greatest, -2, 3]), "z1": torch.tensor([-5, greatest, 3])}
    assert attention_ops.at_least_zero(var("z0") - var("z1"), values).tolist() == [True, False, True]


def test_autocast_counts():
    predicate, reads, mask = MASKS["window"]
    q, k, v = operands()
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_ops.attend(q, k, v.bfloat16(), reads, [], str(predicate), SCALE)
        expected = attention(q, k, v.bfloat16(), attn_mask=mask, scale=SCALE)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=4e-3, rtol=0)
