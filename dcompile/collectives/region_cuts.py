"""Predict, before lowering, where collectives will split a graph's computation: by inputs and outputs of the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from dcompile.collectives.contract import ParamInfo, Request
from dcompile.collectives.ddp_all_reduce import lay_out_all
from dcompile.collectives.fsdp_units import holder_of_unit, shard_of, unit_buckets


@dataclass(frozen=True, slots=True)
class RegionCuts:
    """Collectives by number, in the order in which the graph needs their results or makes their operands."""

    gathers: Mapping[int, int] = field(default_factory=dict)
    """Position of an input -> the all-gather that it comes from, counted from 1."""
    reductions: Mapping[int, int] = field(default_factory=dict)
    """Position of an output -> the reduction of its gradient, counted from 0."""


def region_cuts(request: Request, first_use: Mapping[int, int], ready: Mapping[int, int]) -> RegionCuts:
    """Predict the collectives that the loop passes will insert, by inputs and outputs of the graph.

    `first_use`: position of an input -> place of the first operation that uses it, if any. `ready`: position of an
    output -> place of the operation that makes it. The passes place collectives again, after the steps of the regions.
    Where their choice differs, a collective only waits longer than necessary.
    """
    infos = {info.number: info for info in request.params}
    return RegionCuts(_gathers(request, infos, first_use), _reductions(request, infos, ready))


def _gathers(request: Request, infos: Mapping[int, ParamInfo], first_use: Mapping[int, int]) -> dict[int, int]:
    used = {number: position for position, number in request.gathers if position in first_use}
    params = [infos[number] for number in used]
    places: dict[int, int] = {}
    for param in params:
        unit, place = shard_of(param).unit, first_use[used[param.number]]
        places[unit] = min(place, places.get(unit, place))
    holders = {param.number: holder_of_unit("all_gather", shard_of(param).unit) for param in params}
    buckets = unit_buckets("all_gather", params, places, holders)
    return {used[n]: count for count, (_, bucket) in enumerate(buckets, 1) for n in bucket.params}


def _reductions(request: Request, infos: Mapping[int, ParamInfo], ready: Mapping[int, int]) -> dict[int, int]:
    """Number the reductions in the order of their starts.

    All-reduces keep the order of their buckets, which depends on parameters alone, so none is ready before its
    predecessor. Reduce-scatters come in the order in which they are ready.
    """
    output = {number: at for at, number in request.grads if at in ready and number in infos}
    placed = [*_all_reduces(request, infos, output, ready), *_reduce_scatters(infos, output, ready)]
    placed.sort(key=lambda found: found[0])
    return {output[number]: count for count, (_, members) in enumerate(placed) for number in members}


def _all_reduces(
    request: Request, infos: Mapping[int, ParamInfo], output: Mapping[int, int], ready: Mapping[int, int]
) -> list[tuple[int, tuple[int, ...]]]:
    """(place at which it can start, parameters) of each of DDP's buckets."""
    if request.rule is None or not output:
        return []
    params = request.params if request.rule.covers_all_params else [infos[number] for number in output]
    buckets, _ = lay_out_all(params, request.rule, {number: f"grad{number}" for number in output})
    places = [max((ready[output[number]] for number in bucket.params), default=-1) for bucket in buckets]
    return [(at, bucket.params) for at, bucket in zip(accumulate(places, max), buckets, strict=True) if bucket.params]


def _reduce_scatters(
    infos: Mapping[int, ParamInfo], output: Mapping[int, int], ready: Mapping[int, int]
) -> list[tuple[int, tuple[int, ...]]]:
    """(place at which its last gradient is ready, parameters) of each reduction of sharded parameters."""
    params = [infos[number] for number in output if infos[number].shard is not None]
    places: dict[int, int] = {}
    for param in params:
        unit = shard_of(param).unit
        places[unit] = max(ready[output[param.number]], places.get(unit, -1))
    buckets = unit_buckets("reduce_scatter", params, places, {param.number: f"grad{param.number}" for param in params})
    return [(at, bucket.params) for at, bucket in buckets]
