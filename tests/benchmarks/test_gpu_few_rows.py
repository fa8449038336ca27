"""Programs and conclusions of the benchmark of few rows; its times need a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import gpu_few_rows
from dcompile.ir.interpret import interpret
from dcompile.ir.verify import verify


@pytest.mark.parametrize("kind", ["mm", "gated", "residual"])
def test_programs_compute_what_results_are_compared_with(kind):
    program = gpu_few_rows.program(kind, 2, 256, 288)
    verify(program)
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal(program.table[name].shape).astype(np.float32) / 4 for name in program.inputs}
    memory = {name: torch.from_numpy(value).bfloat16() for name, value in given.items()}
    given = {name: value.float().numpy() for name, value in memory.items()}
    (got,) = interpret(program, given)
    want = gpu_few_rows.expected(kind, memory, 2, 256, 288)
    assert np.linalg.norm(got - want.numpy()) <= gpu_few_rows.TOLERANCE * np.linalg.norm(want.numpy())


def test_lines_have_the_usual_tile_and_the_library_among_their_candidates():
    line = gpu_few_rows.Line("gated_4096x14336", 8)
    assert next(iter(line.candidates.own)) == line.candidates.usual
    assert len(line.candidates.matmuls) == 2 and line.candidates.rest is not None
    assert line.nbytes == 2 * 4096 * 14336 * 2


def test_conclusions_name_what_to_change():
    def line(library, usual, best):
        return {"us": {"library": library, "usual": usual, "best": best}, "usual": "8x32x128", "best": "8x16x64"}

    lines = {"a x2": line(10.0, 8.0, 7.9), "b x16": line(10.0, 12.5, 10.0)}
    assert gpu_few_rows.conclusions(lines) == [
        "the library is faster than the usual tile: b x16",
        "another tile is faster: b x16: 8x16x64 for 8x32x128, 0.80",
        "geometric means over the library: usual 1.00, best 0.89",
    ]
