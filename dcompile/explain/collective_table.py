"""Collectives of a planned program: size, dependences, and the cost model's prediction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from dcompile import compat
from dcompile.collectives.contract import Predicted
from dcompile.explain.timeline import OWN, CollectiveReport, advise, duration, label
from dcompile.ir.collective_kinds import HostCopyKind
from dcompile.ir.diagram import buffer_bytes, bytes_text
from dcompile.ir.functional_collectives import group_of, is_wait, kind_of, whole_bytes
from dcompile.ir.nodes import Collective, Extern, Loop, Program, Wait


def exchanges_of(
    program: Program, parameters: Mapping[int, str], schedule: Sequence[Predicted]
) -> Iterator[CollectiveReport]:
    """Collectives of a program, in the order of their starts; `parameters` maps a number to its name."""
    buckets = {bucket.name: bucket for bucket in program.buckets}
    foreseen, table = dict(_foreseen(schedule)), program.table
    spans = seconds_of_steps(program, schedule)
    whole = sum(length for _, resource, _, length, _ in schedule if resource == "compute") / 1e6
    for position, step in enumerate(program.steps):
        if isinstance(step, Extern) and kind_of(step.op) is not None:
            yield _own(program, position, spans.get(position, 0.0), whole)
        if not isinstance(step, Collective):
            continue
        sizes = [buffer_bytes(buffer) for name, buffer in table.items() if name in step.buffers]
        seconds, exposed, queued = foreseen.get(step.bucket, (0.0, 0.0, 0.0))
        producer, consumer = _producer(program, position), _consumer(program, step.bucket)
        nbytes = sum(size for size in sizes if size is not None) if step.call is None else whole_bytes(step.call, table)
        named = step.group if step.copies_by_host or step.call is None else group_of(step.call)
        group = step.group if step.call is None else compat.groups.describe_group(named)
        numbers = buckets[step.bucket].params if step.call is None else ()
        names = tuple(parameters.get(number, f"parameter {number}") for number in numbers)
        found = CollectiveReport(
            program.name, step.kind, step.bucket, group, nbytes, producer, consumer, seconds, exposed,
            queued=queued, own=step.call is not None, parameters=names,
        )  # fmt: skip
        yield replace(found, advice=advise(found, whole + exposed))


def _own(program: Program, position: int, seconds: float, whole: float) -> CollectiveReport:
    """Row for one of the model's own that is a library call.

    Its wait is the next step, so that all of it is exposed.
    """
    step = program.steps[position]
    assert isinstance(step, Extern)
    kind, group = kind_of(step.op) or step.op, compat.groups.describe_group(group_of(step))
    bucket = next((out for out in step.outs if out is not None), step.op)
    producer, consumer = _writer(program, position, step.reads), _reader(program, position, step.writes)
    nbytes = whole_bytes(step, program.table)
    found = CollectiveReport(program.name, kind, bucket, group, nbytes, producer, consumer, seconds, seconds, own=True)
    return replace(found, advice=advise(found, whole) if seconds else OWN)


def seconds_of_steps(program: Program, schedule: Sequence[Predicted]) -> dict[int, float]:
    """Position of each step except waits -> predicted seconds; empty where there is no prediction."""
    places = [position for position, step in enumerate(program.steps) if not isinstance(step, Wait)]
    return {place: length / 1e6 for place, (_, _, _, length, _) in zip(places, schedule, strict=False)}


def _foreseen(schedule: Sequence[Predicted]) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """Predicted seconds of each collective: duration, exposed time, and time queued behind others."""
    computed = 0.0
    for name, resource, start, length, exposed in schedule:
        if resource == "compute":
            computed = start + length
        else:
            yield name, (length / 1e6, exposed / 1e6, max(start - computed, 0.0) / 1e6)


def _producer(program: Program, position: int) -> str:
    start = program.steps[position]
    assert isinstance(start, Collective)
    if start.gathers_parameters:
        return "nothing: shards are there from the start"
    return _writer(program, position, start.reads)


def _writer(program: Program, position: int, buffers: Iterable[str]) -> str:
    """Last step before `position` that wrote to the memory of any of these buffers."""
    holders = {name: buffer.holder or name for name, buffer in program.table.items()}
    roots = {holders.get(name, name) for name in buffers}
    for step in reversed(program.steps[:position]):
        if isinstance(step, Loop | Extern) and any(holders.get(name, name) in roots for name in step.writes):
            return _label(step)
    return "the program's inputs"


def _reader(program: Program, position: int, buffers: Iterable[str]) -> str:
    """First step after `position` that reads one of its results, or a result of their wait."""
    made = set(buffers)
    for step in program.steps[position + 1 :]:
        if isinstance(step, Loop | Extern) and made & set(step.reads):
            if isinstance(step, Loop) or not is_wait(step.op):
                return _label(step)
            made |= set(step.writes)
    return "the end of the program"


def _consumer(program: Program, bucket: str) -> str:
    places = [n for n, step in enumerate(program.steps) if isinstance(step, Wait) and step.bucket == bucket]
    behind = program.steps[places[0] + 1 :] if places else ()
    return next((_label(step) for step in behind if isinstance(step, Loop | Extern)), "the end of the program")


def _label(step: Loop | Extern) -> str:
    return label(step.op if isinstance(step, Extern) else step.name, step.origin)


def exchange_lines(exchange: CollectiveReport) -> Iterator[str]:
    """Describe a collective in three lines: what it is, what it depends on, and what would change it."""
    shown = ", ".join(exchange.parameters[:3]) + (", ..." if len(exchange.parameters) > 3 else "")
    count = len(exchange.parameters)
    whose = "a saved value" if exchange.kind in get_args(HostCopyKind) else "of the model's own"
    of = f"{count} parameter{'' if count == 1 else 's'} ({shown})" if count else whose
    yield f"{exchange.kind} {exchange.bucket} over {exchange.group}: {bytes_text(exchange.nbytes)}, {of}"
    yield f"  starts after {exchange.producer}; {exchange.consumer} waits for it"
    foreseen = f"by the cost model {duration(exchange.seconds)}, {duration(exchange.exposed)} exposed; "
    yield f"  {foreseen if exchange.seconds else ''}{exchange.advice}"
