"""Max pooling, convolutions' biases and layouts on a GPU, in nets that train, against float64's. `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcompile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("compiled_anew"),
]

aten = torch.ops.aten
WINDOWS = {
    "apart": (2, 2, 0, 1, False),
    "as in ResNet": (3, 2, 1, 1, False),
    "dilated": ((3, 2), (2, 1), (1, 0), (2, 3), False),
    "rounded up": (3, 2, 0, 1, True),
    "each": (3, 1, 1, 1, False),
}


class Net(nn.Module):
    """Two convolutions with biases, one of them transposed or in groups, norms, ReLU and pooling between."""

    def __init__(self, window: tuple[object, ...], transposed: bool) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 48, 3, padding=1), nn.GroupNorm(1, 48)
        # groups of 24 channels are padded
        self.two = nn.ConvTranspose2d(48, 24, 2, 2) if transposed else nn.Conv2d(48, 24, 3, padding=1, groups=2)
        self.window = window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernel, stride, padding, dilation, ceil = self.window
        x = F.max_pool2d(F.relu(self.norm(self.one(x))), kernel, stride, padding, dilation, ceil)
        return self.two(x + F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)).mean((2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_net_is_as_near_to_float64_as_eagers(name, transposed, dtype):
    torch.manual_seed(0)
    net = Net(WINDOWS[name], transposed).cuda().to(dtype)
    x = torch.randn(4, 3, 37, 30, device="cuda", dtype=dtype)

    def results(call, x):
        x = x.clone().requires_grad_()
        out = call(x)
        return [out.detach(), *torch.autograd.grad(out.float().square().mean(), [x, *net.parameters()])]

    eager = results(net, x)
    call = dcompile.compile(net, options={"receipt": False})
    ours = results(call, x)
    assert not dcompile.receipt(call).fallbacks
    exact = results(net.double(), x.double())
    for found, theirs, true in zip(ours, eager, exact, strict=True):
        assert found.stride() == theirs.stride()
        off, theirs_off = ((value - true).norm() / true.norm() for value in (found, theirs))
        assert off <= 2 * theirs_off + 1e-6


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", WINDOWS)
def test_ties_and_nan_go_where_eagers_go(name, layout):
    def both(x):
        y, indices = aten.max_pool2d_with_indices(x, *map(pair, WINDOWS[name][:4]), WINDOWS[name][4])
        return y, indices

    def pair(given):
        return [given, given] if isinstance(given, int) else list(given)

    x = torch.randint(-2, 3, (3, 5, 19, 22), device="cuda").bfloat16().contiguous(memory_format=layout)
    x[..., 5, 7], x[:, :, 9:12] = torch.nan, -torch.inf
    # for windows of -inf alone, ATen's kernel of channels-last images gives position 0 (torch 2.11), outside of them
    eager = both(x.contiguous())
    for found, expected in zip(dcompile.compile(both, options={"receipt": False})(x), eager, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
