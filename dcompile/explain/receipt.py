"""Receipt of a compiled model, as data and as the lines printed after the first compiled step."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.capture.call_state import Variant
from dcompile.capture.compiled_model import CompiledModel
from dcompile.collectives.contract import ProgramReport
from dcompile.errors import NotCompiledError
from dcompile.explain.sources import source_of_frames
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.diagram import count_text


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
    regions: int = 0
    """Calls per step of regions that another compiler has compiled."""
    bytes_copied: int = 0
    """Bytes that a step copies only to move gradients to where they are reduced."""
    predicted_exposed_us: float = 0.0
    """Predicted exposed communication of a step, by the cost model. `profile` measures it."""
    reasons: tuple[str, ...] = ()
    fallbacks: dict[str, int] = field(default_factory=dict)
    traces_uncacheable: dict[str, int] = field(default_factory=dict)
    """Why graphs are traced anew at each start -> how many."""
    notes: tuple[str, ...] = ()
    variants: tuple[VariantReceipt, ...] = ()

    def __str__(self) -> str:
        """Three lines for people, followed by reasons, fallbacks and notes."""
        lines = [_graphs_line(self), _collectives_line(self), _kernels_line(self)]
        lines += [f"not eligible: {reason}" for reason in self.reasons]
        lines += [f"fallback: {op} x{count}" for op, count in sorted(self.fallbacks.items())]
        lines += [f"traced anew at each start: {why} x{n}" for why, n in sorted(self.traces_uncacheable.items())]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def details(self) -> str:
        """Every field that is a name or a number, on one line, as `name=value`."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        single = {name: value for name, value in values.items() if isinstance(value, str | int | float)}
        return " ".join(f"{name}={_text(value)}" for name, value in single.items())


def _text(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _graphs_line(receipt: Receipt) -> str:
    if not receipt.graph_breaks:
        return f"{count_text(receipt.graphs, 'graph')}, no graph break"
    breaks = count_text(receipt.graph_breaks, "graph break")
    return f"{count_text(receipt.graphs, 'graph')}, {breaks} (dcompile.explain(model, *inputs) lists them)"


def _collectives_line(receipt: Receipt) -> str:
    """Line on the collectives: who reduces gradients or gathers parameters, and the exposed time."""
    by = receipt.adapter.upper().replace("+", " and ").replace("ZERO", "ZeRO ")
    if receipt.adapter != PlainAdapter.name and not receipt.eligible:
        return f"{by} communicates by itself, outside the graphs"
    if not receipt.eligible:
        return "no collectives in the graphs: others communicate around them"
    if not receipt.collectives:
        return "no collectives" if receipt.adapter == PlainAdapter.name else f"{by}: no collectives in these graphs"
    whose = "the model's own" if receipt.adapter == PlainAdapter.name else f"{by}'s"
    exposed = f"{receipt.predicted_exposed_us / 1e3:.2f} ms of a step exposed by the cost model"
    return f"{count_text(receipt.collectives, 'collective')} in the graphs, {whose}; {exposed}"


def _kernels_line(receipt: Receipt) -> str:
    found = receipt.cache_hits + receipt.kernels_received
    other = [f"{count_text(receipt.regions, 'region')} by another compiler"] if receipt.regions else []
    parts = [
        *other,
        f"{count_text(receipt.kernels, 'kernel')} in {count_text(receipt.kernel_calls, 'call')}",
        f"{count_text(receipt.library_calls, 'library call')}; {receipt.built} built",
        f"{found} from the cache",
        f"{receipt.compile_seconds:.1f} s",
    ]
    return ", ".join(parts)


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
    values["eligible"] = whole.eligible and part.eligible
    for name in ("fallbacks", "traces_uncacheable"):
        values[name] = dict(Counter(getattr(whole, name)) + Counter(getattr(part, name)))
    return Receipt(**values)


def _receipt_of(model: CompiledModel, has_parts: bool) -> Receipt:
    variant = model.newest or Variant((), training=False)
    reports = _reports(model, variant)
    runs_eagerly = not variant.graphs and not model.adapter.eager and not has_parts
    arriving = model.sync.arriving(variant.graphs)
    every = [executable.report for graph in model.graphs for executable in graph.executables.values()]
    traces = [graph.trace for graph in model.graphs if graph.trace is not None]
    return Receipt(
        adapter=model.adapter.name,
        eligible=model.adapter.eligible and not runs_eagerly,
        graphs=len(variant.graphs),
        graph_breaks=model.graph_breaks,
        kernels=sum(report.kernels for report in reports),
        kernel_calls=sum(report.kernel_calls for report in reports),
        library_calls=sum(report.library_calls for report in reports),
        collectives=sum(report.collectives for report in reports) + len(arriving),
        buckets=_bucket_count(model, variant) + len(arriving),
        compile_seconds=model.compile_seconds,
        cache_hits=sum(report.cache_hits for report in every),
        built=sum(report.built for report in every),
        graphs_cached=sum(report.graphs_cached for report in every),
        graphs_received=sum(report.graphs_received for report in every),
        kernels_received=sum(report.kernels_received for report in every),
        graphs_uncacheable=sum(report.graphs_uncacheable for report in every),
        traces_cached=sum(trace.cached is not None for trace in traces),
        recordings=sum(report.recordings for report in every),
        replays=sum(report.replays for report in every),
        regions=sum(report.regions for report in reports),
        bytes_copied=sum(report.bytes_copied for report in reports)
        + sum(bucket.numel * ITEMSIZE[bucket.dtype] for bucket in arriving),
        predicted_exposed_us=sum(report.exposed_us for report in reports),
        reasons=(*model.adapter.reasons, *((nothing_compiled(model),) if runs_eagerly else ())),
        fallbacks=_fallbacks(model, variant, reports),
        traces_uncacheable=dict(Counter(trace.objection for trace in traces if trace.objection)),
        notes=tuple(
            dict.fromkeys((*model.adapter.notes, *_graph_notes(model, variant, reports), *model.settings.config.idle()))
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
    return [e.report for number in sorted(set(variant.graphs)) for e in model.graphs[number].executables.values()]


def _graph_notes(model: CompiledModel, variant: Variant, reports: list[ProgramReport]) -> list[str]:
    captured = [note for number in sorted(set(variant.graphs)) for note in model.graphs[number].notes]
    return captured + [note for report in reports for note in report.notes]


def _bucket_count(model: CompiledModel, variant: Variant) -> int:
    executables = [e for number in set(variant.graphs) for e in model.graphs[number].executables.values()]
    return sum(len(executable.buckets) for executable in executables)


def _fallbacks(model: CompiledModel, variant: Variant, reports: list[ProgramReport]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for number in set(variant.graphs):
        total.update(model.graphs[number].fallbacks)
    if not variant.graphs and model.eager_calls:
        total["call of the model, run eagerly"] = model.eager_calls
    for report in reports:
        total.update(report.fallbacks)
    return dict(total)
