"""Sums where values meet in no fixed order, as on a GPU: rows of small tables take their own, others are added up."""

import pytest
import torch
from torch.nn import functional as F

import dcompile
from dcompile.codegen.lower.rules import scatter


@pytest.fixture(autouse=True)
def in_no_order(monkeypatch):
    for module in (scatter, scatter):
        monkeypatch.setattr(module, "needs_order", lambda low: False)
    torch.compiler.reset()


def compiled(function):
    return dcompile.compile(function, options={"receipt": False, "verify": True})


@pytest.mark.parametrize("padding", [None, 3])
def test_gradients_of_a_small_embedding(padding):
    table = torch.randn(7, 5, requires_grad=True)
    indices, weights = torch.randint(0, 7, (4, 11)), torch.randn(4, 11, 5)

    def gradient(function):
        (found,) = torch.autograd.grad((function(indices, table) * weights).sum(), table)
        return found

    function = compiled(lambda indices, table: F.embedding(indices, table, padding_idx=padding))
    torch.testing.assert_close(gradient(function), gradient(lambda i, t: F.embedding(i, t, padding_idx=padding)))
    assert not dcompile.receipt(function).fallbacks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_table_that_values_are_added_to(dtype):
    x, values = torch.randn(6, 3, dtype=dtype), torch.randn(20, 3, dtype=dtype)
    indices = torch.randint(-6, 6, (20,))

    def add(x, indices, values):
        return x.index_put((indices,), values, accumulate=True)

    function = compiled(add)
    wanted = add(x.float(), indices, values.float()).to(dtype)
    torch.testing.assert_close(function(x, indices, values), wanted)
    assert not dcompile.receipt(function).fallbacks


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    yield lambda: torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(before)


def added(places, values):
    """Fallbacks of a sum of `values` numbers into a table of `places`."""
    indices, given = torch.randint(0, places, (values,)), torch.randn(values)
    function = compiled(lambda x, i, v: x.index_put((i,), v, accumulate=True))
    wanted = torch.zeros(places).index_put((indices,), given, accumulate=True)
    torch.testing.assert_close(function(torch.zeros(places), indices, given), wanted)
    return dcompile.receipt(function).fallbacks


def test_a_table_too_large_for_that_is_added_to(deterministic):
    assert added(4000, 9000) == {}
    deterministic()
    assert added(4000, 9000) == {"aten.index_put.default": 1}, "the library's kernel has an order"


def test_a_large_table_with_few_values_is_left_to_the_library():
    assert added(90_000, 9000) == {}
    assert added(scatter.MAX_SMALL_ELEMENTS + 1, 9000) == {"aten.index_put.default": 1}
