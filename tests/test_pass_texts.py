"""What each pass of `pipeline.py` does to one small input, as text.

Rewrite the texts with `pytest tests/test_pass_texts.py --update-golden`, and review what `git diff tests/golden` says.
Inputs are in `tests/pass_inputs`; a row that has none fails here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

import pytest

from dcompile.capture.passes.dynamo import decode_attention
from dcompile.capture.passes.joint import broadcast_addends, padding, saved_values
from dcompile.codegen.emit.cpp import kernel
from dcompile.codegen.emit.target import EmitRequest, Kernels
from dcompile.compat.versions import torch_version
from dcompile.device_traits import traits_of
from dcompile.ir.parse import parse
from dcompile.ir.text import show
from dcompile.ir.verify import verify
from dcompile.passes import GraphPass
from dcompile.pipeline import DYNAMO_PASSES, JOINT_PASSES, OUTPUT_STEPS, launch_passes, loop_passes, nest_passes
from tests.codegen.emit.cpp.test_decisions import CASES
from tests.pass_inputs.graphs import DYNAMO_INPUTS, JOINT_INPUTS, GraphInput, graph_text
from tests.pass_inputs.launches import LAUNCH_INPUTS
from tests.pass_inputs.loop_programs import LOOP_INPUTS
from tests.pass_inputs.outputs import OUTPUT_INPUTS, results_text

LOOP_ROWS, NEST_ROWS = ({row.name: row for row in rows()} for rows in (loop_passes, nest_passes))
LAUNCH_ROWS = {row.name: row for row in launch_passes()}


def sections(**texts: str) -> str:
    """Texts under headings."""
    return "\n\n".join(f"--- {name.replace('_', ' ')} ---\n{text}" for name, text in texts.items()) + "\n"


def difference(before: str, after: str) -> str:
    """Lines that are gone and new ones, with a line around them."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


def test_every_row_of_every_list_has_an_input() -> None:
    assert [*DYNAMO_INPUTS] == [row.name for row in DYNAMO_PASSES]
    assert [*JOINT_INPUTS] == [row.name for row in JOINT_PASSES]
    assert [*LOOP_INPUTS] == [*LOOP_ROWS]
    assert [*CASES] == [*NEST_ROWS]
    assert [*LAUNCH_INPUTS] == [*LAUNCH_ROWS]
    assert [name.partition(" ")[0] for name in OUTPUT_INPUTS] == [row.name for row in OUTPUT_STEPS]


@pytest.mark.parametrize("name", LOOP_ROWS)
def test_loop_pass(name: str, golden: Callable[[str], None]) -> None:
    row, given = LOOP_ROWS[name], LOOP_INPUTS[name]
    before = given.program
    verify(before)
    after = row.run(before, *row.given(given.requested()))
    verify(after)
    assert after != before and parse(show(after)) == after
    golden(sections(before=show(before), after=show(after)))


NAMES_OF_2_13 = ("inline_nested_regions", "inline_checkpoints", "save_as_strided_views")
"""Passes whose texts hold names and strides that torch gives otherwise before 2.13."""


def check_graph_pass(row: GraphPass, given: GraphInput, golden: Callable[[str], None]) -> None:
    gm, request = given.graph(), given.request()
    assert row.when(request.config), "the row is on with these settings"
    before = graph_text(gm)
    report = row.run(gm, *row.given(request))
    after = graph_text(gm)
    gm.graph.lint()
    assert after != before and report.changes
    if row.name in NAMES_OF_2_13 and torch_version() < "2.13":
        pytest.skip("all is checked but the text, which holds names that this torch gives otherwise")
    notes = [re.sub(r" of \w+\.py:\d+", "", note) for note in report.notes]
    texts = {"before": before, "after": after} if before.count("\n") < 50 else {"changes": difference(before, after)}
    golden(sections(**texts, **({"report": "\n".join(notes)} if notes else {})))


@pytest.mark.parametrize("row", DYNAMO_PASSES, ids=lambda row: row.name)
def test_dynamo_pass(row: GraphPass, golden: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "traits_of", lambda _: traits_of("cuda"))
    check_graph_pass(row, DYNAMO_INPUTS[row.name], golden)


@pytest.mark.parametrize("row", JOINT_PASSES, ids=lambda row: row.name)
def test_joint_pass(row: GraphPass, golden: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (broadcast_addends, padding, saved_values):
        monkeypatch.setattr(module, "traits_of", lambda _: traits_of("cuda"))
    check_graph_pass(row, JOINT_INPUTS[row.name], golden)


@pytest.mark.parametrize("number", range(len(OUTPUT_STEPS)), ids=[name.replace(" ", "_") for name in OUTPUT_INPUTS])
def test_output_step(number: int, golden: Callable[[str], None]) -> None:
    row, given = OUTPUT_STEPS[number], [*OUTPUT_INPUTS.values()][number]
    gm = given.graph()
    graph = graph_text(gm)
    plan = row.plan(gm, given.request)
    gm.recompile()
    results = given.results(gm)
    before = results_text(results)
    row.run(results, plan)
    after = results_text(results)
    assert plan and after != before
    golden(sections(graph=graph, plan=repr(plan), results_before=before, results_after=after))


@pytest.mark.parametrize("name", NEST_ROWS)
def test_nest_pass(name: str, golden: Callable[[str], None]) -> None:
    """The decision, and the lines of the kernel that follow from it."""
    program = CASES[name].program
    (loop,) = program.steps
    rows = [row.run for row in NEST_ROWS.values()]
    at = [*NEST_ROWS].index(name)
    plans = [kernel.plan_kernel(loop, program.table, rows[:count]) for count in (at, at + 1)]
    decisions = ["\n".join(plan.decisions()) for plan in plans]
    sources = [kernel.emit(loop, program.table, rows[:count]) for count in (at, at + 1)]
    texts = [source.text.replace(source.name, "kernel") for source in sources]
    assert plans[0] != plans[1]
    golden(sections(program=show(program), decisions=difference(*decisions).strip(), kernel=difference(*texts).strip()))


@pytest.mark.parametrize("name", LAUNCH_ROWS)
def test_launch_pass(name: str, golden: Callable[[str], None]) -> None:
    """The kernels of a program of inference, behind the rows before it and behind it."""
    program = LAUNCH_INPUTS[name]()
    request, kernels = EmitRequest("inference", [row.run for row in NEST_ROWS.values()], 90), Kernels()
    for row in LAUNCH_ROWS.values():
        before = kernels
        kernels = row.run(kernels, program, *row.given(request))
        if row.name == name:
            break
    assert kernels != before
    old, new = (re.sub(r"_[0-9a-f]{16,}", "", shown.show()) for shown in (before, kernels))
    texts = ["".join(source.text for source in shown.sources) for shown in (before, kernels)]
    golden(sections(before=old, after=new, **({"kernels": difference(*texts)} if old == new else {})))
