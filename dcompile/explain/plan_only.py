"""explain(): capture and plan a model without building kernels, run it eagerly once, and restore its state.

It returns a report: text to read, and files to keep.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from dcompile import compat
from dcompile.capture.adapters.fsdp_common import ShardedAdapter
from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.capture.adapters.table import WrappedModule, sync_for
from dcompile.capture.callables import original_function, unwrap_module
from dcompile.capture.captured_graph import Boxed, CaptureMode
from dcompile.capture.compiled_model import CompiledModel, Settings
from dcompile.capture.entry import Entry, find_model
from dcompile.capture.graph_programs import GraphPrograms
from dcompile.capture.services import Services
from dcompile.codegen.lower.fx_nodes import origin_of
from dcompile.codegen.schedule.order.overlap_collectives import predict_schedule
from dcompile.collectives.contract import AnySource, Foreseen, ProgramReport, Request
from dcompile.compiler.autotune import forecast_notes
from dcompile.compiler.caching import CachingCompiler
from dcompile.compiler.driver import Pipeline, ProgramPlan
from dcompile.compiler.dry_run import LocalShards, do_nothing, no_buckets
from dcompile.config import Config
from dcompile.errors import NotCompiledError, OptionError, suggestion
from dcompile.explain.export import PICTURES, check_path, save_timeline
from dcompile.explain.html import page
from dcompile.explain.html_document import framed
from dcompile.explain.profile import newest_timeline
from dcompile.explain.receipt import Receipt, make_receipt
from dcompile.explain.report_data import GraphBreak, GraphReport, ReportData, describe_program, text_lines
from dcompile.explain.sources import SourceLine, source_of, source_of_frames
from dcompile.ir.buffers import Bucket
from dcompile.ir.nodes import Loop, Program, Tile
from dcompile.ir.text import show
from dcompile.logs import difference


class ProgramStages:
    """A planned program that shows itself after any of its passes. `print` shows it as it is executed."""

    def __init__(self, pipeline: Pipeline, plan: ProgramPlan, request: Request) -> None:
        self._pipeline, self._request, self._lowered = pipeline, request, plan.lowered.program
        self.kernels: Mapping[str, str] = {kernel.name: kernel.text for kernel in plan.kernels.sources}
        """Source of each kernel, by its name."""

    @functools.cached_property
    def _texts(self) -> dict[str, str]:
        programs: dict[str, Program] = dict(self._pipeline.stages(self._lowered, self._request))
        return {name: show(program) for name, program in programs.items()}

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of the passes that changed this program, in their order, after "lower"."""
        names = [*self._texts]
        pairs = itertools.pairwise(names)
        return ("lower", *(name for before, name in pairs if self._texts[before] != self._texts[name]))

    def after(self, name: str) -> str:
        """Return the program's text after the pass `name`; "lower" is the program before the first pass.

        Raises OptionError for a pass that this program did not go through.
        """
        if (text := self._texts.get(name)) is None:
            near = suggestion(name, self._texts, "its passes")
            raise OptionError(f"dcompile: {self._lowered.name} has no pass {name!r}{near}")
        return text

    def change(self, name: str) -> str:
        """Return what the pass `name` changed, as a unified diff; empty if nothing."""
        after, names = self.after(name), [*self._texts]
        before = self._texts[names[max(0, names.index(name) - 1)]]
        return difference(before, after, "before", name)

    def __str__(self) -> str:
        return [*self._texts.values()][-1]

    def __repr__(self) -> str:
        return f"<program {self._lowered.name}: {len(self.kernels)} kernels, changed by {', '.join(self.passes[1:])}>"


@dataclass(frozen=True)
class Report(ReportData):
    """Report on a model, from `dcompile.explain`. `str` is a page to read, `save` writes it as text or as HTML."""

    programs: Mapping[str, ProgramStages] = field(default_factory=dict, repr=False)
    """Programs by name: `report.programs["backward0"].after("fuse")` is one's text after a pass."""

    def __str__(self) -> str:
        return "\n".join(text_lines(self))

    def _repr_html_(self) -> str:
        return framed(page(self))

    def save(self, path: str | Path) -> Path:
        """Write the report: an HTML page with pictures for the suffix .html, text for .txt.

        A measured timeline can be written alone: as a trace for Perfetto (.json), or as a picture (.svg, .png). Raises
        ValueError if there is none, and for other endings.
        """
        path = Path(path)
        check_path(path)
        if path.suffix in PICTURES:
            if self.timeline is None:
                raise ValueError(
                    f"dcompile: {path.name} would show measured steps, and none were; run some inside "
                    "`with dcompile.profile(model):` and explain the model again"
                )
            return save_timeline(self.timeline, path)
        path.write_text(page(self) if path.suffix in (".html", ".htm") else f"{self}\n")
        return path


def explain(model: Any, /, *args: Any, **kwargs: Any) -> Report:
    """Report what compiling `model` for these inputs would produce. `model(*args, **kwargs)` runs once, eagerly.

    `model` is a module (DDP or not, compiled or not) or a function. One that dcompile has compiled is explained under
    its own settings. Backwards are planned, too, if gradients are needed, but not run.

    Parameters, buffers, gradients and random generators are restored afterwards, from a copy of all parameters and
    buffers. Other side effects of the model's Python code remain. Any rank may call this alone: no collective runs,
    except under FSDP1 that stays stock. This rank's own part replaces data of other ranks.
    """
    settings, receipt, timeline = _settings(model), _receipt(model), newest_timeline(model)
    module, ddp = _module_of(model)
    target = module._call_impl if module is not None else original_function(model)
    planner = _ExplainingCompiler(settings.config)
    guards: dict[str, None] = {}
    settings = replace(settings, fullgraph=False, guard_filter_fn=_record_guards(guards, settings.guard_filter_fn))
    entry = Entry(target, None, settings, planner.services(), PLANNED)
    sync = None if module is None else sync_for(WrappedModule(module, settings.config, ddp=ddp))
    adapter = None if sync is None else sync.adapter
    if adapter is not None:
        adapter.only_plan()
    if sync is not None and adapter is not None and not adapter.eager:
        entry.model.adopt(sync)
        planner.parameters = {info.number: info.fqn for info in adapter.param_infos()}
        planner.adapter = sync.sharded
    before = len(compat.dynamo.graph_breaks())
    alone = _single_rank(entry.model, adapter)
    with as_it_was(module), compat.aot.backward_at_once(), alone, compat.composable.hooks_resting(module):
        entry(*args, **kwargs)
    notes = [note for graph in entry.model.graphs for note in graph.notes]
    return Report(
        model=type(module).__name__ if module is not None else getattr(target, "__qualname__", str(target)),
        adapter="plain" if adapter is None else adapter.name,
        graphs=tuple(planner.graphs.values()),
        breaks=_breaks(before),
        guards=tuple(guards),
        reasons=() if adapter is None else tuple(adapter.reasons),
        notes=(*dict.fromkeys(notes), *_left_out(adapter, module), *settings.config.idle()),
        receipt=receipt,
        timeline=timeline,
        copy_rate=planner.copy_rate,
        programs=planner.programs,
    )


def _single_rank(model: CompiledModel, adapter: PlainAdapter | None) -> contextlib.AbstractContextManager[None]:
    """Replace collectives of eager code by local ones if there are other ranks. Dynamo traces torch's own functions.

    FSDP1 that stays stock keeps its collectives: it caches gathered parameters, and must not cache replaced ones.
    """
    if adapter is not None and adapter.keeps_gathered and not adapter.eligible:
        return contextlib.nullcontext()
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return contextlib.nullcontext()
    alone = compat.absent_ranks.SingleRankCollectives()
    model.while_capturing = alone.resting
    return alone.active()


def _settings(model: Any) -> Settings:
    compiled = find_model(model)
    settings = compiled.settings if compiled is not None else Settings(Config.make())
    quiet = replace(settings.config, dump="", trace_enabled=False, trace_graph_diagram=False, receipt=False)
    return replace(settings, config=quiet)


def _left_out(adapter: Any, module: Any) -> Iterator[str]:
    """Notes on parts of the model that the report does not show."""
    if adapter is None and compat.composable.replicate_state(module) is not None:
        yield "replicate() gets its DDP in the first forward: explain shows what it reduces after that"
    if adapter is not None and adapter.breaks_at_hooks and not adapter.eligible:
        yield (
            "FullyShardedDataParallel, which stays stock here and runs eagerly, is explained with breaks at its hooks"
        )


def _receipt(model: Any) -> Receipt | None:
    try:
        return make_receipt(find_model(model))
    except NotCompiledError:  # no compiled step has run
        return None


def _module_of(model: Any) -> tuple[Module | None, DistributedDataParallel | None]:
    """The module to call, and the DDP module that synchronizes it."""
    if not isinstance(model, Module):
        if not callable(model):
            raise TypeError(f"dcompile: explain needs a module or a function, not {type(model).__name__}")
        return None, None
    root = unwrap_module(model)
    if isinstance(root, DistributedDataParallel):
        return unwrap_module(root.module), root
    return root, compat.composable.replicate_ddp(root)


def _breaks(before: int) -> tuple[GraphBreak, ...]:
    """Graph breaks, one for each line of code.

    A break inside the model also ends the frames that call it, one after another.
    """
    found: dict[SourceLine | None, GraphBreak] = {}
    for reason, frames in compat.dynamo.graph_breaks(before):
        source = source_of_frames(frames)
        found.setdefault(source, GraphBreak(reason, source))
    return tuple(found.values())


def _record_guards(found: dict[str, None], also: Callable[..., Any] | None) -> Callable[..., Any]:
    """Guard filter that keeps all guards (or those that `also` keeps) and records them."""

    def keep(guards: Any) -> Any:
        found.update(dict.fromkeys(f"{guard.guard_type} {guard.name}".rstrip() for guard in guards))
        return also(guards) if also is not None else [True] * len(guards)

    return keep


# --- in place of compiling --------------------------------------------------------------------------------------------


class _ExplainingCompiler(CachingCompiler):
    """Compiler that plans and describes each graph, and runs it with torch on this rank alone."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.graphs: dict[str, GraphReport] = {}
        self.programs: dict[str, ProgramStages] = {}
        self.parameters: dict[int, str] = {}
        self.adapter: ShardedAdapter | None = None
        self.copy_rate = 0.0
        """Bytes per second of a copy; 0 if nothing was planned."""

    def traces(self) -> None:
        """Nothing is kept of what is only planned."""

    def compile_graph(self, gm: Any, request: Request, foreseen: Foreseen | None = None) -> _DryRun:
        """See `CachingCompiler`."""
        notes: list[str] = []

        def forecast(program: Program) -> dict[Loop, Tile]:
            """Choose no epilogues, since nothing is measured here."""
            notes.extend(forecast_notes(program) if self.config.max_autotune and self.config.epilogue_fusion else ())
            return {}

        plan = self._pipeline().plan(gm, request, forecast)
        plan.report.notes += notes
        self._describe(gm, request, plan)
        return _DryRun(self, gm, plan.program.buckets, request.gathers)

    def services(self) -> Services:
        """Services for capture/: this compiler, and no communication."""
        return Services(self, no_buckets, do_nothing, do_nothing, do_nothing, LocalShards)

    def _describe(self, gm: Any, request: Request, plan: ProgramPlan) -> None:
        self.programs[request.name] = ProgramStages(self._pipeline(), plan, request)
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        sources: dict[str, SourceLine] = {}
        for node in nodes:
            source = source_of(node)
            if source is not None:
                sources.setdefault(origin_of(node)[0], source)
        self.graphs[request.name] = describe_program(
            request.name,
            request.kind,
            plan.program,
            [kernel.name for kernel in plan.kernels.calls],
            {position: product.kernel.name for position, product in plan.kernels.products.items()},
            operations=len(nodes),
            sources=sources,
            parameters=self.parameters,
            counts=plan.report,
            schedule=plan.report.schedule or predict_schedule(plan.program, request.figures, dict(request.groups))[0],
            kernel_texts={kernel.name: kernel.text for kernel in plan.kernels.sources},
        )
        self.copy_rate = request.figures.memory_gbs * 1e9

    def gathered(self, number: int) -> torch.Tensor:
        """Fake gather of a sharded parameter: its full shape, filled from this rank's shard."""
        adapter = self.adapter
        assert adapter is not None, "only sharded parameters are gathered"
        shard = adapter.param_infos()[number].shard
        assert shard is not None, "parameters of FSDP are sharded"
        return compat.absent_ranks.whole(adapter.units[shard.unit].data(), shard.offset, adapter.arriving(number))


class _DryRun:
    """Implements `collectives.contract.Executable` with torch's own operators."""

    source = ""

    def __init__(
        self, compiler: _ExplainingCompiler, gm: Any, buckets: tuple[Bucket, ...], gathers: Sequence[tuple[int, int]]
    ) -> None:
        self.gm, self.buckets, self.report = gm, buckets, ProgramReport()
        self._compiler, self._gathers = compiler, gathers

    def __call__(self, args: list[Any], *, buckets: AnySource | None = None, sync: bool = False) -> list[Any]:
        values = list(args)
        args.clear()
        for position, number in self._gathers:
            values[position] = self._compiler.gathered(number)
        with torch.no_grad():
            return list(compat.absent_ranks.run_alone(self.gm, values))


class _PlannedPrograms(GraphPrograms):
    """Programs whose backward is planned together with the forward, since no backward will run."""

    def backward(self, gm: Any) -> Boxed:
        """Plan the backward at once."""
        runner = super().backward(gm)
        self.build_backward(gm)
        return runner


PLANNED = CaptureMode(_PlannedPrograms)


# --- leaving things as they were --------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_it_was(module: Module | None) -> Iterator[None]:
    """Restore what a forward changes: parameters, buffers, random generators.

    BatchNorm, for example, counts its calls.
    """
    tensors = [*module.parameters(), *module.buffers()] if module is not None else []
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    places = _places(module)
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())), compat.fsdp2.forward_undone(module):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for holder, name, value in places:
            holder[name] = value
        for tensor, before in kept:
            if not _same_bits(tensor, before):
                with torch.no_grad():
                    tensor.copy_(before)


def _places(module: Module | None) -> list[tuple[dict[str, Any], str, Any]]:
    """Dictionary entries of all parameters and buffers, since a forward may replace the tensors."""
    modules = list(module.modules()) if module is not None else []
    holders = [holder for part in modules for holder in (part._parameters, part._buffers)]
    return [(holder, name, value) for holder in holders for name, value in holder.items()]


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether nothing changed. An unchanged tensor is not written, so that graphs that saved it stay valid."""
    one, two = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (one, two))
    same = one.is_meta or torch.equal(one, two)
    return same or (one.is_floating_point() and torch.allclose(one, two, 0, 0, equal_nan=True))
