"""Column reductions: accumulated in the result itself, or by each thread in scratch memory, in blocks of rows."""

from __future__ import annotations

import math
from dataclasses import replace

from dcompile.codegen.emit.cpp.interleave_rows import print_added_rows
from dcompile.codegen.emit.cpp.ops import literal, memory_type
from dcompile.codegen.emit.cpp.plan import NestPlan
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.emit.cpp.row_passes import print_row
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import Size, size_product
from dcompile.ir.ops import REDUCTIONS

MAX_SCRATCH_BYTES = 1 << 20
"""Largest column reduction that each thread accumulates in scratch memory."""
MAX_ELEMENTS_PER_POINT = 1
"""Elements that combining blocks may add for each accumulated element. Bags of embeddings, with four, took 2.6 times as
long as in place (1 MB)."""


# --- the decision -----------------------------------------------------------------------------------------------------


def collect_columns(plan: NestPlan) -> NestPlan:
    """Decide to accumulate column reductions in the results themselves if these are large or the rows few."""
    rows = size_product(axis.count for axis in plan.row_axes)
    results = [plan.table[plan.nest.stores[n].buffer] for n in plan.columns]
    in_place = any(collects_in_place(rows, plan.nest.points, b.extent, ITEMSIZE[b.dtype]) for b in results)
    return replace(plan, in_place=True) if in_place else plan


def rows_of_block(rows: int) -> int:
    """Return how many rows are added up before their sum is added to the others."""
    return max(min(max(64, math.isqrt(rows)), rows // 64), 1)


def collects_in_place(rows: Size, points: Size, count: Size, itemsize: int) -> bool:
    """Is a result of `count` elements too large for scratch memory of each thread, or for the points added to it?

    Combining blocks of rows would then take longer than the rows: a scatter of 1 MB into as much took 5 times as long.
    """
    if not isinstance(count, int) or count * itemsize > MAX_SCRATCH_BYTES:
        return True
    if not isinstance(rows, int) or not isinstance(points, int) or not rows:
        return False
    return math.ceil(rows / rows_of_block(rows)) * count > MAX_ELEMENTS_PER_POINT * points


# --- the text ---------------------------------------------------------------------------------------------------------


def open_in_place(p: Printer) -> None:
    """Fill the results with the identities of their reductions."""
    for number, name in p.plan.columns.items():
        kind, identity = _identity(p, number)
        target, count = p.argument(p.nest.stores[number].buffer), _count(p, number)
        if p.plan.parallel:
            p.parallel_for()
        p.line(f"for (int64 k = 0; k < {p.size(count)}; k++) {target}[k] = {identity};")
        p.line(f"{kind}* const {name} = {target};")


def print_row_blocks(p: Printer) -> None:
    """Print rows in blocks: a block's sums are added to its thread's, and finally the threads' sums in thread order.

    Two levels, of about the square root of the rows each, keep the error of a long sum small. With blocks of 64, 100
    000 float32 were 1.2e-6 off, ten times eager's error.
    """
    axes, columns = p.plan.row_axes, p.plan.columns
    for number in columns:
        p.argument(p.nest.stores[number].buffer)
    rows, block, blocks = _row_blocks(p)
    parallel = p.plan.parallel and blocks != "1"
    threads = "omp_get_max_threads()" if parallel else "1"
    if parallel and p.if_worthwhile():
        threads = f"{p.if_worthwhile().removeprefix(' if')} && {blocks} > 1 ? {threads} : 1"
    p.line(f"const int64 threads = {threads};")
    for number, name in columns.items():
        kind, identity = _identity(p, number)
        count = _stride(p, number)
        p.line(f"{kind}* const {name}_all = scratch<{kind}>(threads * {2 * count});")
        p.line(f"for (int64 k = 0; k < threads * {2 * count}; k++) {name}_all[k] = {identity};")
    if parallel:
        p.line("#pragma omp parallel num_threads(threads)")
    p.open("")
    thread = "omp_get_thread_num()" if parallel else "0"
    for number, name in columns.items():
        p.line(f"{_identity(p, number)[0]}* const {name} = {name}_all + {thread} * {2 * _stride(p, number)};")
    if parallel:
        p.line("#pragma omp for schedule(static)")
    p.open(f"for (int64 b = 0; b < {blocks}; b++)")
    if axes:
        low, high = f"b * {block}", f"(b * {block} + {block} < {rows} ? b * {block} + {block} : {rows})"
        if p.plan.interleaved_columns:
            p.line(f"int64 r_at = {low};")
            low = "r_at"
            print_added_rows(p, low, high, block)
        p.open(f"for (int64 r = {low}; r < {high}; r++)")
        p.name_coordinates("r")
    print_row(p)
    p.close(bool(axes))
    for number, name in columns.items():
        _print_block_end(p, number, name)
    p.close()
    if p.plan.streamed:
        p.line("finish_streams();")
    p.close()
    for number, name in columns.items():
        _print_total(p, number, name)


def _row_blocks(p: Printer) -> tuple[str, str, str]:
    """Return the number of rows, the rows of a block, and the number of blocks."""
    rows = size_product(axis.count for axis in p.plan.row_axes)
    if isinstance(rows, int):
        block = rows_of_block(rows)
        return str(rows), str(block), str(math.ceil(rows / block))
    p.line(f"const int64 rows = {p.size(rows)};")
    p.line("int64 root = 64;")
    p.line("while (root * root < rows) root *= 2;")
    p.line("const int64 block = rows < 128 ? 1 : root < rows / 64 ? root : rows / 64;")
    p.line("const int64 blocks = (rows + block - 1) / block;")
    return "rows", "block", "blocks"


def _count(p: Printer, number: int) -> Size:
    """Return the number of elements of a column reduction."""
    return p.plan.table[p.nest.stores[number].buffer].extent


def _stride(p: Printer, number: int) -> int:
    """Return the elements from one partial result to the next: whole cache lines, so that threads share none."""
    count = _count(p, number)
    assert isinstance(count, int), "results of symbolic size are collected in place"
    return (count + 63) // 64 * 64


def _identity(p: Printer, number: int) -> tuple[str, str]:
    """Return type and identity of a column reduction."""
    store = p.nest.stores[number]
    dtype = p.plan.table[store.buffer].dtype
    return memory_type(dtype), literal(REDUCTIONS[store.mode].identity(dtype), dtype)


def _print_block_end(p: Printer, number: int, name: str) -> None:
    """Add a block's sums to its thread's."""
    store, (_, identity), stride = p.nest.stores[number], _identity(p, number), _stride(p, number)
    p.line("#pragma omp simd")
    p.open(f"for (int64 k = 0; k < {_count(p, number)}; k++)")
    p.line(p.combine(store.mode, f"{name}[{stride} + k]", f"{name}[k]", p.plan.table[store.buffer].dtype))
    p.line(f"{name}[k] = {identity};")
    p.close()


def _print_total(p: Printer, number: int, name: str) -> None:
    """Add up the threads' sums in the result."""
    store, stride = p.nest.stores[number], _stride(p, number)
    target, dtype, count = p.argument(store.buffer), p.plan.table[store.buffer].dtype, _count(p, number)
    p.line("#pragma omp simd")
    p.line(f"for (int64 k = 0; k < {count}; k++) {target}[k] = {name}_all[{stride} + k];")
    p.open("for (int64 thread = 1; thread < threads; thread++)")
    p.line("#pragma omp simd")
    p.open(f"for (int64 k = 0; k < {count}; k++)")
    place = f"{name}_all[thread * {2 * stride} + {stride} + k]"
    p.line(p.combine(store.mode, f"{target}[k]", place, dtype))
    p.close(2)
    p.line(f"free({name}_all);")
