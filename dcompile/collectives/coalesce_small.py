"""Choose small units of a bucket to pack into one message: copies cost time, and so does each further tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dcompile.ir.buffers import ITEMSIZE, Bucket
from dcompile.ir.nodes import Collective, Program, Wait
from dcompile.machine_model import Figures, GroupSize

SAFETY_FACTOR = 2.0
"""Ratio by which packing must save more time than its copies cost: figures of a table may be off by that much."""


def coalesce_small(program: Program, figures: Figures, groups: Mapping[str, GroupSize]) -> Program:
    """Choose `Bucket.packed` of gathers and reduce-scatters.

    A collective on many tensors (a group of NCCL's calls) takes some time for each of them. Copying norms and biases
    into one message is cheaper if there are enough of them. Matrices are not packed, since the time of a copy grows
    with its size.

    Guarantees: the same steps and values. Depends on sizes of units, figures and the order of collectives alone. So
    ranks with the same collectives in the same order use the same messages.
    Relies on: buckets in the order in which they are started.
    """
    if not figures.member_us:
        return program
    exposed = _exposed_collectives(program)
    buckets = tuple(
        replace(
            bucket,
            packed=units_to_pack(bucket, figures, groups.get(bucket.group, GroupSize()).ranks, bucket.name in exposed),
        )
        for bucket in program.buckets
    )
    return replace(program, buckets=buckets)


def units_to_pack(bucket: Bucket, figures: Figures, ranks: int, exposed: bool) -> tuple[int, ...]:
    """Places in `bucket.units` of the units to pack, ascending: the smallest ones, as many as save the most time.

    `exposed`: nothing is computed during the collective. Otherwise, a shorter collective saves time only because it
    slows concurrent kernels for less long, while copies are kernels themselves.
    """
    if not bucket.carries_units or ranks == 1:
        return ()
    share = 1.0 if exposed else figures.interference
    gather = bucket.traits.gathers
    smallest = sorted(range(len(bucket.sizes)), key=lambda place: (bucket.sizes[place], place))
    best, found, copied = 0.0, 0, 0
    for count, place in enumerate(smallest, 1):
        copied += bucket.sizes[place] * ITEMSIZE[bucket.dtype]
        moved = 2 * (copied // ranks + copied if gather else copied)  # a gather packs its shards, and unpacks the whole
        calls = 2 if gather else 1
        costs = calls * figures.library_us + moved / (figures.memory_gbs * 1e3)
        saved = (count - 1) * figures.member_us * share - SAFETY_FACTOR * costs
        if saved > best:
            best, found = saved, count
    return tuple(sorted(smallest[:found]))


def _exposed_collectives(program: Program) -> set[str]:
    """Gathers before all computation, and reductions after it: nothing can hide them.

    Updates count as no computation, since another rank may run the same backward without them.
    """
    computing = [n for n, step in enumerate(program.steps) if not isinstance(step, (Collective, Wait))]
    made = {name for step in program.steps if isinstance(step, Collective) for name in step.made}
    first = next((n for n in computing if program.steps[n].reads & made), len(program.steps))
    computing = [n for n in computing if n < first]
    if not computing:
        return {bucket.name for bucket in program.buckets}
    starts = {step.bucket: n for n, step in enumerate(program.steps) if isinstance(step, Collective)}
    waits = {step.bucket: n for n, step in enumerate(program.steps) if isinstance(step, Wait)}
    return {name for name, n in starts.items() if waits[name] < computing[0] or n > computing[-1]}
