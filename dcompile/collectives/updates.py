"""Let the optimizer's updates, which are part of a backward's program, read gradients where their reductions end.

The graph marks each reduced gradient (`operators/step_ops.py`). Before collectives are inserted, a mark lets go of the
gradient, which becomes a result of the program as in a backward without updates: same buckets, same collectives, on
every rank. Afterwards the results disappear again, and updates read the buckets, each behind its own reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from dcompile.ir.buffers import Bucket
from dcompile.ir.canonical_names import buffers_in, rename_buffers
from dcompile.ir.nodes import Collective, Extern, Loop, Program, Step, View, Wait, map_arguments

REDUCED = "dcompile_step.reduced.default"
Names: TypeAlias = Mapping[str, str]


def return_gradients(program: Program) -> Program:
    """Return gradients that updates read after their reduction as results, and let the marks read nothing.

    Guarantees: the same steps. Results are added at the end, of gradients that are none yet. Marks come last, with all
    steps that depend on them.
    """
    if not any(map(_is_mark, program.steps)):
        return program
    outputs, grads = list(program.outputs), list(program.grads)
    returned = {number for at, number in grads if isinstance(outputs[at], View)}
    first, updates, late = list[Step](), list[Step](), set[str]()
    for step in program.steps:
        if isinstance(step, Extern) and _is_mark(step):
            gradient, number, *more = step.args
            assert isinstance(gradient, View) and isinstance(number, int)
            if number not in returned:
                grads.append((len(outputs), number))
                outputs.append(gradient)
            step = replace(step, args=(number, *more))
            late |= step.writes
        if late & (step.reads | step.writes):
            late |= step.writes
            updates.append(step)
        else:
            first.append(step)
    assert not {name for step in first for name in step.writes} & {n for step in updates for n in step.writes}
    marks_first = sorted(updates, key=lambda step: not _is_mark(step))
    return replace(program, outputs=tuple(outputs), grads=tuple(grads), steps=(*first, *marks_first))


def cut_updates(program: Program) -> tuple[Program, tuple[Step, ...]]:
    """Return a program without its marks and the updates behind them, for collectives to be inserted, and these."""
    count = next((at for at, step in enumerate(program.steps) if _is_mark(step)), len(program.steps))
    return replace(program, steps=program.steps[:count]), program.steps[count:]


def update_after_reductions(program: Program, grads: Sequence[tuple[int, int]]) -> Program:
    """Replace marks by the memory of reduced gradients, with each update behind the wait for what it reads.

    An all-reduced gradient is in its bucket. A reduce-scatter makes a shard in place of the mark's result. Updates
    follow the rest of the program, in the order in which reductions end, so that the last of these hide behind the
    updates of earlier ones. `grads`: (result, parameter) of the program's own.

    Guarantees: collectives keep their order. No update comes before a step that reads a parameter's old value.
    """
    first, found = cut_updates(program)
    marks = {step.args[0]: step.outs[0] for step in found if isinstance(step, Extern) and _is_mark(step)}
    if not marks:
        return program
    added = {at for at, _ in program.grads} - {at for at, _ in grads}
    reduced = [bucket for bucket in program.buckets if not bucket.carries_units]
    place = {number: buffer for b in reduced for number, buffer in zip(b.params, b.buffers, strict=True)}
    names = {out: place[n] for n, out in marks.items() if isinstance(n, int) and n in place and out is not None}
    buckets = tuple(_taking(bucket, marks) for bucket in program.buckets)
    made = {b.name: tuple(out for n in b.params if (out := marks.get(n)) is not None) for b in buckets if b.taken}
    steps = [_making(step, made) for step in first.steps]
    count = next((n for n, step in enumerate(reversed(steps)) if not isinstance(step, Wait)), len(steps))
    waits = [step for step in steps[len(steps) - count :] if isinstance(step, Wait)]
    updates = [_renamed(step, names) for step in found if not _is_mark(step)]
    return replace(
        program,
        steps=(*steps[: len(steps) - count], *_after_waits(updates, waits)),
        outputs=program.outputs[: min(added, default=len(program.outputs))],
        grads=tuple(entry for entry in program.grads if entry[0] not in added),
        buffers=tuple(buffer for buffer in program.buffers if buffer.name not in names),
        buckets=buckets,
    )


def _taking(bucket: Bucket, marks: Mapping[Any, Any]) -> Bucket:
    """Return a bucket of units with those whose shards marks stand for; units of one parameter alone have such."""
    if not bucket.carries_units or bucket.traits.gathers or marks.keys().isdisjoint(bucket.params):
        return bucket
    return replace(bucket, taken=tuple(u for n, u in zip(bucket.params, bucket.units, strict=True) if n in marks))


def _making(step: Step, made: Mapping[str, tuple[str, ...]]) -> Step:
    """Let the start and the wait of a reduction know the shards that it makes for the program."""
    if not isinstance(step, (Collective, Wait)) or step.bucket not in made:
        return step
    more = made[step.bucket]
    if isinstance(step, Collective):
        return replace(step, buffers=(*step.buffers, *more), made=more)
    return replace(step, buffers=(*step.buffers, *more))


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
    if names.keys().isdisjoint(step.reads | step.writes):
        return step
    if isinstance(step, Loop):
        return rename_buffers(step, {name: names.get(name, name) for name in buffers_in(step)})
    if isinstance(step, Extern):
        return map_arguments(step, lambda arg: _renamed_view(arg, names) if isinstance(arg, View) else arg)
    raise AssertionError(f"a gradient is read by a {type(step).__name__}")


def _renamed_view(view: View, names: Names) -> View:
    return replace(view, buffer=names.get(view.buffer, view.buffer))
