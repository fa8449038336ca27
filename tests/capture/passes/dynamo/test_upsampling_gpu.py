"""Gradients of interpolation on a GPU, by kernels of ours, next to eager's and to float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import dcompile
from tests.capture.passes.dynamo.test_upsampling import MODES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [4.0, 3.0])
@pytest.mark.parametrize("mode", MODES)
def test_kernels_give_eagers_gradients(mode: str, factor: float, dtype: torch.dtype) -> None:
    sizes = {"linear": (257,), "trilinear": (9, 8, 17)}.get(mode, (33, 64))
    x = torch.randn(4, 8, *sizes, dtype=dtype, device="cuda", requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x * 1, scale_factor=factor, mode=mode).cos()

    compiled = dcompile.compile(function, options={"receipt": False})
    grad = torch.randn_like(function(x))
    (ours,) = torch.autograd.grad(compiled(x), x, grad)
    (eagers,) = torch.autograd.grad(function(x), x, grad)
    exact_x = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(function(exact_x), exact_x, grad.double())
    off, allowed = ((found.double() - exact).norm() for found in (ours, eagers))
    assert off <= 1.1 * allowed + 1e-6 * exact.norm()
    receipt = dcompile.receipt(compiled)
    assert receipt.kernels and not receipt.fallbacks
