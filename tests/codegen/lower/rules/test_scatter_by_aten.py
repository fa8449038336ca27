"""Values that the library puts in place on CPUs: which, what becomes of them, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.codegen.lower.lower import lower
from dcompile.codegen.lower.rules.scatter import MIN_LIBRARY_ELEMENTS
from dcompile.ir.nodes import Extern, Loop
from tests.codegen.lower.lowered import run
from tests.codegen.lower.rules.test_input_mutation import check as check_in_place
from tests.codegen.lower.test_ops import BF16, BOOL, F32, I64, check, program_of, tensor

put = torch.ops.aten.index_put.default
ROWS, COLUMNS = 64, 96


def positions(*shape: int, end: int) -> torch.Tensor:
    return torch.randint(0, end, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [F32, BF16, I64, BOOL])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_scatter_where_values_meet(dtype: torch.dtype, dim: int) -> None:
    """The last one wins. What is scattered into is computed once, and what comes of it is read afterwards."""
    x, source = tensor(ROWS, COLUMNS, dtype=dtype), tensor(ROWS, COLUMNS + 5, dtype=dtype)
    index = positions(ROWS - 1, COLUMNS, end=ROWS)
    check(lambda x, i, s: x.scatter(dim, i, s), x, index, source, library=1, bitwise=True)
    check(lambda x, i, s: x | (~x).scatter(dim, i, s) if dtype in (I64, BOOL) else (x * 2).scatter(dim, i, s) + x, x,
          index, source, library=1)  # fmt: skip
    check(lambda x, i: x.scatter(dim, i[:, :4], 1), x, index, library=1, bitwise=True)


@pytest.mark.parametrize("dtype", [F32, I64])  # bfloat16: compiled, for the interpreter adds it in float32
def test_few_values_are_added_in_eagers_order(dtype: torch.dtype) -> None:
    x, values = tensor(ROWS, COLUMNS, dtype=dtype), tensor(ROWS, 5, dtype=dtype)
    index, rows = positions(ROWS, 5, end=6), torch.tensor([3, -2, 3, 60])
    check(lambda x, i, v: x.scatter_add(1, i, v), x, index, values, library=1, bitwise=True)
    check(lambda x, r, v: put(x, [r], v, True), x, rows, tensor(4, COLUMNS, dtype=dtype), library=1, bitwise=True)
    check(lambda x, r, v: put(x, [r, r], v, True), x, rows, tensor(1, dtype=dtype), library=1, bitwise=True)


def test_few_single_elements_are_put_in_eagers_order() -> None:
    x, rows, columns = tensor(ROWS, COLUMNS), torch.tensor([3, -1, 3, 60]), torch.tensor([[7], [-2], [7]])
    check(lambda x, r, c, v: put(x, [r, c], v) * 2, x, rows, columns, tensor(3, 4), library=1, bitwise=True)
    check(lambda x, r, v: put(x, [r, r], v), x, rows, tensor(), library=1, bitwise=True)


def test_loops_of_ours_take_small_tensors_whole_rows_many_values_and_sums_from_zero() -> None:
    x, index = tensor(ROWS, COLUMNS), positions(ROWS, 5, end=6)
    small, rows = tensor(8, MIN_LIBRARY_ELEMENTS // 8 - 1), torch.tensor([3, -2, 3])
    check(lambda x, i, v: x.scatter(1, i[:8], v), small, index, tensor(8, 5))
    check(lambda x, r, v: put(x, [r], v), x, rows, tensor(3, COLUMNS))
    check(lambda x, i, v: x.scatter_add(1, i, v), x, positions(ROWS, COLUMNS, end=COLUMNS), tensor(ROWS, COLUMNS))
    check(lambda i, v: torch.zeros(ROWS, COLUMNS).scatter_add(1, i, v), index, tensor(ROWS, 5))
    check(lambda r, v: put(torch.zeros(ROWS, COLUMNS), [r], v, True), rows, tensor(3, COLUMNS))


def test_positions_outside_raise_eagers_error_and_leave_the_tensor_alone() -> None:
    x, index = tensor(ROWS, COLUMNS), positions(ROWS, 5, end=6)
    for function, wrong in (
        (lambda x, i: x.scatter(1, i, 2.0), index + 95),
        (lambda x, i: x.scatter(1, i, 2.0), index - 5),
        (lambda x, i: put(x, [i[0], i[0]], torch.ones(())), index + 63),
    ):
        with pytest.raises((IndexError, RuntimeError)) as eagers:
            function(x, wrong)
        program, constants = program_of(function, (x, index))
        given = x.clone()
        with pytest.raises(eagers.type):
            run(program, constants, [given, wrong])
        assert torch.equal(given, x)


def test_compiled_with_gradients() -> None:
    x, values, index = tensor(ROWS, COLUMNS), tensor(ROWS, COLUMNS), positions(ROWS, COLUMNS, end=9).sort(1)[0]

    def loss(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (x * 2).scatter(0, index, values.exp()).square().sum()

    results = []
    for function in (loss, torch.compile(loss, backend="dcompile")):
        leaves = [t.clone().requires_grad_() for t in (x, values)]
        results.append((function(*leaves), *torch.autograd.grad(function(*leaves), leaves)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_compiled_bfloat16_is_added_as_eager_does() -> None:
    x, values, rows = tensor(ROWS, COLUMNS, dtype=BF16), tensor(4, COLUMNS, dtype=BF16), torch.tensor([3, -2, 3, 60])

    def add(x: torch.Tensor) -> torch.Tensor:
        return x.index_put((rows,), values, accumulate=True).scatter_add(1, rows[None] % ROWS, values)

    assert torch.equal(torch.compile(add, backend="dcompile")(x), add(x))


# --- a cache ----------------------------------------------------------------------------------------------------------


def take(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor]:
    """A functionalised `cache[:, at] = new`, and what is read of the cache afterwards."""
    after = put(cache, [None, at], new)
    cache.copy_(after)
    return (after.sum(1),)


@pytest.mark.parametrize("at", [[4], [-2, 3], [5, 5, 0]])
def test_a_cache_takes_few_values_in_place(at: list[int]) -> None:
    """Without a look at all of it."""
    steps = check_in_place(take, torch.randn(3, 900, 2), torch.randn(3, len(at), 2), torch.tensor(at))
    (writer,) = (step for step in steps if "arg0_1" in step.writes)
    assert isinstance(writer, Extern) and not writer.fallback and "arg0_1" in writer.reads
    assert all(isinstance(step, Extern) or step.reads & {"arg0_1"} for step in steps)


def test_a_position_outside_is_found_before_anything_is_written() -> None:
    given = torch.randn(3, 9, 2), torch.randn(3, 2, 2), torch.tensor([4, 5])
    lowered = lower(make_fx(take, tracing_mode="fake")(*given), "graph")
    cache = given[0].clone()
    with pytest.raises(IndexError):
        run(lowered.program, lowered.constants, [cache, given[1], torch.tensor([4, 9])])
    assert torch.equal(cache, given[0])


def test_many_values_for_a_cache_go_by_loops() -> None:
    """Threads of the library may put them in any order."""
    steps = check_in_place(take, torch.randn(3, 40, 512), torch.randn(3, 32, 512), torch.arange(32))
    assert all(isinstance(step, Loop) for step in steps)
