"""Pads that mirror what is there or repeat its edges, against eager: every edge, types, layouts, gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import dcompile
from dcompile.ir.nodes import Loop
from tests.codegen.lower.test_ops import BF16, F32, F64, I64, check, tensor

PADDINGS = [
    (1, [2, 3]), (1, [0, 3]), (1, [3, 0]), (1, [-1, 2]), (2, [2, 1, 3, 0]), (2, [0, 0, 1, 2]), (2, [1, -2, -1, 2]),
    (3, [1, 2, 0, 3, 2, 1]),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize(("rank", "padding"), PADDINGS)
def test_every_edge(rank: int, padding: list[int], mode: str) -> None:
    x = tensor(2, 3, *(5, 4, 9)[3 - rank :])
    check(lambda x: F.pad(x, padding, mode=mode), x, bitwise=True)
    check(lambda x: F.pad(x[0], padding, mode=mode), x, bitwise=True)
    check(lambda x: F.pad(x * 2 + 1, padding, mode=mode).relu(), x, bitwise=True)


@pytest.mark.parametrize("padding", [[7, 9], [12, 0], [-3, 20], [-4, -1], [4, -5]])
def test_edges_are_repeated_more_often_than_there_are_elements(padding: list[int]) -> None:
    check(lambda x: F.pad(x, padding, mode="replicate"), tensor(2, 3, 6), bitwise=True)


@pytest.mark.parametrize("channels_last", [False, True])
def test_edges_that_are_repeated_lie_as_eager_lays_them_out(channels_last: bool) -> None:
    """In one loop, that reads in order, where rows are whole."""
    x = tensor(2, 3, 6, 37)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    for dtype in (F32, BF16, I64):
        given = x.to(dtype)
        compiled = torch.compile(lambda x: F.pad(x, [2, 1, 3, 2], mode="replicate"), backend="dcompile")
        got, want = compiled(given), F.pad(given, [2, 1, 3, 2], mode="replicate")
        assert torch.equal(got, want) and got.stride() == want.stride()
    (loop,) = check(lambda x: F.pad(x, [2, 1, 3, 2], mode="replicate"), tensor(2, 3, 6, 37), bitwise=True).steps
    assert isinstance(loop, Loop)


@pytest.mark.parametrize("dtype", [F32, F64, BF16, I64])
def test_types_and_layouts(dtype: torch.dtype) -> None:
    x = tensor(2, 3, 6, 37, dtype=dtype)
    for given in (x, x.transpose(2, 3), x[:, :, :, ::2], x.contiguous(memory_format=torch.channels_last)):
        check(lambda x: F.pad(x, [2, 1, 3, 2], mode="reflect"), given, bitwise=True)


def test_of_no_elements() -> None:
    check(lambda x: F.pad(x, [1, 2], mode="reflect"), tensor(0, 3, 5), bitwise=True)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_gradients(mode: str) -> None:
    x = tensor(2, 3, 6, 7).requires_grad_()
    grad = tensor(2, 3, 11, 10)

    def padded(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x.sigmoid(), [2, 1, 3, 2], mode=mode)

    (want,) = torch.autograd.grad(padded(x), x, grad)
    (got,) = torch.autograd.grad(dcompile.compile(padded)(x), x, grad)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
