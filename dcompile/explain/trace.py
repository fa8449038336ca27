"""explain(): capture and plan a model as compiling would, build nothing, run it eagerly once, leave it as it was."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from dcompile import compat
from dcompile.capture.adapters.ddp import DdpAdapter
from dcompile.capture.entry import Entry, find_model, original_function, unwrapped
from dcompile.capture.graph import Graph
from dcompile.capture.model import Settings
from dcompile.capture.toolbox import Toolbox
from dcompile.codegen.lower.origin import origin_of
from dcompile.collectives.params import AnySource, Request
from dcompile.collectives.params import Report as Counts
from dcompile.compiler import CachingCompiler
from dcompile.config import Config
from dcompile.errors import NotCompiledError
from dcompile.explain.profile import newest_timeline
from dcompile.explain.receipt import Receipt, make_receipt
from dcompile.explain.report import GraphBreak, GraphReport, Report, describe_program
from dcompile.explain.sources import Source, source_of, source_of_frames
from dcompile.ir.nodes import Program
from dcompile.pipeline import Pipeline


def explain(model: Any, /, *args: Any, **kwargs: Any) -> Report:
    """What compiling `model` for these inputs comes to: `model(*args, **kwargs)` runs once, eagerly, graph by graph.

    `model` is a module (DDP or not, compiled or not) or a function; one that dcompile has compiled is explained under
    its own settings. Backwards are planned too where gradients are wanted, but none runs. Parameters, buffers,
    gradients and random generators are afterwards what they were; for that, a copy of all parameters and buffers is
    held meanwhile. What else the model's own Python code does when it is called, it does here as well.
    """
    settings, receipt, timeline = _settings(model), _receipt(model), newest_timeline(model)
    module, ddp = _module_of(model)
    target = module._call_impl if module is not None else original_function(model)
    planner = _Planner(settings.config)
    toolbox = Toolbox(planner, _no_buckets, _nothing, _nothing, _nothing, _no_buckets)
    guards: dict[str, None] = {}
    settings = replace(settings, fullgraph=False, guard_filter_fn=_watching(guards, settings.guard_filter_fn))
    entry = Entry(target, None, settings, toolbox, _PlannedGraph)
    adapter = None
    if ddp is not None:
        adapter = _PlannedDdp(ddp, settings.config.distributed == "stock")
        entry.model.adopt(adapter)
        planner.parameters = {info.number: info.fqn for info in adapter.param_infos()}
    before = len(compat.dynamo.graph_breaks())
    with _as_it_was(module), compat.aot.backward_at_once():
        entry(*args, **kwargs)
    notes = [note for graph in entry.model.graphs for note in graph.notes]
    return Report(
        model=type(module).__name__ if module is not None else getattr(target, "__qualname__", str(target)),
        adapter="plain" if adapter is None else adapter.name,
        graphs=tuple(planner.graphs.values()),
        breaks=_breaks(before),
        guards=tuple(guards),
        reasons=() if adapter is None else tuple(adapter.reasons),
        notes=(*dict.fromkeys(notes), *settings.config.idle()),
        receipt=receipt,
        timeline=timeline,
    )


def _settings(model: Any) -> Settings:
    compiled = find_model(model)
    settings = compiled.settings if compiled is not None else Settings(Config.make())
    quiet = replace(settings.config, dump="", trace_enabled=False, trace_graph_diagram=False, receipt=False)
    return replace(settings, config=quiet)


def _receipt(model: Any) -> Receipt | None:
    try:
        return make_receipt(find_model(model))
    except NotCompiledError:  # no compiled step has run
        return None


def _module_of(model: Any) -> tuple[Module | None, DistributedDataParallel | None]:
    """The module to call, and the DDP module around it."""
    if not isinstance(model, Module):
        if not callable(model):
            raise TypeError(f"dcompile: explain needs a module or a function, not {type(model).__name__}")
        return None, None
    root = unwrapped(model)
    if isinstance(root, DistributedDataParallel):
        return unwrapped(root.module), root
    return root, None


def _breaks(before: int) -> tuple[GraphBreak, ...]:
    """A break inside the model also ends the frames that call it, one after another: each line counts once."""
    found: dict[Source | None, GraphBreak] = {}
    for reason, frames in compat.dynamo.graph_breaks(before):
        source = source_of_frames(frames)
        found.setdefault(source, GraphBreak(reason, source))
    return tuple(found.values())


def _watching(found: dict[str, None], also: Callable[..., Any] | None) -> Callable[..., Any]:
    """A guard filter that keeps all guards (or what `also` keeps) and notes them."""

    def keep(guards: Any) -> Any:
        found.update(dict.fromkeys(f"{guard.guard_type} {guard.name}".rstrip() for guard in guards))
        return also(guards) if also is not None else [True] * len(guards)

    return keep


# --- in place of compiling --------------------------------------------------------------------------------------------


class _Planner(CachingCompiler):
    """The compiler, but that it only plans each graph, notes what came of it, and lets torch run it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.graphs: dict[str, GraphReport] = {}
        self.parameters: dict[int, str] = {}

    def compile_graph(self, gm: Any, request: Request) -> _Eager:
        plan = Pipeline(self.config).plan(gm, request)
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        sources: dict[str, Source] = {}
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
            notes=plan.report.notes,
        )
        return _Eager(gm, plan.program)


class _Eager:
    """Implements `collectives.params.Executable` by torch's own operators."""

    source = ""

    def __init__(self, gm: Any, program: Program) -> None:
        self.gm = gm
        self.report = Counts()
        self.buckets = program.buckets

    def __call__(self, args: list[Any], *, buckets: AnySource | None = None, sync: bool = False) -> list[Any]:
        del buckets, sync
        values = list(args)
        args.clear()
        with torch.no_grad():
            return list(self.gm(*values))


class _PlannedGraph(Graph):
    """A graph whose backward is planned with its forward: none is going to run."""

    def _backward(self, gm: Any) -> Any:
        runner = super()._backward(gm)
        self._build_backward(gm)
        return runner


class _PlannedDdp(DdpAdapter):
    """Decides at once, from what speaks against taking over, and touches nothing."""

    carries_sync = False

    def __init__(self, ddp: Any, stock: bool) -> None:
        super().__init__(ddp, stock, serial=-1)
        self.reasons = tuple(self.standing_objections())
        self.state = "stock" if self.reasons else "taken"


def _no_buckets(*_: Any) -> Any:
    return None


def _nothing(*_: Any) -> None:
    return None


# --- leaving things as they were --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_it_was(module: Module | None) -> Iterator[None]:
    """Put back what a forward changed: parameters, buffers, random generators; BatchNorm counts its calls."""
    tensors = [*module.parameters(), *module.buffers()] if module is not None else []
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    places = _places(module)
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
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
    """Where each parameter and buffer is held: a forward may put another tensor in its place."""
    modules = list(module.modules()) if module is not None else []
    holders = [holder for part in modules for holder in (part._parameters, part._buffers)]
    return [(holder, name, value) for holder in holders for name, value in holder.items()]


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether nothing changed: what did not is not written, so that graphs which saved it stay usable."""
    return torch.equal(one, two) or (one.is_floating_point() and torch.allclose(one, two, 0, 0, equal_nan=True))
