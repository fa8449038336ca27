"""Print prefetches of a matrix into L2, by kernels of products of one row that start before their turn."""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.emit.triton.library import PREFETCH
from dcompile.codegen.emit.triton.printer import TritonText
from dcompile.codegen.nest.tile_plan import TileDim
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import ZERO, substitute, var
from dcompile.ir.nodes import Load

PIECE_BYTES = 2048
"""Bytes of one prefetch. A multiprocessor starts about one in a cycle. Prefetches of 32 bytes for whole rows took
longer than the product (4096 x 3072, one H200)."""


def prefetch_rows(text: TritonText, pid: str) -> bool:
    """Ask for rows of the matrices that no kernel writes; return whether there are any. `pid`: the program's number.

    A thread asks for one piece. Programs that walk along their rows ask for the start. Others hold their rows anyway:
    the first `ahead` of them, which wait for their turn, ask for the rows of as many later ones.
    """
    plan = text.plan
    if plan.row_matmul is None:
        return False
    (found, tile), (x, r) = plan.row_matmul, plan.dims
    loads = [load for ref in found.matrices if isinstance(load := plan.nest.body[ref], Load)]
    loads = [load for load in loads if load.buffer in text.constant and _is_aligned(load, r)]
    if not loads or not (tile.early_bytes if plan.looped else tile.ahead):
        return False
    threads = 32 * plan.warps
    text.line(f"piece = tl.arange(0, {threads}){'.to(tl.int64)' if text.wide else ''}")
    program = pid if plan.looped else f"({pid} + {tile.ahead})"
    names = {axis.name: f"p{axis.name}" for axis in (*x.axes, *r.axes)}
    (along,) = r.axes
    for load in loads:
        width = ITEMSIZE[load.dtype]
        row = found.depth * width
        wanted = min(tile.early_bytes, row) if plan.looped else row
        pieces = max(min(-(-wanted // PIECE_BYTES), threads // x.block), 1)
        each = wanted // pieces // 16 * 16
        text.line(f"px = {program} * {x.block} + piece // {pieces}")
        text.coordinates("px", tuple(replace(axis, name=names[axis.name]) for axis in x.axes))
        text.line(f"{names[along.name]} = piece % {pieces} * {each // width}")
        inside = f"(piece < {x.block * pieces}) & (px < {text.size(x.size)})"
        inside += "" if plan.looped else f" & ({pid} < {tile.ahead})"
        index = text.index(substitute(load.index, {old: var(new) for old, new in names.items()}, {}))
        text.line(f"{PREFETCH}({text.argument(load.buffer)} + ({index}), {each}, {inside})")
    return True


def _is_aligned(load: Load, r: TileDim) -> bool:
    """Does each row of a matrix begin at whole 16 bytes, as prefetches do?"""
    rest = substitute(load.index, {axis.name: ZERO for axis in r.axes}, {})
    return all(coefficient * ITEMSIZE[load.dtype] % 16 == 0 for _, coefficient in rest.terms)
