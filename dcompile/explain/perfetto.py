"""Timeline as a trace for ui.perfetto.dev and chrome://tracing: JSON of the Trace Event Format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dcompile.explain.timeline import Timeline
from dcompile.explain.timeline_bars import LANES, bars


def trace(timeline: Timeline) -> str:
    """Trace of all measured steps. A process is a rank, a thread a track. Ranks of one machine share a clock."""
    return json.dumps({"traceEvents": list(_events(timeline)), "displayTimeUnit": "ms"})


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """See "Trace Event Format", complete events (ph X) and metadata (ph M); times in microseconds."""
    rank = timeline.rank
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}, {timeline.device}"}}
    threads = {lane: number for number, lane in enumerate((*LANES, "steps"), 1)}
    for lane, number in threads.items():
        yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": lane}}
    for number, step in enumerate(timeline.steps):
        yield _complete(rank, threads["steps"], f"step {number}", "step", step.begin, step.seconds)
        for bar in bars(step):
            name = bar.title.partition(":")[0]
            yield _complete(
                rank, threads[bar.lane], name, bar.kind, step.begin + bar.begin, bar.end - bar.begin, said=bar.title
            )


def _complete(
    rank: int, thread: int, name: str, kind: str, begin: float, seconds: float, **arguments: str
) -> dict[str, Any]:
    found: dict[str, Any] = {"ph": "X", "pid": rank, "tid": thread, "name": name, "cat": kind}
    return {**found, "ts": begin * 1e6, "dur": seconds * 1e6, "args": arguments}
