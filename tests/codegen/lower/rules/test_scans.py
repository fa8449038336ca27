"""Running sums and their kind against eager: bit for bit where eager's arithmetic is ours, per dtype and dimension."""

from __future__ import annotations

import pytest
import torch

from dcompile.ir.nodes import Loop, Scan
from tests.codegen.lower.test_ops import BF16, BOOL, F16, F32, F64, I32, I64, check, tensor

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64, I64, I32])
def test_sums_and_products(dtype: torch.dtype) -> None:
    x = (tensor(3, 40, 5) * 3).to(dtype)
    for dim in (0, 1, -1):
        program = check(lambda x, d=dim: aten.cumsum(x, d), x, bitwise=True)
        (loop,) = program.steps
        assert isinstance(loop, Loop) and sum(isinstance(value, Scan) for value in loop.body) == 1
    # an integer product that overflows wraps in both
    check(lambda x: aten.cumprod(x, 1), x, bitwise=True)


@pytest.mark.parametrize("dtype", [F32, BF16, F64, I64])
def test_extremes_are_the_last_of_equals_and_every_nan(dtype: torch.dtype) -> None:
    x = (tensor(4, 60) * 2).round().to(dtype)
    if dtype.is_floating_point:
        x[0, 5] = x[0, 17] = float("nan")
        x[1, 3] = float("inf")
        x[2] = float("-inf")
        x[3, 30:] = -0.0
    for dim in (0, 1):
        check(lambda x, d=dim: tuple(aten.cummax(x, d)), x, bitwise=True)
        check(lambda x, d=dim: tuple(aten.cummin(x, d)), x, bitwise=True)


def test_log_of_sums_of_exponentials() -> None:
    x = tensor(4, 50) * 40
    x[0, :3] = float("-inf")
    x[1, 7] = float("inf")
    x[2, 9] = float("nan")
    for dim in (0, 1):
        check(lambda x, d=dim: aten.logcumsumexp(x, d), x)


def test_the_dtype_is_that_of_the_elements() -> None:
    x = tensor(3, 20) * 50
    check(lambda x: aten.cumsum(x, 1, dtype=BF16), x, bitwise=True)
    check(lambda x: aten.cumsum(x, 1, dtype=I32), x, bitwise=True)
    check(lambda x: aten.cumsum(x, 1, dtype=torch.uint8), tensor(3, 20) > 0, bitwise=True)
    check(lambda x: aten.cumsum(x, -1), (tensor(3, 20) > 0).to(BOOL), bitwise=True)


def test_few_elements() -> None:
    for shape, dim in (((), 0), ((0, 3), 0), ((0, 3), 1), ((3, 0), 1), ((4, 1), 1), ((1, 4), 1)):
        check(lambda x, d=dim: aten.cumsum(x, d), tensor(*shape), bitwise=True)
        if 0 not in shape:
            check(lambda x, d=dim: tuple(aten.cummax(x, d)), tensor(*shape), bitwise=True)


def test_layouts() -> None:
    x = tensor(2, 3, 4, 4).to(memory_format=torch.channels_last)
    check(lambda x: torch.cumsum(x.relu(), 1), x)
    check(lambda x: torch.cumsum(x.permute(0, 2, 3, 1).exp(), 1), x)
    check(lambda x: torch.cumsum(x.flip(1), 1).flip(1), tensor(3, 20), bitwise=True)
