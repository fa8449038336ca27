"""A linear layer in 8-bit floats with one scale for each tensor, as float8 training has it, forward and backward.

The largest magnitude makes a scale; scaled, bounded and rounded, a tensor is kept once by rows and once by columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
Product = Callable[..., torch.Tensor]


def scale_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What makes the largest magnitude the dtype's largest number: a power of two."""
    amax = x.abs().amax().to(torch.float64)
    scale = torch.finfo(dtype).max / torch.clamp(amax, min=1e-12)
    return torch.exp2(torch.floor(torch.log2(scale.to(torch.float32))))


def rounded(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    most = torch.finfo(dtype).max
    return (x.to(torch.float32) * scale).clamp(min=-most, max=most).to(dtype)


def by_columns(x: torch.Tensor) -> torch.Tensor:
    """The same matrix, neighbours of a column next to each other: what a product takes as its second factor."""
    return x.t().contiguous().t()


def parts(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """All that the three products of a layer are given."""
    found = []
    for tensor, dtype in ((x, FORWARD), (weight, FORWARD), (grad, BACKWARD)):
        scale = scale_of(tensor, dtype)
        eight = rounded(tensor, scale, dtype)
        found += [eight, by_columns(eight), eight.t().contiguous(), scale.reciprocal()]
    return found


class Multiply(torch.autograd.Function):
    """x @ weight.t(), and its gradients, with factors of 8 bits."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor, product: Product) -> torch.Tensor:
        context.save_for_backward(x, weight)
        context.product = product
        a, b = scale_of(x, FORWARD), scale_of(weight, FORWARD)
        first, second = rounded(x, a, FORWARD), rounded(weight, b, FORWARD)
        return product(first, second.t(), a.reciprocal(), b.reciprocal(), x.dtype)

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = context.saved_tensors
        a, b, g = scale_of(x, FORWARD), scale_of(weight, FORWARD), scale_of(grad, BACKWARD)
        error = rounded(grad, g, BACKWARD)
        columns = by_columns(rounded(weight, b, FORWARD))
        grad_x = context.product(error, columns, g.reciprocal(), b.reciprocal(), x.dtype)
        turned, columns = error.t().contiguous(), by_columns(rounded(x, a, FORWARD))
        grad_weight = context.product(turned, columns, g.reciprocal(), a.reciprocal(), x.dtype)
        return grad_x, grad_weight, None


class Layers(torch.nn.Module):
    """Linear layers with an activation behind each."""

    def __init__(self, widths: list[int], product: Product) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(b, a) / a**0.5) for a, b in itertools.pairwise(widths)
        )
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.relu(Multiply.apply(x, weight, self.product))
        return x


def in_float32(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype):
    """What `scaled` computes, by a product of float32: for processors whose torch has no other."""
    assert a.stride(1) == 1 and b.stride(0) == 1
    return (a.to(torch.float32) @ b.to(torch.float32) * (scale_a * scale_b)).to(dtype)


def scaled(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype):
    """The library's product of 8-bit floats."""
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype)
