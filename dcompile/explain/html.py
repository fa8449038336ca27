"""Report as one self-contained HTML page: tables, and each graph as a picture or as DOT text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from dcompile.explain.collective_table import exchange_lines
from dcompile.explain.export import timeline_section
from dcompile.explain.html_document import document, table, text_row
from dcompile.explain.kernel_table import MEANINGS, kernel_table
from dcompile.explain.program_pictures import draw_memory, draw_schedule
from dcompile.explain.report_data import (
    GraphReport,
    ReportData,
    StepReport,
    group_steps,
    headline,
    size_text,
    summary,
)
from dcompile.explain.timeline import kernel_seconds
from dcompile.ir.diagram import dot, render
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
