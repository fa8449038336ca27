"""What a sequence of steps comes to: one stream that computes, one for each communicator, by durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcompile.ir.functional_collectives import kind_of
from dcompile.ir.nodes import Collective, Extern, Step, Wait
from dcompile.machine_model import GroupSize


@dataclass(frozen=True, slots=True)
class PredictedSpan:
    """One step on its resource, in seconds from the start. `held_up`: how long its wait holds up what comes after."""

    step: int
    resource: str
    start: float
    duration: float
    held_up: float = 0.0


@dataclass(frozen=True, slots=True)
class PredictedTimeline:
    """Spans of all steps but waits, in order of the steps."""

    spans: tuple[PredictedSpan, ...]
    total: float
    exposed: float
    """How long nothing is computed because a collective is waited for."""


def timeline(
    steps: Sequence[Step],
    seconds: Sequence[float],
    groups: Mapping[str, GroupSize],
    interference: float = 0.0,
    crowding: float = 0.0,
) -> PredictedTimeline:
    """Run the steps in their order; `groups` says which communicator each group is.

    A collective begins when all steps before it are computed and its communicator is done with the ones before;
    computing goes on until a wait, which holds it up until its collective is through. While a collective runs, what is
    computed takes longer by `interference` of the time, and the collective by `crowding` of it; gathers that are copies
    have a lane to themselves, and do neither.
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
                    free |= {
                        lane: _slowed_progress(end, now, took, crowding)
                        for lane, end in free.items()
                        if lane not in quiet
                    }
                    for at in flying.values():
                        span = spans[at]
                        if span.resource in quiet:
                            continue
                        start = _slowed_progress(span.start, now, took, crowding)
                        end = _slowed_progress(span.start + span.duration, now, took, crowding)
                        spans[at] = PredictedSpan(span.step, span.resource, start, end - start, span.held_up)
                now += took
                if isinstance(step, Extern) and kind_of(step.op) is not None:
                    exposed += took  # the model's own collective, whose wait follows it
    return PredictedTimeline(tuple(spans), now, exposed)


def _slowed_progress(moment: float, now: float, took: float, crowding: float) -> float:
    """When a collective gets to what it would get to at `moment` if nothing were computed for `took` from `now` on."""
    ahead = max(moment - now, 0.0)
    return moment + crowding * min(ahead, took / (1 + crowding))


def lane_of(step: Collective, groups: Mapping[str, GroupSize]) -> str:
    """The communicator that a collective runs on; groups of which nothing is said are one each."""
    lane = groups[step.group].lane if step.group in groups else step.group
    return f"{lane} copies" if is_copied_gather(step, groups) else lane


def is_copied_gather(step: Collective, groups: Mapping[str, GroupSize]) -> bool:
    """Whether a collective is a gather that copies from the other ranks' memory."""
    return step.gathers_parameters and step.group in groups and groups[step.group].copies
