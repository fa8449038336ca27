"""Averages over windows, forward and backward, against eager: padding, strides, what is counted."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.codegen.lower.test_ops import BF16, F32, check, tensor

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("include", [True, False])
def test_average_and_its_gradient(dtype: torch.dtype, include: bool) -> None:
    x = tensor(2, 3, 7, 6, dtype=dtype)
    for (kernel, stride, padding), ceil in product([(3, 2, 1), ((2, 3), (1, 3), (1, 0)), (2, 2, 0)], [False, True]):
        rest = (kernel, stride, padding, ceil, include, None)
        y = check(lambda x, r=rest: aten.avg_pool2d(x, *r), x) and aten.avg_pool2d(x, *rest)
        # in float32, rounded once, where eager rounds bfloat16 after every window
        expected = aten.avg_pool2d_backward(y.float(), x.float(), *rest).to(dtype)
        check(lambda g, x, r=rest: aten.avg_pool2d_backward(g, x, *r), y, x, expected=expected)


def test_divisor_and_three_dimensions() -> None:
    x = tensor(2, 4, 5, 6)
    check(lambda x: aten.avg_pool2d(x, [2, 2], [2, 2], [0, 0], False, True, 3), x)
    check(lambda x: aten.avg_pool3d(x, [2, 3, 2], [2, 2, 1], [1, 0, 1], False, True, None), x)


def test_large_windows_and_none() -> None:
    x = tensor(2, 9, 9)
    for rest in ([[6, 6], [1, 1], [3, 2]], [[7, 5], [2, 3], [0, 0]]):
        y = aten.avg_pool2d(x, *rest)
        check(lambda x, r=rest: aten.avg_pool2d(x, *r), x)
        check(lambda g, x, r=rest: aten.avg_pool2d_backward(g, x, *r, False, True, None), y, x)
    check(lambda x: aten.avg_pool2d(x, [2, 2]), torch.arange(-20, 16).view(1, 6, 6))
    none = tensor(0, 2, 6, 6)
    check(lambda g, x: aten.avg_pool2d_backward(g, x, [2, 2], [2, 2], 0, False, True, None), none[..., :3, :3], none)
