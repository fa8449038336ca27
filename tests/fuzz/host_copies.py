"""Races of copies to and from host memory: random programs with copies, in every order that is legal.

A copy takes place at any time between its start and its wait. The interpreter lets each take place at one or at the
other. Where results depend on that, two steps race: a schedule has a fault, or the verifier, which let it pass.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from dcompile.codegen.schedule.fusion.fuse import fuse
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.codegen.schedule.order.dependences import edges
from dcompile.codegen.schedule.order.overlap_collectives import overlap_collectives
from dcompile.errors import VerifyError
from dcompile.ir.canonical_names import rename_buffers
from dcompile.ir.collective_kinds import HOST_LINK, HostCopyKind
from dcompile.ir.interpret import execute
from dcompile.ir.nodes import Collective, Extern, Loop, Program, Step, View, Wait
from dcompile.ir.verify import verify
from dcompile.machine_model import CPU
from tests.fuzz.records import Inputs

ORDERS, MOVES = 3, 12
"""Random orders of each program, and attempts to move one step somewhere else."""


def copy_steps(kind: HostCopyKind, source: View, target: str) -> tuple[Collective, Wait]:
    """Start and wait of a copy of a whole buffer."""
    call = Extern(f"dcompile_host.{kind}.default", (source,), (), (target,), "out")
    start = Collective(kind, target, HOST_LINK, (target,), call)
    return start, Wait(target, start.buffers, start.sent)


def with_copies(program: Program, choose: random.Random) -> Program:
    """Offload some of what loops compute, each an output more, and load some inputs, each before its first reader."""
    table = dict(program.table)
    written = {name for step in program.steps for name in step.writes}
    loads = [name for name in program.inputs if name in table and name not in written and choose.random() < 0.6]
    made = [name for name in table if name in written and name not in program.inputs and choose.random() < 0.5]
    steps: list[Step] = []
    outputs = [*program.outputs]
    loaded: dict[str, str] = {}

    def copied(kind: HostCopyKind, name: str) -> str:
        buffer = replace(table[name], name=f"{kind}_{name}")
        table[buffer.name] = buffer
        steps.extend(copy_steps(kind, View(name, buffer.shape, buffer.strides), buffer.name))
        return buffer.name

    for step in program.steps:
        assert isinstance(step, Loop)
        for name in loads:
            if name in step.reads and name not in loaded:
                loaded[name] = copied("load", name)
        steps.append(rename_buffers(step, {name: loaded.get(name, name) for name in step.reads | step.writes}))
        for name in made:
            if name in step.writes:
                host = copied("offload", name)
                outputs.append(View(host, table[host].shape, table[host].strides))
    return replace(program, steps=tuple(steps), outputs=tuple(outputs), buffers=tuple(table.values()))


def legal_orders(program: Program, choose: random.Random) -> Iterator[Program]:
    """Yield the program in random orders that keep its dependences."""
    before = edges(program.steps, ordered_starts=False)
    while True:
        order: list[int] = []
        left = set(range(len(program.steps)))
        while left:
            ready = sorted(n for n in left if left.isdisjoint(before[n]))
            order.append(choose.choice(ready))
            left.remove(order[-1])
        yield replace(program, steps=tuple(program.steps[n] for n in order))


def moved(program: Program, choose: random.Random) -> Program:
    """Move one start or wait somewhere else, legally or not."""
    steps = [*program.steps]
    among = [n for n, step in enumerate(steps) if isinstance(step, (Collective, Wait))]
    step = steps.pop(choose.choice(among))
    steps.insert(choose.randrange(len(steps) + 1), step)
    return replace(program, steps=tuple(steps))


def race(program: Program, inputs: Inputs, want: Sequence[np.ndarray], choose: random.Random) -> str | None:
    """Return where results depend on when copies take place; None if they do not."""
    copies = sorted(step.bucket for step in program.steps if isinstance(step, Collective))
    some = frozenset(name for name in copies if choose.random() < 0.5)
    for late in (frozenset[str](), frozenset(copies), some):
        got = execute(program, {name: np.copy(array) for name, array in inputs.items()}, late=late).outputs
        for view, one, two in zip(program.outputs, want, map(np.asarray, got), strict=True):
            if not np.array_equal(one, two, equal_nan=np.issubdtype(one.dtype, np.floating)):
                return f"{view} differs with {sorted(late)} late"
    return None


def check_copies(program: Program, inputs: Inputs) -> str | None:
    """Return what is wrong with a program's schedule, with an order of its steps, or with the verifier."""
    choose = random.Random(program.name)
    program = with_copies(program, choose)
    verify(program)
    if not any(isinstance(step, Collective) for step in program.steps):
        return None
    figures = replace(CPU, host_gbs=choose.choice((1e-4, 1e-2, 1.0)))
    early = choose.choice((None, 0, 1 << 20))
    want = [np.asarray(output) for output in execute(program, {n: np.copy(a) for n, a in inputs.items()}).outputs]
    scheduled = overlap_collectives(fuse(program), figures, {}, early)
    for ordered in (scheduled, *islice(legal_orders(scheduled, choose), ORDERS)):
        planned = plan_memory(ordered)
        verify(planned)
        if (found := race(planned, inputs, want, choose)) is not None:
            return found
    for _ in range(MOVES):
        other = moved(scheduled, choose)
        try:
            verify(other)
        except VerifyError:
            continue
        if (found := race(other, inputs, want, choose)) is not None:
            return f"the verifier accepts a race: {found}"
    return None
