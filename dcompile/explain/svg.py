"""Measured step as SVG: two tracks, compute and communication, on one time axis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from dcompile.explain.timeline import Timeline
from dcompile.explain.timeline_bars import COLOURS, LANES, bars, caption

WIDTH, LEFT, TOP, LANE, GAP = 1000, 120, 40, 44, 14
_EDGE = ' stroke="#ffffff" stroke-width="0.8"'
_TEXT = 'font-family="sans-serif" font-size="12" fill="#222222"'


def draw_timeline(timeline: Timeline) -> str:
    """Draw the typical step of a timeline as an SVG element, for a page or a file."""
    return "\n".join(_lines(timeline))


def _lines(timeline: Timeline) -> Iterator[str]:
    step = timeline.typical
    scale = (WIDTH - LEFT - 20) / step.seconds
    bottom = TOP + len(LANES) * (LANE + GAP)
    height = bottom + 70
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    )
    title = f"{timeline.model}, rank {timeline.rank} of {timeline.world}, {timeline.device}"
    yield f'<text x="{LEFT}" y="20" {_TEXT} font-weight="bold">{escape(title)}</text>'
    for number, lane in enumerate(LANES):
        y = TOP + number * (LANE + GAP)
        yield f'<text x="{LEFT - 8}" y="{y + LANE / 2 + 4}" text-anchor="end" {_TEXT}>{lane}</text>'
        yield f'<rect x="{LEFT}" y="{y}" width="{step.seconds * scale:.1f}" height="{LANE}" fill="#f4f4f4"/>'
    used = set()
    for bar in bars(step, finest=0.7 / scale):
        used.add(bar.kind)
        y = TOP + LANES.index(bar.lane) * (LANE + GAP)
        edge = _EDGE if bar.lane == LANES[1] else ""
        yield (
            f'<rect x="{LEFT + bar.begin * scale:.2f}" y="{y}" width="{max((bar.end - bar.begin) * scale, 0.3):.2f}" '
            f'height="{LANE}" fill="{COLOURS[bar.kind]}"{edge}><title>{escape(bar.title)}</title></rect>'
        )
    for at in ticks(step.seconds):
        x = LEFT + at * scale
        yield f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#999999" stroke-width="0.5" stroke-dasharray="2 3"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 12}" text-anchor="middle" {_TEXT}>{at * 1e3:g} ms</text>'
    x = LEFT
    for kind, colour in COLOURS.items():
        if kind in used:
            yield f'<rect x="{x}" y="{bottom + 24}" width="12" height="12" fill="{colour}"/>'
            yield f'<text x="{x + 16}" y="{bottom + 34}" {_TEXT}>{kind}</text>'
            x += 30 + 7 * len(kind)
    yield f'<text x="{LEFT}" y="{bottom + 56}" {_TEXT}>{escape(caption(step))}</text>'
    yield "</svg>"


def ticks(seconds: float) -> list[float]:
    """Five to ten round times."""
    rough = seconds / 6
    base = 10 ** math.floor(math.log10(rough))
    unit = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= rough)
    return [unit * number for number in range(int(seconds / unit) + 1)]
