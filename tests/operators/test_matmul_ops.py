"""Matmuls of 16-bit matrices with float32 results, on CPUs; GPUs have `test_match_gpu.py`."""

import pytest
import torch

from dcompile.operators import matmul_ops
from dcompile.operators.matmul_ops import wide_addmm, wide_mm


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def factors(request, monkeypatch):
    monkeypatch.setattr(matmul_ops, "BLOCK_DEPTH", 16)
    torch.manual_seed(0)
    return torch.randn(24, 40).to(request.param), torch.randn(7, 40).to(request.param).t()


def test_nothing_is_rounded_to_16_bits(factors):
    x, y = factors
    found, exact = wide_mm(x, y), x.double() @ y.double()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(wide_addmm(found, x, y).double(), 2 * exact, rtol=1e-5, atol=1e-5)


def test_sums_may_be_written_in_place(factors):
    x, y = factors
    sums = wide_mm(x, y)
    twice, ops = 2 * sums, torch.ops.dcompile_matmul
    assert ops.addmm_float32.out(sums, x, y, out=sums) is sums
    torch.testing.assert_close(sums, twice)
    other = torch.empty_like(sums)
    ops.addmm_float32.out(twice, x, y, out=other)
    torch.testing.assert_close(other, ops.addmm_float32(twice, x, y))


def test_wide_factors_keep_their_dtype():
    x = torch.randn(3, 4, dtype=torch.float64)
    assert wide_mm(x, x.t()).dtype == wide_addmm(x @ x.t(), x, x.t()).dtype == torch.float64
    assert wide_mm(x.float(), x.t().float()).dtype == torch.float32


def test_operators_are_as_they_are_traced(factors):
    x, y = factors
    sums = wide_mm(x, y)
    for op, given in (("mm_float32", (x, y)), ("addmm_float32", (sums, x, y))):
        torch.library.opcheck(getattr(torch.ops.dcompile_matmul, op).default, given, test_utils="test_faketensor")
