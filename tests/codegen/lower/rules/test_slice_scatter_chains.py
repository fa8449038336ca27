"""Tensors put together of slices of one other are read from it in one loop, against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from tests.codegen.lower.lowered import Seen, compile_with
from tests.codegen.lower.test_ops import BF16, I64, tensor

Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
PADDINGS = [(1, [2, 3]), (1, [0, 3]), (1, [3, 0]), (2, [2, 1, 3, 0]), (2, [0, 0, 1, 2]), (3, [1, 2, 0, 3, 2, 1])]


def check(function: Function, x: torch.Tensor) -> int:
    """The results are eager's, to the bit, with the same strides; returns how many loops there were."""
    seen, given = Seen(), x.clone()
    got, want = compile_with(seen, function)(x), function(given)
    for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
    assert torch.equal(x, given)
    return seen.loops


@pytest.mark.parametrize(("rank", "padding"), PADDINGS)
def test_circular_padding_is_one_loop(rank: int, padding: list[int]) -> None:
    x = tensor(2, 3, *(5, 4, 9)[3 - rank :])
    assert check(lambda x: F.pad(x, padding, mode="circular"), x) == 1
    check(lambda x: F.pad(x * 2 + 1, padding, mode="circular").relu(), x)


@pytest.mark.parametrize("dtype", [BF16, I64])
def test_types_and_layouts(dtype: torch.dtype) -> None:
    x = tensor(2, 3, 6, 37, dtype=dtype)
    for given in (x, x.transpose(2, 3), x[:, :, :, ::2], x.contiguous(memory_format=torch.channels_last)):
        check(lambda x: F.pad(x, [2, 1, 3, 2], mode="circular"), given)


def test_gradients() -> None:
    x, again = (tensor(2, 3, 6, 7).requires_grad_() for _ in range(2))

    def padded(x: torch.Tensor) -> torch.Tensor:
        return (F.pad(x, [2, 1, 3, 2], mode="circular") * 3).tanh().sum()

    compile_with(Seen(), padded)(x).backward()
    padded(again).backward()
    torch.testing.assert_close(x.grad, again.grad)


def halves_swapped(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    y[:, :3], y[:, 3:] = x[:, 4:], x[:, :4]
    return y


def of_two(x: torch.Tensor) -> torch.Tensor:
    """Slices of two tensors, which are not one loop's reads of one."""
    z = x * 2
    y = z.clone()
    y[:, 2:4] = x[:, :2]
    y[:, :2] = y[:, 3:5]
    return y + z


def askew(x: torch.Tensor) -> torch.Tensor:
    """A part whose other dimension is another part of the source."""
    y = x.new_empty(4, 4)
    y[:2], y[2:] = x[:2, :4], x[:2, 3:]
    return y


def changed_between(x: torch.Tensor) -> torch.Tensor:
    """What is put together lies before and behind a change of its source."""
    y = torch.empty_like(x)
    y[:, :3], y[:, 3:] = x[:, 4:], x[:, :4]
    x.add_(1)
    z = torch.empty_like(x)
    z[:, :3], z[:, 3:] = x[:, 4:], y[:, :4]
    return z + y


def pieces_of_it(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The result and what it was on its way are asked for too."""
    y = torch.zeros(5, 7)
    y[:, 1:] = x[:, :6]
    first = y * 2
    y[:, :1] = y[:, 6:]
    return first, y, y[1:3, 2:]


@pytest.mark.parametrize("function", [halves_swapped, of_two, askew, changed_between, pieces_of_it])
def test_other_slices(function: Function) -> None:
    check(function, tensor(5, 7))


def test_halves_swapped_are_one_loop() -> None:
    assert check(halves_swapped, tensor(5, 7)) == 1
