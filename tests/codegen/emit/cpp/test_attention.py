"""Attention of our own on CPUs: values and gradients for all layouts and numbers of threads; which calls it serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend

import dcompile
from dcompile.codegen.emit.cpp import attention

OWN = {"matmul": "own", "receipt": False}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(
    queries: int, keys: int, width: int, *, batch: int = 2, heads: int = 2, shared: int = 1, layout: str = "heads first"
) -> Tensors:
    """Queries, keys and values whose heads lie in memory before their rows, behind them, or in one joined tensor."""

    def make(rows: int, count: int) -> torch.Tensor:
        match layout:
            case "heads first":
                return torch.randn(batch, count, rows, width)
            case "rows first":
                return torch.randn(batch, rows, count, width).transpose(1, 2)
            case _:
                return torch.randn(batch, rows, count, 3 * width)[..., width : 2 * width].transpose(1, 2)

    torch.manual_seed(0)
    return make(queries, heads * shared), make(keys, heads), make(keys, heads)


def results(call: Callable[..., Any], given: Tensors, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The output and the gradients of queries, keys and values, all in float64."""
    inputs = [x.to(dtype).detach().requires_grad_() for x in given]
    out = call(*inputs)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape).to(dtype))
    return [x.detach().double() for x in (out, *(x.grad for x in inputs))]


def check(function: Callable[..., Any], given: Tensors, kernels: int = 2) -> list[torch.Tensor]:
    """As near to float64 as ATen's kernel is, by `kernels` kernels and no library call."""
    compiled = dcompile.compile(function, options=OWN)
    exact, eager, found = results(function, given, torch.float64), results(function, given), results(compiled, given)
    receipt = dcompile.receipt(compiled)
    assert (receipt.kernel_calls, receipt.library_calls) == (kernels, 0)
    for ours, atens, true in zip(found, eager, exact, strict=True):
        bound = 4 * float((atens - true).abs().max()) + 1e-6 * float(true.abs().max())
        assert float((ours - true).abs().max()) < bound
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "queries, keys, width", [(32, 32, 16), (57, 57, 64), (300, 517, 48), (517, 300, 32), (40, 9, 256)]
)
def test_values_and_gradients_are_as_near_to_float64_as_atens(queries, keys, width, causal):
    check(lambda q, k, v: attend(q, k, v, is_causal=causal), operands(queries, keys, width))


@pytest.mark.parametrize("layout", ["rows first", "a slice"])
def test_rows_may_lie_apart(layout):
    check(lambda q, k, v: attend(q, k, v, is_causal=True), operands(70, 70, 32, layout=layout))


@pytest.mark.parametrize("layout", ["heads first", "rows first"])
def test_heads_of_queries_may_share_one_of_keys(layout):
    given = operands(100, 100, 32, shared=3, layout=layout)
    check(lambda q, k, v: attend(q, k, v, is_causal=True, enable_gqa=True), given)


def test_the_scale_is_the_users():
    given = operands(64, 64, 32)
    found = check(lambda q, k, v: attend(q, k, v, scale=0.7), given)
    other = results(lambda q, k, v: attend(q, k, v), given)
    assert not torch.allclose(found[0], other[0], rtol=1e-2)


def test_a_batch_may_have_a_symbolic_size():
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, is_causal=True)

    compiled = torch.compile(function, backend="dcompile", dynamic=True, options=OWN)
    for batch in (2, 5, 3):
        given = operands(64, 64, 32, batch=batch)
        torch.testing.assert_close(results(compiled, given), results(function, given), rtol=1e-5, atol=1e-5)


def test_bits_do_not_depend_on_threads():
    given = operands(300, 300, 64, batch=1, shared=2)
    compiled = dcompile.compile(lambda q, k, v: attend(q, k, v, is_causal=True, enable_gqa=True), options=OWN)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            found.append(results(compiled, given))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_large_scores_do_not_overflow():
    q, k, v = operands(64, 600, 32)
    check(lambda q, k, v: attend(q * 100, k * 10, v), (q, k, v), kernels=6)


def test_what_is_not_finite_stays_so():
    q, k, v = operands(64, 64, 32)
    v[0, 0, 3, 5], q[1, 1, 7, 0] = torch.inf, torch.nan
    found = dcompile.compile(lambda q, k, v: attend(q, k, v, is_causal=True), options=OWN)(q, k, v)
    assert torch.equal(found.isfinite(), attend(q, k, v, is_causal=True).isfinite())


def test_masks_dropout_other_dtypes_and_single_queries_stay_the_librarys():
    def library_calls(function: Callable[..., Any], *given: torch.Tensor) -> int:
        compiled = dcompile.compile(function, options=OWN)
        torch.testing.assert_close(compiled(*given), function(*given), rtol=1e-5, atol=1e-5)
        return int(dcompile.receipt(compiled).library_calls)

    q, k, v = operands(64, 64, 32)
    assert library_calls(lambda q, k, v: attend(q, k, v), q, k, v) == 0
    assert library_calls(lambda q, k, v, m: attend(q, k, v, m), q, k, v, torch.randn(64, 64)) == 1
    assert library_calls(lambda q, k, v: attend(q, k, v), q[:, :, :1].clone(), k, v) == 1, "a decoding step"
    assert library_calls(lambda q, k, v: attend(q, k, v), *operands(64, 64, 20)) == 1, "rows of whole vectors only"
    assert library_calls(lambda q, k, v: attend(q, k, v), *(x.double() for x in (q, k, v))) == 1


def test_the_kernel_is_one_text_for_all_sizes():
    assert attention._source(False) is attention._source(False)
    assert attention._source(False).name != attention._source(True).name
