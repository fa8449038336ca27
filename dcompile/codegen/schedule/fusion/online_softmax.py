"""Softmax's divisor in one reading of long rows, for GPUs: the largest element and the sum of exponentials below it.

A sum over `exp(x - max(x))` needs the maximum first. Rows that a program keeps in registers are read once anyway, but
longer ones, such as logits over a vocabulary, would be read twice. Reduce("sum_exp") means the same sum, and a target
may collect it beside a running maximum. Which sums become one follows from the graph before fusion, so that a value
does not depend on what was fused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dcompile.codegen.nest.gpu_tiling import MAX_PERSISTENT_ELEMENTS, MULTIPROCESSORS
from dcompile.codegen.schedule.fusion.iteration_space import canonical
from dcompile.codegen.schedule.fusion.merge import merge, without
from dcompile.device_traits import loop_traits
from dcompile.ir.index import size_product, typical
from dcompile.ir.nodes import Apply, Buffer, Loop, Program, Reduce, Ref, Step, Value

MAX_ROW_PASSES = 4
"""Loops that may lie between a maximum and the sum that needs it."""


def use_online_softmax(program: Program) -> Program:
    """Join a row's maximum and the sum of exponentials below it, where rows are long, into one pass over the row.

    The sum is collected below a running maximum and scaled as that grows: it differs from the sum in two passes by its
    rounding. Loops on the CPU, short rows and rows so few that several programs share each are left alone.
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
    """Is a row read in pieces, by one program?"""
    if not loop_traits(loop, table).many_threads or any(store.mode != "set" for store in loop.stores):
        return False
    return (
        typical(size_product(loop.inner)) > MAX_PERSISTENT_ELEMENTS
        and typical(size_product(loop.outer)) >= MULTIPROCESSORS
    )


def _sums(loop: Loop) -> Iterator[Ref]:
    """Sums of exponentials."""
    for ref, value in enumerate(loop.body):
        if isinstance(value, Reduce) and value.op == "sum":
            argument = loop.body[value.arg]
            if isinstance(argument, Apply) and argument.op == "exp":
                yield ref


def rewritten(loop: Loop) -> Loop | None:
    """The loop with every sum of `exp(x - max(x))` as one reduction of x; None if it has no such sum."""
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
    """The sum's loop and that of its maximum as one, and where that may stand: in the place of the latter."""
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
            kept = without(merged, producer.writes)  # it stays for whoever else reads it
            assert kept is not None
            joined = kept
            break
        else:
            return None
    return None


def _may_join(producer: Loop) -> bool:
    """Something for each element, or maxima of rows?"""
    if len(producer.stores) != 1 or producer.stores[0].mode != "set":
        return False
    result = producer.body[producer.stores[0].value]
    return not producer.inner or (isinstance(result, Reduce) and result.op == "max")


def _may_stand(loop: Loop, between: list[Step | None]) -> bool:
    """Is all that the loop reads there before these steps, which it overtakes?"""
    return not any(loop.reads & step.writes for step in between if step is not None)
