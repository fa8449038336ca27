"""Insert all-gathers of sharded parameters into a program: each parameter becomes memory that an all-gather fills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from dcompile.collectives.contract import ParamInfo
from dcompile.collectives.fsdp_units import holder_of_unit, shard_of, unit_buckets
from dcompile.ir.buffers import ITEMSIZE, Bucket, Buffer
from dcompile.ir.index import Index, as_index, as_size
from dcompile.ir.nodes import Collective, Extern, Load, Loop, Program, Step, Value, View, Wait, map_arguments


@dataclass(frozen=True, slots=True)
class _GatheredPlace:
    """Place of a gathered parameter: the buffer of its unit, and its offset there in elements."""

    holder: str
    offset: int


Output: TypeAlias = View | Index | int | float | bool | None
Places: TypeAlias = Mapping[str, _GatheredPlace]
"""Places by input, for each input that represents a sharded parameter."""


def insert_all_gathers(
    program: Program, params: tuple[ParamInfo, ...], gathers: tuple[tuple[int, int], ...], results: int
) -> Program:
    """Gather sharded parameters before their first use, with one all-gather for units of a group with a common use.

    `gathers`: (position among the inputs, parameter number). These inputs stay, but hold no data: nothing reads them.

    Guarantees: the same values. A unit's memory is an ordinary buffer from its gather to its last use, so that it is
    reused afterwards. One group is in flight while the previous one is computed with. Outputs after the first `results`
    are saved by a forward. Those that are views of a parameter that stays gathered become views of the gathered one.
    All others stay inputs, and are gathered again where they are needed.
    Relies on: no step writes a parameter; no storage is planned yet.
    """
    if not gathers:
        return program
    infos = {info.number: info for info in params}
    gathered = {program.inputs[position]: infos[number] for position, number in gathers}
    places = {
        name: _GatheredPlace(holder_of_unit("all_gather", shard_of(i).unit), shard_of(i).offset)
        for name, i in gathered.items()
    }
    kept = {name: place for name, place in places.items() if not shard_of(gathered[name]).reshard}
    steps = [_rebase_step(step, places) for step in program.steps]
    saved = (_rebase_view(output, kept) for output in program.outputs[results:])
    outputs = (*program.outputs[:results], *saved)
    buckets = _buckets(list(gathered.values()), _first_uses(steps, outputs))
    return replace(
        program,
        outputs=outputs,
        buffers=(*program.buffers, *(buffer for _, bucket in buckets for buffer in _holders(bucket))),
        steps=tuple(_with_gathers(steps, buckets)),
        buckets=(*program.buckets, *(bucket for _, bucket in buckets)),
    )


def _first_uses(steps: Sequence[Step], outputs: Sequence[object]) -> dict[str, int]:
    """First step that touches each buffer; the end of the program for outputs that no step touches."""
    first: dict[str, int] = {}
    for position, step in enumerate(steps):
        for name in step.reads | step.writes:
            first.setdefault(name, position)
    for output in outputs:
        if isinstance(output, View):
            first.setdefault(output.buffer, len(steps))
    return first


def _buckets(params: Sequence[ParamInfo], first: Mapping[str, int]) -> list[tuple[int, Bucket]]:
    """(first use, bucket) of all used units, in the order of that use."""
    holder = {param.number: holder_of_unit("all_gather", shard_of(param).unit) for param in params}
    used = [param for param in params if holder[param.number] in first]
    places = {shard_of(param).unit: first[holder[param.number]] for param in used}
    return unit_buckets("all_gather", used, places, holder)


def _holders(bucket: Bucket) -> list[Buffer]:
    """Buffers into which the bucket's units are gathered."""
    pairs = zip(bucket.holders, bucket.sizes, strict=True)
    return [Buffer(name, bucket.dtype, (size,), (1,), bucket.device) for name, size in pairs]


def _with_gathers(steps: Sequence[Step], buckets: Sequence[tuple[int, Bucket]]) -> Iterator[Step]:
    """Steps with gathers: each is waited for at its first use, and starts when the previous one has arrived."""
    waiting = list(buckets)
    if waiting:
        yield _start(waiting[0][1])
    for position in range(len(steps) + 1):
        while waiting and waiting[0][0] == position:
            _, bucket = waiting.pop(0)
            yield Wait(bucket.name, bucket.buffers)
            if waiting:
                yield _start(waiting[0][1])
        if position < len(steps):
            yield steps[position]


def _start(bucket: Bucket) -> Collective:
    return Collective("all_gather", bucket.name, bucket.group, bucket.buffers)


def gathered_bytes(program: Program) -> int:
    """Bytes of sharded parameters that a call gathers."""
    return sum(bucket.numel * ITEMSIZE[bucket.dtype] for bucket in program.buckets if bucket.traits.gathers)


# --- other places for the same elements -------------------------------------------------------------------------------


def _rebase_step(step: Step, places: Places) -> Step:
    """Make a step read parameters where they are gathered."""
    if places.keys().isdisjoint(step.reads | step.writes):
        return step
    assert places.keys().isdisjoint(step.writes), f"a step writes a sharded parameter: {step}"
    match step:
        case Loop():
            return replace(step, body=tuple(_rebase_load(value, places) for value in step.body))
        case Extern():
            return _rebase_call(step, places)
        case Collective(call=Extern() as call):
            return replace(step, call=_rebase_call(call, places))
        case Wait():  # for one of the model's own, which has sent a parameter
            holders = dict.fromkeys(places[name].holder if name in places else name for name in step.sent)
            return replace(step, sent=tuple(sorted(holders)))
        case _:
            raise AssertionError(f"a collective works on a sharded parameter: {step}")


def _rebase_call(call: Extern, places: Places) -> Extern:
    return map_arguments(call, lambda arg: _rebase_view(arg, places) if isinstance(arg, View) else arg)


def _rebase_load(value: Value, places: Places) -> Value:
    if isinstance(value, Load) and value.buffer in places:
        place = places[value.buffer]
        return replace(value, buffer=place.holder, index=value.index + place.offset)
    return value


def _rebase_view(value: Output, places: Places) -> Output:
    """Turn a view of a parameter into a view of its gathered unit."""
    if isinstance(value, View) and value.buffer in places:
        place = places[value.buffer]
        return replace(value, buffer=place.holder, offset=as_size(as_index(value.offset) + place.offset))
    return value
