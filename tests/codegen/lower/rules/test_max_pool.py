"""The largest of each window, and windows of uneven size, against eager: positions, padding, gradients."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.lower.test_ops import BF16, F32, I64, check, tensor

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [F32, BF16, I64])
def test_max_pool(dtype: torch.dtype) -> None:
    x = tensor(2, 3, 9, 8, dtype=dtype)
    for rest in ([3, 2, 1, 1, False], [3, 2, 1, 1, True], [[2, 3], [1, 2], [1, 0], 1, False], [3, 2, 1, 3, False]):
        check(lambda x, r=rest: aten.max_pool2d_with_indices(x, *r), x, bitwise=True)
    check(lambda x: aten.max_pool3d_with_indices(x, 2, 2, 1), x, bitwise=True)


def test_max_pool_of_special_values() -> None:
    x = tensor(1, 1, 6, 6)
    x[0, 0, :2] = -torch.inf  # the first of equals, and of a window that reaches into the padding
    x[0, 0, 4, 3] = torch.nan
    check(lambda x: aten.max_pool2d_with_indices(x, 2, 2, 1), x, bitwise=True)


def test_channels_last_is_the_librarys() -> None:
    x = tensor(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    check(lambda x: aten.max_pool2d_with_indices(x, 2), x, library=1)


@pytest.mark.parametrize("size", [(4, 5), (13, 3), (3, 8), (1, 1), (2, 1)])
def test_adaptive(size: tuple[int, int]) -> None:
    for x in (tensor(2, 3, 9, 8), tensor(2, 3, 9, 8).to(BF16)):  # windows of 72 elements are reductions
        y, indices = aten.adaptive_max_pool2d(x, size)
        check(lambda x: aten.adaptive_max_pool2d(x, size), x, bitwise=True)
        expected = aten.adaptive_max_pool2d_backward(y.float(), x.float(), indices).to(x.dtype)
        check(lambda g, x, i: aten.adaptive_max_pool2d_backward(g, x, i), y, x, indices, expected=expected)
        check(lambda x: aten._adaptive_avg_pool2d(x, size), x) if size != (1, 1) else None
        expected = aten._adaptive_avg_pool2d_backward(y.float(), x.float()).to(x.dtype)
        check(lambda g, x: aten._adaptive_avg_pool2d_backward(g, x), y, x, expected=expected)


def test_adaptive_in_three_dimensions() -> None:
    x = tensor(2, 3, 4, 5, 6)
    y, indices = aten.adaptive_max_pool3d(x, [3, 2, 4])
    check(lambda x: aten.adaptive_max_pool3d(x, [3, 2, 4]), x)
    check(lambda x: aten._adaptive_avg_pool3d(x, [3, 2, 4]), x)
    check(lambda g, x: aten._adaptive_avg_pool3d_backward(g, x), y, x)
    check(lambda g, x, i: aten.adaptive_max_pool3d_backward(g, x, i), y, x, indices)
