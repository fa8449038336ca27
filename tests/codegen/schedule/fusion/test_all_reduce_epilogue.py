"""Loops that the kernel of an all-reduce can end with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcompile.codegen.emit.triton.one_shot_all_reduce import all_reduce_epilogues
from dcompile.ir.index import var
from dcompile.ir.nodes import Load, Loop, View
from tests.codegen.emit import reduced_rows


def found(program):
    return all_reduce_epilogues(program, {"p"})


@pytest.mark.parametrize(
    ("case", "kind", "elements"),
    [
        (("rms", 1, 4096), "rows", 4096),
        (("rms", 32, 4096), "rows", 4096),
        (("layer", 8, 5120), "rows", 5120),
        (("add", 1, 4096), "flat", 128),
    ],
)
def test_a_program_has_a_row_or_a_run_of_elements(case, kind, elements):
    epilogue = found(reduced_rows.program(*case))["p"]
    assert (epilogue.plan.kind, epilogue.elements) == (kind, elements)
    assert (epilogue.number, epilogue.step, epilogue.operand) == (1, 3, "p")
    assert not epilogue.keeps_sum


def test_the_sum_is_kept_for_its_other_readers():
    program = reduced_rows.program("rms", 1, 256, keeps_sum=True)
    assert found(program)["p"].keeps_sum
    outputs = tuple(output for output in program.outputs if isinstance(output, View) and output.buffer != "p")
    later = replace(program.steps[0], name="later", stores=(), body=(Load("p", var("i0") * 1, "bfloat16"),))
    assert found(replace(program, outputs=outputs, steps=(*program.steps, later)))["p"].keeps_sum
    assert not found(replace(program, outputs=outputs))["p"].keeps_sum


def changed(program, change):
    """The program with another last loop."""
    *steps, loop = program.steps
    return replace(program, steps=(*steps, change(loop)))


def with_load(change):
    def changed_loop(loop: Loop) -> Loop:
        body = (change(value) if isinstance(value, Load) and value.buffer == "p" else value for value in loop.body)
        return replace(loop, body=tuple(body))

    return changed_loop


def test_other_loops_are_none():
    program = reduced_rows.program("rms", 4, 256)
    first, start, wait, loop = program.steps
    assert not found(replace(program, steps=(start, wait, first, loop)))  # another step is between
    assert not all_reduce_epilogues(program, ())
    turned = with_load(lambda load: replace(load, index=var("j0") * 4 + var("i0")))
    assert not found(changed(program, turned))  # a program would read words that others receive
    shifted = with_load(lambda load: replace(load, index=load.index - 1))
    assert not found(changed(program, shifted))
    masked = with_load(lambda load: replace(load, mask=0))
    assert not found(changed(program, masked))
    assert not found(reduced_rows.program("rms", 1, 32768))  # a row that is read several times
    assert not found(changed(program, lambda loop: replace(loop, stores=(replace(loop.stores[0], buffer="p"),))))
