"""Planned program as SVG: computation and communication on one time axis, and memory over its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from dcompile.collectives.contract import Predicted
from dcompile.explain.svg import ticks
from dcompile.explain.timeline_bars import COLOURS, LANES, duration
from dcompile.ir.diagram import bytes_text

WIDTH, LEFT, LANE, GAP = 1000, 120, 34, 10
MEMORY_HEIGHT = 120
FINEST_PX = 0.7
"""Pixels below which neighbouring bars are merged."""
TEXT = 'font-family="sans-serif" font-size="12" fill="#222222"'


def draw_schedule(name: str, kind: str, spans: Sequence[Predicted]) -> str:
    """Draw two tracks by the cost model. Gaps in the compute track are waits for a collective."""
    total_us = max((start + length for _, _, start, length, _ in spans), default=0.0)
    if not total_us:
        return ""
    scale, height = (WIDTH - LEFT - 20) / total_us, 30 + 2 * (LANE + GAP) + 24
    lines = [_opening(height), f'<text x="{LEFT}" y="18" {TEXT} font-weight="bold">{escape(name)}</text>']
    for number, lane in enumerate(LANES):
        y = 30 + number * (LANE + GAP)
        lines.append(f'<text x="{LEFT - 8}" y="{y + LANE / 2 + 4}" text-anchor="end" {TEXT}>{lane}</text>')
        lines.append(f'<rect x="{LEFT}" y="{y}" width="{total_us * scale:.1f}" height="{LANE}" fill="#f4f4f4"/>')
        colour = COLOURS["on the wire"] if number else COLOURS["backward" if kind == "backward" else "forward"]
        own = [span for span in spans if (span[1] != "compute") == bool(number)]
        lines += [
            f'<rect x="{LEFT + begin * scale:.2f}" y="{y}" width="{max(length * scale, 0.3):.2f}" height="{LANE}" '
            f'fill="{colour}"><title>{escape(title)}</title></rect>'
            for begin, length, title in _joined(own, FINEST_PX / scale)
        ]
    bottom = 30 + 2 * (LANE + GAP)
    for at in ticks(total_us / 1e6):
        x = LEFT + at * 1e6 * scale
        lines.append(f'<text x="{x:.1f}" y="{bottom + 10}" text-anchor="middle" {TEXT}>{at * 1e3:g} ms</text>')
    return "\n".join([*lines, "</svg>"])


def _joined(spans: Sequence[Predicted], finest_us: float) -> Iterator[tuple[float, float, str]]:
    """(begin, length, title) of bars; bars too narrow to be seen are merged with their neighbours."""
    begin = end = 0.0
    names: list[str] = []
    for name, _, start, length, exposed in spans:
        wide = length >= finest_us or exposed > 0
        if names and (wide or start - end >= finest_us):
            yield begin, end - begin, _title(names, end - begin)
            names = []
        if wide:
            held = f", {duration(exposed / 1e6)} exposed" if exposed else ""
            yield start, length, f"{name}: {duration(length / 1e6)}{held}"
            continue
        if not names:
            begin = start
        names.append(name)
        end = start + length
    if names:
        yield begin, end - begin, _title(names, end - begin)


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
            _opening(top + MEMORY_HEIGHT + 26),
            f'<path d="{"".join(points)}" fill="#ccddee" stroke="{COLOURS["forward"]}"/>',
            f'<path d="M{x:.1f} {top}V{top + MEMORY_HEIGHT}" stroke="{COLOURS["waiting"]}" stroke-dasharray="3 2"/>',
            f'<text x="{min(x, WIDTH - 160):.1f}" y="16" {TEXT}>peak {bytes_text(peak)} at step {at}</text>',
            f'<text x="{LEFT - 8}" y="{top + 10}" text-anchor="end" {TEXT}>{bytes_text(peak)}</text>',
            f'<text x="{LEFT - 8}" y="{top + MEMORY_HEIGHT}" text-anchor="end" {TEXT}>0</text>',
            f'<text x="{LEFT}" y="{top + MEMORY_HEIGHT + 18}" {TEXT}>steps of the program, 0 to {len(held) - 1}</text>',
            "</svg>",
        ]
    )


def _opening(height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    )
