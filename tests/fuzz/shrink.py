"""The smallest program that still fails: fewer loops, fewer outputs, intermediates as inputs, simpler bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dcompile.codegen.schedule.fusion.merge import without
from dcompile.codegen.schedule.order.dependences import remove_dead_steps
from dcompile.errors import VerifyError
from dcompile.ir.analysis import operands, store_operands
from dcompile.ir.interpret import execute, interpret
from dcompile.ir.nodes import Const, Loop, Program, View
from dcompile.ir.verify import verify

if TYPE_CHECKING:
    from tests.fuzz.checks import Case

Fails = Callable[["Case"], bool]


def shrink(case: Case, fails: Fails, tries: int = 400) -> Case:
    """Take one simplification after another as long as the case stays valid and still fails."""
    left = tries
    progress = True
    while progress:
        progress = False
        for smaller in simpler(case):
            if left <= 0:
                return case
            if not _valid(smaller):
                continue
            left -= 1
            if fails(smaller):
                case, progress = smaller, True
                break
    return case


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest cuts first."""
    program, inputs = case
    for output in program.outputs if len(program.outputs) > 1 else ():
        yield _tidy(replace(program, outputs=(output,)), inputs)
    for number in range(len(program.steps)):
        yield from _without_step(case, number)
    for number, step in enumerate(program.steps):
        for loop in _simpler_loops(step, program):
            steps = (*program.steps[:number], loop, *program.steps[number + 1 :])
            yield _tidy(replace(program, steps=steps), inputs)


def _without_step(case: Case, number: int) -> Iterator[Case]:
    """A step less: what it wrote becomes an input, with the values that it wrote."""
    program, inputs = case
    step = program.steps[number]
    if step.writes & set(program.inputs):
        return
    made = sorted(step.writes)
    table = program.table
    seen = tuple(View(name, table[name].shape, table[name].strides) for name in made)
    values = interpret(replace(program, steps=program.steps[: number + 1], outputs=seen), inputs)
    outputs = tuple(view for view in program.outputs if view.buffer not in step.writes)
    if not outputs:
        return
    steps = (*program.steps[:number], *program.steps[number + 1 :])
    arrays = dict(inputs) | {name: np.asarray(value) for name, value in zip(made, values, strict=True)}
    yield _tidy(replace(program, steps=steps, outputs=outputs, inputs=(*program.inputs, *made)), arrays)


def _simpler_loops(step: Loop, program: Program) -> Iterator[Loop]:
    needed = {view.buffer for view in program.outputs} | {name for other in program.steps for name in other.reads}
    for name in sorted(step.writes) if len(step.stores) > 1 else ():
        if name not in needed and (kept := without(step, frozenset((name,)))) is not None:
            yield kept
    for ref, value in reversed(list(enumerate(step.body))):
        if isinstance(value, Const):
            continue
        for arg in operands(value):
            if step.body[arg].dtype == value.dtype and (kept := _redirected(step, ref, arg)) is not None:
                yield kept
        one: bool | int | float = True if value.dtype == "bool" else 1.0 if "float" in value.dtype else 1
        body = (*step.body[:ref], Const(one, value.dtype), *step.body[ref + 1 :])
        if (kept := without(replace(step, body=body), frozenset())) is not None:
            yield kept


def _redirected(step: Loop, old: int, new: int) -> Loop | None:
    """The loop with one of a value's own arguments in its place. Indices that name the value keep it alive."""
    body = list(step.body)
    for ref in range(old + 1, len(body)):
        value = body[ref]
        match value:
            case _ if old not in operands(value):
                continue
            case _ if hasattr(value, "args"):
                body[ref] = replace(value, args=tuple(new if arg == old else arg for arg in value.args))
            case _ if hasattr(value, "arg"):
                body[ref] = replace(value, arg=new)
    stores = tuple(replace(store, value=new) if store.value == old else store for store in step.stores)
    if (tuple(body), stores) == (step.body, step.stores):
        return None
    alive = any(old in store_operands(store) for store in stores)
    return (
        replace(step, body=tuple(body), stores=stores)
        if alive
        else without(replace(step, body=tuple(body), stores=stores), frozenset())
    )


def _tidy(program: Program, inputs: dict[str, np.ndarray]) -> Case:
    """Without steps, buffers and inputs that no output needs."""
    program = remove_dead_steps(program)
    used = {view.buffer for view in program.outputs} | {n for step in program.steps for n in step.reads | step.writes}
    kept = tuple(name for name in program.inputs if name in used)
    buffers = tuple(buffer for buffer in program.buffers if buffer.name in used)
    return replace(program, inputs=kept, buffers=buffers), {name: inputs[name] for name in kept}


def _valid(case: Case) -> bool:
    """Well-formed, inside its buffers, and with numbers for results."""
    program, inputs = case
    if not program.steps or not program.outputs:
        return False
    try:
        verify(program)
        outputs = execute(program, inputs).outputs
    except (VerifyError, AssertionError, IndexError):
        return False
    return all(np.asarray(output).dtype.kind != "f" or np.isfinite(output).all() for output in outputs)
