"""Find loops that the kernel of a small all-reduce can end with: the residual addition and the norm that read the sum.

A row of a decoded token is small. Each rank has all of the sum, so it can compute the whole row in the program that has
received it. That saves a launch and a round trip through memory, which take as long as the exchange itself. The loop
stays a step of the program: where ranks use the group's own collective, its own kernel runs after the wait.

Any loop over rows qualifies: RMSNorm, LayerNorm, softmax, or an addition alone. Names of operations are not looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dcompile.codegen.nest.gpu_tiling import make_plan
from dcompile.codegen.nest.loop_nest import Axis, stride
from dcompile.codegen.nest.tile_plan import TilePlan, count
from dcompile.ir.buffers import WITHIN
from dcompile.ir.index import ZERO, Index, substitute
from dcompile.ir.nodes import Apply, Collective, Load, Loop, Program, View, Wait

MAX_ROW_ELEMENTS = 8192
"""Elements of a row that a program may exchange: with more, its threads have no registers for what else it reads."""


@dataclass(frozen=True, slots=True)
class AllReduceEpilogue:
    """A loop that follows an all-reduce, and how its kernel is tiled: one program for each part of the sum."""

    number: int
    """Position of the loop among the program's loops."""
    step: int
    """Position of the loop among the program's steps."""
    loop: Loop
    plan: TilePlan
    operand: str
    """Buffer of the sum."""
    elements: int
    """Elements of the sum that a program of the kernel has."""
    keeps_sum: bool
    """Whether later steps or the caller read the sum, too."""


def all_reduce_epilogues(program: Program, all_reduces: Collection[str]) -> dict[str, AllReduceEpilogue]:
    """Return the loop of each of these all-reduces, by bucket, that its kernel may end with.

    Relies on: memory is planned. The loop follows the all-reduce and its wait directly, so running it earlier, as part
    of the all-reduce, meets no other step. In its result's memory may be what it reads, row by row.
    """
    found: dict[str, AllReduceEpilogue] = {}
    numbers = [number for number, step in enumerate(program.steps) if isinstance(step, Loop)]
    for place, step in enumerate(program.steps[:-2]):
        if not isinstance(step, Collective) or step.bucket not in all_reduces:
            continue
        wait, loop = program.steps[place + 1 : place + 3]
        if not isinstance(wait, Wait) or wait.bucket != step.bucket or not isinstance(loop, Loop):
            continue
        (operand,) = step.buffers
        if (tiled := _tiled(loop, operand)) is not None:
            plan, elements = tiled
            keeps = _is_read_later(program, place + 3, operand)
            number = numbers.index(place + 2)
            found[step.bucket] = AllReduceEpilogue(number, place + 2, loop, plan, operand, elements, keeps)
    return found


def _tiled(loop: Loop, operand: str) -> tuple[TilePlan, int] | None:
    """Return the tiling of a loop, and a program's elements of the sum, if no other program reads those."""
    if loop.product is not None or operand in loop.writes or any(store.mode != "set" for store in loop.stores):
        return None
    if any(isinstance(value, Apply) and value.op == "philox" for value in loop.body):
        return None
    plan = make_plan(loop)
    loads = [value for value in plan.nest.body if isinstance(value, Load) and value.buffer == operand]
    axes = tuple(axis for dim in plan.dims for axis in dim.axes)
    if not loads or any(load.mask is not None or not _is_in_order(load.index, axes) for load in loads):
        return None
    elements = _elements(plan)
    return None if elements is None else (plan, elements)


def _elements(plan: TilePlan) -> int | None:
    """Return the elements of a program that has a whole row, or a run of elements; None for other tilings."""
    if plan.kind == "flat":
        return plan.dims[0].block
    if plan.kind != "rows" or plan.looped or plan.dims[0].block != 1:
        return None
    size = count(plan.dims[1].axes)
    return size if isinstance(size, int) and size <= MAX_ROW_ELEMENTS else None


def _is_in_order(index: Index, axes: Sequence[Axis]) -> bool:
    """Is an index the position in the space of these variables?"""
    for place, axis in enumerate(axes):
        if stride(index, axis.name) != count(axes[place + 1 :]):
            return False
    return substitute(index, {axis.name: ZERO for axis in axes}, {}) == ZERO


def _is_read_later(program: Program, place: int, operand: str) -> bool:
    """Does a step from `place` on, or the caller, read a buffer or a part of it?"""
    if operand in program.inputs and operand not in program.donated:
        return True
    buffers = program.table
    parts = {name for name, buffer in buffers.items() if buffer.storage == WITHIN + operand}
    home = buffers[operand].storage or ""
    if home.startswith(WITHIN):
        return True  # the rest of it may be read together with this part
    names = {operand, *parts}
    later = any(names & step.reads for step in program.steps[place:])
    return later or any(isinstance(output, View) and output.buffer in names for output in program.outputs)
