"""Report as one self-contained HTML page: tables, and each graph as a picture or as DOT text.

Each row of the table of kernels opens a kernel's source, its roofline and the user's lines. Pictures of planned
programs are SVG: computation and communication on one time axis, and memory over the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dcompile.collectives.contract import Predicted
from dcompile.explain.collective_table import exchange_lines
from dcompile.explain.export import timeline_section
from dcompile.explain.html_document import document, table, text_row
from dcompile.explain.report_data import (
    GraphReport,
    GroupedSteps,
    ReportData,
    StepReport,
    group_steps,
    headline,
    size_text,
    summary,
)
from dcompile.explain.sources import SourceLine
from dcompile.explain.svg import LEFT, TEXT, WIDTH, draw_tracks, opening
from dcompile.explain.timeline import COLOURS, LANES, Bar, duration, kernel_seconds
from dcompile.ir.diagram import bytes_text, dot, render
from dcompile.ir.text import show


def page(report: ReportData) -> str:
    """Text of the page."""
    return document(report.model, _body(report))


def _body(report: ReportData) -> Iterator[str]:
    yield f"<h1>{escape(report.model)}</h1>\n<p>{escape(summary(report))}</p>"
    if report.timeline is not None:
        yield from timeline_section(report.timeline)
    else:
        yield "<h2>The step, by the cost model</h2>"
        yield from (draw_schedule(graph.name, graph.kind, graph.schedule) for graph in report.graphs)
        yield "<p>dcompile.profile(model) measures steps; the picture is then of what was measured.</p>"
    yield _list("Parameters and gradients are left to stock PyTorch", report.reasons)
    if report.receipt is not None:
        yield _list("Receipt", str(report.receipt).splitlines())
    yield _list("Graph breaks", [str(found) for found in report.breaks])
    measured = {} if report.timeline is None else kernel_seconds(report.timeline)
    for graph in report.graphs:
        yield from _graph(graph, measured, report.copy_rate)
    yield _list("Guards", report.guards, folded=True)
    yield _list("Notes", report.notes)


def _graph(graph: GraphReport, measured: Mapping[tuple[str, str], float], copy_rate: float) -> Iterator[str]:
    yield f"<h2>{escape(graph.name)}</h2>\n<p>{escape(headline(graph))}</p>"
    own = {kernel: seconds for (program, kernel), seconds in measured.items() if program == graph.name}
    yield from kernel_table(graph, own, copy_rate)
    if memory := draw_memory(graph.held):
        yield f"<h3>Memory</h3>\n{memory}"
        yield _list("Held at the peak", graph.memory)
    yield _calls("Library calls", [call for call in graph.library_calls if not call.fallback])
    yield _calls("Fallbacks: dcompile has no kernel for these yet", graph.fallbacks, fallback=True)
    yield _list("Collectives", ["; ".join(map(str.strip, exchange_lines(found))) for found in graph.exchanges])
    yield _list("Notes", graph.notes)
    yield f"<details><summary>Picture</summary>{_picture(graph)}</details>"
    yield f"<details><summary>Program</summary><pre>{escape(show(graph.program))}</pre></details>"


def _picture(graph: GraphReport) -> str:
    text = dot(graph.program)
    if (picture := render(text)) is not None:
        return f'<div class="picture">{picture}</div>'
    note = "Graphviz draws this DOT text: dot -Tsvg. With its command dot on PATH, the picture is drawn here."
    return f"<p>{note}</p><pre>{escape(text)}</pre>"


def _calls(title: str, calls: Iterable[StepReport], fallback: bool = False) -> str:
    rows = [
        (row.name, str(row.calls), size_text(row.read), size_text(row.written), ", ".join(row.modules), str(row.source))
        for row in group_steps(calls, with_source=fallback)
    ]
    if not rows:
        return ""
    names = ("name", "calls", "read", "written", "modules", *(("source",) if fallback else ()))
    kind = "fallback" if fallback else "call"
    lines = [text_row(kind, row[: len(names)]) for row in rows]
    return f"<h3>{escape(title)}</h3>\n{table(names, lines, MEANINGS)}"


def _list(title: str, lines: Sequence[str], *, folded: bool = False) -> str:
    """Section with one item per line; if `folded`, the reader opens it."""
    if not lines:
        return ""
    items = "\n".join(f"<li><code>{escape(line)}</code></li>" for line in lines)
    if folded:
        return f"<details><summary>{escape(title)} ({len(lines)})</summary><ul>\n{items}\n</ul></details>"
    return f"<h3>{escape(title)}</h3>\n<ul>\n{items}\n</ul>"


# --- pictures of a planned program ------------------------------------------------------------------------------------


MEMORY_HEIGHT = 120


def draw_schedule(name: str, kind: str, spans: Sequence[Predicted]) -> str:
    """Draw two tracks by the cost model. Gaps in the compute track are waits for a collective."""
    total_us = max((start + length for _, _, start, length, _ in spans), default=0.0)
    if not total_us:
        return ""

    def bars_of(_: str, finest: float) -> Iterator[Bar]:
        computed = [span for span in spans if span[1] == "compute"]
        yield from _joined(computed, LANES[0], "backward" if kind == "backward" else "forward", finest * 1e6)
        yield from _joined([span for span in spans if span[1] != "compute"], LANES[1], "on the wire", finest * 1e6)

    return "\n".join(draw_tracks(name, {name: total_us / 1e6}, bars_of, ()))


def _joined(spans: Sequence[Predicted], lane: str, kind: str, finest_us: float) -> Iterator[Bar]:
    """Yield bars; those too narrow to be seen are merged with their neighbours."""
    begin = end = 0.0
    names: list[str] = []

    def bar(first: float, length: float, title: str) -> Bar:
        return Bar(lane, kind, first / 1e6, (first + length) / 1e6, title)

    for name, _, start, length, exposed in spans:
        wide = length >= finest_us or exposed > 0
        if names and (wide or start - end >= finest_us):
            yield bar(begin, end - begin, _title(names, end - begin))
            names = []
        if wide:
            held = f", {duration(exposed / 1e6)} exposed" if exposed else ""
            yield bar(start, length, f"{name}: {duration(length / 1e6)}{held}")
            continue
        if not names:
            begin = start
        names.append(name)
        end = start + length
    if names:
        yield bar(begin, end - begin, _title(names, end - begin))


def _title(names: Sequence[str], length_us: float) -> str:
    shown = ", ".join(dict.fromkeys(names[:4])) + (", ..." if len(names) > 4 else "")
    return f"{shown}: {duration(length_us / 1e6)}"


def draw_memory(held: Sequence[int]) -> str:
    """Draw the bytes that a program holds in each of its steps, with a line at the peak."""
    peak = max(held, default=0)
    if not peak:
        return ""
    step_px, at = (WIDTH - LEFT - 20) / len(held), held.index(peak)
    top = 24
    points = [f"M{LEFT} {top + MEMORY_HEIGHT}"]
    for number, nbytes in enumerate(held):
        y = top + MEMORY_HEIGHT * (1 - nbytes / peak)
        points.append(f"L{LEFT + number * step_px:.1f} {y:.1f}L{LEFT + (number + 1) * step_px:.1f} {y:.1f}")
    points.append(f"L{LEFT + len(held) * step_px:.1f} {top + MEMORY_HEIGHT}Z")
    x = LEFT + (at + 0.5) * step_px
    return "\n".join(
        [
            opening(top + MEMORY_HEIGHT + 26),
            f'<path d="{"".join(points)}" fill="#ccddee" stroke="{COLOURS["forward"]}"/>',
            f'<path d="M{x:.1f} {top}V{top + MEMORY_HEIGHT}" stroke="{COLOURS["waiting"]}" stroke-dasharray="3 2"/>',
            f'<text x="{min(x, WIDTH - 160):.1f}" y="16" {TEXT}>peak {bytes_text(peak)} at step {at}</text>',
            f'<text x="{LEFT - 8}" y="{top + 10}" text-anchor="end" {TEXT}>{bytes_text(peak)}</text>',
            f'<text x="{LEFT - 8}" y="{top + MEMORY_HEIGHT}" text-anchor="end" {TEXT}>0</text>',
            f'<text x="{LEFT}" y="{top + MEMORY_HEIGHT + 18}" {TEXT}>steps of the program, 0 to {len(held) - 1}</text>',
            "</svg>",
        ]
    )


# --- kernels ----------------------------------------------------------------------------------------------------------


HEAD = ("kernel", "calls", "time", "share", "read", "written", "of a copy's rate", "modules")
MEANINGS = {
    "name": "The kernel or the operator of ATen",
    "kernel": "Open it for its roofline, your lines and its source",
    "calls": "How often a step runs it",
    "time": "All of its calls in a step",
    "share": "Its part of the time of all kernels here",
    "read": "Bytes that all of its calls read from memory",
    "written": "Bytes that all of its calls write to memory",
    "of a copy's rate": "Bytes per second, over those of a plain copy on this machine: near 100 %, nothing is left",
    "modules": "Modules of the model that it computes",
    "source": "The line of your code",
}
"""Title of a column -> what it says."""


@dataclass(frozen=True)
class KernelRow:
    """One kernel of a program, with all of its calls."""

    steps: GroupedSteps
    seconds: float
    """Seconds of all calls: measured, or by the cost model."""
    operations: int
    lines: tuple[SourceLine, ...]

    @property
    def moved(self) -> int | None:
        """Bytes read from and written to memory; None where sizes are symbolic."""
        read, written = self.steps.read, self.steps.written
        return None if read is None or written is None else read + written


def kernel_rows(calls: Sequence[StepReport], measured: Mapping[str, float]) -> list[KernelRow]:
    """One row for each kernel, the longest first. `measured`: kernel -> its measured seconds per step."""
    seconds: dict[str, float] = {}
    operations: dict[str, int] = {}
    lines: dict[str, dict[SourceLine, None]] = {}
    for call in calls:
        seconds[call.name] = seconds.get(call.name, 0.0) + call.seconds
        operations[call.name] = operations.get(call.name, 0) + call.operations
        lines.setdefault(call.name, {}).update(dict.fromkeys(call.lines))
    rows = [
        KernelRow(row, measured.get(row.name, seconds[row.name]), operations[row.name], tuple(lines[row.name]))
        for row in group_steps(calls)
    ]
    return sorted(rows, key=lambda row: -row.seconds)


def kernel_table(graph: GraphReport, measured: Mapping[str, float], copy_rate: float) -> Iterator[str]:
    """Table of a graph's kernels. `copy_rate`: bytes per second that a copy reads and writes on this machine."""
    rows = kernel_rows(graph.kernels, measured)
    if not rows:
        return
    whole = sum(row.seconds for row in rows)
    by = "measured" if any(row.steps.name in measured for row in rows) else "by the cost model"
    lines = [_line(row, graph, whole, copy_rate) for row in rows]
    yield f"<h3>Kernels by time, {by}</h3>\n{table(HEAD, lines, MEANINGS, 'sortable')}"


def _line(row: KernelRow, graph: GraphReport, whole: float, copy_rate: float) -> str:
    steps = row.steps
    cells = [
        (_details(row, graph.kernel_texts.get(steps.name, ""), copy_rate), steps.name),
        (str(steps.calls), steps.calls),
        (duration(row.seconds), row.seconds),
        (f"{row.seconds / whole:.0%}" if whole else "", row.seconds),
        (size_text(steps.read), steps.read or 0),
        (size_text(steps.written), steps.written or 0),
        (_share_text(row, copy_rate), _share(row, copy_rate) or 0),
        (escape(", ".join(steps.modules)), ", ".join(steps.modules)),
    ]
    return f"<tr class='call'>{''.join(_cell(text, key) for text, key in cells)}</tr>"


def _cell(text: str, key: object) -> str:
    return f'<td data-key="{escape(str(key))}">{text}</td>'


def _share(row: KernelRow, copy_rate: float) -> float | None:
    moved = row.moved
    return None if moved is None or not row.seconds or not copy_rate else moved / row.seconds / copy_rate


def _share_text(row: KernelRow, copy_rate: float) -> str:
    share = _share(row, copy_rate)
    return "?" if share is None else f"{share:.0%}"


def _details(row: KernelRow, text: str, copy_rate: float) -> str:
    """Expandable cell of a kernel: roofline, lines and source."""
    moved = row.moved
    intensity = f"{row.operations / moved:.2g} operations a byte; " if moved else ""
    roofline = (
        f"{size_text(moved)} moved, {row.operations:.3g} operations; {intensity}"
        f"{_share_text(row, copy_rate)} of the {copy_rate / 1e9:.0f} GB/s of a copy"
    )
    lines = "".join(f"<li><code>{escape(str(line))}</code></li>" for line in row.lines)
    return (
        f"<details><summary>{escape(row.steps.name)}</summary><p>{escape(roofline)}</p>"
        f"{f'<ul>{lines}</ul>' if lines else ''}{f'<pre>{escape(text)}</pre>' if text else ''}</details>"
    )
