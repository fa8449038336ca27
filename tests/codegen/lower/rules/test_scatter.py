"""Writing at positions computed at run time: values that meet, wrap around, or fall outside."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dcompile.codegen.lower.rules import scatter
from tests.codegen.lower.test_ops import BF16, F32, I64, check, program_of, run, tensor

aten = torch.ops.aten
MANY = torch.tensor([[1, 1, 3], [0, 4, 0], [2, 2, 2]])


@pytest.mark.parametrize("dtype", [F32, BF16, I64])
def test_scatter_where_values_meet(dtype: torch.dtype) -> None:
    x, source = tensor(5, 3, dtype=dtype), tensor(4, 6, dtype=dtype)
    check(lambda x, i, s: x.scatter(0, i, s), x, MANY, source, bitwise=True)  # the last one wins
    check(lambda x, i: x.scatter(0, i, 2), x, MANY, bitwise=True)
    check(lambda x, i, s: x.scatter_add(0, i, s), x.float(), MANY, source.float())


@pytest.mark.parametrize("how", ["sum", "mean", "prod", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_scatter_reduce(how: str, include_self: bool) -> None:
    for dtype in (F32, I64):
        x, source = tensor(5, 3, dtype=dtype), tensor(4, 6, dtype=dtype)
        check(lambda x, i, s: x.scatter_reduce(0, i, s, how, include_self=include_self), x, MANY, source)


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put(accumulate: bool) -> None:
    x, rows, columns = tensor(5, 4, 6), torch.tensor([0, -1, 2, 0]), torch.tensor([[3], [-2]])
    put = aten.index_put.default
    check(lambda x, r, v: put(x, [r], v, accumulate), x, rows, tensor(4, 4, 6))
    check(lambda x, r, c, v: put(x, [r, c], v, accumulate), x, rows, columns, tensor(6))
    check(lambda x, r, v: put(x, [None, None, r], v, accumulate), x, rows, tensor(5, 1, 4))
    check(lambda x, r, c, v: put(x, [r, None, c], v, accumulate), x, rows, columns, tensor(2, 4, 4))


def test_values_are_counted_where_indices_have_different_shapes() -> None:
    x, rows, columns = (SimpleNamespace(shape=shape) for shape in ((2, 5, 7, 9), (4, 1), (3,)))
    assert scatter._put_sizes(x, [None, rows, columns]) == (4, 3, 2, 9)  # type: ignore[list-item, arg-type]


def test_whole_rows_are_put_by_a_table_of_rows() -> None:
    """Of rows that fall on one place the last wins; the others' numbers are found without their columns."""
    x, rows, places = tensor(5, 4, 6), torch.tensor([0, -1, 2, 0]), torch.tensor([[2, 0], [2, 1], [-1, 2]])
    put = aten.index_put.default
    check(lambda x, r, v: put(x, [r], v), x, rows, tensor(4, 6))
    check(lambda x, r, v: put(x, [None, r], v), x, places, tensor(5, 3, 2, 6))
    check(lambda x, r, v: put(x, [None, r, r], v), x, places, tensor(3, 2))
    check(lambda x, r, v: put(x, [r, None, r], v), x, places, tensor(3, 2, 4))
    check(lambda x, r, v: x.index_copy(1, r, v), x, torch.tensor([3, 0]), tensor(5, 2, 6), decompose=True)
    table = tensor(64, 4096)  # as large as its columns' numbers would be
    places, values = torch.randint(0, 64, (100,)), tensor(100, 4096)
    expected = table.clone()
    for place, row in zip(places, values, strict=True):  # eager's threads write rows of one place in any order
        expected[place] = row
    check(lambda x, r, v: put(x, [r], v), table, places, values, expected=expected)


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put_where_a_mask_holds(accumulate: bool) -> None:
    put = aten.index_put.default
    for dtype in (F32, I64):
        x, mask = tensor(5, 4, 6, dtype=dtype), tensor(5, 4) > 0
        check(lambda x, m, v: put(x, [m], v, accumulate), x, mask, tensor(dtype=dtype))
        check(lambda x, m, v: put(x, [m], v, accumulate), x, mask, tensor(1, 6, dtype=dtype))
        check(lambda x, m, v: put(x, [None, m], v, accumulate), x, mask[0], tensor(5, 1, 1, dtype=dtype))
        count = int(mask.sum())  # as many values as places: which goes where depends on how many came before
        check(lambda x, m, v: put(x, [m], v, accumulate), x, mask, tensor(count, 6, dtype=dtype), library=1)


def test_embedding_backward() -> None:
    where = torch.tensor([[0, 3, 3], [6, 1, 3]])
    for padding in (-1, 3):
        check(lambda g, i, p=padding: aten.embedding_dense_backward(g, i, 7, p, False), tensor(2, 3, 5), where)
    # a sum in float32, rounded once, where eager rounds bfloat16 at every step
    expected = aten.embedding_dense_backward(tensor(2, 3, 5, dtype=BF16).float(), where, 7, -1, False).to(BF16)
    check(
        lambda g, i: aten.embedding_dense_backward(g, i, 7, -1, False),
        tensor(2, 3, 5, dtype=BF16),
        where,
        bitwise=True,
        expected=expected,
    )


def test_empty() -> None:
    none = torch.zeros(0, 3, dtype=I64)
    check(lambda x, i: x.scatter(0, i, 2.0), tensor(5, 3), none)
    check(lambda x, i, v: aten.index_put(x, [i], v), tensor(5, 3), none[:, 0], tensor(0, 3))
    check(lambda g, i: aten.embedding_dense_backward(g, i, 7, -1, False), tensor(0, 3, 5), none)


@pytest.mark.parametrize("reduce", ["", "sum"])
def test_positions_outside_raise(reduce: str) -> None:
    def scatter(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x.scatter_reduce(0, i, x[:3], reduce) if reduce else x.scatter(0, i, 2.0)

    program, constants = program_of(scatter, (tensor(5, 3), MANY))
    for wrong in (MANY + 3, MANY - 1):
        with pytest.raises(IndexError):
            run(program, constants, [tensor(5, 3), wrong])


def test_what_is_collected_is_the_sum_where_there_was_zero() -> None:
    source = tensor(3, 3)
    source[0] = -0.0
    for function in (
        lambda i, s: torch.zeros(5, 3).scatter_add(0, i, s),
        lambda i, s: aten.index_put(torch.zeros(5, 3), [i[0]], s, True),
    ):
        check(function, MANY, source, bitwise=True)
        program, _ = program_of(function, (MANY, source))
        assert len(program.steps) == 1
