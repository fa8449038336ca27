"""Backwards behind a forward under autocast run without it, as eager's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.graph_backend import cut_by

pytestmark = [
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Product(torch.autograd.Function):
    """A matrix product whose backward runs under the forward's autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


class Nested(nn.Module):
    """Linear layers in both precisions, a custom function and a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e = self.layers
        x = a(x)
        with torch.autocast("cpu", enabled=False):
            x = b(x.float()).pow(2)
            with torch.autocast("cpu", torch.float16):
                x = checkpoint(lambda v: torch.sin(c(v)), x, use_reentrant=False)
        with torch.autocast("cpu", torch.float16):
            x = Product.apply(x, d.weight)
        return torch.softmax(e(x), -1)


def gradients(run: Any, module: nn.Module, inside: bool = False) -> list[torch.Tensor]:
    """Gradients of a forward under autocast, from a backward behind it or `inside` of autocast."""
    torch.manual_seed(1)
    x = torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        result = run(x).float().square().sum()
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        return [*torch.autograd.grad(result, [x, *module.parameters()], allow_unused=True)]


def test_regions_in_several_precisions_have_eagers_gradients() -> None:
    torch.manual_seed(0)
    net = Nested()
    expected = gradients(net, net)
    torch.testing.assert_close(gradients(torch.compile(net, backend=cut_by()), net), expected, rtol=1e-5, atol=1e-6)


def test_another_autocast_that_the_user_sets_for_backwards_holds() -> None:
    torch.manual_seed(0)
    net = Nested()
    with torch._functorch.config.patch(backward_pass_autocast=[{"device_type": "cpu", "dtype": torch.bfloat16}]):
        found = gradients(torch.compile(net, backend=cut_by()), net)
    torch.testing.assert_close(found, gradients(net, net, inside=True), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_float16_cannot_hold_stays_float32_where_autocast_is_off() -> None:
    last = nn.Linear(4, 1)

    def forward(x: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
        y = x @ ones
        with torch.autocast("cpu", enabled=False):
            return last(y.float())

    run = torch.compile(forward, backend=cut_by())
    with torch.autocast("cpu", torch.float16):
        result = run(torch.ones(1, 4), torch.ones(4, 4))
    (gradient,) = torch.autograd.grad((result * 16384).sum(), [last.weight])
    assert gradient.eq(65536).all()
