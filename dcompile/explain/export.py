"""Write a timeline to a file whose suffix gives the format."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from dcompile.explain.html_document import document
from dcompile.explain.perfetto import trace
from dcompile.explain.svg import draw_timeline
from dcompile.explain.timeline import MeasuredCollective, Timeline
from dcompile.explain.timeline_bars import COLOURS, LANES, bars, caption, duration, medians, megabytes

PICTURES = (".json", ".svg", ".png")
"""Suffixes of formats that show a timeline alone, without a report."""
HEAD = ("collective", "program", "group", "size", "predicted", "measured", "exposed", "queued", "skew")


def save_timeline(timeline: Timeline, path: Path) -> Path:
    """Write a trace (.json), a picture (.svg, .png), a page (.html), else text."""
    match path.suffix:
        case ".json":
            path.write_text(trace(timeline))
        case ".svg":
            path.write_text(draw_timeline(timeline) + "\n")
        case ".png":
            _plot(timeline, path)
        case ".html" | ".htm":
            path.write_text(_page(timeline))
        case _:
            path.write_text("\n".join(timeline_lines(timeline)) + "\n")
    return path


# --- text -------------------------------------------------------------------------------------------------------------


def timeline_lines(timeline: Timeline) -> Iterator[str]:
    """Print a timeline: totals, a table of the collectives, and their dependences."""
    count = len(timeline.steps)
    yield f"measured on rank {timeline.rank} of {timeline.world}, {timeline.device}; medians of {count} steps:"
    yield f"  {medians(timeline)}"
    rows = [HEAD, *(row(found) for found in timeline.collectives)]
    if len(rows) > 1:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        yield from ("  " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)
        for found in timeline.collectives:
            yield f"  {found.program} {found.bucket}: {blockers(found)}"
            yield f"    {found.advice}"
    yield from (f"  note: {note}" for note in timeline.notes)


def row(found: MeasuredCollective) -> tuple[str, ...]:
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


def blockers(found: MeasuredCollective) -> str:
    """Describe what a collective waits for, and what waits for it."""
    late = f" ({duration(found.exposed_skew)} of it for rank {found.latest_rank})" if found.exposed_skew else ""
    waits = f"waits {duration(found.exposed)}{late}" if found.exposed else "does not wait"
    return f"starts behind {found.producer}; {found.consumer} {waits}"


# --- pictures ---------------------------------------------------------------------------------------------------------


def timeline_section(timeline: Timeline) -> Iterator[str]:
    """Print a timeline as HTML: the picture, and the table of collectives."""
    yield f"<h2>Measured: {len(timeline.steps)} steps</h2>\n{draw_timeline(timeline)}"
    yield f"<p>The step of median length is drawn. Medians over all of them: {escape(medians(timeline))}</p>"
    if timeline.collectives:
        heads = (*HEAD, "what it hangs on", "what would change it")
        yield f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in heads)}</tr>"
        for found in timeline.collectives:
            cells = (*row(found), blockers(found), found.advice)
            yield f'<tr class="collective">{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        yield "</table>"
    yield from (f"<p>{escape(note)}</p>" for note in timeline.notes)


def _page(timeline: Timeline) -> str:
    return document(timeline.model, [f"<h1>{escape(timeline.model)}</h1>", *timeline_section(timeline)])


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
