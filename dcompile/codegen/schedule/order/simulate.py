"""Simulate a sequence of steps on one compute stream and one stream for each communicator, from given durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcompile.ir.functional_collectives import kind_of
from dcompile.ir.nodes import Collective, Extern, Step, Wait
from dcompile.machine_model import GroupSize


@dataclass(frozen=True, slots=True)
class PredictedSpan:
    """One step on its resource, in seconds from the start; `held_up`: how long its wait delays later steps."""

    step: int
    resource: str
    start: float
    duration: float
    held_up: float = 0.0


@dataclass(frozen=True, slots=True)
class PredictedTimeline:
    """Spans of all steps except waits, in the order of steps."""

    spans: tuple[PredictedSpan, ...]
    total: float
    exposed: float
    """Seconds in which computation waits for a collective."""


def timeline(
    steps: Sequence[Step],
    seconds: Sequence[float],
    groups: Mapping[str, GroupSize],
    interference: float = 0.0,
    crowding: float = 0.0,
) -> PredictedTimeline:
    """Simulate the steps in their order; `groups` maps each group to its communicator.

    A collective begins when all steps before it are computed and its communicator is free. Computation continues until
    a wait, which delays it until its collective is complete. While a collective runs, computation takes longer by the
    fraction `interference`, and the collective by the fraction `crowding`. Gathers by peer copies have a stream of
    their own and cause neither.
    """
    now = exposed = 0.0
    free: dict[str, float] = {}
    quiet = {lane_of(step, groups) for step in steps if isinstance(step, Collective) and is_copied_gather(step, groups)}
    flying: dict[str, int] = {}
    spans: list[PredictedSpan] = []
    for number, (step, duration) in enumerate(zip(steps, seconds, strict=True)):
        match step:
            case Collective():
                lane = lane_of(step, groups)
                start = max(now, free.get(lane, 0.0))
                free[lane] = start + duration
                flying[step.bucket] = len(spans)
                spans.append(PredictedSpan(number, lane, start, duration))
            case Wait():
                at = flying.pop(step.bucket)
                span = spans[at]
                late = max(span.start + span.duration - now, 0.0) + duration
                spans[at] = PredictedSpan(span.step, span.resource, span.start, span.duration, late)
                exposed += late
                now += late
            case _:
                loud = max((end for lane, end in free.items() if lane not in quiet), default=0.0)
                beside = max(loud - now, 0.0) * (1 + crowding)
                slowed = min(duration * (1 + interference), beside)
                took = slowed + max(duration - slowed / (1 + interference), 0.0)
                spans.append(PredictedSpan(number, "compute", now, took))
                if beside and crowding:
                    crowded = [at for at in flying.values() if spans[at].resource not in quiet]
                    for at in crowded:
                        spans[at] = _crowd(spans[at], now, took, crowding)
                    ends = {lane: _slowed_progress(end, now, took, crowding) for lane, end in free.items()}
                    free |= {lane: end for lane, end in ends.items() if lane not in quiet}
                now += took
                if isinstance(step, Extern) and kind_of(step.op) is not None:
                    exposed += took  # the model's own collective, whose wait follows it
    return PredictedTimeline(tuple(spans), now, exposed)


def _crowd(span: PredictedSpan, now: float, took: float, crowding: float) -> PredictedSpan:
    """Return a collective in flight as computation slows it for `took` s from `now` on."""
    start = _slowed_progress(span.start, now, took, crowding)
    end = _slowed_progress(span.start + span.duration, now, took, crowding)
    return PredictedSpan(span.step, span.resource, start, end - start, span.held_up)


def _slowed_progress(moment: float, now: float, took: float, crowding: float) -> float:
    """Return when a collective reaches its state of `moment` if computation slows it for `took` s from `now` on."""
    ahead = max(moment - now, 0.0)
    return moment + crowding * min(ahead, took / (1 + crowding))


def lane_of(step: Collective, groups: Mapping[str, GroupSize]) -> str:
    """Return the communicator of a collective; a group missing in `groups` has one of its own."""
    lane = groups[step.group].lane if step.group in groups else step.group
    return f"{lane} copies" if is_copied_gather(step, groups) else lane


def is_copied_gather(step: Collective, groups: Mapping[str, GroupSize]) -> bool:
    """Return whether a collective is a gather that copies from the other ranks' memory."""
    return step.gathers_parameters and step.group in groups and groups[step.group].copies
