"""Accumulate sums of matmuls: each matmul adds to the previous result, instead of a loop that adds up all results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dcompile.ir.buffers import Buffer
from dcompile.ir.gemm import MATMUL_OPS, matmul_of
from dcompile.ir.nodes import Apply, Extern, Load, Loop, Program, Step, View

DTYPES = ("float32", "float64")  # narrower ones round after each addition, and an accumulating matmul does not


@dataclass(frozen=True, slots=True)
class SummedMatmuls:
    """A loop that adds up matmul results, and at most one other value first. Steps are given by position."""

    loop: int
    start: str
    """Buffer of the first addend."""
    begun: int
    """Step that writes the first addend."""
    products: tuple[int, ...]
    """Steps of the other addends' matmuls, in order."""


def accumulate_matmuls(program: Program) -> Program:
    """Accumulate matmuls into one another where a loop would only add up their results.

    A weight used many times, such as a recurrent layer's, gets as many gradients. They then need the memory of one, and
    no loop reads them again.
    Guarantees: the same values, up to the order and rounding of these sums.
    Relies on: no step is fused yet, so a loop that only adds is recognized.
    """
    sums = find_sums(program)
    if not sums:
        return program
    gone = {found.loop for found in sums}
    instead: dict[int, list[Step]] = defaultdict(list)
    buffers = list(program.buffers)
    table = program.table
    for found in sums:
        total = table[_stored_sum(program.steps[found.loop])]
        so_far, at = found.start, found.begun
        for number, position in enumerate(found.products):
            gone.add(position)
            last = number == len(found.products) - 1
            into = total if last else replace(total, name=f"{total.name}_so_far{number}")
            buffers += [] if last else [into]
            at = max(at, position)
            instead[at].append(_added_matmul(program.steps[position], table[so_far], into))
            so_far = into.name
            table[so_far] = into
    kept = [[*([] if n in gone else [step]), *instead[n]] for n, step in enumerate(program.steps)]
    steps = tuple(step for group in kept for step in group)
    used = {name for step in steps for name in step.reads | step.writes} | set(program.inputs)
    return replace(program, steps=steps, buffers=tuple(buffer for buffer in buffers if buffer.name in used))


def find_sums(program: Program) -> list[SummedMatmuls]:
    """Find loops that add up matmul results without other readers, and at most one value without later readers."""
    writers: dict[str, list[int]] = defaultdict(list)
    readers: dict[str, list[int]] = defaultdict(list)
    for number, step in enumerate(program.steps):
        for name in step.writes:
            writers[name].append(number)
        for name in step.reads:
            readers[name].append(number)
    shown = program.returned
    table, found = program.table, []
    for number, step in enumerate(program.steps):
        addends = _addends(step, table) if isinstance(step, Loop) else None
        if addends is None or not all(
            len(writers[name]) == 1 and readers[name][-1] == number and name not in shown for name in addends
        ):
            continue
        products = [name for name in addends if len(readers[name]) == 1 and _is_product(program, writers[name][0])]
        others = [name for name in addends if name not in products]
        read = frozenset().union(*(program.steps[writers[name][0]].reads for name in products))
        changes = any(len(writers[name]) > (name not in program.inputs) for name in read)
        if len(others) > 1 or not products or changes:  # the matmul may move later, so its inputs must not change
            continue
        products.sort(key=lambda name: writers[name][0])
        start, *rest = [*others, *products]
        found.append(SummedMatmuls(number, start, writers[start][0], tuple(writers[name][0] for name in rest)))
    return found


def _stored_sum(step: Step) -> str:
    (name,) = step.writes
    return name


def _addends(loop: Loop, table: Mapping[str, Buffer]) -> list[str] | None:
    """Return the buffers that a loop adds up, if it does nothing else and all have the layout of the result."""
    if len(loop.stores) != 1 or loop.stores[0].mode != "set" or len(loop.body) < 3:
        return None
    (store,) = loop.stores
    target = table[store.buffer]
    loads = [value for value in loop.body if isinstance(value, Load)]
    adds = [value for value in loop.body if isinstance(value, Apply) and value.op == "add"]
    used = sorted(ref for add in adds for ref in add.args)
    each_once = used == [ref for ref in range(len(loop.body)) if ref != store.value]
    if len(loads) + len(adds) != len(loop.body) or not each_once or target.dtype not in DTYPES:
        return None
    layout = (target.shape, target.strides, target.dtype, target.device)
    for load in loads:
        buffer = table[load.buffer]
        lies_so = (buffer.shape, buffer.strides, buffer.dtype, buffer.device) == layout
        if not lies_so or load.index != store.index or load.mask is not None:
            return None
    names = [load.buffer for load in loads]
    return names if len(set(names)) == len(names) and store.buffer not in names else None


def _is_product(program: Program, position: int) -> bool:
    call = matmul_of(program.steps[position])
    return call is not None and call.added is None and not call.op.wide


def _added_matmul(step: Step, start: Buffer, into: Buffer) -> Extern:
    assert isinstance(step, Extern)
    whole = View(start.name, start.shape, start.strides)
    return replace(step, op=MATMUL_OPS[step.op].adding, args=(whole, *step.args), outs=(into.name,))
