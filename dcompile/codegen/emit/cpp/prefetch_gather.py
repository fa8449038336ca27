"""Prefetch rows of a large table that are addressed by an index, since hardware prefetch cannot predict them."""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.emit.cpp.plan import GatherPrefetch, NestPlan
from dcompile.codegen.emit.cpp.prefetch import MIN_PREFETCH_BYTES
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.nest.loop_nest import stride
from dcompile.ir.analysis import operands, runtime_refs
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import ZERO, substitute, var
from dcompile.ir.nodes import Const, Load, Ref

PREFETCH_ROWS = 4
"""Rows ahead: bags of rows of 1 KB took 0.76 of the time with 4 (docs/lab/constants.md, K9)."""
MIN_ROW_BYTES, MAX_ROW_BYTES = 64, 2048
"""Bytes of a row that are prefetched: at least a cache line; hardware prefetch takes over after the most."""


def prefetch_gathers(plan: NestPlan) -> NestPlan:
    """Prefetch, at the start of a row, the rows of tables that a later row reads."""
    nest = plan.nest
    if nest.lane or not nest.rows or len(nest.elements) != 1 or nest.rows[-1].tile > 1:
        return plan
    loads = (load for load in map(_plain_load, nest.body) if load)
    found = [GatherPrefetch(load, position) for load in loads if (position := _position_of(plan, load))]
    return replace(plan, gathers=tuple(found)) if found else plan


def _position_of(plan: NestPlan, load: Load) -> Load | None:
    """Return the load of the row number that this load uses, if the table is large and the next number loadable."""
    (last,), row = plan.nest.elements, plan.nest.rows[-1].name
    refs = runtime_refs(load.index)
    if len(refs) != 1 or plan.levels.element[refs[0]] or not plan.has_bytes(load.buffer, MIN_PREFETCH_BYTES):
        return None
    if stride(load.index, last.name) != 1 or not isinstance(last.size, int):
        return None
    if last.size * ITEMSIZE[load.dtype] < MIN_ROW_BYTES:
        return None
    position = _source(plan, refs[0])
    if position is None or position.dtype not in ("int64", "int32") or runtime_refs(position.index):
        return None
    return position if isinstance(step := stride(position.index, row), int) and step > 0 else None


def _source(plan: NestPlan, ref: Ref) -> Load | None:
    """Return the load of the only tensor that a position is computed from."""
    value = plan.nest.body[ref]
    if isinstance(value, Load):
        return _plain_load(value)
    found = {_source(plan, arg) for arg in operands(value) if not isinstance(plan.nest.body[arg], Const)}
    return found.pop() if len(found) == 1 else None


def _plain_load(value: object) -> Load | None:
    return value if isinstance(value, Load) and value.mask is None else None


def print_gather_prefetches(p: Printer) -> None:
    """Prefetch, at the start of a row, the rows of tables that a later row reads."""
    if not p.plan.gathers:
        return
    row, last, shared = p.nest.rows[-1], p.nest.elements[-1], p.plan.shared_columns
    low = f"{last.name}_low" if shared else "0"
    end = f"({last.name}_high - {low})" if shared else p.size(last.size)
    p.open(f"if ({row.name} + {PREFETCH_ROWS} < {p.size(row.size)})")
    for number, gather in enumerate(p.plan.gathers):
        soon, load = f"ahead{number}", gather.table
        later = {row.name: var(row.name) + PREFETCH_ROWS}
        p.line(f"const int64 {soon} = {p.place(gather.position.buffer, substitute(gather.position.index, later, {}))};")
        (ref,) = runtime_refs(load.index)
        start = var(f"{last.name}_low") if shared else ZERO
        moved = later | {f"v{ref}": var(soon), last.name: start}
        place = p.place(load.buffer, substitute(load.index, moved, {}))
        most = MAX_ROW_BYTES // ITEMSIZE[load.dtype]
        p.line(f"ask_for(&{place}, 0, 1, {end} < {most} ? {end} : {most});")
    p.close()
