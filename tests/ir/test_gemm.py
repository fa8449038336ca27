"""Library calls read as matmuls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcompile.ir.gemm import MATMUL_OPS, matmul_of
from dcompile.ir.nodes import SCALED, Extern, View

LEFT, RIGHT, BIAS = View("x", (4, 8), (8, 1)), View("w", (8, 2), (1, 8)), View("b", (2,), (1,))


def matmul(op: str, *args: View, **how: float) -> Extern:
    return Extern(op, args, tuple(how.items()), ("y",), "out")


@pytest.mark.parametrize("name", MATMUL_OPS)
def test_factors_addend_and_result_of_each_op(name: str) -> None:
    op = MATMUL_OPS[name]
    added = (BIAS,) if name == op.adding else ()
    call = matmul_of(matmul(name, *added, LEFT, RIGHT))
    assert call is not None and (call.left, call.right, call.out) == (LEFT, RIGHT, "y")
    assert call.added == (BIAS if added else None) and call.is_product == (not added)


def test_scales_of_one_are_none() -> None:
    call = matmul_of(matmul("aten.addmm.default", BIAS, LEFT, RIGHT, beta=1, alpha=0.5))
    assert call is not None and call.kwargs == (("alpha", 0.5),) and not call.is_product


def test_an_addend_times_zero_is_none() -> None:
    call = matmul_of(replace(matmul("aten.addmm.default", BIAS, LEFT, RIGHT), kwargs=SCALED))
    assert call is not None and call.is_product


def test_other_calls_are_no_matmuls() -> None:
    assert matmul_of(matmul("aten.cat.default", LEFT, RIGHT)) is None
    allocated = replace(matmul("aten.mm.default", LEFT, RIGHT), mode="alloc")
    assert matmul_of(allocated) is None, "the library allocates its result"
