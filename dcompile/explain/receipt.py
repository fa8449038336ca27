"""Receipt of a compiled model, as data and as the lines printed after the first compiled step."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from html import escape
from typing import Any

import torch

from dcompile.capture import graph_programs
from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.capture.aliasing import input_memory
from dcompile.capture.call_state import Variant
from dcompile.capture.compiled_model import CompiledModel
from dcompile.capture.train_step.deferred_backward import WHOLE, WITH_NORMS, WITH_UPDATES
from dcompile.collectives.contract import REGION_LEFT, ProgramReport
from dcompile.device_traits import traits_of
from dcompile.errors import NotCompiledError
from dcompile.explain.sources import source_of_frames
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.diagram import bytes_text, count_text
from dcompile.passes import GAIN

OVER_BREAKS = "gradients of one tensor from several graphs, added in another order"
EAGER_CALLS = "call of the model, run eagerly"


@dataclass(frozen=True)
class VariantReceipt:
    """One kind of call: its graphs, and the objections to reducing gradients in them."""

    graphs: int
    training: bool
    objections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Receipt:
    """Receipt of a compiled model. Counts are of the newest variant; `variants` lists all of them."""

    adapter: str
    eligible: bool
    graphs: int
    graph_breaks: int
    kernels: int
    kernel_calls: int
    library_calls: int
    collectives: int
    buckets: int
    compile_seconds: float
    cache_hits: int
    built: int
    graphs_cached: int = 0
    """Graphs loaded from the cache, among all that were compiled or loaded. Nothing was lowered or emitted for them."""
    graphs_received: int = 0
    """Graphs that another rank compiled for this one, and kernels that came with them."""
    kernels_received: int = 0
    graphs_uncacheable: int = 0
    traces_cached: int = 0
    """Graphs that AOTAutograd did not trace: what it had traced in an earlier start was in the cache."""
    recordings: int = 0
    """CUDA graphs that were recorded, and number of calls that were replays."""
    replays: int = 0
    pieces: int = 0
    """CUDA graphs that replays of a step launch. A note names what runs between the pieces of a program."""
    regions: int = 0
    """Calls per step of regions that another compiler has compiled."""
    bytes_copied: int = 0
    """Bytes that a step copies only to move gradients to where they are reduced."""
    bytes_gathered: int = 0
    """Bytes of sharded parameters that a step gathers, in forward and backward, as they arrive on each rank."""
    bytes_offloaded: int = 0
    """Bytes of saved values that a step copies to host memory, from where its backward loads them."""
    predicted_exposed_us: float = 0.0
    """Predicted exposed communication of a step on a GPU, by the cost model; 0 on CPUs. `profile` measures it."""
    reasons: tuple[str, ...] = ()
    fallbacks: dict[str, int] = field(default_factory=dict)
    traces_uncacheable: dict[str, int] = field(default_factory=dict)
    """Why graphs are traced anew at each start -> how many."""
    notes: tuple[str, ...] = ()
    variants: tuple[VariantReceipt, ...] = ()
    name: str = ""
    is_function: bool = False
    numerics: str = "eager"
    """What option `numerics` promises of results: bitwise, eager or fast."""
    weaker: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Program -> how its bits may differ from stock's -> names of the kernels or functions that may differ."""
    decided: bool = True
    """Whether it is known who communicates: under DDP, the first training step decides."""

    def __str__(self) -> str:
        """Three lines for people, or one for a function, followed by reasons, fallbacks and notes."""
        return "\n".join((*self.counts(brief=self.is_function), *self.remarks()))

    def _repr_html_(self) -> str:
        first, *rest = str(self).splitlines()
        return "\n".join((f"<b>{escape(first)}</b>", *(f"<br>{escape(line)}" for line in rest)))

    def as_dict(self) -> dict[str, Any]:
        """Return every field as numbers, strings, lists and dictionaries, for loggers."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # tuples, also inner ones, become lists
        return values

    def counts(self, *, brief: bool = False, kind: str = "") -> list[str]:
        """Lines, or one, on graphs, collectives, kernels, and numerics other than eager's.

        `kind`: of the graphs, to be told with the name.
        """
        whose = ", ".join(filter(None, (self.name, kind)))
        graphs, *rest = _graphs_line(self), _collectives_line(self), _kernels_line(self)
        lines = [f"{whose}: {graphs}" if whose else graphs, *rest, *_numerics_lines(self)]
        return ["; ".join(lines)] if brief else lines

    def remarks(self) -> list[str]:
        """Lines on what was given up, and why; empty if all is as it should be."""
        given_up = self.reasons if self.decided else ()
        return [
            *(f"not eligible: {reason}" for reason in given_up),
            *(f"fallback: {op} x{count}: {_why(op)}" for op, count in sorted(self.fallbacks.items())),
            *(f"traced anew at each start: {why} x{n}" for why, n in sorted(self.traces_uncacheable.items())),
            *(f"note: {note}" for note in self.notes if not note.startswith(GAIN)),
        ]

    def shape(self) -> tuple[Any, ...]:
        """What equal parts of a model have in common: all that does not say where kernels came from."""
        same = (self.name, self.adapter, self.eligible, self.graphs, self.graph_breaks, self.kernels)
        return (*same, self.kernel_calls, self.library_calls, self.collectives, *self.remarks())

    def details(self) -> str:
        """Every field that is a name or a number, on one line, as `name=value`; below, notes that are not printed."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        single = {name: value for name, value in values.items() if isinstance(value, str | int | float)}
        counts = " ".join(f"{name}={_text(value)}" for name, value in single.items())
        return "\n".join((counts, *(f"note: {note}" for note in self.notes if note.startswith(GAIN))))


def _text(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _graphs_line(receipt: Receipt) -> str:
    if not receipt.graph_breaks:
        return f"{count_text(receipt.graphs, 'graph')}, no graph break"
    breaks = count_text(receipt.graph_breaks, "graph break")
    return f"{count_text(receipt.graphs, 'graph')}, {breaks} (dcompile.explain(model, *inputs) lists them)"


def _collectives_line(receipt: Receipt) -> str:
    """Line on the collectives: one of four phrases, which docs/guide/receipt.md lists."""
    by = receipt.adapter.upper().replace("+", " and ").replace("ZERO", "ZeRO ")
    plain = receipt.adapter == PlainAdapter.name
    if not receipt.decided:
        return f"collectives undecided until a training step, {by}'s"
    if not receipt.eligible:
        return f"collectives outside the graphs, {'by others' if plain else f'by {by} itself'}"
    if not receipt.collectives:
        return "no collectives"
    exposed_ms = receipt.predicted_exposed_us / 1e3
    wait = f"; predicted wait for them: {exposed_ms:.2f} ms a step" if exposed_ms else ""
    whose = "the model's own" if plain else f"{by}'s"
    return f"{count_text(receipt.collectives, 'collective')} in the graphs, {whose}{wait}"


_UNDECIDED = "no training step has run yet; the first one decides who communicates"


def _why(fallback: str) -> str:
    """Why something runs without a kernel of dcompile's, and whether it matters."""
    known = {
        EAGER_CALLS: "correct, as slow as eager; a line above says why",
        graph_programs.BATCHED_GRADIENTS: "correct, as slow as eager; programs are for one gradient",
        input_memory.COUNTED: "correct, as slow as eager; let the same tensors share memory in each call",
    }
    if fallback in known:
        return known[fallback]
    if fallback.startswith(REGION_LEFT):
        return "kernels of dcompile's own run it"
    space, _, name = fallback.partition(".")
    if " " in fallback:
        return "correct, for the price of a copy" if "cop" in fallback else "correct; a note says why"
    if space not in ("aten", "prims"):
        return "an operator of another library's, called as it is"
    operator = getattr(torch.ops.aten, name.partition(".")[0], None)
    tags = {tag for each in (operator.overloads() if operator else ()) for tag in getattr(operator, each).tags}
    if torch.Tag.nondeterministic_seeded in tags:
        return "draws eager's random numbers, by ATen's kernel, which fuses with nothing"
    return "no rule for it yet, so ATen's kernel runs, as in eager mode; it fuses with nothing"


def _kernels_line(receipt: Receipt) -> str:
    left = sum(count for what, count in receipt.fallbacks.items() if what.startswith(REGION_LEFT))
    made = f"{receipt.regions} of {count_text(receipt.regions + left, 'region')}" if left else "all regions"
    other = [f"{made} by another compiler"] if receipt.regions or left else []
    parts = [
        *other,
        f"{count_text(receipt.kernels, 'kernel')} in {count_text(receipt.kernel_calls, 'call')}",
        f"{count_text(receipt.library_calls, 'library call')}; {receipt.built} built",
        f"{receipt.cache_hits} from the cache",
        *([f"{receipt.kernels_received} by another rank"] if receipt.kernels_received else []),
        f"in {receipt.compile_seconds:.1f} s",
        *([f"{bytes_text(receipt.bytes_offloaded)} offloaded to host memory"] if receipt.bytes_offloaded else []),
    ]
    return ", ".join(parts)


def _numerics_lines(receipt: Receipt) -> list[str]:
    """Line on the tier of numerics if it is not the default, with what is weaker than stock's bits."""
    if receipt.numerics == "eager":
        return []
    weaker = [f"{program}: {', '.join(found)}" for program, found in receipt.weaker.items()]
    return [f"numerics: {'; '.join((receipt.numerics, *weaker))}"]


def make_receipt(*models: CompiledModel | None) -> Receipt:
    """Receipt of a compiled model, or of several in one module. Raises NotCompiledError before their first step.

    If a step ran without any compiled code, the receipt has no graphs, and the reason.
    """
    if len(models) > 1:
        ran = [model for model in models if model is not None and _has_run(model)]
        return functools.reduce(_joined, map(make_receipt, ran or models[:1]))
    model = models[0] if models else None
    if model is None:
        raise NotCompiledError(
            "dcompile: this was not compiled by dcompile; pass what dcompile.compile or "
            "torch.compile(..., backend='dcompile') returned, the module inside it, or its DDP wrapper"
        )
    inside = [make_receipt(part) for part in model.inside if _has_run(part)]
    if not _has_run(model) and not inside:
        raise NotCompiledError("dcompile: no compiled step has run yet; run one step first, then ask for the receipt")
    return functools.reduce(_joined, inside, _receipt_of(model, bool(inside)))


def _has_run(model: CompiledModel) -> bool:
    variant = model.newest
    return variant is not None and (not variant.graphs or model.adapter.eager or bool(_reports(model, variant)))


def _joined(whole: Receipt, part: Receipt) -> Receipt:
    """Combine the receipt of a model with that of a synchronized module inside it, which was compiled by itself."""
    values: dict[str, Any] = {}
    for name in (f.name for f in fields(Receipt)):
        mine, other = getattr(whole, name), getattr(part, name)
        values[name] = tuple(dict.fromkeys(mine + other)) if name in ("reasons", "notes") else mine
        if isinstance(mine, int | float) or name == "variants":
            values[name] = mine + other
    names = [name for name in (whole.adapter, part.adapter) if name != PlainAdapter.name]
    values["adapter"] = "+".join(dict.fromkeys(names)) or whole.adapter
    values["eligible"], values["decided"] = whole.eligible and part.eligible, whole.decided and part.decided
    values["is_function"] = whole.is_function
    values["numerics"], values["weaker"] = whole.numerics, whole.weaker | part.weaker
    for name in ("fallbacks", "traces_uncacheable"):
        values[name] = dict(Counter(getattr(whole, name)) + Counter(getattr(part, name)))
    return Receipt(**values)


OF_NEWEST = ("kernels", "kernel_calls", "library_calls", "pieces", "regions", "bytes_gathered", "bytes_offloaded")
"""Counts of a receipt that are sums over the programs of the newest variant."""
OF_EVERY = (
    "cache_hits", "built", "graphs_cached", "graphs_received", "kernels_received", "graphs_uncacheable", "recordings",
    "replays",
)  # fmt: skip
"""Those that are sums over all programs of the model."""


def _receipt_of(model: CompiledModel, has_parts: bool) -> Receipt:
    variant = model.newest or Variant((), training=False)
    reports = _reports(model, variant)
    runs_eagerly = not variant.graphs and not model.adapter.eager and not has_parts
    arriving = model.sync.arriving(variant.graphs)
    every = [executable.report for graph in model.graphs for executable in graph.executables.values()]
    traces = [graph.trace for graph in model.graphs if graph.trace is not None]
    counts = {name: sum(getattr(report, name) for report in reports) for name in OF_NEWEST}
    counts |= {name: sum(getattr(report, name) for report in every) for name in OF_EVERY}
    return Receipt(
        **counts,
        adapter=model.adapter.name,
        eligible=model.adapter.eligible and not runs_eagerly,
        graphs=len(variant.graphs),
        graph_breaks=model.graph_breaks,
        collectives=sum(report.collectives for report in reports) + len(arriving),
        buckets=_bucket_count(model, variant) + len(arriving),
        compile_seconds=model.compile_seconds,
        traces_cached=sum(trace.cached is not None for trace in traces),
        bytes_copied=sum(report.bytes_copied for report in reports)
        + sum(bucket.numel * ITEMSIZE[bucket.dtype] for bucket in arriving),
        predicted_exposed_us=_predicted_exposed_us(model, variant),
        numerics=model.settings.config.numerics,
        weaker=_weaker(model, variant),
        name=model.name,
        is_function=model.is_function,
        decided=model.adapter.decided or runs_eagerly,
        reasons=(
            *(() if model.adapter.decided else (_UNDECIDED,)),
            *model.adapter.reasons,
            *((nothing_compiled(model),) if runs_eagerly else ()),
        ),
        fallbacks=_fallbacks(model, variant, reports),
        traces_uncacheable=dict(Counter(trace.objection for trace in traces if trace.objection)),
        notes=tuple(
            dict.fromkeys(
                (
                    *model.adapter.notes,
                    *_graph_notes(model, variant, reports),
                    *(() if model.step is None else model.step.remarks()),
                    *model.settings.config.idle(),
                )
            )
        ),
        variants=tuple(VariantReceipt(len(v.graphs), v.training, v.objections) for v in model.variants.values()),
    )


def nothing_compiled(model: CompiledModel) -> str:
    """Message for a model whose steps run eagerly: its first graph break or the adapter's reason, and what to do."""
    said = f"a step has run, but nothing of it was compiled (calls so far: {model.eager_calls})"
    if not model.breaks and model.adapter.eager_reason:
        return f"{said}: {model.adapter.eager_reason}"
    if not model.breaks:
        return f"{said}; TORCH_LOGS=graph_breaks,recompiles says why"
    reason, frames = model.breaks[0]
    source = source_of_frames(frames)
    where = f", at {source}" if source is not None else ""
    return (
        f"{said}: {reason.splitlines()[0]}{where}; "
        "dcompile.explain(model, *inputs) lists every graph break, fullgraph=True makes them errors"
    )


def _reports(model: CompiledModel, variant: Variant) -> list[ProgramReport]:
    return [*_named_reports(model, variant).values()]


def _named_reports(model: CompiledModel, variant: Variant) -> dict[str, ProgramReport]:
    """Return the reports of the programs that a step runs, by name."""
    graphs = [(number, model.graphs[number].executables) for number in sorted(set(variant.graphs))]
    return {
        f"{name}{number}": executable.report
        for number, programs in graphs
        for name, executable in programs.items()
        if name not in _contained(programs)
    }


def _contained(programs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return names of programs whose steps another one contains."""
    if WHOLE in programs:
        return "forward", "backward", WITH_NORMS, WITH_UPDATES
    return ("backward", WITH_NORMS) if WITH_UPDATES in programs else ()


def _weaker(model: CompiledModel, variant: Variant) -> dict[str, dict[str, list[str]]]:
    found = {name: report.weaker for name, report in _named_reports(model, variant).items() if report.weaker}
    if variant.training and len(variant.graphs) > 1:
        found["graph breaks"] = {OVER_BREAKS: [f"graph{number}" for number in variant.graphs]}
    return found


def _predicted_exposed_us(model: CompiledModel, variant: Variant) -> float:
    """Sum over graphs on GPUs. On CPUs the cost model was 20 times off, so that its figure would mislead."""
    graphs = [model.graphs[number] for number in sorted(set(variant.graphs))]
    on_gpus = [graph for graph in graphs if not traits_of(graph.device.type).is_host]
    return sum(executable.report.exposed_us for graph in on_gpus for executable in graph.executables.values())


def _graph_notes(model: CompiledModel, variant: Variant, reports: list[ProgramReport]) -> list[str]:
    captured = [note for number in sorted(set(variant.graphs)) for note in model.graphs[number].notes]
    shards = [note] if model.shards is not None and (note := model.shards.note()) else []
    return shards + captured + [note for report in reports for note in report.notes]


def _bucket_count(model: CompiledModel, variant: Variant) -> int:
    executables = [e for number in set(variant.graphs) for e in model.graphs[number].executables.values()]
    return sum(len(executable.buckets) for executable in executables)


def _fallbacks(model: CompiledModel, variant: Variant, reports: list[ProgramReport]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for number in set(variant.graphs):
        total.update(model.graphs[number].fallbacks)
    if not variant.graphs and model.eager_calls:
        total[EAGER_CALLS] = model.eager_calls
    for report in reports:
        total.update(report.fallbacks)
    return dict(total)
