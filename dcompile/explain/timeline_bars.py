"""Measured step as bars on two tracks, for every kind of picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from dcompile.explain.timeline import CollectiveInterval, MeasuredSpan, MeasuredStep, Timeline

COLOURS = {
    "forward": "#4477aa",
    "backward": "#66ccee",
    "optimizer": "#aa3377",
    "waiting": "#ee6677",
    "on the wire": "#228833",
    "behind another": "#ccbb44",
    "other rank late": "#bbbbbb",
}
"""Kind of bar -> colour of Paul Tol's bright scheme, which colour-blind people can distinguish, too."""
LANES = ("compute", "communication")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; times in seconds from the step's begin."""

    lane: str
    kind: str
    begin: float
    end: float
    title: str


def bars(step: MeasuredStep, finest: float = 0.0) -> list[Bar]:
    """Bars of a step. Neighbours of one kind that are shorter than `finest` seconds are merged."""
    compute = [_compute_bar(span, step.begin) for span in step.spans]
    return [*_merge_bars(compute, finest), *(bar for e in step.exchanges for bar in _exchange_bars(e, step.begin))]


def _compute_bar(span: MeasuredSpan, zero: float) -> Bar:
    kind = {"optimizer": "optimizer", "wait": "waiting"}.get(span.lane) or (
        "backward" if span.program.startswith("backward") else "forward"
    )
    title = f"{span.name}: {duration(span.seconds)}"
    return Bar("compute", kind, span.begin - zero, span.end - zero, title)


def _merge_bars(found: Iterable[Bar], finest: float) -> Iterator[Bar]:
    """Merge bars that are too short to be seen with their neighbours."""
    open_: Bar | None = None
    for bar in found:
        small = bar.kind != "waiting" and bar.end - bar.begin < finest
        if open_ and small and bar.kind == open_.kind and bar.begin - open_.end < finest:
            open_ = Bar(bar.lane, bar.kind, open_.begin, max(open_.end, bar.end), open_.title)
            continue
        if open_:
            yield open_
        open_ = bar
    if open_:
        yield open_


def _exchange_bars(found: CollectiveInterval, zero: float) -> Iterator[Bar]:
    what = f"{found.kind} {found.bucket}, {megabytes(found.nbytes)}"
    late = max(found.arrived, found.latest or found.arrived)
    pieces = (
        (
            "other rank late",
            found.arrived,
            min(late, found.ended),
            f"{what}: rank {found.latest_rank} is not there yet",
        ),
        ("behind another", late, found.begin, f"{what}: behind the collective before it"),
        ("on the wire", found.begin, found.ended, f"{what}: {duration(found.wire)}, {duration(found.exposed)} exposed"),
    )
    for kind, begin, end, title in pieces:
        if end > begin:
            yield Bar("communication", kind, begin - zero, end - zero, title)


def duration(seconds: float) -> str:
    """Text of a duration: `1.42 s`, `12.3 ms`, `85 us`."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def megabytes(nbytes: int) -> str:
    """Text of a size: `25.0 MiB`, `3.1 KiB`."""
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 1 << 20 else f"{nbytes / 2**10:.1f} KiB"


def caption(step: MeasuredStep) -> str:
    """Numbers of one step, for the caption of its picture."""
    return _totals([step], step.exposed)


def exchange_caption(step: MeasuredStep) -> str:
    """Numbers of one step's communication, for a picture of several steps."""
    if not step.exchanges:
        return "nothing is exchanged"
    share = step.overlapped / step.communication if step.communication else 0.0
    return (
        f"on the wire {duration(step.communication)}, of which {share:.0%} while something computes; exposed "
        f"{duration(step.exposed)} ({step.exposed / step.seconds:.1%} of the step)"
    )


def medians(timeline: Timeline) -> str:
    """Same numbers as medians over the steps. Exposed time is the sum of the medians of all collectives."""
    return _totals(timeline.steps, sum(found.exposed for found in timeline.collectives))


def _totals(steps: Sequence[MeasuredStep], exposed: float) -> str:
    def middle(of: Callable[[MeasuredStep], float]) -> float:
        return statistics.median(map(of, steps))

    seconds, moving = middle(lambda step: step.seconds), middle(lambda step: step.communication)
    idle = f"idle {middle(lambda step: step.idle) / seconds:.1%}"
    if not any(step.exchanges for step in steps):
        computing = duration(middle(lambda step: step.compute))
        return f"step of {duration(seconds)}: computing {computing}, {idle}; nothing is exchanged"
    share = middle(lambda step: step.overlapped) / moving if moving else 0.0
    return (
        f"step of {duration(seconds)}: computing {duration(middle(lambda step: step.compute))}, on the wire "
        f"{duration(moving)}, of which {share:.0%} while something computes; exposed "
        f"{duration(exposed)} ({exposed / seconds:.1%} of the step); {idle}"
    )
