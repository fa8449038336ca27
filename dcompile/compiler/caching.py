"""Compiler as capture/ sees it: it loads graphs from the cache, and imports the pipeline for new ones."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dcompile import compat
from dcompile.capture.compiled_model import without_collecting
from dcompile.collectives.contract import Executable, Foreseen, ProgramReport, Request
from dcompile.compat import process_state, storage_offsets
from dcompile.compat.sizes import guard_count, known_facts, reads_values
from dcompile.config import Config, parse_log
from dcompile.errors import BuildError
from dcompile.logs import doing, log
from dcompile.passes import GraphPasses, select_rows
from dcompile.pipeline import DYNAMO_PASSES, GRAPH_WRAPPERS, JOINT_PASSES, OUTPUT_STEPS
from dcompile.runtime.cache import portable
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.cache.key import (
    NotCacheable,
    communicates,
    constants_of,
    device_numbers,
    gpus,
    graph_key,
    group_names,
    with_groups,
    with_numbers,
    without_groups,
    without_numbers,
)
from dcompile.runtime.cache.precompiled import reason_for_miss
from dcompile.runtime.coordination.artifact_sharing import ArtifactSharing
from dcompile.runtime.coordination.heartbeat import PeerCoordinator, SingleProcess, peers_of
from dcompile.runtime.cuda_graphs.trees import GraphTree, ReplayedExecutable, SizeClasses
from dcompile.runtime.measure.region_times import RegionTimes
from dcompile.runtime.program.artifact import CompiledGraph, Loadable
from dcompile.runtime.program.executable import HostProgram
from dcompile.runtime.program.workspace import Workspaces
from dcompile.toolchain import own_products, products_key

if TYPE_CHECKING:
    from dcompile.codegen.lower.opaque_calls import FlexBuild
    from dcompile.compiler.compute_regions import RegionCompiler
    from dcompile.compiler.driver import PendingGraph, Pipeline


class CachingCompiler:
    """Implementation of `collectives.contract.Compiler`: a cache lookup before each graph, and a new entry after it."""

    measures_regions = True
    """Whether regions that another compiler compiles may be run to measure them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._trees: dict[str, GraphTree] = {}
        """One tree for each device on which programs are replayed."""
        self._peers = SingleProcess()
        self._sharing: ArtifactSharing | None = None
        self._reasons: dict[str, str] = {}
        """Name of a graph -> why it was compiled here, though another rank had claimed it."""
        self._begun_elsewhere = ""
        """Key of the GEMM kernel, if another rank builds it."""
        self._workspaces = Workspaces()
        self._made: Pipeline | None = None
        self._regions: RegionCompiler | None = None
        self._begun: dict[tuple[str, str | None], PendingGraph] = {}
        """(name, key) -> a predicted graph that is planned already."""
        if config.skip or config.until:
            self._pipeline()  # raises now if there is no such pass

    def _pipeline(self) -> Pipeline:
        from dcompile.compiler.driver import (
            Pipeline,  # late: a warm start needs no compiler stage, and saves their import
        )

        if self._made is None:
            self._made = Pipeline(self.config, self._region_compiler())
        return self._made

    def _region_compiler(self) -> RegionCompiler | None:
        """Compiler of regions, if option `kernels` names another compiler."""
        if self._regions is None and self.config.backend is not None:
            from dcompile.compiler.compute_regions import RegionCompiler

            self._regions = RegionCompiler(self.config, self.config.backend)
        return self._regions

    def connect_peers(self, group: Any) -> SingleProcess:
        """Coordinator of a process group's ranks, which share graphs from now on."""
        peers = peers_of(group)
        self._peers = SingleProcess() if peers is None else peers
        shares = isinstance(peers, PeerCoordinator) and self.config.share_artifacts and not self.ignores_cache()
        self._sharing = ArtifactSharing(peers, self.config.compile_timeout_s) if peers is not None and shares else None
        return self._peers

    def decompositions(self, trains: bool = True) -> dict[Any, Any]:
        """AOTAutograd's decomposition table; empty if ATen runs everything, so that eager's own kernels run."""
        if self.config.kernels == "aten":
            return {}
        from dcompile.codegen.lower.decompositions import table

        backend = self.config.backend
        if backend is None or (trains and not backend.row.trains):
            return table.table(fallback_random=self.config.fallback_random)
        whole = compat.inductor.decompositions() if backend.name == "inductor" else {}
        return table.with_random(whole, fallback_random=self.config.fallback_random)

    def fusible(self) -> tuple[frozenset[Any], frozenset[Any]] | None:
        """Fusible ops for the partitioner, besides torch's; None if ATen runs everything.

        With `recompute="memory"`, the backward recomputes what torch takes for fusible, also where it is not free.
        """
        if not self.config.own_kernels:
            alone = self.config.kernels == "aten" and self.config.recompute != "memory"
            return None if alone else (frozenset(), frozenset())
        from dcompile.codegen.lower import registry

        return registry.fusible_ops()

    def graph_passes(self) -> GraphPasses:
        """Rows of `pipeline.py` for FX graphs and results that options `skip` and `until` leave."""
        joint = select_rows(self.config, JOINT_PASSES, earlier=(DYNAMO_PASSES,))
        return GraphPasses(select_rows(self.config, DYNAMO_PASSES), joint, OUTPUT_STEPS, GRAPH_WRAPPERS)

    def expect_products(self) -> None:
        """Start building the GEMM kernel, if it will be needed and is not cached.

        g++ takes 0.7 s for it with AVX-512, once per machine. Tracing a small model takes as long, and runs meanwhile.
        """
        if not self.config.own_kernels or not own_products(self.config.matmul):
            return
        cache, key = KernelCache.open(self.config), products_key()
        if cache.find(key) is not None:
            return
        if self._sharing is not None and not self._sharing.claim(key):
            self._begun_elsewhere = key
        else:
            with contextlib.suppress(BuildError):  # the kernel's user reports the error
                self._pipeline().begin_products(cache)

    def traces(self) -> portable.RecordedTraces | None:
        """Where traces of AOTAutograd are kept; None where somebody wants to see one being made."""
        shown = process_state.is_artifact_enabled(*process_state.TRACE_ARTIFACTS)
        if shown or not self.config.trace_cache or self.ignores_cache():
            return None
        return portable.RecordedTraces(KernelCache.open(self.config))

    def compile_graph(self, gm: Any, request: Request, foreseen: Foreseen | None = None) -> Executable:
        """Load a graph from the cache, or compile it now."""
        began = time.perf_counter()
        cache = KernelCache.open(self.config)
        with self._peers.busy("compiling"):
            request = self._with_region_times(gm, request)
            key, objection = self._key(gm, request)
            program = self._found(cache, key, gm, request)
            if program is None:
                program = self._compile_for_all(cache, key, objection, gm, request, foreseen)
            if key is not None and self._sharing is not None:
                self._sharing.give(key, cache)
        program.report.compile_seconds = time.perf_counter() - began
        self._log_summary(request.name, program.report)
        return self._replayed(program, gm, request) if self.config.triton_cudagraphs else program

    def _with_region_times(self, gm: Any, request: Request) -> Request:
        """Return a request with measured times of another compiler's regions, if the graph has collectives to hide.

        They are measured if no rank and no disk knows them, and are a part of the key from here on.
        """
        regions = self._region_compiler()
        if regions is None or request.region_us or not communicates(gm, request):
            return request
        keeps = regions.backend.is_stable and not self.ignores_cache()
        kept = portable.RecordedTraces(KernelCache.open(self.config)) if keeps else None
        times = RegionTimes(kept, self._peers, self.measures_regions)
        with without_collecting():
            return replace(request, region_us=regions.measure(gm, request, times))

    def _record(self, cache: KernelCache, key: str, graph: CompiledGraph, libraries: Mapping[str, Path]) -> None:
        """Record a graph of the cache for torch.compiler.save_cache_artifacts()."""
        kernels = {graph.kernels[name]: path for name, path in libraries.items()}
        products = cache.find(products_key()) if own_products(self.config.matmul) else None
        if products is not None:
            kernels[products_key()] = products
        portable.record(key, cache, kernels)

    def _log_summary(self, name: str, report: ProgramReport) -> None:
        """Log the results for a graph, whether compiled now or loaded."""
        log(self.config, "kernels", logging.INFO, f"{name}: {report}")
        times = f"{report.predicted_us:.1f} us by the cost model, {report.exposed_us:.1f} us exposed"
        found = f"{report.collectives} collectives, {times}" if report.collectives else "no collectives"
        level = logging.INFO if report.collectives else logging.DEBUG
        log(self.config, "overlap", level, f"{name}: {found}")

    def _replayed(self, program: HostProgram, gm: Any, request: Request) -> Executable:
        """Wrap the program for CUDA graphs, if it runs on one GPU and computes the same in each call."""
        devices = gpus(gm)
        why = None
        if len(devices) != 1:
            why = f"it uses {len(devices)} GPUs" if devices else "it does not run on a GPU"
        elif program.late_sizes and not program.marked:
            why = f"{program.late_sizes} of its sizes depend on values"
        elif reads_values(gm) and not program.marked:
            why = "it reads values of tensors on the CPU, to check them"
        elif storage_offsets.gives_data(gm):
            why = "it gives a tensor other memory (.data = ...), which a replay would not repeat"
        elif program.report.regions and self.config.backend is not None and not self.config.backend.row.records:
            why = f"{self.config.backend.name} runs parts of it, which cannot be recorded"
        elif any(storage_offsets.resizes(node.target) for node in gm.graph.nodes):
            why = "it frees or makes an input's memory (.resize_), which a replay would not repeat"
        if why is not None:
            program.report.notes.append(f"a graph ({request.kind}) runs without a CUDA graph: {why}")
            return program
        (device,) = devices
        if device not in self._trees:
            from dcompile.runtime.cuda_graphs.recording import CudaRecorder

            self._trees[device] = GraphTree(CudaRecorder(torch.device(device)))
        bounds = self.config.size_bounds
        return ReplayedExecutable(
            program,
            self._trees[device],
            results=request.results,
            saved=bool(request.saved),
            whole=storage_offsets.looked_beyond(gm),
            classes=None if bounds is None else SizeClasses(bounds),
            sizes=compat.sizes.size_inputs(gm),
        )

    def _key(self, gm: Any, request: Request) -> tuple[str | None, str]:
        try:
            return graph_key(gm, request, self.config), ""
        except NotCacheable as reason:
            return None, str(reason)

    def ignores_cache(self) -> bool:
        """Whether to ignore the cache: for users who inspect or verify compilation; tests would fill it."""
        shows_code = process_state.is_artifact_enabled(*process_state.CODE_ARTIFACTS)
        return self.config.verify or bool(self.config.dump) or shows_code or self._shows_plan()

    def _shows_plan(self) -> bool:
        """Whether option `log` requests decisions, which are known only while a graph is planned.

        It is the same on every rank: rank 0, which logs, may otherwise receive another rank's plan.
        """
        levels = parse_log(self.config.log).levels
        return any(levels.get(channel) == logging.DEBUG for channel in ("overlap", "memory"))

    def _compile_for_all(
        self, cache: KernelCache, key: str | None, objection: str, gm: Any, request: Request, foreseen: Foreseen | None
    ) -> HostProgram:
        """Compile a graph. If that fails, tell the other ranks not to wait for it."""
        try:
            return self._compile(cache, key, objection, gm, request, foreseen)
        except BaseException:
            if key is not None and self._sharing is not None:
                with contextlib.suppress(RuntimeError):  # the store may be gone
                    self._sharing.fail(key)
            raise

    def _found(self, cache: KernelCache, key: str | None, gm: Any, request: Request) -> HostProgram | None:
        """Find a graph that was compiled before, here or by another rank just now."""
        if key is None or self.ignores_cache():
            return None
        found = self._load(cache, key, gm, request)
        if self._sharing is None:
            return found
        if found is None and self._begun_elsewhere and cache.find(self._begun_elsewhere) is None:
            self._sharing.let_pass(self._begun_elsewhere, key)  # otherwise this rank would build the GEMM kernel again
        folder = str(cache.directory)
        first = self._sharing.claim(key, "" if found else folder)
        if waits := found is None and not first:
            with doing(self.config, f"waiting for another rank's {request.kind} program"):
                sent, reason = self._sharing.receive(key, cache)
            if sent is None:
                self._reasons[request.name] = f"a graph ({request.kind}) was compiled on this rank too: {reason}"
                return None
            found = self._load(cache, key, gm, request)
        if found is not None and (waits or self._sharing.is_news(key, folder)):
            report = found.report
            report.graphs_cached, report.graphs_received = 0, 1
            # also those that are in a directory of both: the other rank has just put them there
            report.kernels_received, report.cache_hits = report.cache_hits, 0
        return found

    def _load(self, cache: KernelCache, key: str, gm: Any, request: Request) -> HostProgram | None:
        found = cache.find_graph(key)
        if found is None:
            return None
        graph, libraries = found
        calls = self._loaded_regions(graph, gm, request)
        if calls is None:
            return None
        source = with_groups(with_numbers(graph.source, device_numbers(gm)), group_names(gm))
        graph = replace(graph, source=source)
        flex = self._flex_calls(gm, graph.constants)
        constants = constants_of(gm) | calls | flex
        executable = HostProgram(request.name, Loadable(graph, libraries, constants), self._workspaces)
        _report_flex(self._build_flex(flex), executable.report)
        self._record(cache, key, graph, libraries)
        executable.report.graphs_cached = 1
        executable.report.cache_hits = len(libraries)
        log(self.config, "passes", logging.INFO, f"{request.name}: from the cache")
        names = ", ".join(sorted(libraries))
        log(self.config, "kernels", logging.DEBUG, f"{request.name}: {len(libraries)} kernels in the cache: {names}")
        log(self.config, "memory", logging.INFO, f"{request.name}: arena {graph.arena_bytes} B, from the cache")
        return executable

    def _loaded_regions(self, graph: CompiledGraph, gm: Any, request: Request) -> dict[str, Any] | None:
        """Compile this graph's regions again with the other compiler. None if it refuses one of them now."""
        regions = self._region_compiler()
        if not graph.regions or regions is None:
            return {}
        with without_collecting():
            return regions.load(gm, request, graph.regions)  # type: ignore[return-value, unused-ignore]

    def _flex_calls(self, gm: Any, names: Collection[str]) -> dict[str, Any]:
        """Calls of FlexAttention that a loaded program has by name, which TorchInductor compiles in each process."""
        if not any(compat.inductor.is_flex(node.target) for node in gm.graph.nodes if node.op == "call_function"):
            return {}
        from dcompile.codegen.lower.opaque_calls import flex_calls

        return flex_calls(gm, names)

    def _build_flex(self, constants: Mapping[str, Any]) -> FlexBuild | None:
        """Have TorchInductor compile calls of FlexAttention, if there are any."""
        if not any(callable(constant) for constant in constants.values()):
            return None
        from dcompile.codegen.lower.opaque_calls import build_flex

        return build_flex(constants.values())

    def _compile(
        self, cache: KernelCache, key: str | None, objection: str, gm: Any, request: Request, foreseen: Foreseen | None
    ) -> HostProgram:
        guards, pipeline, regions = guard_count(gm), self._pipeline(), self._region_compiler()
        known = 0 if regions is None else regions.guards
        with without_collecting():
            begun = self._begun.pop((request.name, key), None) or pipeline.begin(gm, request, cache)
            lowered = guard_count(gm)
            flex = self._build_flex(begun.plan.lowered.constants)
            guards += guard_count(gm) - lowered  # those are made again where the program is loaded
            if begun.waits and foreseen is not None and not self.ignores_cache():
                self._begin(cache, foreseen())
            made, built = pipeline.finish(begun, gm, request, cache)
        guards += 0 if regions is None else regions.guards - known
        if key is not None and guard_count(gm) != guards:
            key, objection = None, "compiling it looked at a symbolic size, on which Dynamo then guards"
        executable = HostProgram(request.name, made, self._workspaces)
        _report_flex(flex, executable.report)  # not in the entry: another process compiles these calls itself
        if key is not None and not self.ignores_cache():
            source = without_groups(without_numbers(made.graph.source, device_numbers(gm)), group_names(gm))
            cache.put_graph(key, replace(made.graph, source=source))
            self._record(cache, key, made.graph, made.libraries)
        elif key is None:
            executable.report.graphs_uncacheable = 1
            executable.report.notes.append(f"a graph ({request.kind}) is compiled at each start: {objection}")
        if self.config.precompiled and key is not None and not self.ignores_cache():
            why = reason_for_miss(self.config)
            executable.report.notes.append(f"a graph ({request.kind}) was not precompiled: {why}")
        if request.name in self._reasons:
            executable.report.notes.append(self._reasons.pop(request.name))
        executable.report.built, executable.report.cache_hits = built.built, built.cache_hits
        return executable

    def _begin(self, cache: KernelCache, foreseen: tuple[Any, Request] | None) -> None:
        """Plan a predicted graph and start building its kernels while other kernels are built.

        The result waits in `_begun` until a request with the same key arrives. If none does, only idle CPU time is
        lost. Errors surface when the graph is requested.
        """
        if foreseen is None or known_facts(foreseen[0]):  # reading a symbolic size could add guards to another graph
            return
        gm, request = foreseen[0], self._with_region_times(*foreseen)
        key, _ = self._key(gm, request)
        if key is not None and cache.find_graph(key) is None:
            with contextlib.suppress(Exception):
                self._begun[request.name, key] = self._pipeline().begin(gm, request, cache)


def _report_flex(built: FlexBuild | None, report: ProgramReport) -> None:
    """Add notes on FlexAttention's calls. Those that TorchInductor left are fallbacks by a name of their own."""
    if built is not None:
        report.notes += built.notes
        others = Counter(report.fallbacks) - Counter(built.fallbacks)
        report.fallbacks = {**others, **built.left}
