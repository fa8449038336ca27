"""Programs from public reports of silently wrong results under torch.compile: right here, in every tier of numerics.

Each case is named by its number among PyTorch's issues of 2025 and 2026, and written anew after what the report says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dcompile

TIERS = ("bitwise", "eager", "fast")
SLACK = 8
"""Our error against float64 may be this many times eager's and a rounding of the largest value: sums' orders differ."""


@dataclass(frozen=True)
class Report:
    """A program of tensors alone, and their shapes; it returns one tensor or several."""

    run: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    changes_input: bool = False


def slice_scatter_summed(x, y):
    return torch.slice_scatter(x, y, dim=1, start=0, end=6).sum(dim=1)


def slice_scatter_start(x, y):
    return torch.slice_scatter(x, y, dim=0, start=0, end=2).sum()


def diagonal_scatter_summed(x, y):
    return torch.diagonal_scatter(x, y, 0).sum()


def windows_behind_interpolation(x, weight, bias):
    """A convolution of a cropped enlargement, pooled, and chosen by a mask that reads the pool's own result."""
    y = F.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear", align_corners=False)[:, :, 1:7, 1:8]
    y = F.conv2d(y, weight, bias, padding=1)
    pool = F.max_pool2d(y, kernel_size=3, stride=1, padding=1)
    return torch.where((y > pool.mean(dim=(2, 3), keepdim=True)).detach(), y, pool)


def norms_with_chunks_of_one_table(x, table):
    """Two norms, each scaled and shifted by parts of one parameter."""
    scale, shift, later_scale, later_shift = table.chunk(4, dim=1)
    x = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
    return F.layer_norm(torch.tanh(x), x.shape[-1:]) * (1 + later_scale) + later_shift


def moments_with_numbers_of_a_counter(p, g):
    """An optimizer's step by a counter that is read on the host, three times."""
    m, v, count = torch.zeros_like(p), torch.zeros_like(p), torch.zeros(())
    for _ in range(3):
        count = count + 1
        m = m * 0.9 + g * 0.1
        v = v * 0.999 + (g * g) * 0.001
        step = count.item()
        p = p.addcdiv(m, (v.sqrt() / (1 - 0.999**step) ** 0.5).add(1e-8), value=-0.001 / (1 - 0.9**step))
    return p


def put_and_add_flipped(x):
    x.index_put_((torch.arange(x.size(0)),), x * 2.0)
    x.add_(x.flip(0))
    return x


def copied_and_shifted(x):
    x.index_copy_(0, torch.arange(x.size(0)), x * 2.0)
    x[1:] = x[:-1].clone()
    return x


def stacked_columns_chosen(x):
    """Chosen columns of a stack of columns, whose gradient is put into a tensor that was expanded."""
    rows = torch.stack([x[..., k] for k in range(x.size(-1))], dim=-1)
    return (torch.index_select(rows, -1, torch.tensor([0, 2])) * torch.tensor([1.0, -1.0], dtype=x.dtype)).sum(-1)


def reciprocal_of_a_norm(x):
    return torch.reciprocal(torch.abs(F.layer_norm(x, x.shape[-1:])) + 0.1)


def gated_triangle(x, gate, a, b):
    """Gated products under bfloat16, in two chunks that are added."""
    first, second = (F.linear(x, a) * F.linear(gate, b).sigmoid()).chunk(2, dim=-1)
    return F.layer_norm(torch.einsum("bikd,bjkd->bijd", first, second), second.shape[-1:])


def instance_norms_normalized(x):
    t = F.normalize(F.adaptive_avg_pool2d(F.instance_norm(x) + x.mean(1, keepdim=True), (1, 1)), dim=0)
    return F.normalize(F.hardswish(t * x), dim=0)


def frozen_norms(x, weight):
    """A norm by frozen statistics, whose result another one normalizes."""
    y = F.elu(F.batch_norm(x, torch.zeros(10, dtype=x.dtype), torch.ones(10, dtype=x.dtype), weight))
    return torch.log1p(F.group_norm(y, 5).exp())


REPORTS = {
    "180164": Report(slice_scatter_summed, ((4, 13, 33), (4, 6, 33))),
    "180771": Report(slice_scatter_start, ((5,), (2,))),
    "182012": Report(diagonal_scatter_summed, ((8, 8), (8,))),
    "185509": Report(windows_behind_interpolation, ((2, 3, 6, 7), (4, 3, 3, 3), (4,))),
    "193061": Report(norms_with_chunks_of_one_table, ((2, 512, 256), (1, 4, 256))),
    "185382": Report(moments_with_numbers_of_a_counter, ((4, 8), (4, 8))),
    "198270": Report(put_and_add_flipped, ((64, 48),), changes_input=True),
    "198270, a copy": Report(copied_and_shifted, ((64, 48),), changes_input=True),
    "188084": Report(stacked_columns_chosen, ((4, 4),), torch.float64),
    "186577": Report(reciprocal_of_a_norm, ((64, 128),)),
    "168126": Report(gated_triangle, ((1, 6, 6, 32), (1, 6, 6, 32), (64, 32), (64, 32)), torch.bfloat16),
    "183601": Report(instance_norms_normalized, ((4, 3, 10, 12),)),
    "181696": Report(frozen_norms, ((6, 10, 12), (10,))),
}


def results(run: Callable[..., object], given: list[Tensor], report: Report) -> list[Tensor]:
    """What the program returns, and gradients of a weighted sum of that."""
    inputs = [tensor.clone().requires_grad_(not report.changes_input) for tensor in given]
    found = run(*inputs)
    outs = list(found) if isinstance(found, tuple) else [found]
    if not report.changes_input:
        weights = [torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape) for out in outs]
        sum((out * weight.to(out.dtype)).sum() for out, weight in zip(outs, weights, strict=True)).backward()
    return [*outs, *(inputs if report.changes_input else [tensor.grad for tensor in inputs])]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", REPORTS)
def test_reported_programs_are_right(name, tier):
    report = REPORTS[name]
    torch.manual_seed(0)
    torch.compiler.reset()
    given = [torch.randn(shape).to(report.dtype) for shape in report.shapes]
    compiled = dcompile.compile(report.run, options={"numerics": tier, "receipt": False})
    exact = results(report.run, [tensor.double() for tensor in given], report)
    eager = results(report.run, given, report)
    for _ in range(2):
        for ours, stock, true in zip(results(compiled, given, report), eager, exact, strict=True):
            if tier == "bitwise":
                assert torch.equal(ours, stock)
            assert ours.dtype == stock.dtype
            rounding = torch.finfo(report.dtype).eps * true.abs().max()
            assert (ours - true).abs().max() <= SLACK * ((stock - true).abs().max() + rounding)


@pytest.mark.parametrize("tier", TIERS)
def test_report_197887_an_input_changed_before_the_backward_is_an_error(tier):
    """A view of the input is what the backward reads; the change must be seen through it."""
    torch.compiler.reset()
    compiled = dcompile.compile(lambda x, w: x @ w, options={"numerics": tier, "receipt": False})
    x, w = torch.randn(2, 3), torch.randn(3, 3, requires_grad=True)
    y = compiled(x, w)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
