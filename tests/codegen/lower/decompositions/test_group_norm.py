"""Group norms by parts are those of rows; which norms are taken so follows from sizes and device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dcompile.codegen.lower.decompositions import aten


def rule(*_args):
    return "torch's"


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pixels", [64, 48, 36])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("far", [0.0, 1e4])
def test_parts_make_up_the_group(layout, pixels, affine, far, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(aten, "part_of", lambda x, inner, channels: 16 if inner % 16 == 0 else 12)
    x = (torch.randn(2, 12, pixels // 4, 4) + far).to(memory_format=layout)
    weight, bias = (torch.randn(12), torch.randn(12)) if affine else (None, None)
    found, mean, rstd = aten.by_parts(rule)(x, weight, bias, 2, 12, pixels, 3, 1e-5)
    wide = [None if value is None else value.double() for value in (x, weight, bias)]
    expected = torch.native_group_norm(*wide, 2, 12, pixels, 3, 1e-5)
    eager = torch.native_group_norm(x, weight, bias, 2, 12, pixels, 3, 1e-5)
    for ours, theirs, exact in zip((found, mean, rstd), eager, expected, strict=True):
        off = (ours.double() - exact).abs().max()
        assert off <= 2 * (theirs.double() - exact).abs().max() + 1e-6 * exact.abs().max()


def test_sixteen_bits_are_rounded_once(monkeypatch):
    monkeypatch.setattr(aten, "part_of", lambda *_: 16)
    x = torch.randn(1, 8, 8, 8, dtype=torch.bfloat16)
    found, mean, rstd = aten.by_parts(rule)(x, None, None, 1, 8, 64, 2, 1e-5)
    assert found.dtype == mean.dtype == rstd.dtype == torch.bfloat16
    exact = F.group_norm(x.double(), 2)
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize(
    ("device", "inner", "channels", "part"),
    [("meta", 4096, 8, 32), ("meta", 63 * 63, 8, 27), ("meta", 4099, 8, 0), ("meta", 256, 8, 0), ("cpu", 4096, 8, 0)],
    ids=["pixels of whole parts", "an odd number", "a prime", "fits a program", "CPU"],
)
def test_large_groups_on_gpus_are_taken_by_parts(device, inner, channels, part):
    x = torch.empty(1, channels, inner, device=device)
    assert aten.part_of(x, inner, channels) == part
