"""Which column reductions are collected in the result itself, and that they are right."""

import numpy as np
import pytest

from dcompile.codegen.emit.cpp.column_sums import (
    MAX_ELEMENTS_PER_POINT,
    MAX_SCRATCH_BYTES,
    collects_in_place,
    rows_of_block,
)
from dcompile.ir.interpret import interpret
from tests.codegen.emit import cpp_kernel, loops
from tests.codegen.emit.harness import run


@pytest.mark.parametrize("rows", [1, 63, 64, 1000, 4096, 10_000, 1_000_000])
def test_blocks_of_rows_are_about_as_many_as_rows_in_a_block(rows):
    block = rows_of_block(rows)
    assert 1 <= block <= rows and -(-rows // block) <= max(128, 2 * rows**0.5)


def test_sums_of_columns_have_memory_of_each_thread_unless_they_are_large_or_sparse():
    assert not collects_in_place(rows=1000, points=1000 * 300, count=300, itemsize=4)
    assert collects_in_place(rows=1000, points=1000 * 300, count=MAX_SCRATCH_BYTES // 4 + 1, itemsize=4)
    assert collects_in_place(rows=64, points=64 * 16, count=64 * 16 * MAX_ELEMENTS_PER_POINT, itemsize=4)
    assert not collects_in_place(rows=64, points=64 * 16, count=16 * MAX_ELEMENTS_PER_POINT, itemsize=4)
    assert not collects_in_place(rows=0, points=0, count=16, itemsize=4)


@pytest.mark.parametrize("tokens", [2, 150])
def test_the_gradient_of_an_embedding_of_few_tokens_is_collected_in_place(tokens):
    program = loops.embedding_backward(tokens, 24, 500)
    (source,) = (cpp_kernel.emit(step, program.table) for step in program.steps)
    assert "scratch" not in source.text
    rng = np.random.default_rng(0)
    inputs = {
        b.name: rng.integers(0, 500, b.shape) if b.dtype == "int64" else rng.standard_normal(b.shape, np.float32)
        for b in program.buffers
        if b.name in program.inputs
    }
    for want, got in zip(interpret(program, inputs), run(program, inputs), strict=True):
        assert np.allclose(want, got, rtol=2e-6, atol=1e-6)
