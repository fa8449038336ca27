"""The order in which GPU loops go through a row: neighbours in memory come one after another.

A row's elements come in the order of the tensor's dimensions. The groups of a group norm, of channels-last images, are
a few channels of every pixel: told channel by channel, each element lies in a cache line of its own (60 launches of a
Stable Diffusion decoder took 17.6 ms so, on one H200).
"""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.nest.gpu_tiling import distance, reach
from dcompile.codegen.schedule.fusion.iteration_space import respace
from dcompile.device_traits import loop_traits
from dcompile.ir.analysis import ancestors, inner_names
from dcompile.ir.index import var
from dcompile.ir.nodes import Loop, Program, Reduce, Ref, Scan, Step
from dcompile.ir.ops import REDUCTIONS


def order_inner_loops(program: Program) -> Program:
    """Sort the inner axes of each GPU loop that reduces, the axis with the longest steps in memory first.

    Steps are those of what the reductions read, and stores count where reads leave it open. A long row is split later,
    and its stores get a loop of their own. Changes only the order in which a reduction is summed. Loops that scan, or
    that ask where a value lies, keep theirs.
    """
    # float8 training stores a scaled matrix turned as well: in that order its maximum took 230 us, by rows 35 (H200)
    table = program.table

    def ordered(step: Step) -> Step:
        return _reorder_inner(step) if isinstance(step, Loop) and loop_traits(step, table).many_threads else step

    return replace(program, steps=tuple(map(ordered, program.steps)))


def _reorder_inner(loop: Loop) -> Loop:
    names = inner_names(loop)
    if len(names) < 2 or not _may_be_permuted(loop):
        return loop
    read = [loop.body[ref] for ref in sorted(ancestors(loop.body, _reductions(loop)))]
    order = sorted(range(len(names)), key=lambda at: (-distance(read, (), names[at]), -reach(loop, names[at])))
    if order == [*range(len(names))]:
        return loop
    values = {f"i{place}": var(f"i{place}") for place in range(len(loop.outer))}
    values |= {names[old]: var(f"j{new}") for new, old in enumerate(order)}
    return respace(loop, loop.outer, tuple(loop.inner[place] for place in order), values)


def _reductions(loop: Loop) -> list[Ref]:
    return [ref for ref, value in enumerate(loop.body) if isinstance(value, Reduce)]


def _may_be_permuted(loop: Loop) -> bool:
    reduces = [value for value in loop.body if isinstance(value, Reduce)]
    if not reduces or any(isinstance(value, Scan) for value in loop.body):
        return False
    known = all(REDUCTIONS[value.op].combine is not None for value in reduces)
    return known and all(store.mode == "set" for store in loop.stores)
