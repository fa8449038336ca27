"""Let the optimizer's updates, which are part of a backward's program, read gradients where their reductions end.

The graph marks each reduced gradient (`operators/step_ops.py`). Before collectives are inserted, a mark lets go of the
gradient, which becomes a result of the program as in a backward without updates: same buckets, same collectives, on
every rank. Afterwards the results disappear again, and updates read the buckets, each behind its own reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from dcompile.ir.canonical_names import buffers_in, rename_buffers
from dcompile.ir.nodes import Extern, Loop, Program, Step, View, Wait, map_arguments

REDUCED = "dcompile_step.reduced.default"
Names: TypeAlias = Mapping[str, str]


def return_gradients(program: Program) -> Program:
    """Return gradients that updates read after their reduction as results, and let the marks read nothing.

    Guarantees: the same steps. Results are added at the end, of gradients that are none yet.
    """
    if not any(map(_is_mark, program.steps)):
        return program
    outputs, grads, steps = list(program.outputs), list(program.grads), list[Step]()
    returned = {number for at, number in grads if isinstance(outputs[at], View)}
    for step in program.steps:
        if isinstance(step, Extern) and _is_mark(step):
            gradient, number, *_ = step.args
            assert isinstance(gradient, View) and isinstance(number, int)
            if number not in returned:
                grads.append((len(outputs), number))
                outputs.append(gradient)
            step = replace(step, args=(number,))
        steps.append(step)
    return replace(program, outputs=tuple(outputs), grads=tuple(grads), steps=tuple(steps))


def update_after_reductions(program: Program, grads: Sequence[tuple[int, int]]) -> Program:
    """Replace marks by the memory of reduced gradients, with each update behind the wait for what it reads.

    Updates follow the rest of the program, in the order in which reductions end, so that the later ones of these hide
    behind the updates of earlier ones. `grads`: (result, parameter) of the program's own.

    Guarantees: collectives keep their order. No update comes before a step that reads a parameter's old value.
    """
    marks = {step.args[0]: step.outs[0] for step in program.steps if isinstance(step, Extern) and _is_mark(step)}
    if not marks:
        return program
    added = {at for at, _ in program.grads} - {at for at, _ in grads}
    place = {number: buffer for b in program.buckets for number, buffer in zip(b.params, b.buffers, strict=True)}
    names = {out: place[number] for number, out in marks.items() if isinstance(number, int) and out is not None}
    waits = [step for step in program.steps if isinstance(step, Wait) and set(step.buffers) & set(names.values())]
    late = set(names)
    first, updates = list[Step](), list[Step]()
    for step in program.steps:
        if _is_mark(step) or step in waits:
            continue
        if late & (step.reads | step.writes):
            late |= step.writes
            updates.append(_renamed(step, names))
        else:
            first.append(step)
    assert not {name for step in first for name in step.writes} & {n for step in updates for n in step.writes}
    return replace(
        program,
        steps=(*first, *_after_waits(updates, waits)),
        outputs=program.outputs[: min(added, default=len(program.outputs))],
        grads=tuple(entry for entry in program.grads if entry[0] not in added),
        buffers=tuple(buffer for buffer in program.buffers if buffer.name not in names),
    )


def _is_mark(step: Step) -> bool:
    return isinstance(step, Extern) and step.op == REDUCED


def _after_waits(updates: list[Step], waits: list[Wait]) -> list[Step]:
    """Return the updates in their order, each behind the waits for what it reads."""
    steps: list[Step] = []
    pending = dict(enumerate(updates))
    held = {name for wait in waits for name in wait.buffers}
    blocked = set[str]()
    for wait in (None, *waits):
        if wait is not None:
            steps.append(wait)
            held -= set(wait.buffers)
        blocked.clear()
        for number, step in list(pending.items()):
            if (held | blocked) & (step.reads | step.writes):
                blocked |= step.writes
            else:
                steps.append(pending.pop(number))
    return steps


def _renamed(step: Step, names: Names) -> Step:
    if isinstance(step, Loop):
        return rename_buffers(step, {name: names.get(name, name) for name in buffers_in(step)})
    if isinstance(step, Extern):
        return map_arguments(step, lambda arg: _renamed_view(arg, names) if isinstance(arg, View) else arg)
    raise AssertionError(f"a gradient is read by a {type(step).__name__}")


def _renamed_view(view: View, names: Names) -> View:
    return replace(view, buffer=names.get(view.buffer, view.buffer))
