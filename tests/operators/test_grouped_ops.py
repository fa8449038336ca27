"""Grouped matmuls as operators: each group's rows by its matrix, gradients that trace, and who computes them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dcompile.operators import grouped_ops
from dcompile.operators.grouped_ops import autocast_grouped_mm, grouped_mm, has_grouped_gemm

GROUPS, WIDTH, RESULT, ROWS = 4, 16, 8, 20
OFFSETS = {
    "all have rows": (3, 9, 10, 20),
    "some have none": (0, 9, 9, 20),
    "one has all": (0, 20, 20, 20),
    "nobody has any": (0, 0, 0, 0),
}


def operands(dtype: torch.dtype = torch.float32, by_columns: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, in) and a parameter behind (groups, in, out), stored by columns as a linear layer's weight is, or not."""
    torch.manual_seed(0)
    shape = (GROUPS, RESULT, WIDTH) if by_columns else (GROUPS, WIDTH, RESULT)
    return (
        torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True),
        torch.randn(shape, dtype=dtype, requires_grad=True),
    )


def one_by_one(input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    ends = [0, *offsets.tolist()]
    return torch.cat([input[start:end] @ weight[group] for group, (start, end) in enumerate(pairwise(ends))])


@pytest.mark.parametrize("each", [False, True], ids=["grouped", "each"])
@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("ends", OFFSETS.values(), ids=OFFSETS)
def test_values_and_gradients_are_those_of_a_matmul_for_each_group(each, by_columns, ends, monkeypatch):
    if each:
        monkeypatch.setattr(grouped_ops, "has_grouped_gemm", lambda *_: False)
    offsets = torch.tensor(ends, dtype=torch.int32)
    results = []
    for function in (grouped_mm, one_by_one):
        input, weight = operands(by_columns=by_columns)
        found = function(input, weight.transpose(1, 2) if by_columns else weight, offsets)[: ends[-1]]
        found.square().sum().backward()
        assert weight.grad.stride() == weight.stride()
        results.append((found.detach(), input.grad[: ends[-1]], weight.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_rows_behind_the_last_group_are_zero_where_the_groups_are_taken_one_by_one():
    input, weight = operands(by_columns=False)
    found = torch.ops.dcompile_grouped.mm_each(input, weight, torch.tensor([1, 2, 2, 5]))
    assert not found[5:].any() and found[:5].all()


def test_a_gradient_that_is_expanded_is_taken():
    input, weight = operands()
    grouped_mm(
        input, weight.transpose(1, 2), torch.tensor(OFFSETS["all have rows"], dtype=torch.int32)
    ).sum().backward()
    assert weight.grad.any()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch 2.15's opcheck
@pytest.mark.parametrize("name", ["mm", "mm_each"])
def test_the_operators_are_what_their_fakes_say(name):
    input, weight = operands(by_columns=False)
    offsets = torch.tensor(OFFSETS["some have none"], dtype=torch.int32 if name == "mm" else torch.int64)
    torch.library.opcheck(getattr(torch.ops.dcompile_grouped, name).default, (input, weight, offsets))


def test_under_autocast_the_dtype_is_autocasts():
    input, weight = operands()
    offsets = torch.tensor(OFFSETS["all have rows"], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_grouped_mm(input, weight.transpose(1, 2), offsets).dtype == torch.bfloat16
        assert grouped_mm(input, weight.transpose(1, 2), offsets).dtype == torch.float32
    assert autocast_grouped_mm(input, weight.transpose(1, 2), offsets).dtype == torch.float32


@pytest.mark.parametrize(
    ("device", "dtype", "shape", "takes"),
    [
        ("cpu", torch.float32, (4, 16, 8), True),
        ("cpu", torch.float64, (4, 16, 8), False),
        ("cpu", torch.float32, (4, 6, 8), False),
        ("cuda", torch.bfloat16, (4, 16, 8), True),
        ("cuda", torch.bfloat16, (4, 16, 12), False),
        ("cuda", torch.float32, (4, 16, 8), False),
        ("cuda", torch.float16, (4, 16, 8), False),
        ("cpu", torch.float32, (4, 0, 8), False),
    ],
)
def test_the_grouped_gemm_is_taken_where_it_takes_the_operands(device, dtype, shape, takes):
    with torch._subclasses.FakeTensorMode():
        weight = torch.empty(shape, dtype=dtype, device=device)
        input = torch.empty(20, shape[1], dtype=dtype, device=device)
        assert has_grouped_gemm(input, weight) is takes


def test_a_weight_with_gaps_is_not_taken():
    input, weight = operands(by_columns=False)
    assert has_grouped_gemm(input, weight) and not has_grouped_gemm(input[:, ::2], weight[:, ::2])
