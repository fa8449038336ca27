"""Rows of a large table that are read where an index says: asked for ahead, since no processor foresees them."""

from __future__ import annotations

from dcompile.codegen.emit.cpp.prefetch import AHEAD_BYTES
from dcompile.codegen.emit.cpp.printer import Statements
from dcompile.codegen.nest.loop_nest import stride
from dcompile.ir.analysis import operands, runtime_refs
from dcompile.ir.index import ZERO, substitute, var
from dcompile.ir.nodes import ITEMSIZE, Const, Load, Ref

ROWS = 4
"""How many rows ahead. Bags of rows of 1 KB of a table of 4 MB took 0.86, 0.79, 0.76 and 0.74 of the time with 1, 2, 4
and 8 (Zen 5)."""
LEAST, MOST = 64, 2048
"""Bytes of a row that are asked for: a cache line at least; behind the most, memory is read ahead by itself."""


def ask_ahead(kernel: Statements) -> None:
    """Write, at the start of a row, what asks for the rows of tables that a later one reads."""
    nest = kernel.nest
    if nest.lane or not nest.rows or len(nest.elements) != 1 or nest.rows[-1].tile > 1:
        return
    row, last = nest.rows[-1], nest.elements[-1]
    tables = [(load, found) for load in map(_load, nest.body) if load and (found := _told(kernel, load, row.name))]
    if not tables:
        return
    low = f"{last.name}_low" if kernel.split else "0"
    end = f"({last.name}_high - {low})" if kernel.split else kernel.size(last.size)
    kernel.open(f"if ({row.name} + {ROWS} < {kernel.size(row.size)})")
    for number, (load, told) in enumerate(tables):
        soon = f"ahead{number}"
        ahead = kernel.place(told.buffer, substitute(told.index, {row.name: var(row.name) + ROWS}, {}))
        kernel.line(f"const int64 {soon} = {ahead};")
        (ref,) = runtime_refs(load.index)
        start = var(f"{last.name}_low") if kernel.split else ZERO
        moved = {f"v{ref}": var(soon), row.name: var(row.name) + ROWS, last.name: start}
        place = kernel.place(load.buffer, substitute(load.index, moved, {}))
        most = MOST // ITEMSIZE[load.dtype]
        kernel.line(f"ask_for(&{place}, 0, 1, {end} < {most} ? {end} : {most});")
    kernel.close()


def _load(value: object) -> Load | None:
    return value if isinstance(value, Load) and value.mask is None else None


def _told(kernel: Statements, load: Load, row: str) -> Load | None:
    """What is loaded to say which row of a large table this load reads, if the next row's can be loaded as well."""
    (last,) = kernel.nest.elements
    refs, nbytes = runtime_refs(load.index), kernel.bytes_of(load.buffer)
    if len(refs) != 1 or kernel.levels.element[refs[0]] or not isinstance(nbytes, int) or nbytes < AHEAD_BYTES:
        return None
    if stride(load.index, last.name) != 1 or not isinstance(last.size, int):
        return None
    if last.size * ITEMSIZE[load.dtype] < LEAST:
        return None
    told = _source(kernel, refs[0])
    if told is None or told.dtype not in ("int64", "int32") or runtime_refs(told.index):
        return None
    return told if isinstance(step := stride(told.index, row), int) and step > 0 else None


def _source(kernel: Statements, ref: Ref) -> Load | None:
    """The only tensor that a position is made from."""
    value = kernel.nest.body[ref]
    if isinstance(value, Load):
        return _load(value)
    found = {_source(kernel, arg) for arg in operands(value) if not isinstance(kernel.nest.body[arg], Const)}
    return found.pop() if len(found) == 1 else None
