"""Write a timeline to a file whose suffix gives the format.

A trace is JSON of the Trace Event Format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from dcompile.explain.html_document import document, table, text_row
from dcompile.explain.svg import draw_timeline
from dcompile.explain.timeline import (
    COLOURS,
    LANES,
    CollectiveReport,
    Timeline,
    bars,
    caption,
    duration,
    kernel_seconds,
    medians,
    megabytes,
)
from dcompile.ir.diagram import count_text

PICTURES = (".json", ".svg", ".png")
"""Suffixes of formats that show a timeline alone, without a report."""
FORMATS = {
    **dict.fromkeys((".html", ".htm"), "a page"),
    ".json": "a trace for ui.perfetto.dev",
    **dict.fromkeys((".svg", ".png"), "a picture of the step"),
    **dict.fromkeys((".txt", ".md", ""), "text"),
}
"""Suffix of a file -> what is written to it."""
HEAD = ("collective", "program", "group", "size", "predicted", "measured", "exposed", "queued", "skew")
MEANINGS = {
    "collective": "Kind, and the bucket or tensor that it moves",
    "program": "The compiled graph that it is a step of",
    "group": "The process group",
    "size": "Bytes of the whole result or operand",
    "predicted": "Time on the wire by the cost model",
    "measured": "Time on the wire: from the moment when all ranks were there and the group was free",
    "exposed": "Part in which this rank computed nothing and waited for it",
    "queued": "Time behind the collective before it, on the same group",
    "skew": "How much later the last rank arrived than this one",
    "what it hangs on": "The kernel that it starts after, and the one that waits for it",
    "what would change it": "The setting or the change of the model that would make it shorter, or hide it",
}
"""Title of a column -> what it says."""
SHOWN_KERNELS = 10
"""Kernels of a step that its text lists: the longest."""


def check_path(path: Path) -> None:
    """Raise ValueError for an ending of a file's name that no format has, FileNotFoundError without its folder."""
    if path.suffix not in FORMATS:
        known = ", ".join(f"{suffix} ({what})" for suffix, what in FORMATS.items() if suffix)
        raise ValueError(f"dcompile: cannot save {path.name}: no format ends in {path.suffix}; known are {known}")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"dcompile: cannot save {path}: there is no folder {path.absolute().parent}")


def save_timeline(timeline: Timeline, path: Path) -> Path:
    """Write a trace (.json), a picture (.svg, .png), a page (.html) or text. Raises ValueError for other endings."""
    check_path(path)
    match path.suffix:
        case ".json":
            path.write_text(trace(timeline))
        case ".svg":
            path.write_text(draw_timeline(timeline) + "\n")
        case ".png":
            _plot(timeline, path)
        case ".html" | ".htm":
            path.write_text(page(timeline))
        case _:
            path.write_text("\n".join(timeline_lines(timeline)) + "\n")
    return path


# --- text -------------------------------------------------------------------------------------------------------------


def timeline_lines(timeline: Timeline) -> Iterator[str]:
    """Print a timeline: totals, a table of the collectives, and their dependences."""
    count = len(timeline.steps)
    measured = f"{'medians of ' if count > 1 else ''}{count_text(count, 'step')}"
    after = ", without the first, which prepares calls" if timeline.left_out else ""
    yield f"measured on rank {timeline.rank} of {timeline.world}, {timeline.device}; {measured}{after}:"
    yield f"  {medians(timeline)}"
    rows = _columns(timeline)
    if len(rows) > 1:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        yield from ("  " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)
        for found in timeline.collectives:
            yield f"  {found.program} {found.bucket}: {blockers(found)}"
            yield f"    {found.advice}"
    else:
        yield from (f"  {'  '.join(cells)}" for cells in _kernels(timeline)[:SHOWN_KERNELS])
    yield from (f"  note: {note}" for note in timeline.notes)


def _columns(timeline: Timeline) -> list[tuple[str, ...]]:
    """`HEAD` and the row of each collective; without predictions on CPUs, whose links other processes share."""
    rows = [HEAD, *(row(found) for found in timeline.collectives)]
    if timeline.device != "cpu":
        return rows
    place = HEAD.index("predicted")
    return [(*cells[:place], *cells[place + 1 :]) for cells in rows]


def row(found: CollectiveReport) -> tuple[str, ...]:
    """Table row of one collective under `HEAD`."""
    unknown = "unknown"
    return (
        f"{found.kind} {found.bucket}",
        found.program,
        found.group,
        megabytes(found.nbytes),
        unknown if found.predicted is None else duration(found.predicted),
        duration(found.seconds),
        duration(found.exposed),
        duration(found.queued),
        unknown if found.skew is None else duration(found.skew),
    )


def blockers(found: CollectiveReport) -> str:
    """Describe what a collective waits for, and what waits for it."""
    late = f" ({duration(found.exposed_skew)} of it for rank {found.latest_rank})" if found.exposed_skew else ""
    waits = f"waits {duration(found.exposed)}{late}" if found.exposed else "does not wait"
    return f"starts after {found.producer}; {found.consumer} {waits}"


# --- pictures ---------------------------------------------------------------------------------------------------------


def timeline_section(timeline: Timeline) -> Iterator[str]:
    """Print a timeline as HTML: the picture, and the table of collectives."""
    count = len(timeline.steps)
    of = "The measured step" if count == 1 else f"Medians of {count} steps"
    yield f"<h2>{of}: {escape(medians(timeline))}</h2>\n{draw_timeline(timeline)}"
    if count > 1:
        yield f"<p>Drawn is the step of median length, a {escape(caption(timeline.typical))}</p>"
    if timeline.collectives:
        head, *cells = _columns(timeline)
        heads = (*head, "what it hangs on", "what would change it")
        pairs = zip(cells, timeline.collectives, strict=True)
        rows = [(*row, blockers(found), found.advice) for row, found in pairs]
        yield table(heads, (text_row("collective", cells) for cells in rows), MEANINGS)
    yield from (f"<p>{escape(note)}</p>" for note in timeline.notes)


def page(timeline: Timeline) -> str:
    """Print a timeline as a page: its section, and a table of kernels."""
    rows = (text_row("call", cells) for cells in _kernels(timeline))
    kernels = f"<h2>Kernels by time, measured</h2>\n{table(('time', 'share', 'kernel', 'program'), rows, {})}"
    return document(timeline.model, [f"<h1>{escape(timeline.model)}</h1>", *timeline_section(timeline), kernels])


def _kernels(timeline: Timeline) -> list[tuple[str, str, str, str]]:
    """Time in a step, share of all kernels' time, name and program of each kernel, the longest first."""
    found = sorted(kernel_seconds(timeline).items(), key=lambda entry: -entry[1])
    whole = sum(seconds for _, seconds in found) or 1.0
    return [(duration(time), f"{time / whole:.0%}", kernel, program) for (program, kernel), time in found]


def _plot(timeline: Timeline, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("dcompile: a .png needs matplotlib; .svg, .html and .json need nothing") from error
    step = timeline.typical
    figure = Figure(figsize=(11, 3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    seen: set[str] = set()
    for bar in bars(step, finest=step.seconds / 2000):
        edge = {"edgecolor": "white", "linewidth": 0.5} if bar.lane == LANES[1] else {}
        name = bar.kind if bar.kind not in seen else None
        seen.add(bar.kind)
        place = len(LANES) - LANES.index(bar.lane)
        left, width = bar.begin * 1e3, (bar.end - bar.begin) * 1e3
        axes.barh(place, width, left=left, height=0.7, color=COLOURS[bar.kind], label=name, **edge)
    axes.set_yticks(range(1, len(LANES) + 1), reversed(LANES))
    axes.set_xlim(0, step.seconds * 1e3)
    axes.set_xlabel(f"ms\n{caption(step)}", fontsize=8)
    axes.set_title(f"{timeline.model}, rank {timeline.rank} of {timeline.world}, {timeline.device}", fontsize=9)
    figure.legend(fontsize=7, ncols=len(seen), loc="outside lower center")
    figure.savefig(path)


# --- traces for ui.perfetto.dev and chrome://tracing ------------------------------------------------------------------


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
