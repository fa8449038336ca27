"""Which small units of a bucket travel as one message: copies in and out against what each further tensor costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dcompile.ir.nodes import ITEMSIZE, Bucket, Collective, Program, Wait
from dcompile.machine_model import Figures, GroupSize

SAFETY_FACTOR = 2.0
"""Copies are to save so many times what they cost: figures of a table are easily off by that much."""


def coalesce_small(program: Program, figures: Figures, groups: Mapping[str, GroupSize]) -> Program:
    """Choose `Bucket.packed` of gathers and reduce-scatters.

    A collective on many tensors (a group of NCCL's calls) takes some time for each. Norms and biases are better copied
    to one message, if enough of them come together; matrices are not, for a copy takes as long as they are large.

    Guarantees: the same steps and values. Depends on sizes of units, figures and the order of collectives alone, so
    ranks that exchange the same in the same order do it in the same messages.
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
    """Places in `bucket.units` of those that share a message, ascending: the smallest, as many as save the most time.

    `exposed`: nothing is computed meanwhile. Otherwise what a shorter collective saves is that kernels beside it are
    slowed down for less long, while copies are kernels themselves.
    """
    if not bucket.carries_units or ranks == 1:
        return ()
    share = 1.0 if exposed else figures.interference
    gather = bucket.traits.gathers
    smallest = sorted(range(len(bucket.sizes)), key=lambda place: (bucket.sizes[place], place))
    best, found, copied = 0.0, 0, 0
    for count, place in enumerate(smallest, 1):
        copied += bucket.sizes[place] * ITEMSIZE[bucket.dtype]
        moved = 2 * (copied // ranks + copied if gather else copied)  # a gather's shards, and all of it behind
        calls = 2 if gather else 1
        costs = calls * figures.library_us + moved / (figures.memory_gbs * 1e3)
        saved = (count - 1) * figures.member_us * share - SAFETY_FACTOR * costs
        if saved > best:
            best, found = saved, count
    return tuple(sorted(smallest[:found]))


def _exposed_collectives(program: Program) -> set[str]:
    """Gathers before all computing, and reductions behind it: they have nothing to hide behind."""
    computing = [n for n, step in enumerate(program.steps) if not isinstance(step, (Collective, Wait))]
    if not computing:
        return {bucket.name for bucket in program.buckets}
    starts = {step.bucket: n for n, step in enumerate(program.steps) if isinstance(step, Collective)}
    waits = {step.bucket: n for n, step in enumerate(program.steps) if isinstance(step, Wait)}
    return {name for name, n in starts.items() if waits[name] < computing[0] or n > computing[-1]}
