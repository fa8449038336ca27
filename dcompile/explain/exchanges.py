"""The collectives of a planned program: what each exchanges and waits for, and what the cost model expects of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dcompile.collectives.params import Predicted
from dcompile.explain.lanes import duration
from dcompile.explain.timeline import Collective as Measured
from dcompile.explain.timeline import advise, label
from dcompile.ir.diagram import buffer_bytes, bytes_text
from dcompile.ir.nodes import Collective, Extern, Loop, Program, Wait, holder_of


@dataclass(frozen=True)
class Exchange:
    """A collective."""

    kind: str
    bucket: str
    group: str
    bytes: int
    parameters: tuple[str, ...]
    producer: str
    """What computes the last of what it sends."""
    consumer: str
    """What runs first after the wait for it."""
    seconds: float
    """By the cost model, as the next one."""
    exposed: float
    """How long its wait holds up what comes after."""
    advice: str
    """Which setting would change that."""


def exchanges_of(program: Program, parameters: Mapping[int, str], schedule: Sequence[Predicted]) -> Iterator[Exchange]:
    """The collectives of a program, in the order of their starts; `parameters` maps a number to its name."""
    buckets = {bucket.name: bucket for bucket in program.buckets}
    foreseen = dict(_foreseen(schedule))
    whole = sum(length for _, resource, _, length, _ in schedule if resource == "compute") / 1e6
    for position, step in enumerate(program.steps):
        if not isinstance(step, Collective):
            continue
        sizes = [buffer_bytes(buffer) for name, buffer in program.table.items() if name in step.buffers]
        seconds, exposed, queued = foreseen.get(step.bucket, (0.0, 0.0, 0.0))
        producer, consumer = _producer(program, position), _consumer(program, step.bucket)
        nbytes = sum(size for size in sizes if size is not None)
        like = Measured(
            program.name, step.kind, step.bucket, step.group, nbytes, producer, consumer, seconds, exposed,
            exposed_skew=0.0, queued=queued, skew=None, latest_rank=None, advice="",
        )  # fmt: skip
        names = tuple(parameters.get(number, f"parameter {number}") for number in buckets[step.bucket].params)
        advice = advise(like, whole + exposed)
        yield Exchange(
            step.kind, step.bucket, step.group, nbytes, names, producer, consumer, seconds, exposed, advice
        )  # fmt: skip


def _foreseen(schedule: Sequence[Predicted]) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """For each collective: how long it takes, is waited for, and stands behind others, in seconds."""
    computed = 0.0
    for name, resource, start, length, exposed in schedule:
        if resource == "compute":
            computed = start + length
        else:
            yield name, (length / 1e6, exposed / 1e6, max(start - computed, 0.0) / 1e6)


def _producer(program: Program, position: int) -> str:
    start = program.steps[position]
    assert isinstance(start, Collective)
    if start.kind == "all_gather":
        return "nothing: shards are there from the start"
    roots = {holder_of(buffer) or name: name for name, buffer in program.table.items() if name in start.buffers}
    holders = {name: holder_of(buffer) or name for name, buffer in program.table.items()}
    for step in reversed(program.steps[:position]):
        if isinstance(step, Loop | Extern) and any(holders.get(name, name) in roots for name in step.writes):
            return _label(step)
    return "the program's inputs"


def _consumer(program: Program, bucket: str) -> str:
    places = [n for n, step in enumerate(program.steps) if isinstance(step, Wait) and step.bucket == bucket]
    behind = program.steps[places[0] + 1 :] if places else ()
    return next((_label(step) for step in behind if isinstance(step, Loop | Extern)), "the end of the program")


def _label(step: Loop | Extern) -> str:
    return label(step.op if isinstance(step, Extern) else step.name, step.origin)


def exchange_lines(exchange: Exchange) -> Iterator[str]:
    """A collective for people: what it is; what blocks it; and what would change it."""
    shown = ", ".join(exchange.parameters[:3]) + (", ..." if len(exchange.parameters) > 3 else "")
    count = len(exchange.parameters)
    yield (
        f"{exchange.kind} {exchange.bucket} over {exchange.group}: {bytes_text(exchange.bytes)}, "
        f"{count} parameter{'' if count == 1 else 's'} ({shown})"
    )
    yield f"  starts behind {exchange.producer}; {exchange.consumer} waits for it"
    yield (f"  by the cost model {duration(exchange.seconds)}, {duration(exchange.exposed)} exposed; {exchange.advice}")
