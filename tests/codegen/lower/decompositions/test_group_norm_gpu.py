"""Group norms on a GPU, with what stands around them in image models, against float64's. `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dcompile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("compiled_anew"),
]


class Block(torch.nn.Module):
    """Convolution, norm and SiLU, twice as large in between."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.one, self.two = (torch.nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = torch.nn.GroupNorm(groups, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(self.one(x), scale_factor=2.0, mode="nearest")
        return self.two(F.silu(self.norm(x))) + x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("side", [64, 33, 8])
@pytest.mark.parametrize(("channels", "groups"), [(128, 32), (96, 4)])
def test_a_block_is_as_near_to_float64_as_eagers(dtype, side, channels, groups):
    torch.manual_seed(0)
    block = Block(channels, groups).cuda().to(dtype)
    x = torch.randn(2, channels, side, side, device="cuda", dtype=dtype)

    def results(call, x):
        x = x.clone().requires_grad_()
        out = call(x)
        return [out.detach(), *torch.autograd.grad(out.float().square().mean(), [x, *block.parameters()])]

    eager = results(block, x)
    call = dcompile.compile(block, options={"receipt": False})
    ours = results(call, x)
    assert not dcompile.receipt(call).fallbacks
    block.double()
    exact = results(block, x.double())
    for found, theirs, true in zip(ours, eager, exact, strict=True):
        assert found.stride() == theirs.stride()
        scale = true.abs().max()
        assert (found - true).abs().max() <= 2 * (theirs - true).abs().max() + 1e-6 * scale
