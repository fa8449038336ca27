"""Report on a model as data and as lines of text: graphs, breaks, kernels, library calls, collectives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dcompile.codegen.schedule.memory.memory_summary import holder_lines, summarize_memory
from dcompile.codegen.schedule.order.cost_model import loop_operations
from dcompile.collectives.contract import Predicted
from dcompile.collectives.contract import ProgramReport as Counts
from dcompile.explain.collective_table import exchange_lines, exchanges_of, seconds_of_steps
from dcompile.explain.export import timeline_lines
from dcompile.explain.receipt import Receipt
from dcompile.explain.sources import SourceLine
from dcompile.explain.timeline import CollectiveReport, Timeline, duration
from dcompile.ir.diagram import buffer_bytes, bytes_text, count_text
from dcompile.ir.library_ops import extern_flops
from dcompile.ir.nodes import Extern, Loop, Program


@dataclass(frozen=True)
class GraphBreak:
    """Place where Dynamo had to end a graph, and the reason."""

    reason: str
    source: SourceLine | None

    def __str__(self) -> str:
        lines = [line.strip() for line in self.reason.strip().splitlines()] or ["no reason given"]
        lines = [lines[0], *(line for line in lines[1:] if line.startswith(("Explanation:", "Hint:")))]
        return "\n    ".join([*lines, *([f"at {self.source}"] if self.source else [])])


@dataclass(frozen=True)
class StepReport:
    """One step of a program: a kernel of dcompile's, or a library call. Bytes are None where sizes are symbolic.

    `read` and `written` count each buffer once and as a whole: an embedding counts its table, though it reads few rows.
    """

    name: str
    """Name of the kernel, or the op."""
    origin: tuple[str, ...]
    modules: tuple[str, ...]
    """Paths of modules; the op and its line if it is in no module."""
    read: int | None
    written: int | None
    fallback: bool = False
    source: SourceLine | None = None
    lines: tuple[SourceLine, ...] = ()
    """All of the user's lines that it computes."""
    seconds: float = 0.0
    """Predicted by the cost model."""
    operations: int = 0
    """Arithmetic of a kernel, in additions."""


@dataclass(frozen=True)
class GraphReport:
    """One program: the forward, the backward or the inference of one graph of Dynamo's."""

    name: str
    kind: str
    operations: int
    """Number of ATen operations, before lowering."""
    kernels: tuple[StepReport, ...]
    library_calls: tuple[StepReport, ...]
    exchanges: tuple[CollectiveReport, ...]
    program: Program = field(repr=False)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    """Predicted by the cost model, the last wait included. `exposed`, too; both are 0 without collectives."""
    exposed: float = 0.0
    """Seconds in which nothing is computed because a collective is waited for."""
    kernel_texts: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Kernel -> its source."""
    schedule: tuple[Predicted, ...] = field(default=(), repr=False)
    """Predicted time of each step."""
    held: tuple[int, ...] = field(default=(), repr=False)
    """Bytes that the program holds in each of its steps."""
    memory: tuple[str, ...] = ()
    """Memory at the peak, one line for each holder."""

    @property
    def fallbacks(self) -> tuple[StepReport, ...]:
        return tuple(call for call in self.library_calls if call.fallback)

    @property
    def read(self) -> int | None:
        return _sum(call.read for call in (*self.kernels, *self.library_calls))

    @property
    def written(self) -> int | None:
        return _sum(call.written for call in (*self.kernels, *self.library_calls))


@dataclass(frozen=True)
class ReportData:
    """Content of a report on a model."""

    model: str
    adapter: str
    graphs: tuple[GraphReport, ...]
    breaks: tuple[GraphBreak, ...]
    guards: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why gradients are left to DDP's own reducer."""
    notes: tuple[str, ...] = ()
    receipt: Receipt | None = None
    """Receipt, if the model has run a compiled step."""
    timeline: Timeline | None = None
    """Newest measurement of the model by `dcompile.profile`."""
    copy_rate: float = 0.0
    """Bytes per second that a copy reads and writes on this machine, by the cost model's figures."""

    @property
    def fallbacks(self) -> tuple[StepReport, ...]:
        return tuple(call for graph in self.graphs for call in graph.fallbacks)


def describe_program(
    name: str,
    kind: str,
    program: Program,
    kernel_names: Iterable[str],
    products: Mapping[int, str],
    *,
    operations: int,
    sources: Mapping[str, SourceLine],
    parameters: Mapping[int, str],
    counts: Counts,
    schedule: Sequence[Predicted],
    kernel_texts: Mapping[str, str],
) -> GraphReport:
    """Describe one program.

    `kernel_names`: names of all loops' kernels, in order. `products`: position of a step -> dcompile's kernel for its
    matmul. `sources`: text of a step's origin -> the user's line. `parameters`: number -> name. `schedule`: predicted
    times of the steps.
    """
    kernels, library = [], []
    names = iter(kernel_names)
    lengths, memory = seconds_of_steps(program, schedule), summarize_memory(program)
    for position, step in enumerate(program.steps):
        length = lengths.get(position, 0.0)
        match step:
            case Loop():
                made = _call(next(names), step, program, sources, length)
                kernels.append(replace(made, operations=loop_operations(step)))
            case Extern() if position in products:
                made = _call(products[position], step, program, sources, length)
                kernels.append(replace(made, operations=extern_flops(step, program.table)))
            case Extern():
                library.append(_call(step.op, step, program, sources, length))
            case _:
                pass
    exchanges = tuple(exchanges_of(program, parameters, counts.schedule))
    seconds, exposed = counts.predicted_us / 1e6, counts.exposed_us / 1e6
    return GraphReport(
        name,
        kind,
        operations,
        tuple(kernels),
        tuple(library),
        exchanges,
        program,
        tuple(counts.notes),
        seconds,
        exposed,
        kernel_texts,
        tuple(schedule),
        memory.held,
        tuple(holder_lines(memory)),
    )


def _call(
    name: str, step: Loop | Extern, program: Program, sources: Mapping[str, SourceLine], seconds: float
) -> StepReport:
    modules = dict.fromkeys(text.partition(": ")[0] for text in step.origin)
    lines = tuple(dict.fromkeys(sources[text] for text in step.origin if text in sources))
    read, written = _bytes(step.reads, program), _bytes(step.writes, program)
    fallback = isinstance(step, Extern) and step.fallback
    return StepReport(
        name, step.origin, tuple(modules), read, written, fallback, next(iter(lines), None), lines, seconds
    )


def _bytes(names: Iterable[str], program: Program) -> int | None:
    table = program.table
    return _sum(buffer_bytes(table[name]) for name in names if name in table)


def _sum(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


# --- the page ---------------------------------------------------------------------------------------------------------


def text_lines(report: ReportData) -> Iterator[str]:
    yield f"{report.model}: {summary(report)}"
    yield f"gradients: {'; '.join(report.reasons) or _gradients(report)}"
    if report.receipt is not None:
        yield from (f"receipt: {line}" for line in str(report.receipt).splitlines())
    if report.timeline is not None:
        yield from timeline_lines(report.timeline)
    for number, found in enumerate(report.breaks, 1):
        yield f"graph break {number}: {found}"
    for graph in report.graphs:
        yield ""
        yield f"{graph.name}: {headline(graph)}"
        yield from _section("kernels", graph.kernels)
        yield from _section("library calls", [call for call in graph.library_calls if not call.fallback])
        yield from _section("fallbacks", graph.fallbacks, with_source=True)
        if graph.exchanges:
            yield "  collectives"
            yield from (f"    {line}" for exchange in graph.exchanges for line in exchange_lines(exchange))
        yield from (f"  note: {note}" for note in graph.notes)
    if report.guards:
        kinds = Counter(guard.partition(" ")[0] for guard in report.guards)
        yield ""
        yield f"guards: {', '.join(f'{kind} x{count}' for kind, count in kinds.most_common())}"
    yield from (f"note: {note}" for note in report.notes)


def summary(report: ReportData) -> str:
    """Summary of a report, for its first line."""
    count = len({re.sub(r"\D", "", graph.name) for graph in report.graphs})
    return (
        f"{count_text(count, 'graph')}, {count_text(len(report.breaks), 'graph break')}, "
        f"{count_text(sum(len(graph.kernels) for graph in report.graphs), 'kernel call')}, "
        f"{count_text(len(report.fallbacks), 'fallback')}"
    )


def _gradients(report: ReportData) -> str:
    if report.adapter == "plain":
        return "nothing to reduce, the model is neither in DistributedDataParallel nor in fully_shard"
    if report.adapter in ("fsdp1", "fsdp2"):
        return "reduced inside the compiled backward, to shards; parameters are gathered in the compiled graphs"
    return "reduced inside the compiled backward"


def headline(graph: GraphReport) -> str:
    """Summary of a graph in one line."""
    distinct = len({call.name for call in graph.kernels})
    arena = graph.program.arena_bytes
    foreseen = f"; by the cost model {duration(graph.seconds)}, {duration(graph.exposed)} exposed"
    return (
        f"{count_text(graph.operations, 'operation')} -> {count_text(len(graph.kernels), 'kernel call')} of "
        f"{count_text(distinct, 'kernel')}, "
        f"{count_text(len(graph.library_calls) - len(graph.fallbacks), 'library call')}, "
        f"{count_text(len(graph.fallbacks), 'fallback')}, {count_text(len(graph.exchanges), 'collective')}; reads "
        f"{size_text(graph.read)}, writes {size_text(graph.written)}"
        f"{f', arena of {bytes_text(arena)}' if isinstance(arena, int) else ''}"
        f"{foreseen if graph.exchanges else ''}"
    )


def _section(title: str, calls: Iterable[StepReport], with_source: bool = False) -> Iterator[str]:
    rows = list(group_steps(calls, with_source=with_source))
    if not rows:
        return
    yield f"  {title}"
    width = max(len(row.name) for row in rows)
    for row in rows:
        times = f"x{row.calls}" if row.calls > 1 else ""
        sizes = f"reads {size_text(row.read)}, writes {size_text(row.written)}"
        yield f"    {row.name:{width}} {times:4} {sizes:34} {', '.join(row.modules)}".rstrip()
        if with_source and row.source is not None:
            yield f"      at {row.source}"


@dataclass(frozen=True)
class GroupedSteps:
    """Calls of the same kernel or op: their number, their bytes, and their modules."""

    name: str
    calls: int
    read: int | None
    written: int | None
    modules: tuple[str, ...]
    source: SourceLine | None


def group_steps(calls: Iterable[StepReport], with_source: bool = False) -> Iterator[GroupedSteps]:
    """One row for each kernel or op, in the order of the first call; with sources, one for each line of source."""
    key: Callable[[StepReport], Any] = (
        (lambda call: (call.name, call.source)) if with_source else (lambda call: call.name)
    )
    found: dict[Any, list[StepReport]] = {}
    for call in calls:
        found.setdefault(key(call), []).append(call)
    for same in found.values():
        read, written = _sum(call.read for call in same), _sum(call.written for call in same)
        modules = collapse_layers(module for call in same for module in call.modules)
        yield GroupedSteps(same[0].name, len(same), read, written, modules, same[0].source)


def collapse_layers(modules: Iterable[str]) -> tuple[str, ...]:
    """Merge paths that differ in numbers alone: `layers.0.mlp.1` and `layers.1.mlp.1` become `layers.0-1.mlp.1`."""
    found: dict[tuple[str, ...], list[list[str]]] = {}
    for module in dict.fromkeys(modules):
        parts = module.split(".")
        found.setdefault(tuple("*" if part.isdigit() else part for part in parts), []).append(parts)
    columns = (zip(*same, strict=True) for same in found.values())
    return tuple(".".join(parts[0] if len(set(parts)) == 1 else _runs(parts) for parts in column) for column in columns)


def _runs(numbers: Iterable[str]) -> str:
    """Ranges of numbers as text: `0-3`, or `{0-3,7}`."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(map(int, numbers))):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    texts = [f"{first}-{last}" if first < last else str(first) for first, last in runs]
    return texts[0] if len(texts) == 1 else f"{{{','.join(texts)}}}"


def size_text(count: int | None) -> str:
    """Text of a size in bytes; "?" for sizes that are known only at run time."""
    return "?" if count is None else bytes_text(count)
