"""Online softmax for GPUs: one pass over a long row computes its maximum and the sum of exponentials below it.

A sum over `exp(x - max(x))` needs the maximum first. Rows that fit into registers are read once anyway, but longer
ones, such as logits over a vocabulary, would be read twice. Reduce("sum_exp") denotes the same sum, and a target may
compute it beside a running maximum. The graph before fusion determines which sums are rewritten, so a value does not
depend on fusion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dcompile.codegen.nest.tile_plan import MAX_PERSISTENT_ELEMENTS
from dcompile.codegen.schedule.fusion.iteration_space import canonical
from dcompile.codegen.schedule.fusion.merge import merge, without
from dcompile.device_traits import MULTIPROCESSORS, loop_traits
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import size_product, typical
from dcompile.ir.nodes import Apply, Loop, Program, Reduce, Ref, Step, Value

MAX_ROW_PASSES = 4
"""Loops merged, at most, from a sum back to the loop of its maximum."""


def use_online_softmax(program: Program) -> Program:
    """Join a long row's maximum and the sum of exponentials below it into one pass over the row.

    The sum is kept relative to a running maximum and rescaled when that grows, so its rounding differs from two passes.
    Loops on CPUs, short rows, and rows so few that several programs share each are unchanged.
    """
    table = program.table
    steps: list[Step | None] = list(program.steps)
    for at in range(len(steps)):
        step = steps[at]
        if not isinstance(step, Loop) or not _is_long(step, table) or not any(_sums(step)):
            continue
        alone = rewritten(step)
        if alone is not None:
            steps[at] = alone
            continue
        found = _with_its_maximum(steps, at)
        if found is not None:
            place, joined = found
            steps[place], steps[at] = joined, None
    return replace(program, steps=tuple(step for step in steps if step is not None))


def _is_long(loop: Loop, table: dict[str, Buffer]) -> bool:
    """Does one program read the row in several blocks?"""
    if not loop_traits(loop, table).many_threads or any(store.mode != "set" for store in loop.stores):
        return False
    return (
        typical(size_product(loop.inner)) > MAX_PERSISTENT_ELEMENTS
        and typical(size_product(loop.outer)) >= MULTIPROCESSORS
    )


def _sums(loop: Loop) -> Iterator[Ref]:
    """Yield the sums of exponentials."""
    for ref, value in enumerate(loop.body):
        if isinstance(value, Reduce) and value.op == "sum":
            argument = loop.body[value.arg]
            if isinstance(argument, Apply) and argument.op == "exp":
                yield ref


def rewritten(loop: Loop) -> Loop | None:
    """Replace every sum of `exp(x - max(x))` by one reduction of x; return None if there is no such sum."""
    body: list[Value] = list(loop.body)
    for ref in _sums(loop):
        total = body[ref]
        assert isinstance(total, Reduce)
        exp = body[total.arg]
        assert isinstance(exp, Apply)
        below = body[exp.args[0]]
        if isinstance(below, Apply) and below.op == "sub":
            x, top = below.args
            if body[top] == Reduce("max", x, below.dtype):
                body[ref] = Reduce("sum_exp", x, below.dtype)
    return without(replace(loop, body=tuple(body)), frozenset()) if tuple(body) != loop.body else None


def _with_its_maximum(steps: list[Step | None], at: int) -> tuple[int, Loop] | None:
    """Merge the sum's loop with its maximum's loop; return the merged loop and its position, which is the latter's."""
    step = steps[at]
    assert isinstance(step, Loop)
    joined, writers = canonical(step), {name: n for n, s in enumerate(steps[:at]) if s is not None for name in s.writes}
    for _ in range(MAX_ROW_PASSES):
        for place in sorted({writers[name] for name in joined.reads if name in writers}, reverse=True):
            producer = steps[place]
            if not isinstance(producer, Loop) or not _may_join(producer):
                continue
            merged = merge(canonical(producer), joined)
            if merged is None:
                continue
            if producer.inner:
                done = rewritten(merged)
                return (place, done) if done is not None and _may_stand(done, steps[place + 1 : at]) else None
            kept = without(merged, producer.writes)  # the producer stays for its other readers
            assert kept is not None
            joined = kept
            break
        else:
            return None
    return None


def _may_join(producer: Loop) -> bool:
    """Is the producer a pointwise loop, or one that stores maxima of rows?"""
    if len(producer.stores) != 1 or producer.stores[0].mode != "set":
        return False
    result = producer.body[producer.stores[0].value]
    return not producer.inner or (isinstance(result, Reduce) and result.op == "max")


def _may_stand(loop: Loop, between: list[Step | None]) -> bool:
    """Are all inputs of the loop ready before these steps, which it overtakes?"""
    return not any(loop.reads & step.writes for step in between if step is not None)
