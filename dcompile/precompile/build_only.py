"""Compile all programs of an absent job into the cache, without running them, as one rank without the others."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from dcompile import compat
from dcompile.api import SERVICES, ordinary_services
from dcompile.capture.services import Services
from dcompile.collectives.contract import Executable, Foreseen, ProgramReport, Request
from dcompile.compat import absent_ranks
from dcompile.compiler.caching import CachingCompiler
from dcompile.compiler.dry_run import LocalShards, do_nothing, no_buckets
from dcompile.config import Config
from dcompile.errors import PrecompileError
from dcompile.explain.receipt import Receipt, make_receipt
from dcompile.explain.sources import source_of_frames
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.coordination.heartbeat import SingleProcess


@dataclass(frozen=True, slots=True)
class BuiltProgram:
    """One program of a job and its cache entry."""

    name: str
    key: str | None
    """Key of the entry; None if it cannot be cached. `report.notes` has the reason."""
    kernels: tuple[str, ...]
    """Keys of its kernels, sorted."""
    report: ProgramReport


@dataclass(eq=False)
class BuildLog:
    """Programs that one rank's compilers have built, in order."""

    programs: list[BuiltProgram] = field(default_factory=list)
    directories: dict[str, None] = field(default_factory=dict)
    """Directories of the filled caches."""
    settings: dict[str, None] = field(default_factory=dict)
    """`Config.key()` of each compiled program."""
    receipts: dict[Any, Receipt] = field(default_factory=dict)
    """Compiled model -> receipt of its latest first step, of inference or training."""
    notes: list[str] = field(default_factory=list)
    """Further notes for the report."""
    seconds: float = 0.0

    def note_model(self, model: Any) -> None:
        """Make the receipt of a model's first step of a kind now, since the model may be freed soon."""
        self.receipts[model] = make_receipt(model)


class PrecompilingCompiler(CachingCompiler):
    """Compiler that logs its programs. With `runs` False, a program returns results without computing them.

    Programs in the cache are not built again. Ranks find in the folder that regions of other compilers are estimated:
    running a region would take the memory that is not there.
    """

    measures_regions = False

    def __init__(self, config: Config, log: BuildLog, *, runs: bool) -> None:
        super().__init__(config)
        self._log, self._runs = log, runs

    def compile_graph(self, gm: Any, request: Request, foreseen: Foreseen | None = None) -> Executable:
        """See `CachingCompiler`."""
        shapes = None if self._runs else ResultShapes(gm, request)
        program = super().compile_graph(gm, request, foreseen)
        self._note(gm, request, program.report)
        return program if shapes is None else UnrunProgram(shapes, program)

    def ignores_cache(self) -> bool:
        """Always False: the programs are made for the cache."""
        return False

    def connect_peers(self, group: Any) -> SingleProcess:
        """See `CachingCompiler`. Raises PrecompileError for a process group of ranks that exist."""
        if group is not None and not compat.absent_ranks.is_of_absent_ranks(group):
            raise PrecompileError(
                "dcompile: a model is kept in step over a process group of another backend "
                f"({torch.distributed.get_backend(group)}), whose ranks would have to be there; give it the default "
                "group, or one of torch.distributed.new_group or init_device_mesh, made meanwhile"
            )
        return super().connect_peers(group)

    def _note(self, gm: Any, request: Request, report: ProgramReport) -> None:
        cache = KernelCache.open(self.config)
        key, _ = self._key(gm, self._with_region_times(gm, request))
        found = None if key is None or report.graphs_uncacheable else cache.find_graph(key)
        kernels = () if found is None else tuple(sorted(found[0].kernels.values()))
        self._log.programs.append(BuiltProgram(request.name, None if found is None else key, kernels, report))
        self._log.directories[str(cache.directory)] = None
        self._log.settings[self.config.key()] = None


class ResultShapes:
    """Shapes, strides and dtypes of a program's results, or the inputs that it returns."""

    def __init__(self, gm: Any, request: Request) -> None:
        inputs = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        shards = {info.number for info in request.params if info.shard is not None}
        handed_on = {place for place, number in request.grads if number in shards}
        results = gm.graph.output_node().args[0]
        self.places = [None if n in handed_on else _described(node, inputs) for n, node in enumerate(results)]
        self._gm = gm if any(isinstance(place, _Symbolic) for place in self.places) else None

    def results(self, args: list[Any]) -> list[Any]:
        """Return tensors without memory. Raises torch's error where a size depends on values."""
        traced = [] if self._gm is None else list(compat.absent_ranks.run_alone(self._gm, args))
        return [_made(place, args, traced, n) for n, place in enumerate(self.places)]


@dataclass(frozen=True, slots=True)
class _Input:
    place: int


class _Symbolic:
    """Result whose size follows from the inputs."""


def _described(node: Any, inputs: Mapping[Any, int]) -> Any:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else node
    if node in inputs:
        return _Input(inputs[node])
    if isinstance(value, torch.Tensor):
        fixed = all(isinstance(n, int) for n in (*value.shape, *value.stride()))
        return (tuple(value.shape), value.stride(), value.dtype, value.device) if fixed else _Symbolic()
    return _Symbolic() if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


def _made(place: Any, args: list[Any], traced: list[Any], number: int) -> Any:
    match place:
        case _Input():
            return args[place.place]
        case _Symbolic():
            return traced[number]
        case (shape, stride, dtype, device):
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        case _:
            return place


class UnrunProgram:
    """Implements `collectives.contract.Executable` without computation and collectives."""

    source = ""

    def __init__(self, shapes: ResultShapes, program: Executable) -> None:
        self.report, self.buckets = program.report, program.buckets
        self._shapes = shapes

    def __call__(self, args: list[Any], *, buckets: Any = None, sync: bool = False) -> list[Any]:
        with torch.no_grad():
            results = self._shapes.results(args)
            args.clear()
            if isinstance(buckets, LocalShards):
                buckets.commit(self.buckets)
        return results


def services(log: BuildLog, runs: bool, path: str | None, config: Config) -> Services:
    """Return capture's services for a model of the job. With `runs`, programs run, and collectives return at once.

    Otherwise tensors have no memory, and no collective runs. `path` replaces the cache's directory.
    """
    filling = config if path is None else replace(config, cache_dir=path, precompiled="")
    compiler = PrecompilingCompiler(filling, log, runs=runs)
    given = ordinary_services(config, compiler, functools.partial(services, log, runs, path))
    given = replace(given, first_step=log.note_model)
    if runs:
        return given
    return replace(given, make_buckets=no_buckets, average=do_nothing, make_shards=LocalShards, needs_data=False)


# --- one rank without the others --------------------------------------------------------------------------------------


NEEDS_GPU = (
    "programs for GPUs depend on the GPU that they run on (its operators, its memory, the build of torch): precompile "
    "them on a host with one GPU of the job's kind"
)


class ValueReadError(PrecompileError):
    """Raised where the value of a tensor without memory is read."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"dcompile: {where} reads the value of a tensor, or makes a size of one, and tensors have no memory here; "
            "leave it out of the step that is precompiled, or give fake=False (no --fake), which runs the step"
        )
        self.where = where


@contextlib.contextmanager
def rank_of_job(world_size: int, rank: int, *, fake: bool, path: str | None, log: BuildLog) -> Iterator[None]:
    """Make this process `rank` of a job of `world_size` ranks. Compiled code fills the cache, or the folder `path`.

    With `fake`, tensors have no memory. `log` records the programs. Raises PrecompileError where code needs values or
    another rank.
    """
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        stack.enter_context(_environment(world_size, rank))
        stack.enter_context(absent_ranks.process_group(rank, world_size))
        stack.enter_context(absent_ranks.for_all_groups(_refuse_objects))
        if fake:
            stack.enter_context(absent_ranks.without_data())
        stack.callback(SERVICES.reset, SERVICES.set(functools.partial(services, log, not fake, path)))
        try:
            yield
        except Exception as error:
            _explain(error)
            raise
        finally:
            log.seconds = time.perf_counter() - began


def _forget() -> None:
    """Drop compiled code: it refers to a destroyed process group and to tensors without memory."""
    torch.compiler.reset()
    gc.collect()


@contextlib.contextmanager
def _environment(world_size: int, rank: int) -> Iterator[None]:
    """Set torchrun's variables, as for the only rank of a host."""
    ours = {
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _refuse_objects(name: str) -> NoReturn:
    where = source_of_frames(traceback.extract_stack())
    raise PrecompileError(
        f"dcompile: {name} at {where} asks other ranks for objects, and they are not there: what they would say cannot "
        "be precompiled; leave it out where WORLD_SIZE ranks are not there, or start the job without precompiling"
    )


def _explain(error: BaseException) -> None:
    """Replace torch's error about a missing value or GPU by a PrecompileError."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, PrecompileError):
        return
    where = source_of_frames(traceback.extract_tb(error.__traceback__))
    if any(map(absent_ranks.is_value_read, chain)):
        raise ValueReadError(str(where)) from error
    if any(map(absent_ranks.is_gpu_missing, chain)):
        raise PrecompileError(f"dcompile: {where} uses a GPU; {NEEDS_GPU}") from error
