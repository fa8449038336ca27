"""Kernels of a program as a sortable HTML table.

Each row opens the kernel's source, its roofline and the user's lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dcompile.explain.html_document import table
from dcompile.explain.report_data import GraphReport, GroupedSteps, StepReport, group_steps, size_text
from dcompile.explain.sources import SourceLine
from dcompile.explain.timeline_bars import duration

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
