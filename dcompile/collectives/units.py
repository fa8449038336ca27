"""Units of sharded parameters: what one collective exchanges, as a bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal

from dcompile.collectives.params import ParamInfo, Shard
from dcompile.ir.nodes import Bucket

Together = tuple[int, str, str]
"""What shares a collective: the number of the group, the dtype that is exchanged, the device."""


def shard_of(param: ParamInfo) -> Shard:
    """How a sharded parameter is spread."""
    assert param.shard is not None, f"{param.fqn} is not sharded"
    return param.shard


def by_unit(params: Sequence[ParamInfo]) -> dict[int, list[ParamInfo]]:
    """Parameters of each unit, in order of their numbers."""
    found: dict[int, list[ParamInfo]] = {}
    for param in sorted(params, key=lambda p: (shard_of(p).unit, p.number)):
        found.setdefault(shard_of(param).unit, []).append(param)
    return found


def unit_bucket(
    kind: Literal["all_gather", "reduce_scatter"],
    units: Mapping[int, Sequence[ParamInfo]],
    holders: Mapping[int, str],
    buffers: Sequence[str],
    dtype: str,
) -> Bucket:
    """The bucket of these units; its name is still to be given."""
    first = next(iter(units.values()))[0]
    sizes = [shard_of(members[0]).numel for members in units.values()]
    starts = [0, *accumulate(sizes)]
    return Bucket(
        name="",
        dtype=dtype,
        device=first.device,
        group=first.group,
        params=tuple(param.number for members in units.values() for param in members),
        buffers=tuple(buffers),
        offsets=tuple(
            start + shard_of(param).offset
            for start, members in zip(starts, units.values(), strict=False)
            for param in members
        ),
        numel=starts[-1],
        kind=kind,
        units=tuple(units),
        holders=tuple(holders[unit] for unit in units),
        sizes=tuple(sizes),
    )
