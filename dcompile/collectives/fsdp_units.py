"""Group units of sharded parameters into buckets, each the memory of one collective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod

from dcompile.collectives.contract import ParamInfo, Shard
from dcompile.ir.buffers import ITEMSIZE, Bucket
from dcompile.ir.collective_kinds import PlannedKind, bucket_traits

Together = tuple[int, str, str]
"""Key of units that share a collective: number of the group, dtype on the wire, device."""


def shard_of(param: ParamInfo) -> Shard:
    """Sharding of a sharded parameter."""
    assert param.shard is not None, f"{param.fqn} is not sharded"
    return param.shard


def together_of(kind: PlannedKind, param: ParamInfo) -> Together:
    """Key of the units that share collectives of a kind with a parameter's unit."""
    shard = shard_of(param)
    sent = shard.sent_dtype or param.dtype
    return shard.together, sent if bucket_traits(kind).gathers else shard.reduce_dtype, param.device


Positions = Sequence[tuple[int, int]]
"""(position among a program's inputs or outputs, parameter number)."""


def sharded_accesses(
    params: Sequence[ParamInfo], gathers: Positions, grads: Positions
) -> tuple[tuple[tuple[int, Together], ...], ...]:
    """(position, key of its collectives) of each input that is gathered, and of each output that is reduced."""
    infos = {param.number: param for param in params if param.shard is not None}
    kinds: tuple[tuple[PlannedKind, Positions], ...] = (("all_gather", gathers), ("reduce_scatter", grads))
    return tuple(tuple((at, together_of(kind, infos[n])) for at, n in places if n in infos) for kind, places in kinds)


def by_unit(params: Sequence[ParamInfo]) -> dict[int, list[ParamInfo]]:
    """Parameters of each unit, in the order of their numbers."""
    found: dict[int, list[ParamInfo]] = {}
    for param in sorted(params, key=lambda p: (shard_of(p).unit, p.number)):
        found.setdefault(shard_of(param).unit, []).append(param)
    return found


APART_BYTES = 1 << 20
"""Bytes below which a separate collective costs its latency (some tens of microseconds) and saves no relevant time."""


def cut_apart(
    places: Mapping[Together, Mapping[int, int]], nbytes: Mapping[int, int]
) -> list[tuple[Together, list[int]]]:
    """Split a group's units into collectives, where all of another group is used between two of its units.

    `places`: for each unit of a group, the step at which it is needed or ready. `nbytes`: bytes of each unit. The
    root's group holds the embedding and the last projection. One collective for both would delay the first layer until
    the projection is gathered. It would also delay the projection's gradient until that of the embedding is ready. No
    part is smaller than `APART_BYTES`.
    """
    spans = {key: (min(units.values()), max(units.values())) for key, units in places.items()}
    found: list[tuple[Together, list[int]]] = []
    for key, units in places.items():
        others = [span for other, span in spans.items() if other != key]
        order = sorted(units, key=lambda unit: (units[unit], unit))
        parts = [order[:1]]
        for at, (before, unit) in enumerate(pairwise(order), 1):
            far = any(units[before] < low and high < units[unit] for low, high in others)
            if far and all(sum(nbytes[u] for u in part) >= APART_BYTES for part in (parts[-1], order[at:])):
                parts.append([])
            parts[-1].append(unit)
        found += [(key, sorted(part)) for part in parts]
    return found


def unit_buckets(
    kind: PlannedKind,
    params: Sequence[ParamInfo],
    places: Mapping[int, int],
    buffer_of: Mapping[int, str],
) -> list[tuple[int, Bucket]]:
    """(place, bucket) of the units of these parameters, in the order of places: one per group unless it is split.

    `places`: the step at which each unit is needed or ready. A gather is placed at the first of its units, a reduction
    at the last. `buffer_of`: parameter number -> the buffer that the collective touches.
    """
    traits = bucket_traits(kind)
    members: dict[Together, list[ParamInfo]] = {}
    nbytes: dict[int, int] = {}
    for param in params:
        shard, key = shard_of(param), together_of(kind, param)
        members.setdefault(key, []).append(param)
        nbytes[shard.unit] = shard.numel * ITEMSIZE[key[1]]
    of_group = {key: by_unit(group) for key, group in members.items()}
    spread = {key: {unit: places[unit] for unit in units} for key, units in of_group.items()}
    found: list[tuple[int, Together, Bucket]] = []
    for key, part in cut_apart(spread, nbytes):
        at = (min if traits.gathers else max)(places[unit] for unit in part)
        found.append((at, key, _bucket(kind, {unit: of_group[key][unit] for unit in part}, buffer_of, key[1])))
    # at one place: gathers in the order of groups, and reductions in the opposite one, as fusion relies on
    found.sort(key=lambda entry: entry[1], reverse=not traits.gathers)
    found.sort(key=lambda entry: entry[0])
    return [
        (at, replace(bucket, name=f"{traits.bucket_prefix}{number}")) for number, (at, _, bucket) in enumerate(found)
    ]


def holder_of_unit(kind: PlannedKind, unit: int) -> str:
    """Name of the buffer that a unit is gathered into, or that holds its gradients."""
    return f"{bucket_traits(kind).holder_prefix}{unit}"


def _bucket(
    kind: PlannedKind,
    units: Mapping[int, Sequence[ParamInfo]],
    buffer_of: Mapping[int, str],
    dtype: str,
) -> Bucket:
    """Bucket of these units, without a name yet."""
    first = next(iter(units.values()))[0]
    sizes = [shard_of(members[0]).numel for members in units.values()]
    starts = [0, *accumulate(sizes)]
    in_order = [param for members in units.values() for param in members]
    return Bucket(
        name="",
        dtype=dtype,
        device=first.device,
        group=first.group,
        params=tuple(param.number for param in in_order),
        buffers=tuple(dict.fromkeys(buffer_of[param.number] for param in in_order)),
        offsets=tuple(
            start + shard_of(param).offset
            for start, members in zip(starts, units.values(), strict=False)
            for param in members
        ),
        numel=starts[-1],
        kind=kind,
        units=tuple(units),
        holders=tuple(holder_of_unit(kind, unit) for unit in units),
        sizes=tuple(sizes),
        gaps=tuple(_gaps(list(units.values()))) if not bucket_traits(kind).gathers else (),
    )


def _gaps(units: Sequence[Sequence[ParamInfo]]) -> Iterator[int]:
    """Compute `Bucket.gaps`. A unit of one parameter has only its padding, which is never read."""
    for place, members in enumerate(units):
        if not shard_of(members[0]).flat:
            continue
        end = 0
        spans = sorted((shard_of(param).offset, prod(param.shape)) for param in members)
        for offset, numel in (*spans, (shard_of(members[0]).numel, 0)):
            if offset > end:
                yield from (place, end, offset)
            end = offset + numel
