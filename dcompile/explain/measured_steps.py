"""Split what instrumented programs recorded into the steps of a timeline."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dcompile.explain.timeline import Arrived, CollectiveInterval, MeasuredSpan, MeasuredStep
from dcompile.ir.collective_kinds import bucket_traits


def steps_of(
    calls: Sequence[Any],
    updates: Sequence[tuple[str, float, float]],
    begin: float,
    end: float,
    latest: Sequence[Arrived] | None,
    groups: Mapping[tuple[str, str], str],
    serial: bool = True,
) -> tuple[MeasuredStep, ...]:
    """Split measured `ProgramCallTiming`s and the optimizer's (name, begin, end) into steps.

    A step ends with an optimizer's update; without any, where a forward follows a backward. `latest`: latest arrival at
    each collective, in the order of their starts. `groups`: (program, bucket) -> name of the group. `serial`:
    collectives of a group run one after another, as on NCCL's stream; Gloo uses threads.
    """
    exchanges = _exchanges(calls, latest, groups, serial)
    spans = [span for call in calls for span in _spans(call)]
    spans += [MeasuredSpan("optimizer", name, begun, ended) for name, begun, ended in updates]
    spans += [MeasuredSpan("compute", f"hands {e.bucket} over", e.arrived, e.started, e.program) for e in exchanges]
    spans += [MeasuredSpan("wait", f"waits for {e.bucket}", e.wait_begin, e.wait_end, e.program) for e in exchanges]
    spans.sort(key=lambda span: span.begin)
    cuts = [begin, *_cuts(calls, updates, end)]
    return tuple(
        MeasuredStep(
            one,
            two,
            tuple(span for span in spans if one <= span.begin < two),
            tuple(exchange for exchange in exchanges if one <= exchange.arrived < two),
        )
        for one, two in itertools.pairwise(cuts)
    )


def _cuts(calls: Sequence[Any], updates: Sequence[tuple[str, float, float]], end: float) -> list[float]:
    """End of each step."""
    if updates:
        ends = sorted(ended for _, _, ended in updates)
        starts = [call.begin for call in calls]
        # of several optimizers in one step, only the last one before the next program ends the step
        return [e for e, after in zip(ends, [*ends[1:], None], strict=True) if _runs_between(starts, e, after)]
    kinds = [call.program.startswith("backward") for call in calls]
    between = [call.begin for call, before, now in zip(calls[1:], kinds, kinds[1:], strict=False) if before and not now]
    return [*between, end]


def _runs_between(starts: Sequence[float], one: float, two: float | None) -> bool:
    return two is None or any(one <= start < two for start in starts)


def _spans(call: Any) -> Iterator[MeasuredSpan]:
    for number, begin, end in call.spans:
        statement = call.statements[number]
        yield MeasuredSpan("compute", label(statement.name, statement.origin), begin, end, call.program, statement.name)


def label(name: str, origin: Sequence[str]) -> str:
    """Short name of a step: the modules it came from, else what it calls."""
    modules = list(dict.fromkeys(text.partition(": ")[0] if ": " in text else "" for text in origin))
    shown = [module for module in modules if module]
    if not shown:
        shown = [text.partition(" (")[0] for text in origin[:1]] or [name]
    return ", ".join(shown[:2]) + (", ..." if len(shown) > 2 else "")


def _exchanges(
    calls: Sequence[Any],
    latest: Sequence[Arrived] | None,
    groups: Mapping[tuple[str, str], str],
    serial: bool,
) -> list[CollectiveInterval]:
    made: list[CollectiveInterval] = []
    free: dict[str, float] = {}
    every = [(call, found) for call in calls for found in call.exchanges]
    for number, (call, found) in enumerate(every):
        if found.wait_end is None:
            continue
        ended = found.wait_end if found.ended is None else found.ended
        group = groups.get((call.program, found.bucket), found.group)
        last = None if latest is None else latest[number]
        made.append(
            CollectiveInterval(
                call.program, found.kind, found.bucket, group, found.nbytes, found.arrived, found.started, ended,
                found.wait_begin, found.wait_end, _producer(call, found), _consumer(call, found),
                None if last is None else last[0], None if last is None else last[1], bool(found.group),
                free.get(group, float("-inf")),
            )
        )  # fmt: skip
        if serial:
            free[group] = max(free.get(group, ended), ended)
    return made


def _producer(call: Any, found: Any) -> str:
    """Last step before the start that touches the bucket."""
    bucket = found.bucket.replace(".", "_")
    if not found.group and bucket_traits(found.kind).gathers:
        return "nothing: shards are there from the start"
    order = [number for number, *_ in call.spans]
    upto = order[: order.index(found.after) + 1] if found.after >= 0 else []
    # if the text names no bucket, gradients are in plain memory, and the start comes right after the last of them
    named = [number for number in upto if bucket in call.statements[number].buckets] or upto
    if not named:
        return "the program's inputs"
    return label(call.statements[named[-1]].name, call.statements[named[-1]].origin)


def _consumer(call: Any, found: Any) -> str:
    """First step after the wait."""
    order = [number for number, *_ in call.spans]
    rest = order[order.index(found.before) + 1 :] if found.before >= 0 else order
    if not rest:
        return "the end of the program"
    return label(call.statements[rest[0]].name, call.statements[rest[0]].origin)
