"""A result is wrong by what ATen's own dtypes lose, not by a constant."""

from __future__ import annotations

import math

import pytest
import torch

from dcompile.verify.compare import Miss, compare, is_near


def evaluated(function, *values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return function(*values), function(*(value.double() for value in values))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_another_order_of_sums_is_no_miss(dtype: torch.dtype) -> None:
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    same, exact = evaluated(lambda x: x.sum(-1), x)
    other = x.view(64, 64, 64).sum(1).sum(-1) if dtype == torch.float32 else x.float().sum(-1).to(dtype)
    assert compare(other, same, exact) is None


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_one_wrong_element_is_named(dtype: torch.dtype) -> None:
    same, exact = evaluated(torch.exp, torch.linspace(-3, 3, 60, dtype=dtype).reshape(6, 10))
    got = same.clone()
    got[4, 7] *= 1.5
    miss = compare(got, same, exact)
    assert miss is not None and (miss.position, miss.count, miss.numel) == ((4, 7), 1, 60)
    assert miss.got == float(got[4, 7]) and miss.wanted == pytest.approx(float(exact[4, 7]))
    assert miss.allowed < abs(miss.got - miss.wanted) and "1 of 60 elements differ; at [4, 7]" in str(miss)


def test_the_error_that_counts_is_the_dtypes_own() -> None:
    """A difference of large numbers loses digits in eager, too; the same error of a product is a miss."""
    big = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 1e6
    same, exact = evaluated(lambda x: (x + 0.1) - x, big)
    assert compare(same + 0.01, same, exact) is None
    product, exact_product = evaluated(lambda x: x * 1e-6, big)
    assert compare(product + 0.01, product, exact_product) is not None


def test_nan_and_infinity_must_be_where_aten_has_them() -> None:
    same = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    assert compare(same.clone(), same, same.double()) is None
    for place, value in ((0, math.nan), (1, 1.0), (2, math.nan), (2, -math.inf), (3, 1.0)):
        got = same.clone()
        got[place] = value
        miss = compare(got, same, same.double())
        assert miss is not None and miss.position == (place,)


def test_an_overflow_that_only_the_dtype_has_may_be_absent() -> None:
    """A sum in float16 overflows in one order only; float64's value is right, too."""
    same, exact = torch.tensor([math.inf], dtype=torch.float16), torch.tensor([60000.0], dtype=torch.float64)
    assert compare(torch.tensor([60000.0], dtype=torch.float16), same, exact) is None
    assert compare(torch.tensor([3.0], dtype=torch.float16), same, exact) is not None


def test_integers_and_truth_values_must_be_equal() -> None:
    same = torch.arange(6)
    assert compare(same.clone(), same, same) is None
    miss = compare(same + (same == 4), same, same)
    assert miss is not None and miss.position == (4,) and (miss.got, miss.wanted) == (5.0, 4.0)
    assert compare(same > 2, same > 3, same > 3) is not None


def test_complex_numbers_are_compared_part_by_part() -> None:
    same = torch.complex(torch.ones(3), torch.arange(3.0))
    wrong = same.clone()
    wrong[2] += 1j
    assert compare(same.clone(), same, same.to(torch.complex128)) is None
    miss = compare(wrong, same, same.to(torch.complex128))
    assert miss is not None and miss.position == (2, 1)


def test_shapes_dtypes_and_absence_are_misses() -> None:
    x = torch.ones(2)
    assert compare(None, None, None) is None
    for got, same in ((None, x), (x, None), (x, torch.ones(3)), (x.double(), x)):
        miss = compare(got, same, same)
        assert isinstance(miss, Miss) and miss.reason and str(miss) == miss.reason


def test_empty_tensors_are_equal() -> None:
    assert compare(torch.ones(0, 3), torch.ones(0, 3), torch.ones(0, 3, dtype=torch.float64)) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_is_near_is_what_has_no_miss(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    same, eps = torch.randn(64, 8).to(dtype), torch.finfo(dtype).eps
    for roundings in (0, 1, 7, 9, 100):
        got = (same.double() * (1 + roundings * eps)).to(dtype)
        got[3, 2] = float("nan") if roundings == 7 else got[3, 2]
        assert is_near(got, same) == (compare(got, same, None) is None)


def test_numbers_of_the_host_are_near_and_absent_tensors_are_not() -> None:
    assert is_near(3, 4) and is_near(None, None)
    assert not is_near(None, torch.ones(1)) and not is_near(torch.ones(2), torch.ones(1))
    assert is_near(torch.arange(3), torch.arange(3)) and not is_near(torch.arange(3), torch.arange(1, 4))
