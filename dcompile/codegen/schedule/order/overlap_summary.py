"""Summarize the schedule of each collective: its start, its wait, the computation that hides it, its exposed time.

Times are the cost model's, for the final order of steps. Places are counted between computing steps: 0 is before the
first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dcompile.codegen.schedule.order.cost_model import durations
from dcompile.codegen.schedule.order.overlap_collectives import step_label
from dcompile.codegen.schedule.order.overlap_problem import OverlapProblem
from dcompile.codegen.schedule.order.simulate import PredictedSpan, timeline
from dcompile.ir.nodes import Collective, Program, Wait
from dcompile.machine_model import Figures, GroupSize

MAX_NAMES = 3
"""Names shown of a list."""
MIN_OVERLAP_S = 1e-9
"""Seconds: a shorter overlap is rounding."""


@dataclass(frozen=True, slots=True)
class CollectiveSummary:
    """One collective: the places of its start and wait, and its times in seconds."""

    bucket: str
    kind: str
    group: str
    earliest_start: int
    """First place at which its inputs are complete."""
    start: int
    wait: int
    latest_wait: int
    """The last place for its wait: before the first step that needs its result."""
    seconds: float
    exposed_seconds: float
    """Seconds by which its wait delays later steps."""
    hidden_behind: tuple[str, ...]
    """Kernels and library calls that run at the same time."""


def summarize_overlap(
    program: Program, figures: Figures, groups: Mapping[str, GroupSize]
) -> tuple[CollectiveSummary, ...]:
    """Summarize every collective that is a step of the program, in the order of their starts."""
    problem = OverlapProblem(program, durations(program, figures, groups), groups)
    places = problem.places()
    found = timeline(program.steps, problem.seconds, groups, figures.interference, figures.crowding)
    spans = {span.step: span for span in found.spans}
    computing = [span for span in found.spans if span.resource == "compute"]
    return tuple(
        CollectiveSummary(
            task.start.bucket,
            task.start.kind,
            task.start.group,
            task.low,
            places.starts[task.number],
            places.waits[task.number],
            task.high,
            spans[task.start_step].duration,
            spans[task.start_step].held_up,
            _hidden_behind(program, spans[task.start_step], computing),
        )
        for task in problem.tasks
    )


def _hidden_behind(program: Program, own: PredictedSpan, computing: list[PredictedSpan]) -> tuple[str, ...]:
    """Return labels of the computing steps that run between the start and the end of a collective."""
    end = own.start + own.duration
    return tuple(
        step_label(program.steps[span.step])
        for span in computing
        if min(end, span.start + span.duration) - max(own.start, span.start) > MIN_OVERLAP_S
    )


def overlap_lines(program: Program, figures: Figures, groups: Mapping[str, GroupSize]) -> Iterator[str]:
    """Yield a line for each collective."""
    names = [step_label(step) for step in program.steps if not isinstance(step, (Collective, Wait))]
    for found in summarize_overlap(program, figures, groups):
        yield (
            f"{found.kind} {found.bucket} over {found.group}: "
            f"may start {_place(found.earliest_start, names)}, starts {_place(found.start, names)}, "
            f"is waited for {_place(found.wait, names)}, is needed {_place(found.latest_wait, names)}; "
            f"{1e6 * found.seconds:.1f} us, {1e6 * found.exposed_seconds:.1f} us exposed, "
            f"hidden behind {_names(found.hidden_behind)}"
        )


def _place(place: int, names: list[str]) -> str:
    return f"before step {place} ({names[place]})" if place < len(names) else "at the end"


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more if names else "nothing"
