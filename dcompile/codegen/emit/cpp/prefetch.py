"""Prefetch later loads of a loop where memory or processors would be idle, and stream large results past the caches.

Later passes over a row leave memory idle, so the next row is prefetched meanwhile. Rows whose elements are gathered in
any order are prefetched in order. Rows of a large table that are addressed by an index are prefetched some rows ahead,
since hardware prefetch cannot predict them. Where caches are far (`toolchain.py`), loads are prefetched some KB ahead.

Streaming stores avoid reading the overwritten memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dcompile.codegen.emit.cpp.ops import FLOATS
from dcompile.codegen.emit.cpp.plan import GatherPrefetch, NestPlan
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.emit.host.batch_launches import known_bytes
from dcompile.codegen.nest.loop_nest import Axis, stride
from dcompile.ir.analysis import operands, runtime_refs
from dcompile.ir.buffers import ITEMSIZE, Buffer
from dcompile.ir.index import ZERO, substitute, var
from dcompile.ir.nodes import Apply, Const, Load, Reduce, Ref, Scan
from dcompile.ir.ops import OPS

MIN_PREFETCH_BYTES = 1 << 20
"""Size from which the next row of a tensor is prefetched: caches hold smaller tensors."""
MAX_PREFETCH_ROW_BYTES = 384 << 10
"""Bytes of a row of all such tensors, together with the next row: less than L2."""
MIN_GATHERED_ROW_BYTES = 512
"""Bytes of a row with gathered elements from which the next row is prefetched."""


def prefetch_next_row(plan: NestPlan) -> NestPlan:
    """Prefetch the next row in a later pass, which finds the current row in the caches.

    Memory would be idle there: a cross-entropy's forward took 0.7 of the time, RMSNorm 0.65 (16 MB, Zen 3). The pass
    with most work does it, since it gives memory the most time.
    """
    nest, later = plan.nest, _later_passes(plan)
    if not later or nest.lane or not nest.rows or nest.rows[-1].tile > 1:
        return plan
    row, last = nest.rows[-1].name, nest.elements[-1].name
    found, nbytes = dict[Load, None](), 0
    for ref in plan.pass_values(0):
        value = nest.body[ref]
        if not isinstance(value, Load) or value.mask is not None or runtime_refs(value.index):
            continue
        distance = stride(value.index, row)
        if not isinstance(distance, int) or distance <= 0 or not plan.has_bytes(value.buffer, MIN_PREFETCH_BYTES):
            continue
        if stride(value.index, last) == 1:
            found[replace(value, index=substitute(value.index, {row: var(row) + 1}, {}))] = None
            nbytes += distance * ITEMSIZE[value.dtype]
    if not found or 2 * nbytes > MAX_PREFETCH_ROW_BYTES:
        return plan
    busiest = max(later, key=lambda number: (plan.cost(plan.new_vector_values(number)), number))
    return replace(plan, next_row=tuple(found), next_row_pass=busiest)


def _later_passes(plan: NestPlan) -> list[int]:
    """Return the passes that read the row once more."""
    return [number for number in range(1, plan.pass_count) if any(plan.pass_roots[number])]


def next_gathered_rows(plan: NestPlan, number: int, axis: Axis) -> list[Load]:
    """Return the next of the rows with gathered elements, which are prefetched in order.

    Gathers from rows of 4 KB took 0.7 of the time (8 MB, Zen 3).
    """
    found = dict[Load, None]()
    if not plan.nest.rows or len(plan.nest.elements) > 1 or plan.nest.rows[-1].tile > 1:
        return []
    row = plan.nest.rows[-1].name
    for ref in plan.new_values(number):
        value = plan.nest.body[ref]
        if not isinstance(value, Load) or value.mask is not None:
            continue
        picks = {f"v{r}": var(axis.name) for r in runtime_refs(value.index) if plan.levels.element[r]}
        distance = stride(value.index, row)
        if not picks or not isinstance(distance, int) or not plan.has_bytes(value.buffer, MIN_PREFETCH_BYTES):
            continue
        along, nbytes = substitute(value.index, picks, {}), distance * ITEMSIZE[value.dtype]
        if stride(along, axis.name) == 1 and MIN_GATHERED_ROW_BYTES <= nbytes <= MAX_PREFETCH_ROW_BYTES:
            found[replace(value, index=substitute(along, {row: var(row) + 1}, {}))] = None
    return list(found)


# --- where caches are far ---------------------------------------------------------------------------------------------


def updates_slowly(plan: NestPlan, number: int, name: str) -> bool:
    """Does a pass update several large float32 tensors by slow operations, as AdamW does?

    It then prefetches all its loads where caches are far. That took 0.87 of the time with one thread and with two (16
    tensors of 1 MB, and three of their kind; Intel's servers).
    """
    values = [plan.nest.body[ref] for ref in plan.vector_values(number)]
    slow = any(isinstance(value, Apply) and OPS[value.op].stalls and value.dtype == "float32" for value in values)
    if not slow:
        return False
    written = {store.buffer for store in plan.nest.stores}
    large = _large_loads(plan, number, name)
    return sum(load.buffer in written and load.dtype == "float32" for load in large) > 1


def far_loads(plan: NestPlan, number: int, name: str) -> list[Load]:
    """Return a pass's contiguous loads of large tensors that no earlier pass has read or prefetched.

    Tensors that the kernel also writes are included only if it `updates_slowly`: AdamW in bfloat16 took 1.02 to 1.05 of
    the time.
    """
    asking = plan.next_row_pass
    if plan.tile or (number == 0 and asking is not None and not _may_stop(plan, asking)):
        return []
    written = {store.buffer for store in plan.nest.stores}
    slow = updates_slowly(plan, number, name)
    return [load for load in _large_loads(plan, number, name) if slow or load.buffer not in written]


def _large_loads(plan: NestPlan, number: int, name: str) -> list[Load]:
    """Return a pass's contiguous loads of large tensors that no earlier pass has read."""
    before = {plan.nest.body[ref] for earlier in range(number) for ref in plan.vector_values(earlier)}
    found = dict[Load, None]()
    for ref in plan.vector_values(number):
        value = plan.nest.body[ref]
        if not isinstance(value, Load) or value.mask is not None or value in before:
            continue
        if plan.constant_stride(value.index, name) == 1 and plan.has_bytes(value.buffer, MIN_PREFETCH_BYTES):
            found[value] = None
    return list(found)


def _may_stop(plan: NestPlan, number: int) -> bool:
    """Does a pass search for a position (`vectorize.find_searched`)? It may stop before the row's end."""
    chosen = (plan.nest.body[plan.reduce(ref).arg] for ref in plan.pass_roots[number][0])
    return any(isinstance(value, Apply) and (value.op, value.dtype) == ("where", "int32") for value in chosen)


def step_prefetches(plan: NestPlan, number: int, stores: Sequence[int], name: str) -> list[tuple[str, Load]]:
    """Return the prefetches of a vector loop's step: the library's function, and the load.

    A loop over one large tensor with functions and streamed results prefetches 1 KB ahead, since hardware prefetch is
    too late. An exponential of 16 MB took 0.9 of the time (Zen 3). Where caches are far, every loop prefetches 4 KB
    ahead: cross-entropy's backward took 0.76 (docs/lab/constants.md, K8).
    """
    if number == plan.next_row_pass:
        return [("ask", load) for load in plan.next_row]
    loads = far_loads(plan, number, name)
    values = [plan.nest.body[ref] for ref in plan.new_vector_values(number)]
    functions = any(isinstance(value, Apply) and OPS[value.op].vector == "function" for value in values)
    soon = len(loads) == 1 and functions and any(n in plan.streamed for n in stores)
    return [("ask_soon" if soon else "ask_far", load) for load in loads]


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


# --- streaming stores -------------------------------------------------------------------------------------------------


MIN_STREAM_BYTES = 12 << 20
"""Size from which a result is streamed. Writing it and reading it again was then 1.09 times as fast with 32 MB of L3
(docs/lab/constants.md, K10)."""
TILES_SOONER = 2 / 3
"""Factor of that size for results written tile by tile. 8 MB of a transposed tensor took 0.64 (int64) to 0.8 (bfloat16)
of the time (AVX2)."""


def may_stream(buffer: Buffer) -> bool:
    """Is a buffer so large that its stores may be streamed?"""
    return known_bytes(buffer) >= MIN_STREAM_BYTES * TILES_SOONER


def stream_stores(plan: NestPlan) -> NestPlan:
    """Stream stores of large results that the kernel does not read, of float dtypes or pure copies."""
    if plan.shared_columns:  # threads share rows there, and none of them ends a row
        return plan
    copies = _copies(plan)
    read = {value.buffer for value in plan.nest.body if isinstance(value, Load)}
    least = MIN_STREAM_BYTES * (TILES_SOONER if plan.tile else 1)
    streamed = frozenset(
        n
        for n, store in enumerate(plan.nest.stores)
        if store.mode == "set" and store.buffer not in read
        if not plan.nest.row_stores[n] and not plan.is_transposed(n)
        if plan.table[store.buffer].dtype in FLOATS or copies
        if plan.has_bytes(store.buffer, least)
    )
    return replace(plan, copies=copies, streamed=streamed) if streamed else plan


def _copies(plan: NestPlan) -> bool:
    """Does the kernel only write the elements that it reads, in the same order after transposing tiles?"""
    if plan.nest.lane or any(isinstance(value, Reduce | Scan) for value in plan.nest.body):
        return False
    return all(_is_copied(plan, number) for number in range(len(plan.nest.stores)))


def _is_copied(plan: NestPlan, number: int) -> bool:
    """Does a store write loaded elements unchanged, contiguous in both?"""
    store, last = plan.nest.stores[number], plan.nest.elements[-1].name
    value = plan.nest.body[store.value]
    if not isinstance(value, Load) or value.mask is not None or value.dtype != plan.table[store.buffer].dtype:
        return False
    transposed = plan.tile is not None and store.value in plan.tile.loads
    in_order = transposed or plan.constant_stride(value.index, last) == 1
    return store.mode == "set" and in_order and plan.constant_stride(store.index, last) == 1


def cached_condition(plan: NestPlan, number: int) -> str:
    """Return the condition on which a streamed result goes through the caches instead, if there is one.

    It keeps results that later steps read again, if the caches are large enough: a Llama's layer trains in 0.99 of the
    time (docs/lab/constants.md, K11).
    """
    store = plan.nest.stores[number]
    return f"stays<{plan.bytes_of(store.buffer)}>" if store.buffer in plan.read_again else ""
