"""The largest of each window, and windows of uneven size, against eager: positions, padding, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.codegen.lower.lower import lower
from dcompile.ir.nodes import Extern
from dcompile.ir.verify import verify
from tests.codegen.lower.lowered import run
from tests.codegen.lower.test_ops import BF16, F32, I64, assert_same, check, tensor
from tests.traits import change_cpu

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


def test_channels_last_is_the_librarys_on_cpus() -> None:
    x = tensor(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    check(lambda x: aten.max_pool2d_with_indices(x, 2), x, library=1)


WINDOWS = {
    "apart": ((2, 3, 8, 6), [2, 2], [], [0], [1], False),
    "as in ResNet": ((2, 3, 12, 11), [3, 3], [2, 2], [1, 1], [1, 1], False),
    "with gaps": ((2, 3, 9, 9), [2, 1], [3, 2], [0, 0], [1, 1], False),
    "dilated": ((1, 2, 11, 13), [3, 2], [2, 1], [1, 0], [2, 3], False),
    "rounded up": ((3, 1, 7, 10), [3, 3], [2, 2], [0, 0], [1, 1], True),
    "each": ((1, 3, 6, 6), [3, 3], [1, 1], [1, 1], [1, 1], False),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_on_gpus_no_window_is_the_librarys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any layout; gradients are gathered, from positions in the image or in the window."""
    change_cpu(monkeypatch, many_threads=True)
    (shape, *rest), back = WINDOWS[name], aten.max_pool2d_with_indices_backward
    for dtype, layout in ((F32, torch.channels_last), (BF16, torch.contiguous_format)):
        x = tensor(*shape, dtype=dtype).contiguous(memory_format=layout)
        x[..., 3, :], x[..., 4, 2], x[:, :, :2] = 1.0, torch.nan, -torch.inf  # ties, NaN wins, the first of -inf
        check(lambda x: aten.max_pool2d_with_indices(x, *rest), x, bitwise=True)
        y, indices = aten.max_pool2d_with_indices(x, *rest)
        grad = torch.randn_like(y, dtype=F32).to(dtype)
        expected = back(grad.float(), x.float(), *rest, indices).to(dtype)
        check(lambda g, x, i: back(g, x, *rest, i), grad, x, indices, expected=expected)

    def both(x: torch.Tensor) -> Any:
        y, indices = aten.max_pool2d_with_indices(x, *rest)
        return y, back(torch.cos(y), x, *rest, indices)

    x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    gm = make_fx(both, tracing_mode="fake")(x)
    program = lower(gm, "op").program
    verify(program)
    assert not any(isinstance(step, Extern) for step in program.steps)
    assert_same(run(program, {}, [x]), both(x))


def test_volumes_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    change_cpu(monkeypatch, many_threads=True)
    x, rest = tensor(2, 3, 4, 6, 5), ([2, 2, 2], [2, 2, 2], [0, 1, 1], [1, 1, 1], True)
    y, indices = aten.max_pool3d_with_indices(x, *rest)
    check(lambda x: aten.max_pool3d_with_indices(x, *rest), x, bitwise=True)
    check(lambda g, x, i: aten.max_pool3d_with_indices_backward(g, x, *rest, i), torch.randn_like(y), x, indices)


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


def test_adaptive_pools_of_integers_are_refused_as_in_eager() -> None:
    for pool in (lambda x: aten.adaptive_max_pool2d(x, [2, 2]), lambda x: aten.adaptive_max_pool3d(x, [1, 2, 2])):
        with pytest.raises(NotImplementedError, match="Long"):
            dcompile.compile(pool)(torch.ones(1, 1, 4, 4, dtype=I64))
