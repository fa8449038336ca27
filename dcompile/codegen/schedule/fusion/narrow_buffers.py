"""Store values of GPU loops before they are widened: half of the memory traffic for 16 bits in float32.

Autocast widens results of 16 bits for norms and sums. Where several loops read the widened value, lowering stores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

from dcompile.codegen.schedule.fusion.merge import append_value, move_value, without
from dcompile.device_traits import loop_traits
from dcompile.ir.analysis import operands, runtime_refs
from dcompile.ir.nodes import Apply, Load, Loop, Program, Ref, Step, Store, Value, View

EXACT = {
    "bool": ("uint8", "int8", "int16", "int32", "int64", "float32", "float64"),
    "uint8": ("int16", "int32", "int64", "float32", "float64"),
    "int8": ("int16", "int32", "int64", "float32", "float64"),
    "int16": ("int32", "int64", "float32", "float64"),
    "int32": ("int64", "float64"),
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
}
"""Dtype -> wider dtypes that have all its values."""


def narrow_buffers(program: Program) -> Program:
    """Give a buffer the narrower dtype of the values that a GPU loop widens just before it stores them.

    Readers widen what they load.

    Guarantees: bitwise-equal values.
    Relies on: a buffer of no storage is used in this program alone.
    """
    found = _narrow_dtypes(program)
    if not found:
        return program
    steps = tuple(_with_narrow(step, found) if isinstance(step, Loop) else step for step in program.steps)
    buffers = tuple(replace(b, dtype=found[b.name]) if b.name in found else b for b in program.buffers)
    return replace(program, steps=steps, buffers=buffers)


def keep_wide_values(program: Program) -> Program:
    """Drop roundings to 16 bits that a loop widens again, so that its operations pass on float32.

    Guarantees: stored values are rounded once, where stock rounds after each operation. Casts of the user's are no
    exception, as in TorchInductor.
    """
    return replace(program, steps=tuple(_without_roundings(s) if _may_change(s) else s for s in program.steps))


def _without_roundings(loop: Loop) -> Loop:
    """Read the value before a cast there and back in place of the one after it."""
    refs: dict[Ref, Ref] = {}
    body, known = list[Value](), dict[Value, Ref]()
    for old, value in enumerate(loop.body):
        match value:
            case Apply("cast", (narrow,), "float32") if (wide := _rounded_from(loop, narrow)) is not None:
                refs[old] = refs[wide]
            case _:
                refs[old] = append_value(body, known, move_value(value, refs, {}, body, known))
    if len(body) == len(loop.body):
        return loop
    return _with_body(loop, body, [replace(store, value=refs[store.value]) for store in loop.stores])


def _rounded_from(loop: Loop, ref: Ref) -> Ref | None:
    """Return the float32 that was rounded to this 16-bit value; None if it is no such value."""
    match loop.body[ref]:
        case Apply("cast", (wide,), "bfloat16" | "float16") if loop.body[wide].dtype == "float32":
            return wide
    return None


def _narrow_dtypes(program: Program) -> dict[str, str]:
    """Return the buffers whose dtype may change, and to what: only loops use them, and each store widens."""
    table = program.table
    found: dict[str, str] = {}
    ruled_out = {view.buffer for view in program.outputs if isinstance(view, View)} | set(program.inputs)
    ruled_out |= {name for name, buffer in table.items() if buffer.storage is not None}
    for step in program.steps:
        if not _may_change(step) or not loop_traits(step, table).many_threads:
            ruled_out |= step.reads | step.writes
            continue
        for store in step.stores:
            narrow = _before_widening(step, store.value) if store.mode == "set" else None
            if narrow is None or found.setdefault(store.buffer, narrow) != narrow:
                ruled_out.add(store.buffer)
    return {name: dtype for name, dtype in found.items() if name not in ruled_out}


def _may_change(step: Step) -> TypeGuard[Loop]:
    """Is a step a loop whose values may be renumbered? Indices of run-time values are left alone."""
    return isinstance(step, Loop) and not any(runtime_refs(store.index) for store in step.stores)


def _before_widening(loop: Loop, ref: Ref) -> str | None:
    """Return the dtype of the value that is widened to this one without loss; None if there is none."""
    match loop.body[ref]:
        case Apply("cast", (narrow,), wide) if wide in EXACT.get(loop.body[narrow].dtype, ()):
            return loop.body[narrow].dtype
    return None


def _with_narrow(loop: Loop, dtypes: Mapping[str, str]) -> Loop:
    """Store the narrow values, and widen those that are loaded."""
    if not (loop.reads | loop.writes) & dtypes.keys():
        return loop
    body: list[Value] = []
    known: dict[Value, Ref] = {}
    refs: dict[Ref, Ref] = {}
    for old, value in enumerate(loop.body):
        moved = move_value(value, refs, {}, body, known)
        if isinstance(value, Load) and value.buffer in dtypes:
            assert isinstance(moved, Load), "no store forwards its value"
            loaded = append_value(body, known, replace(moved, dtype=dtypes[value.buffer]))
            moved = Apply("cast", (loaded,), value.dtype)
        refs[old] = append_value(body, known, moved)
    stores = []
    for store in loop.stores:
        stored = refs[store.value]
        if store.buffer in dtypes:
            (stored,) = operands(body[stored])
        stores.append(replace(store, value=stored))
    return _with_body(loop, body, stores)


def _with_body(loop: Loop, body: Sequence[Value], stores: Sequence[Store]) -> Loop:
    """Give a loop another body, without values that nothing reads."""
    found = without(replace(loop, body=tuple(body), stores=tuple(stores)), frozenset())
    assert found is not None, "it stores as much as before"
    return found
