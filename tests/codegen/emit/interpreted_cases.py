"""Tries kernels in Triton's interpreter, which has to be chosen before Triton is imported: a process of its own.

python -m tests.codegen.emit.interpreted_cases: a line of JSON, from the name of each case to what is wrong, or "".
Of random programs every other one; with --full, all.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator

import numpy as np

from dcompile.codegen.emit.triton import segment_sum
from dcompile.codegen.lower.rules import small_matmul
from dcompile.codegen.nest import contraction, gpu_tiling
from dcompile.codegen.nest.row_matmul import RowMatmul, RowTile, choose_row_tile
from dcompile.codegen.schedule.fusion import matmul_epilogue, split_reductions
from dcompile.codegen.schedule.order import dependences
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Program
from dcompile.ir.symbols import specialise
from tests.codegen.emit import cases, extremes, groups, interpreted, loops, one_row, products, skinny
from tests.fuzz.checks import numbers_of
from tests.ir.fuzz import random_program

EACH = 1 if "--full" in sys.argv else 2
MEANINGS = groups.MEANINGS | products.MEANINGS
Case = tuple[str, Program, dict[str, np.ndarray], dict[str, int], float]


def all_cases() -> Iterator[Case]:
    """(name, program, inputs, what its size symbols are, relative tolerance; 0 where bits have to agree)."""
    for name, program, inputs, tolerance in _known_cases():
        yield name, program, inputs, {}, tolerance
    for name, (program, sizes) in cases.SYMBOLIC.items():
        inputs = cases.random_inputs(specialise(program, sizes))
        yield f"symbolic {name}", spread_out(program), inputs, sizes, 1.6e-2 if "16" in name else 2e-6
    for seed in range(0, 40, EACH):
        program, inputs = random_program(seed, 6, exact=True, symbolic=True)
        if seed >= 24:
            split_reductions.UNKNOWN_ROWS = 3  # so that small loops are shared among programs
            program = spread_out(program)
        yield f"symbolic {seed}", program, inputs, numbers_of(program, inputs), 0


def _known_cases() -> Iterator[tuple[str, Program, dict[str, np.ndarray], float]]:
    for name, program in cases.HAND.items():
        yield name, program, cases.random_inputs(program), 1.6e-2 if "16" in name else 2e-6
    for name, sizes in (("optimizer", loops.OPTIMIZED), ("optimizer of sizes", [256] * 3 + [512] * 7 + [128] * 2)):
        updates = dependences.group_updates(loops.on_a_gpu(loops.optimizer(sizes)))
        yield name, updates, cases.random_inputs(updates), 1.6e-2
    yield "side by side", loops.side_by_side(), cases.random_inputs(loops.side_by_side()), 2e-6
    for name, program in cases.operations().items():
        yield name, program, cases.operands(program, name.split()[0]), 2e-6
    for source, target in cases.CASTS:
        yield f"cast {source} {target}", cases.cast(source, target), cases.cast_inputs(source, target), 0
    segment_sum.ENDS = 4  # so that groups reach across more runs than are looked at in one go
    for name in groups.CASES:
        yield f"groups {name}", *groups.case(name), 1.6e-2 if "16" in name else 2e-6
    matmul_epilogue.MIN_EPILOGUE_FLOPS = 0  # products of any size
    for name in products.CASES:
        yield f"product {name}", products.case(name), products.inputs(products.case(name)), 1.6e-2
    small_matmul.MIN_TILED_ELEMENTS, contraction.MIN_BATCH_PROGRAMS = 0, 1
    for name in skinny.CASES:
        yield f"skinny {name}", skinny.case(name), products.inputs(skinny.case(name)), 1.6e-2
    for name, (*_, tile) in one_row.CASES.items():
        gpu_tiling.choose_row_tile = functools.partial(_chosen, tile)
        yield f"one row {name}", one_row.case(name), products.inputs(one_row.case(name)), 1.6e-2
    gpu_tiling.choose_row_tile = choose_row_tile
    for seed in range(0, 40, EACH):
        product = products.random_case(seed)
        yield f"products {seed}", product, products.inputs(product), 1.6e-2
    for seed in range(0, 24, EACH):
        yield f"exact {seed}", *random_program(seed, 8, exact=True), 0
    for seed in range(500, 510):
        yield f"random {seed}", *random_program(seed, 8), 2e-2
    split_reductions.MIN_SPLIT_ROW_ELEMENTS, split_reductions.PART_ELEMENTS = 8, 3  # so that small loops are shared
    split_reductions.PROGRAMS = split_reductions.PROGRAMS = 4
    for seed in range(24, 44, EACH):
        program, inputs = random_program(seed, 8, exact=True)
        yield f"spread {seed}", spread_out(program), inputs, 0


def _chosen(tile: RowTile, _: RowMatmul) -> RowTile:
    return tile


def spread_out(program: Program) -> Program:
    """A program as it would be made for a GPU."""
    return split_reductions.split_row_reductions(split_reductions.split_column_reductions(loops.on_a_gpu(program)))


def problem(program: Program, inputs: dict[str, np.ndarray], sizes: dict[str, int], tolerance: float) -> str:
    """What is wrong with the kernels of a program; empty if nothing."""
    try:
        results = interpreted.run(program, inputs, sizes)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-400:]}"
    program = specialise(program, sizes)
    for view, want, got in zip(program.outputs, interpret(program, inputs, MEANINGS), results, strict=True):
        wide = np.asarray(want, np.float64), np.asarray(got, np.float64)
        if not np.allclose(*wide, rtol=tolerance, atol=tolerance and 1e-5, equal_nan=True):
            return f"{view} differs by up to {np.nanmax(np.abs(wide[0] - wide[1]))}"
        if (
            tolerance
            and (turned := (wide[0] == 0) & (wide[1] == 0) & (np.signbit(wide[0]) != np.signbit(wide[1]))).any()
        ):
            return f"{view} has zeros of the other sign at {np.flatnonzero(turned)[:4]}"
    return ""


def problem_at_extremes(op: str, dtype: str) -> str:
    """What a kernel gives at the ends of a dtype and eager does not; empty if nothing."""
    try:
        (got,) = interpreted.run(extremes.program(op, dtype), extremes.operands(op, dtype))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-400:]}"
    return extremes.difference(op, dtype, got)


def main() -> None:
    found = {name: problem(*case) for name, *case in all_cases()}
    every = extremes.operations((*extremes.INTEGERS, *extremes.FLOATS))
    found |= {f"extreme {op} {dtype}": problem_at_extremes(op, dtype) for op, dtype in every}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
