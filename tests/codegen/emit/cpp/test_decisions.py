"""Each decision about a nest, on its own: what it decides, what it leaves alone, and kernels without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from dcompile.codegen.emit.cpp.plan import NestPlan, VectorLoop
from dcompile.codegen.emit.target import KernelSource
from dcompile.ir.index import var
from dcompile.ir.nodes import IndexOf, Load, Program, Store
from dcompile.pipeline import nest_passes
from tests.codegen.emit import cpp_kernel, loops
from tests.codegen.emit.cases import random_inputs
from tests.codegen.emit.cpp import test_identity_scale, test_outer_vectorize, test_software_pipeline, test_value_facts
from tests.codegen.emit.harness import execute, loaded, source_of
from tests.codegen.emit.loops import I0, Body, program

ROWS = {row.name: row for row in nest_passes()}
NAMES = list(ROWS)


def summed_columns(rows: int, n: int) -> Program:
    """Elements that are added to a row of sums, one by one."""
    b, i1 = Body(), var("i1")
    stores = [Store("y", i1, b.load("x", I0 * n + i1), "sum")]
    return program(b, (rows, n), (), stores, x=("float32", (rows, n)), y=("float32", (n,)))


def some_rows(rows: int, n: int) -> Program:
    """Rows of a tensor behind one row of zeros."""
    b, i1 = Body(), var("i1")
    one = b.const(1, "int64")
    behind = b.op("le", one, b.put(IndexOf(I0, "int64")), dtype="bool")
    value = b.put(Load("x", I0 * n + i1 - n, "float32", behind))
    stores = [Store("y", I0 * n + i1, b.op("add", value, b.const(1)))]
    return program(b, (rows, n), (), stores, x=("float32", (rows, n)), y=("float32", (rows, n)))


@dataclass(frozen=True)
class Case:
    """A loop that a decision is about, what it decides, and a loop that it leaves alone."""

    program: Program
    decides: Callable[[NestPlan], object]
    expected: object
    other: Program
    fields: tuple[str, ...]


SMALL = loops.binary("add", 100)
CASES = {
    "skip_identity_scale": Case(
        test_identity_scale.scaled(), lambda plan: plan.scaling and plan.scaling.tensor.buffer, "x", SMALL, ("scaling",)
    ),
    "parallelize": Case(loops.binary("add", 1 << 16), lambda plan: plan.parallel, True, SMALL, ("parallel",)),
    "collect_columns": Case(
        loops.embedding_backward(300, 256, 9000), lambda p: p.in_place, True, summed_columns(300, 64), ("in_place",)
    ),
    "share_columns": Case(
        loops.embedding_backward(300, 256, 9000),
        lambda plan: plan.shared_columns and plan.shared_columns.size,
        256,
        loops.embedding_backward(300, 64, 9000),  # too narrow for two threads
        ("shared_columns",),
    ),
    "transpose_tiles": Case(
        loops.transpose(64, 64), lambda plan: plan.tile and plan.tile.along.tile, 64, loops.transpose(64, 8), ("tile",)
    ),
    "shorten_nans": Case(
        test_value_facts.divided(),
        lambda plan: len(plan.shortened),
        1,
        test_value_facts.divided(stored=True),
        ("short_nans", "shortened"),
    ),
    "hoist_values": Case(
        loops.stretched(20, 24), lambda plan: len(plan.hoisted), 3, loops.stretched(8, 24), ("hoisted", "kept")
    ),
    "keep_values": Case(
        loops.softmax(4, 100), lambda plan: list(plan.kept.values()), [1], loops.rms_norm(4, 100), ("kept",)
    ),
    "share_elements": Case(
        loops.row_sum(1, 100_000), lambda p: p.shared_elements, True, loops.row_sum(2, 100_000), ("shared_elements",)
    ),
    "block_scans": Case(
        loops.scan(3, 40), lambda p: [len(r.scans) for r in p.scans.values()], [1], loops.softmax(3, 40), ("scans",)
    ),
    "select_masked_rows": Case(
        some_rows(9, 64), lambda p: len(p.selected_rows), 1, some_rows(9, 5000), ("selected_rows",)
    ),
    "count_positions": Case(
        loops.argmax(3, 100), lambda plan: list(plan.counters), [1], loops.softmax(3, 100), ("counters",)
    ),
    "stream_stores": Case(
        loops.binary("add", 4 << 20),
        lambda plan: plan.streamed,
        frozenset({0}),
        loops.binary("add", 1 << 20),
        ("streamed",),
    ),
    "prefetch_next_row": Case(
        loops.softmax(130, 4096),
        lambda plan: [load.buffer for load in plan.next_row],
        ["x"],
        loops.softmax(4, 4096),  # caches hold it
        ("next_row", "next_row_pass"),
    ),
    "prefetch_gathers": Case(
        loops.embedding(41, 64, 4096),
        lambda plan: [gather.position.buffer for gather in plan.gathers],
        ["t"],
        loops.embedding(41, 64, 4095),
        ("gathers",),
    ),
    "vectorize": Case(
        loops.unary("exp", 1000), lambda p: p.vectors, {0: VectorLoop("VECTORS", "two")}, SMALL, ("vectors",)
    ),
    "vectorize_rows": Case(
        test_outer_vectorize.middle((3, 40, 300)),
        lambda plan: plan.row_vectors,
        frozenset({0}),
        test_outer_vectorize.middle((3, 40, 300), dtype="float64"),
        ("row_vectors",),
    ),
    "pipeline_last_pass": Case(
        test_software_pipeline.residual(130, 256),
        lambda plan: plan.late and (plan.late.number, plan.late.host),
        (1, 0),
        test_software_pipeline.residual(1, 256),  # no row to wait for
        ("late",),
    ),
    "interleave_row_sums": Case(
        loops.row_sum(512, 512), lambda plan: plan.interleaved_sum, 1, loops.row_sum(511, 512), ("interleaved_sum",)
    ),
    "interleave_column_sums": Case(
        summed_columns(300, 64),
        lambda plan: plan.interleaved_columns,
        True,
        summed_columns(300, 65),
        ("interleaved_columns",),
    ),
    "split_loops": Case(
        loops.concatenated(20, 40, 1, 100),
        lambda plan: plan.pieces,
        {0: ((0, 40), (40, 41), (41, 141))},
        SMALL,
        ("pieces",),
    ),
}  # fmt: skip


def before(made: Program, name: str) -> NestPlan:
    """The plan of a loop in front of a decision."""
    return cpp_kernel.plan_of(made, until=NAMES[NAMES.index(name) - 1] if NAMES.index(name) else None)


def test_each_decision_has_a_case() -> None:
    assert list(CASES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_decision_sets_its_fields_of_the_plan_and_no_others(name: str) -> None:
    case, decide = CASES[name], ROWS[name].run
    plan = before(case.program, name)
    decided = decide(plan)
    changed = {f.name for f in dataclasses.fields(plan) if getattr(plan, f.name) != getattr(decided, f.name)}
    assert case.decides(decided) == case.expected and changed == {*case.fields}
    assert decide(plan) == decided, "a pure function"
    other = before(case.other, name)
    assert decide(other) == other


def test_the_pass_beside_the_last_one_prefetches_the_next_row() -> None:
    """The last pass is no longer one of its row, whichever computes most."""
    made = loops.softmax(130, 4096)
    plan = cpp_kernel.plan_of(made)
    assert plan.late is not None and plan.next_row_pass == plan.late.host
    assert cpp_kernel.plan_of(made, until="vectorize").late is None


def test_a_dump_says_what_was_decided() -> None:
    said = list(cpp_kernel.plan_of(loops.stretched(20, 24)).decisions())
    assert [line.split(":")[0] for line in said] == ["hoisted", "kept"]
    assert list(cpp_kernel.plan_of(SMALL).decisions()) == []


@pytest.fixture(scope="module")
def kernels() -> dict[str, tuple[KernelSource, KernelSource]]:
    """Of each case's loop the kernel and the one without the decision, and one without any, all in one file."""
    optional = [name for name in NAMES if not ROWS[name].required]
    made = {name: (CASES[name].program, (name,)) for name in optional}
    made |= {"no decision": (loops.softmax(130, 4096), tuple(optional))}
    found = {name: (source_of(p), source_of(p, without=without)) for name, (p, without) in made.items()}
    loaded([kernel for pair in found.values() for kernel in pair])
    return found


@pytest.mark.parametrize("name", [*(name for name in NAMES if not ROWS[name].required), "no decision"])
def test_without_a_decision_results_are_the_same(
    name: str, kernels: dict[str, tuple[KernelSource, KernelSource]]
) -> None:
    """Up to the order of float sums."""
    made = CASES[name].program if name in CASES else loops.softmax(130, 4096)
    inputs = random_inputs(made)
    with_it, without = kernels[name]
    assert with_it.text != without.text
    for one, other in zip(execute(made, with_it, inputs), execute(made, without, inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
