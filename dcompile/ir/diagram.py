"""Programs as graphs in Graphviz's DOT language: steps are boxes, and buffers are edges from writers to readers."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Collective, Extern, Loop, Program, Step, Wait
from dcompile.ir.text import show_buffer

COLOURS = {"kernel": "#d5e8d4", "library": "#dae8fc", "fallback": "#f8cecc", "collective": "#ffe6cc", "wait": "#fff2cc"}
RENDER_TIMEOUT_S = 30


def bytes_text(count: int) -> str:
    """Text of a size: `512 B`, `1.5 KiB`, `20.0 MiB`."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def count_text(number: int, noun: str) -> str:
    """Text of a count: `1 kernel`, `2 kernels`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def buffer_bytes(buffer: Buffer) -> int | None:
    """Bytes of a buffer with a static size; None for others."""
    static = all(isinstance(size, int) for size in (*buffer.shape, *buffer.strides))
    return buffer.nbytes if static else None


def kind_of(step: Step) -> str:
    """Kind of a step: kernel, library, fallback, collective or wait."""
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
    """(writer, reader) -> buffers that flow from one step to the other.

    A step that overwrites a buffer counts as a reader of it.
    """
    found: dict[tuple[int, int], list[str]] = {}
    writer: dict[str, int] = {}
    for number, step in enumerate(steps):
        for name in sorted(step.reads | step.writes):
            if name in writer:
                found.setdefault((writer[name], number), []).append(name)
        writer |= dict.fromkeys(step.writes, number)
    return found


def dot(program: Program) -> str:
    """Print a program in DOT. Tooltips hold origins and buffers."""
    return "\n".join(["digraph {", *(f"  {line}" for line in _statements(program)), "}", ""])


def render(text: str) -> str | None:
    """Draw DOT text as an `<svg>` element with Graphviz's `dot`. None if that is not installed, fails or is slow."""
    command = shutil.which("dot")
    if command is None:
        return None
    try:
        made = subprocess.run((command, "-Tsvg"), input=text, capture_output=True, text=True, timeout=RENDER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
    return made.stdout[made.stdout.index("<svg") :] if made.returncode == 0 else None


def _statements(program: Program) -> Iterator[str]:
    counts = ((program.steps, "step"), (program.inputs, "input"), (program.outputs, "output"))
    title = f"{program.name}: {', '.join(count_text(len(items), noun) for items, noun in counts)}"
    yield f"graph [label={_quote(title)}, labelloc=t, labeljust=l, fontname=monospace, fontsize=10]"
    yield 'node [shape=box, style="rounded,filled", fontname=monospace, fontsize=10]'
    yield 'edge [color="#888888", fontcolor="#555555", fontname=monospace, fontsize=8]'
    legend = " ".join(f'{kind} [fillcolor="{colour}"]' for kind, colour in COLOURS.items())
    yield f"subgraph legend {{ rank=same {legend} }}"
    escaping = program.returned
    for number, step in enumerate(program.steps):
        label = _quote("\n".join(_words(step, program, escaping)))
        colour = COLOURS[kind_of(step)]
        yield f's{number} [label={label}, tooltip={_quote(_tip(step, program.table))}, fillcolor="{colour}"]'
    for (writer, reader), names in flows(program.steps).items():
        tip = "\n".join(show_buffer(program.table[name]) for name in names)
        label = _quote(_flow_words(names, program.table))
        yield f"s{writer} -> s{reader} [label={label}, tooltip={_quote(tip)}]"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _words(step: Step, program: Program, escaping: frozenset[str]) -> tuple[str, ...]:
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
        ends.append(count_text(count, "input"))
    if count := len(step.writes & escaping):
        ends.append(count_text(count, "output"))
    return (*lines, ", ".join(ends)) if ends else tuple(lines)


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
