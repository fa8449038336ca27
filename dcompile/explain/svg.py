"""Measured steps as SVG: two tracks each, compute and communication, on one time axis."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape

from dcompile.explain.timeline import COLOURS, LANES, Bar, Timeline, bars, caption, duration, exchange_caption

WIDTH, LEFT, TOP, LANE, GAP = 1000, 120, 40, 44, 14
HEADING, LINE = 26, 20
"""Heights of a heading between the tracks of two steps, and of a line of text."""
LINE_CHARACTERS = 130
FINEST_PX = 0.7
"""Pixels below which neighbouring bars are merged."""
MEANING = "Red: it only waits for communication. Gaps: the host is at work, or the script outside of the model."
_EDGE = ' stroke="#ffffff" stroke-width="0.8"'
TEXT = 'font-family="sans-serif" font-size="14" fill="#222222"'
_SAVED = "#117733"
_LONGER = "#aa2233"


def draw_timeline(timeline: Timeline) -> str:
    """Draw the typical step of a timeline as an SVG element, for a page or a file."""
    return "\n".join(_lines({"": timeline}))


def draw_comparison(timelines: Mapping[str, Timeline]) -> str:
    """Draw typical steps of the same job by name, one above another, and what the last saves of the first.

    All steps begin at zero of one time axis. Notes of the timelines are below.
    """
    return "\n".join(_lines(timelines))


def _lines(timelines: Mapping[str, Timeline]) -> Iterator[str]:
    steps = {name: timeline.typical for name, timeline in timelines.items()}
    *_, last = timelines.values()
    texts = [MEANING]
    for name, timeline in timelines.items():
        step = timeline.typical
        texts += [f"{name}: {exchange_caption(step)}", *timeline.notes] if len(steps) > 1 else [caption(step)]
    title = f"{last.model}, rank {last.rank} of {last.world}, {last.device}"
    seconds = {name: step.seconds for name, step in steps.items()}
    yield from draw_tracks(title, seconds, lambda name, finest: bars(steps[name], finest), texts)


def draw_tracks(
    title: str, seconds: Mapping[str, float], bars_of: Callable[[str, float], Iterable[Bar]], texts: Sequence[str]
) -> Iterator[str]:
    """Yield the lines of an SVG element with two tracks for each name of `seconds`, whose lengths these are.

    `bars_of(name, finest)`: bars, where neighbours shorter than `finest` seconds are merged. `texts` stand below.
    """
    longest, compared = max(seconds.values()), len(seconds) > 1
    scale = (WIDTH - LEFT - 20) / longest
    tracks = len(LANES) * (LANE + GAP)
    tops = {name: TOP + HEADING * compared + (tracks + HEADING) * place for place, name in enumerate(seconds)}
    bottom = max(tops.values()) + tracks
    texts = [line for text in texts for line in textwrap.wrap(text, LINE_CHARACTERS)]
    yield opening(bottom + 50 + LINE * len(texts))
    yield f'<text x="{LEFT}" y="22" {TEXT} font-weight="bold">{escape(title)}</text>'
    used = set()
    for name, length in seconds.items():
        if compared:
            heading = f"{name}: {duration(length)}"
            yield f'<text x="{LEFT}" y="{tops[name] - 8}" {TEXT} font-weight="bold">{escape(heading)}</text>'
        for number, lane in enumerate(LANES):
            y = tops[name] + number * (LANE + GAP)
            yield f'<text x="{LEFT - 8}" y="{y + LANE / 2 + 5}" text-anchor="end" {TEXT}>{lane}</text>'
            yield f'<rect x="{LEFT}" y="{y}" width="{length * scale:.1f}" height="{LANE}" fill="#f4f4f4"/>'
        for bar in bars_of(name, FINEST_PX / scale):
            used.add(bar.kind)
            y = tops[name] + LANES.index(bar.lane) * (LANE + GAP)
            edge = _EDGE if bar.lane == LANES[1] else ""
            yield (
                f'<rect x="{LEFT + bar.begin * scale:.2f}" y="{y}" '
                f'width="{max((bar.end - bar.begin) * scale, 0.3):.2f}" '
                f'height="{LANE}" fill="{COLOURS[bar.kind]}"{edge}><title>{escape(bar.title)}</title></rect>'
            )
    if compared:
        yield from _difference(seconds, tops, scale)
    for at in ticks(longest):
        x = LEFT + at * scale
        for top in tops.values():
            end = top + tracks - (GAP if top + tracks < bottom else 0)
            yield f'<path d="M{x:.1f} {top}V{end}" stroke="#999999" stroke-width="0.5" stroke-dasharray="2 3"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle" {TEXT}>{at * 1e3:g} ms</text>'
    x = LEFT
    for kind, colour in COLOURS.items():
        if kind in used:
            yield f'<rect x="{x}" y="{bottom + 26}" width="12" height="12" fill="{colour}"/>'
            yield f'<text x="{x + 17}" y="{bottom + 37}" {TEXT}>{kind}</text>'
            x += 34 + 8 * len(kind)
    for number, text in enumerate(texts):
        yield f'<text x="20" y="{bottom + 61 + LINE * number}" {TEXT}>{escape(text)}</text>'
    yield "</svg>"


def opening(height: float) -> str:
    """Return the begin of an SVG element of a picture's width."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    )


def _difference(seconds: Mapping[str, float], tops: Mapping[str, int], scale: float) -> Iterator[str]:
    """Mark what lies between the ends of the first and the last step, and print it."""
    (first, before), *_, (last, after) = seconds.items()
    saved = before - after
    colour = _SAVED if saved >= 0 else _LONGER
    left, right = LEFT + min(before, after) * scale, LEFT + max(before, after) * scale
    y = tops[last if saved >= 0 else first]
    height = len(LANES) * (LANE + GAP) - GAP
    yield (
        f'<rect x="{left:.2f}" y="{y}" width="{right - left:.2f}" height="{height}" fill="{colour}" '
        f'fill-opacity="0.12" stroke="{colour}" stroke-dasharray="4 3"/>'
    )
    said = f"{duration(abs(saved))} ({abs(saved) / before:.0%}) {'saved' if saved >= 0 else 'longer'}"
    bold = TEXT.replace("#222222", colour)
    yield f'<text x="{right:.1f}" y="{tops[last] - 8}" text-anchor="end" {bold} font-weight="bold">{said}</text>'


def ticks(seconds: float) -> list[float]:
    """Five to ten round times."""
    rough = seconds / 6
    base = 10 ** math.floor(math.log10(rough))
    unit = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= rough)
    return [unit * number for number in range(int(seconds / unit) + 1)]
