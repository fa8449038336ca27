"""Programs as pictures: steps as boxes, layer under layer, and the buffers that go from one to the next as lines.

The drawing is the usual one for directed graphs without cycles (Sugiyama, Tagawa and Toda, 1981): a step lies below all
that it needs, lines that pass a layer bend around its boxes, and boxes are ordered by the middle of their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from statistics import fmean
from typing import TypeAlias

from dcompile.ir.nodes import Buffer, Collective, Extern, Loop, Program, Step, View, Wait
from dcompile.ir.text import show_buffer

CHARACTER, LINE, PAD, GAP, LAYER = 6.2, 14, 8, 18, 52
"""Pixels: a character's width, a line's height, around text, between boxes, between layers."""
SMALL_CHARACTER, SMALL_LINE = 5.0, 10
"""The same of what is written beside lines."""
HEADER = 24 + LINE
"""Height of title and legend."""
SWEEP_COUNT = 4
COLOURS = {"kernel": "#d5e8d4", "library": "#dae8fc", "fallback": "#f8cecc", "collective": "#ffe6cc", "wait": "#fff2cc"}


@dataclass
class _Box:
    """A step, or a bend of a line that passes this layer (no text)."""

    layer: int
    lines: tuple[str, ...] = ()
    kind: str = ""
    tip: str = ""
    above: list[int] = field(default_factory=list)
    below: list[int] = field(default_factory=list)
    x: float = 0.0
    """Of the middle."""

    @property
    def width(self) -> float:
        return max((len(line) * CHARACTER for line in self.lines), default=0.0) + (2 * PAD if self.lines else 0)

    @property
    def height(self) -> float:
        return len(self.lines) * LINE + (PAD if self.lines else 0)


def bytes_text(count: int) -> str:
    """`512 B`, `1.5 KiB`, `20.0 MiB`."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def buffer_bytes(buffer: Buffer) -> int | None:
    """What it takes in memory, if its size is known."""
    static = all(isinstance(size, int) for size in (*buffer.shape, *buffer.strides))
    return buffer.nbytes if static else None


def kind_of(step: Step) -> str:
    """kernel, library, fallback, collective or wait."""
    match step:
        case Loop():
            return "kernel"
        case Extern():
            return "fallback" if step.fallback else "library"
        case Collective():
            return "collective"
        case Wait():
            return "wait"


def flows(steps: Sequence[Step]) -> dict[tuple[int, int], list[str]]:
    """(writer, reader) -> buffers that go from one step to the other. What overwrites a buffer follows its readers."""
    found: dict[tuple[int, int], list[str]] = {}
    writer: dict[str, int] = {}
    for number, step in enumerate(steps):
        for name in sorted(step.reads | step.writes):
            if name in writer:
                found.setdefault((writer[name], number), []).append(name)
        writer |= dict.fromkeys(step.writes, number)
    return found


def draw(program: Program) -> str:
    """The whole program as the text of an SVG file. Boxes and lines say more when pointed at."""
    table = program.table
    found = flows(program.steps)
    layers = _layers(len(program.steps), found)
    escaping = {output.buffer for output in program.outputs if isinstance(output, View)}
    boxes = [
        _Box(layer, _words(step, program, escaping), kind_of(step), _tip(step, table))
        for layer, step in zip(layers, program.steps, strict=True)
    ]
    paths = {pair: _route(boxes, *pair) for pair in found}
    rows = _order_layers(boxes)
    tops = _place(boxes, rows)
    curves = {pair: _points(boxes, tops, path) for pair, path in paths.items()}
    labels = _labels({pair: (curves[pair], _flow_words(found[pair], table)) for pair in curves})
    title = ", ".join(
        [
            f"{program.name}: {_count(len(program.steps), 'step')}",
            _count(len(program.inputs), "input"),
            _count(len(program.outputs), "output"),
        ]
    )
    legend, legend_end = _legend()
    ends = [GAP + len(title) * CHARACTER * 1.05, legend_end]  # bold is a little wider
    ends += [box.x + box.width / 2 for box in boxes]
    ends += [label.x + label.width for label in labels.values()]
    height = (tops[-1] + max(boxes[n].height for n in rows[-1]) if rows else 0) + GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(ends) + GAP:.0f}" height="{height + HEADER:.0f}" '
            'font-family="monospace" font-size="10">',
            f"<title>{escape(title)}</title>",
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{GAP}" y="16" font-weight="bold">{escape(title)}</text>',
            *legend,
            f'<g transform="translate(0 {HEADER})">',
            *(_line(curves[pair], tops, boxes, path, found[pair], table) for pair, path in paths.items()),
            *(_box(box, tops[box.layer]) for box in boxes if box.lines),
            *(_label(label) for label in labels.values()),  # last, so that no line goes over one
            "</g>",
            "</svg>",
            "",
        ]
    )


# --- what stands in a box ---------------------------------------------------------------------------------------------


def _words(step: Step, program: Program, escaping: set[str]) -> tuple[str, ...]:
    table, inputs = program.table, set(program.inputs)
    match step:
        case Loop():
            head = f"{step.name} {list(map(str, (*step.outer, *step.inner)))}".replace("'", "")
        case Extern():
            head = step.op
        case Collective():
            head = f"{step.kind} {step.bucket} over {step.group}"
        case Wait():
            head = f"wait {step.bucket}"
    where = dict.fromkeys(origin.partition(":")[0] for origin in getattr(step, "origin", ()) if ": " in origin)
    lines = [head]
    if where:
        lines.append(_short(", ".join(where)))
    lines.append(f"in {_total(step.reads, table)}, out {_total(step.writes, table)}")
    ends = []
    if count := len(step.reads & inputs):
        ends.append(_count(count, "input"))
    if count := len(step.writes & escaping):
        ends.append(_count(count, "output"))
    return (*lines, ", ".join(ends)) if ends else tuple(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _flow_words(names: Sequence[str], table: Mapping[str, Buffer]) -> str:
    return f"{_short(', '.join(names), 24)} {_total(names, table)}"


def _short(text: str, longest: int = 48) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _total(names: Iterable[str], table: Mapping[str, Buffer]) -> str:
    sizes = [buffer_bytes(table[name]) for name in names if name in table]
    known = bytes_text(sum(size for size in sizes if size is not None))
    return f"{known} + ?" if None in sizes else known


def _tip(step: Step, table: Mapping[str, Buffer]) -> str:
    lines = list(getattr(step, "origin", ()))
    lines += [f"reads {show_buffer(table[name])}" for name in sorted(step.reads) if name in table]
    lines += [f"writes {show_buffer(table[name])}" for name in sorted(step.writes) if name in table]
    return "\n".join(lines)


# --- where it stands --------------------------------------------------------------------------------------------------


def _layers(count: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Of each step: one below the lowest that it needs."""
    layers = [0] * count
    for writer, reader in sorted(pairs, key=lambda pair: pair[1]):
        layers[reader] = max(layers[reader], layers[writer] + 1)
    return layers


def _route(boxes: list[_Box], start: int, end: int) -> list[int]:
    """Boxes that a line goes through: from layer to layer, a bend in each that it passes."""
    path = [start]
    for layer in range(boxes[start].layer + 1, boxes[end].layer):
        boxes.append(_Box(layer))
        path.append(len(boxes) - 1)
    path.append(end)
    for upper, lower in pairwise(path):
        boxes[upper].below.append(lower)
        boxes[lower].above.append(upper)
    return path


def _order_layers(boxes: list[_Box]) -> list[list[int]]:
    """Boxes of each layer from left to right: sweeps down and up, each sorting by the middle of the neighbours."""
    rows: list[list[int]] = [[] for _ in range(max((box.layer for box in boxes), default=-1) + 1)]
    for number, box in enumerate(boxes):
        rows[box.layer].append(number)
    place = {number: float(at) for row in rows for at, number in enumerate(row)}
    for sweep in range(SWEEP_COUNT):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            middle = {n: _middle(boxes[n].above if down else boxes[n].below, place, place[n]) for n in row}
            row.sort(key=middle.__getitem__)
            place |= {number: float(at) for at, number in enumerate(row)}
    return rows


def _middle(neighbours: Sequence[int], place: Mapping[int, float], otherwise: float) -> float:
    return fmean(place[n] for n in neighbours) if neighbours else otherwise


def _place(boxes: list[_Box], rows: list[list[int]]) -> list[float]:
    """Give every box its x: near the middle of those above, as far as its neighbours allow. Tops of the rows."""
    tops, top = [], float(GAP)
    for row in rows:
        tops.append(top)
        wanted = [_middle(boxes[n].above, {m: boxes[m].x for m in boxes[n].above}, 0.0) for n in row]
        widths = [boxes[number].width + GAP for number in row]
        # spread to the right only and to the left only: half way between, boxes keep their distances as well
        right = _spread(wanted, widths)
        left = [-x for x in reversed(_spread([-x for x in reversed(wanted)], widths[::-1]))]
        for number, x, other in zip(row, right, left, strict=True):
            boxes[number].x = (x + other) / 2
        top += max(boxes[n].height for n in row) + LAYER
    first = min((box.x - box.width / 2 for box in boxes), default=0.0)
    for box in boxes:
        box.x += GAP - first
    return tops


def _spread(wanted: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Middles from left to right, none further left than wanted, and none within another's width."""
    found: list[float] = []
    edge = float("-inf")
    for x, width in zip(wanted, widths, strict=True):
        found.append(max(x, edge + width / 2))
        edge = found[-1] + width / 2
    return found


def _points(boxes: Sequence[_Box], tops: Sequence[float], path: Sequence[int]) -> list[tuple[float, float]]:
    """Where a line begins, enters each layer that it passes, and ends."""
    first, last = boxes[path[0]], boxes[path[-1]]
    begin = first.x, tops[first.layer] + first.height
    return [begin, *((boxes[n].x, tops[boxes[n].layer]) for n in path[1:-1]), (last.x, tops[last.layer])]


@dataclass
class _Words:
    """What is written beside a line: where it begins, and its base line."""

    text: str
    x: float
    y: float

    @property
    def width(self) -> float:
        return len(self.text) * SMALL_CHARACTER

    def covers(self, other: _Words) -> bool:
        across = self.x < other.x + other.width and other.x < self.x + self.width
        return across and abs(self.y - other.y) < SMALL_LINE


Pair: TypeAlias = "tuple[int, int]"
Curve: TypeAlias = "list[tuple[float, float]]"


def _labels(wanted: Mapping[Pair, tuple[Curve, str]]) -> dict[Pair, _Words]:
    """Words near the lower end of each line's first bend, higher up or further right where others stand there."""
    placed: dict[Pair, _Words] = {}
    for pair, (points, text) in wanted.items():
        (x, y), (to_x, to_y) = points[:2]
        words = _Words(text, (x + 3 * to_x) / 4 + 3, (y + 4 * to_y) / 5)
        lowest, highest = words.y, max(y, to_y - LAYER) + SMALL_LINE
        while above := [other for other in placed.values() if words.covers(other)]:
            words.y -= SMALL_LINE
            if words.y < highest:
                words.x, words.y = max(other.x + other.width for other in above) + SMALL_CHARACTER, lowest
        placed[pair] = words
    return placed


# --- SVG --------------------------------------------------------------------------------------------------------------


def _legend() -> tuple[list[str], float]:
    """Its elements, and where it ends."""
    lines, x = [], float(GAP)
    for kind, colour in COLOURS.items():
        lines.append(f'<rect x="{x:.0f}" y="23" width="10" height="10" fill="{colour}" stroke="#666"/>')
        lines.append(f'<text x="{x + 14:.0f}" y="32">{kind}</text>')
        x += 30 + len(kind) * CHARACTER
    return lines, x - 16


def _box(box: _Box, top: float) -> str:
    left = box.x - box.width / 2
    words = "".join(
        f'<text x="{left + PAD:.1f}" y="{top + (number + 1) * LINE:.1f}">{escape(line)}</text>'
        for number, line in enumerate(box.lines)
    )
    rect = f'x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"'
    return (
        f'<g class="{box.kind}"><title>{escape(box.tip)}</title>'
        f'<rect {rect} rx="3" fill="{COLOURS[box.kind]}" stroke="#666"/>{words}</g>'
    )


def _line(
    points: Curve,
    tops: Sequence[float],
    boxes: Sequence[_Box],
    path: Sequence[int],
    names: Sequence[str],
    table: Mapping[str, Buffer],
) -> str:
    (x, y), *rest = points
    curve = f"M{x:.1f} {y:.1f}"
    for number, (to_x, to_y) in zip(path[1:], rest, strict=True):
        half = (y + to_y) / 2
        curve += f" C{x:.1f} {half:.1f} {to_x:.1f} {half:.1f} {to_x:.1f} {to_y:.1f}"
        x, y = to_x, to_y
        if number != path[-1]:  # past the boxes of this layer
            y = tops[boxes[number].layer + 1] - LAYER
            curve += f" L{x:.1f} {y:.1f}"
    tip = "\n".join(show_buffer(table[name]) for name in names)
    return f'<g class="flow"><title>{escape(tip)}</title><path d="{curve}" fill="none" stroke="#888"/></g>'


def _label(words: _Words) -> str:
    """On a white rim, since lines may pass below."""
    return (
        f'<text class="label" x="{words.x:.1f}" y="{words.y:.1f}" fill="#555" font-size="8" stroke="white" '
        f'stroke-width="3" paint-order="stroke">{escape(words.text)}</text>'
    )
