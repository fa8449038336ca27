"""Let steps write the operands of the model's own in-place collectives directly into the collectives' buffers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Collective, Extern, Load, Loop, Program, Step, Store


def send_in_place(program: Program) -> Program:
    """Remove copies of results into buffers of the model's own collectives, if nothing else reads the results.

    A functional all-reduce leaves its argument unchanged, so lowering copies it. After a matmul whose result is only to
    be summed, the copy is useless: tensor parallelism has two per layer.

    Guarantees: the same values.
    Relies on: every buffer has one writer but for collectives; no storage is planned yet.
    """
    copies = _copies(program)
    if not copies:
        return program
    table = program.table
    place = dict(copies.values())
    shapes = {target: table[source] for source, target in copies.values()}
    steps = tuple(_renamed(step, place) for step in program.steps if id(step) not in copies)
    buffers = tuple(
        replace(buffer, shape=shapes[buffer.name].shape, strides=shapes[buffer.name].strides)
        if buffer.name in shapes
        else buffer
        for buffer in program.buffers
        if buffer.name not in place
    )
    return replace(program, steps=steps, buffers=buffers)


def _copies(program: Program) -> dict[int, tuple[str, str]]:
    """Removable copies by identity of the step: (copied buffer, the collective's buffer)."""
    own = [step for step in program.steps if isinstance(step, Collective) and step.call is not None]
    targets = frozenset(name for step in own for name in step.reads & step.writes)
    if not targets:
        return {}
    table = program.table
    readers = Counter(name for step in program.steps for name in step.reads)
    writers: dict[str, list[Step]] = {}
    for step in program.steps:
        for name in step.writes:
            writers.setdefault(name, []).append(step)
    outside = program.returned.union(program.inputs)
    found: dict[int, tuple[str, str]] = {}
    for step in program.steps:
        pair = _copied(step)
        if pair is None or pair[1] not in targets or pair[0] in outside or pair[0] in targets:
            continue
        source, target = pair
        made = writers.get(source, [])
        if readers[source] == 1 and len(made) == 1 and _places(made[0]) and _is_alike(table[source], table[target]):
            found[id(step)] = pair
    return found


def _copied(step: Step) -> tuple[str, str] | None:
    """(source, target) of a loop that copies elements to the same index of another buffer; None for other steps."""
    match step:
        case Loop(body=(Load(source, index, _, None),), stores=(Store(target, at, 0, "set"),), product=None):
            return (source, target) if index == at else None
        case _:
            return None


def _places(step: Step) -> bool:
    """Whether a step writes where the compiler says."""
    return isinstance(step, Loop) or (isinstance(step, Extern) and step.mode == "out")


def _is_alike(source: Buffer, target: Buffer) -> bool:
    """Whether one buffer can replace the other: equal extent, dtype and device, and no storage yet."""
    same = (source.dtype, source.device) == (target.dtype, target.device) and source.extent == target.extent
    return same and source.storage is None and target.storage is None


def _renamed(step: Step, place: dict[str, str]) -> Step:
    """Make a step write to other buffers."""
    if place.keys().isdisjoint(step.writes):
        return step
    match step:
        case Loop():
            stores = tuple(replace(store, buffer=place.get(store.buffer, store.buffer)) for store in step.stores)
            return replace(step, stores=stores)
        case Extern():
            return replace(step, outs=tuple(place.get(out, out) if out is not None else None for out in step.outs))
        case _:
            raise AssertionError(f"a collective writes what is only copied: {step}")
