"""What is the same in every row: computed before all rows, kept apart from what is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcompile.codegen.emit.cpp.keep_values import MAX_HOISTED_BYTES, MIN_HOIST_ROWS, find_row_invariant
from dcompile.codegen.nest.loop_nest import levels, make_nest
from dcompile.ir.nodes import Loop, Program
from tests.codegen.emit import cpp_kernel, loops
from tests.codegen.emit.harness import interpret, run


def loop_of(made: Program) -> Loop:
    (loop,) = made.steps
    assert isinstance(loop, Loop)
    return loop


def tables(made: Program) -> tuple[str, ...]:
    nest = make_nest(loop_of(made))
    return tuple(nest.body[ref].dtype for ref in find_row_invariant(nest, levels(nest)))


def test_places_and_weights_are_computed_once():
    made = loops.stretched(20, 24)
    assert sorted(tables(made)) == ["float32", "int64", "int64"]
    before, rows = cpp_kernel.emit(loop_of(made), made.table).text.split("for (int64 r = 0")
    assert "to_int64(" in before and "max_number_(" in before
    assert "to_int64(" not in rows and "max_number_(" not in rows


def test_there_are_none_of_few_rows_of_long_ones_or_of_conditions():
    assert tables(loops.stretched(MIN_HOIST_ROWS, 24)) == ()
    assert tables(loops.stretched(20, MAX_HOISTED_BYTES // 4)) == ()
    assert tables(loops.concatenated(20, 40, 1, 100)) == (), "conditions divide the loop"


@pytest.mark.parametrize("threads", [1, 2])
def test_stretched_rows_are_eagers(threads: int):
    x = np.random.default_rng(0).normal(size=(400, 100)).astype(np.float32)
    made, before = loops.stretched(400, 100), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        (got,) = run(made, {"x": x})
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(got, interpret(made, {"x": x})[0])
    want = torch.nn.functional.interpolate(torch.from_numpy(x)[None], scale_factor=2, mode="linear")[0]
    assert np.allclose(got, want.numpy(), rtol=1e-6, atol=1e-6)
