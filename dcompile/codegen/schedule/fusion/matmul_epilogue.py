"""Epilogue fusion: a matmul and the pointwise loop after it become one kernel.

Kernels and tiles are measured on the program before this pass (`autotune.py`), against the library's matmul and a
separate loop. This file finds the candidates and rewrites the chosen ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from dcompile.codegen.nest.loop_nest import stride
from dcompile.codegen.schedule.order.dependences import edges
from dcompile.device_traits import MAX_INT32_ELEMENTS, traits_of
from dcompile.ir.analysis import is_row_store, runtime_refs, sizes
from dcompile.ir.buffers import Buffer
from dcompile.ir.canonical_names import buffers_in, rename_buffers
from dcompile.ir.gemm import TENSOR_CORE_DTYPES, gemm_layout, matmul_of
from dcompile.ir.index import ZERO, Index, substitute, var
from dcompile.ir.nodes import (
    Extern,
    IndexOf,
    Load,
    Loop,
    Matmul,
    Program,
    Reduce,
    Scan,
    Step,
    Store,
    Tile,
    View,
    map_arguments,
)
from dcompile.ir.symbols import used_symbols

MIN_EPILOGUE_FLOPS = 1 << 30
"""A matmul of fewer floating point operations takes two microseconds, and fusion gains nothing."""
ANY = Tile(0, 0, 0, 0, 0)
"""Placeholder for a tile that is not chosen yet."""


@dataclass(frozen=True, slots=True)
class EpilogueCandidate:
    """A matmul and a loop that can be its epilogue, by position among the steps."""

    product: int
    position: int
    joint: Loop
    """Both as one loop, with the tile `ANY`."""

    @property
    def kind(self) -> Loop:
        """The joint loop without names: the key of a choice, which equal layers share."""
        return _nameless(self.joint)

    @property
    def flops(self) -> int:
        assert self.joint.product is not None, "an ending has a product"
        return flops(self.joint.product)


def flops(product: Matmul) -> int:
    """Return the floating point operations of a matmul, static sizes only."""
    *_, left, right = product.call.views
    known = [size for size in (*left.shape, right.shape[1]) if isinstance(size, int)]
    return 2 * prod(known)


def fuse_matmul_epilogues(program: Program, chosen: Mapping[Loop, Tile]) -> Program:
    """Fuse matmuls with the loops after them, where a tile was chosen.

    Guarantees: the same values, up to the order of summation in these matmuls, which move to the place of their loops.
    Relies on: `chosen` is the same on every rank.
    """
    found = {e.position: (e, chosen[e.kind]) for e in epilogues(program) if e.kind in chosen} if chosen else {}
    if not found:
        return program
    gone = {ending.product for ending, _ in found.values()}
    steps: list[Step] = []
    for position, step in enumerate(program.steps):
        if position in found:
            steps.append(with_tile(found[position][0].joint, found[position][1]))
        elif position not in gone:
            steps.append(step)
    written = {name for step in steps for name in step.reads | step.writes}
    unwritten = {name for n in gone for name in program.steps[n].writes} - written
    return replace(program, steps=tuple(steps), buffers=tuple(b for b in program.buffers if b.name not in unwritten))


def with_tile(joint: Loop, tile: Tile) -> Loop:
    """Return the joint loop with this tile."""
    assert joint.product is not None, "a joint loop has a product"
    return replace(joint, product=replace(joint.product, tile=tile))


def epilogues(program: Program) -> list[EpilogueCandidate]:
    """Return all matmuls that have an epilogue candidate, each with one loop."""
    table = program.table
    products = {n: out for n, step in enumerate(program.steps) if (out := _result(step, table)) is not None}
    if not products:
        return []
    before = edges(program.steps)
    found: dict[int, EpilogueCandidate] = {}
    for at, out in products.items():
        behind = (n for n in range(at + 1, len(program.steps)) if at in before[n])
        position = next(behind, None)  # no other step may need the result, or overwrite the matmul's inputs, before
        joint = None if position is None else _fuse_epilogue(program, at, position, out)
        if position is None or joint is None:
            continue
        ending = EpilogueCandidate(at, position, joint)
        if position not in found or ending.flops >= found[position].flops:
            found[position] = ending  # of two matmuls that a loop reads: the larger, or on ties the later
    return [found[position] for position in sorted(found)]


def _result(step: Step, table: Mapping[str, Buffer]) -> Buffer | None:
    """Return the result buffer of a matmul that dcompile's kernel can compute; None for other steps."""
    call = matmul_of(step)
    if call is None or call.op.batched or call.op.wide or call.kwargs:
        return None
    buffer = table[call.out]
    if (added := call.added) is not None:
        known = isinstance(added.offset, int) and added.strides and isinstance(added.strides[-1], int)
        whole = added.shape[-1:] == call.right.shape[1:] and not any(added.strides[:-1])
        if not known or not whole or table[added.buffer].dtype != buffer.dtype:
            return None
    result = View(call.out, buffer.shape, buffer.strides)
    if (
        buffer.dtype not in TENSOR_CORE_DTYPES
        or not traits_of(buffer.device).has_matmul_epilogues
        or buffer.extent != _elements(result)
    ):
        return None
    if any(table[view.buffer].dtype != buffer.dtype for view in (call.left, call.right)):
        return None
    fits = all(
        gemm_layout(view, buffer.dtype) is not None and _reach(view) < MAX_INT32_ELEMENTS
        for view in (call.left, call.right, result)
    )
    return buffer if fits and gemm_layout(result, buffer.dtype) == (False, buffer.shape[1]) else None


def _elements(view: View) -> int:
    """Return the number of elements of a view of static size; -1 otherwise."""
    return prod(n for n in view.shape if isinstance(n, int)) if all(isinstance(n, int) for n in view.shape) else -1


def _reach(view: View) -> int:
    numbers = [n for n in (*view.shape, *view.strides, view.offset) if isinstance(n, int)]
    rows, columns, down, right, offset = numbers  # seen by `gemm_layout`
    return offset + (rows - 1) * down + (columns - 1) * right + 1


def _fuse_epilogue(program: Program, at: int, position: int, out: Buffer) -> Loop | None:
    """Return matmul and loop as one, if the loop covers the result element by element."""
    call, loop = program.steps[at], program.steps[position]
    assert isinstance(call, Extern), "found by _result"
    if not isinstance(loop, Loop) or loop.product is not None or not _is_pointwise(loop, program.table):
        return None
    if used_symbols(loop) or loop.writes & call.reads or any(b.holder == out.name for b in program.buffers):
        return None
    product = Matmul(call, out.dtype, ANY)
    if flops(product) < MIN_EPILOGUE_FLOPS:
        return None
    ordered = by_rows(loop, out)
    if ordered is None:
        return None
    if is_seen(program, out.name, (at, position)):
        load = next(n for n, value in enumerate(ordered.body) if isinstance(value, Load) and value.buffer == out.name)
        kept = Store(out.name, _of_load(ordered, load), load)
        ordered = replace(ordered, stores=(kept, *ordered.stores))
    origin = tuple(dict.fromkeys((*call.origin, *loop.origin)))
    return replace(ordered, origin=origin, product=product)


def _of_load(loop: Loop, ref: int) -> Index:
    value = loop.body[ref]
    assert isinstance(value, Load), "a load of the product"
    return value.index


def _is_pointwise(loop: Loop, table: Mapping[str, Buffer]) -> bool:
    """Does each iteration compute one element of each store independently, at an index known in advance on a GPU?"""
    if any(isinstance(value, (Reduce, Scan)) for value in loop.body):
        return False
    names = {name for name, size in sizes(loop).items() if size != 1}
    return all(
        store.mode == "set"
        and not runtime_refs(store.index)
        and names <= store.index.variables
        and not (loop.inner and is_row_store(loop, store))
        and traits_of(table[store.buffer].device).has_matmul_epilogues
        for store in loop.stores
    )


def by_rows(loop: Loop, out: Buffer) -> Loop | None:
    """Rewrite the loop over rows and columns of the matrix `out`, of which each iteration reads one element; else None.

    Variables may be in any order. Several may make up the rows or the columns, and one may span both.
    """
    loads = [value for value in loop.body if isinstance(value, Load) and value.buffer == out.name]
    columns, lengths = out.shape[1], sizes(loop)
    if len({load.index for load in loads}) != 1 or any(load.mask is not None for load in loads):
        return None
    assert isinstance(columns, int), "seen by _result"
    found = {name: stride(loads[0].index, name) for name, size in lengths.items() if size != 1}
    steps = {name: step for name, step in found.items() if isinstance(step, int)}
    if len(steps) != len(found):
        return None
    outer, inner, flat, whole = list[Piece](), list[Piece](), ZERO, 1
    for name in sorted(steps, key=lambda name: steps[name]):
        size = lengths[name]
        if steps[name] != whole or not isinstance(size, int):
            return None
        flat = flat + var(name) * whole
        within = columns // whole if whole < columns else 1
        if whole < columns and (columns % whole or (size % within if size > within else within % size)):
            return None
        inner += [(name, min(size, within))] if whole < columns else []
        outer += [(name, size // within)] if size > within else []
        whole *= size
    if whole != out.extent or flat != loads[0].index:
        return None
    return _in_order(loop, outer[::-1], inner[::-1])


Piece: TypeAlias = "tuple[str, int]"
"""A variable, or its upper or lower part, and its length."""


def _in_order(loop: Loop, outer: list[Piece], inner: list[Piece]) -> Loop:
    """Rewrite the loop over these variables; `outer` has the upper part of a variable that is in both."""
    bounds = {f"i{k}": size for k, (_, size) in enumerate(outer)} | {f"j{k}": size for k, (_, size) in enumerate(inner)}
    moved = dict.fromkeys(sizes(loop), ZERO)
    for k, (name, _) in enumerate(outer):
        moved[name] = var(f"i{k}") * dict(inner).get(name, 1)
    for k, (name, _) in enumerate(inner):
        moved[name] = moved[name] + var(f"j{k}")

    def at(index: Index) -> Index:
        return substitute(index, moved, bounds)

    body = tuple(replace(v, index=at(v.index)) if isinstance(v, (Load, IndexOf)) else v for v in loop.body)
    stores = tuple(replace(store, index=at(store.index)) for store in loop.stores)
    return replace(loop, outer=tuple(n for _, n in outer), inner=tuple(n for _, n in inner), body=body, stores=stores)


def is_seen(program: Program, name: str, but: tuple[int, int]) -> bool:
    """Return whether a step other than these two needs a buffer, or an output or storage refers to it."""
    used = any(name in step.reads | step.writes for n, step in enumerate(program.steps) if n not in but)
    shown = any(isinstance(output, View) and output.buffer == name for output in program.outputs)
    return used or shown or program.table[name].storage is not None


# --- names ------------------------------------------------------------------------------------------------------------


def _nameless(joint: Loop) -> Loop:
    """Return the joint loop with buffers numbered in order of use, and without its origin."""
    assert joint.product is not None, "a joint loop has a product"
    call, out = joint.product.call, joint.product.out
    names: dict[str, str] = {}
    for name in (*(view.buffer for view in call.views), out, *buffers_in(joint)):
        names.setdefault(name, f"b{len(names)}")
    call = map_arguments(call, lambda arg: replace(arg, buffer=names[arg.buffer]) if isinstance(arg, View) else arg)
    bare = replace(call, outs=(names[out],), origin=())
    product = replace(joint.product, call=bare)
    return replace(rename_buffers(joint, names), name="", origin=(), product=product)
