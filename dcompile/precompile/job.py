"""Precompile a job: take its first step as one rank, without the others, so that all ranks find it compiled.

The step is a function, or the first ones of a training script. The report comes first.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from dcompile.api import compile
from dcompile.capture.adapters.ddp_reducer import tensors_in
from dcompile.capture.callables import label_of, unwrap_module
from dcompile.capture.entry import find_model
from dcompile.config import Config
from dcompile.errors import OptionError, PrecompileError
from dcompile.ir.diagram import count_text
from dcompile.passes import GAIN
from dcompile.precompile.build_only import BuildLog, BuiltProgram, ValueReadError, rank_of_job
from dcompile.runtime.cache.precompiled import PrecompiledJob, write_manifest


@dataclass(frozen=True)
class RankReport:
    """Programs that one rank of one world size runs in its first steps."""

    world_size: int
    rank: int
    programs: tuple[BuiltProgram, ...]
    adapters: tuple[str, ...]
    """Adapter of each compiled model: "plain", "ddp", "fsdp2", ..."""
    notes: tuple[str, ...]
    """Reasons for stock PyTorch or eager fallbacks, as in the receipt."""
    seconds: float

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the cache entries that the rank loads."""
        return frozenset(program.key for program in self.programs if program.key is not None)

    @property
    def left(self) -> tuple[str, ...]:
        """Programs that cannot be cached, and are compiled at each start."""
        return tuple(program.name for program in self.programs if program.key is None)


@dataclass(frozen=True)
class PrecompileReport:
    """Programs that are ready for a job. `str(report)` is a page of text."""

    model: str
    directories: tuple[str, ...]
    """Directories of the caches with the programs."""
    ranks: tuple[RankReport, ...]

    @property
    def kernels(self) -> int:
        """Number of distinct kernels of all programs."""
        return len({kernel for rank in self.ranks for program in rank.programs for kernel in program.kernels})

    @property
    def built(self) -> int:
        """Number of kernels built now; the others were in the cache."""
        return sum(program.report.built for rank in self.ranks for program in rank.programs)

    @property
    def programs(self) -> int:
        """Number of distinct programs of all world sizes."""
        return len({key for rank in self.ranks for key in rank.keys})

    @property
    def seconds(self) -> float:
        """Total time in seconds."""
        return sum(rank.seconds for rank in self.ranks)

    @property
    def left(self) -> tuple[str, ...]:
        """Programs that cannot be cached, and are compiled at each start."""
        return tuple(dict.fromkeys(name for rank in self.ranks for name in rank.left))

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """World sizes, in the order in which they were precompiled."""
        return tuple(dict.fromkeys(rank.world_size for rank in self.ranks))

    def of(self, world_size: int) -> PrecompileReport:
        """Return the part about one world size."""
        return replace(self, ranks=tuple(rank for rank in self.ranks if rank.world_size == world_size))

    def differing(self) -> tuple[tuple[int, int, int], ...]:
        """Return (world size, rank, other rank) where two ranks have different programs."""
        found = []
        for world_size in self.world_sizes:
            first, *others = self.of(world_size).ranks
            found += [(world_size, first.rank, other.rank) for other in others if other.keys != first.keys]
        return tuple(found)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        adapters = dict.fromkeys(adapter for rank in self.ranks for adapter in rank.adapters)
        sizes = ", ".join(map(str, self.world_sizes))
        yield f"{self.model} ({' and '.join(adapters)}), precompiled for {sizes} ranks in {self.seconds:.1f} s"
        yield (
            f"{count_text(self.programs, 'program')}, {count_text(self.kernels, 'kernel')}: "
            f"{self.built} built, {self.kernels - self.built} from the cache; in {', '.join(self.directories)}"
        )
        for world_size in self.world_sizes:
            part = self.of(world_size)
            new = sum(not program.report.graphs_cached for rank in part.ranks for program in rank.programs)
            counts = f"{count_text(part.programs, 'program')}, {new} planned; {count_text(part.built, 'kernel')} built"
            yield f"  {world_size} ranks: {counts}"
        for name in self.left:
            yield f"left: {name} is compiled by each rank at each start: no cache can keep it"
        for world_size, one, other in self.differing():
            yield f"note: of {world_size} ranks, {one} and {other} run different programs; precompile each kind of rank"
        yield from (f"note: {note}" for note in dict.fromkeys(note for rank in self.ranks for note in rank.notes))


def precompile(
    build: Callable[..., Any],
    *,
    world_size: int | Sequence[int],
    step: Callable[..., Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    ranks: Sequence[int] = (0,),
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    fake: bool = True,
    path: str | os.PathLike[str] | None = None,
) -> PrecompileReport:
    """Fill the kernel cache for a job of `world_size` ranks, in one process on a CPU, by taking its first step.

    `build()` makes the model, wraps it as the job does, and returns it, or (model, args) or (model, args, kwargs) with
    a sample batch of one rank. With `mesh`, {name of a dimension: ranks}, one of which may be -1, it is `build(mesh)`.
    `step(model, *args, **kwargs)` is a training step. Without it the model is called, and a backward runs from its loss
    or from all of its results. A model that `build` has not compiled is compiled with `mode`, `options`, `fullgraph`
    and `dynamic`. Several world sizes, and `ranks` of each, are precompiled one after another.

    With `fake`, tensors have no memory and nothing is computed; otherwise the step runs, without other ranks' values.
    `path` is the folder to fill in place of the cache, for option `precompiled`. Compiled code of this process is
    forgotten. Raises PrecompileError for what needs values or other ranks, and OptionError for bad arguments.
    """
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)
    compiled_with = {"mode": mode, "options": options, "fullgraph": fullgraph, "dynamic": dynamic}
    Config.make(mode, options)  # raises now if they are wrong
    _check(sizes, ranks, mesh)
    job = _Job(build, step, mesh, compiled_with, fake, folder_of(path))
    logs = {(size, rank): job.run(size, rank) for size in sizes for rank in ranks if rank < size}
    return make_report(job.model, logs, mesh or {}, job.path)


def folder_of(path: str | os.PathLike[str] | None) -> str | None:
    """Return the folder to fill as an absolute path."""
    return None if path is None else str(Path(path).expanduser().absolute())


def _check(sizes: Sequence[int], ranks: Sequence[int], mesh: Mapping[str, int] | None) -> None:
    if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise OptionError(f"dcompile: world_size={sizes}: give a number of ranks, or several")
    for size in sizes:
        if not any(0 <= rank < size for rank in ranks):
            raise OptionError(f"dcompile: ranks={list(ranks)}: a job of {size} ranks has none of these")
        if mesh is not None:
            mesh_shape(mesh, size)
    if dist.is_available() and dist.is_initialized():
        raise PrecompileError(
            "dcompile: precompile makes a process group of ranks that are not there, and this process has one already; "
            "call it before init_process_group, or in a process of its own"
        )


def mesh_shape(mesh: Mapping[str, int], world_size: int) -> tuple[int, ...]:
    """Return ranks along each dimension, with -1 computed. Raises OptionError unless their product is `world_size`."""
    known = prod(size for size in mesh.values() if size != -1)
    free = [name for name, size in mesh.items() if size == -1]
    if len(free) > 1 or known < 1 or world_size % known or (not free and known != world_size):
        raise OptionError(f"dcompile: mesh={dict(mesh)} does not come to {world_size} ranks")
    return tuple(world_size // known if size == -1 else size for size in mesh.values())


@dataclass(eq=False)
class _Job:
    """Call to run for each world size and rank."""

    build: Callable[..., Any]
    step: Callable[..., Any] | None
    mesh: Mapping[str, int] | None
    compiled_with: Mapping[str, Any]
    fake: bool
    path: str | None
    model: str = field(init=False, default="")

    def run(self, world_size: int, rank: int) -> BuildLog:
        """Run the first step of one rank."""
        log = BuildLog()
        with rank_of_job(world_size, rank, fake=self.fake, path=self.path, log=log):
            self._take_step(world_size)
        return log

    def _take_step(self, world_size: int) -> None:
        made = self.build() if self.mesh is None else self.build(self._mesh_of(world_size))
        model, args, kwargs = _parts(made)
        self.model = self.model or _name_of(model)
        if not _is_compiled(model):
            compile(model, **self.compiled_with)
        elif any(value not in (None, False) for value in self.compiled_with.values()):
            raise OptionError("dcompile: build() has compiled the model already; give mode and options there")
        (self.step or first_step)(model, *args, **kwargs)

    def _mesh_of(self, world_size: int) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        assert self.mesh is not None, "asked for by those who have one"
        return init_device_mesh("cpu", mesh_shape(self.mesh, world_size), mesh_dim_names=tuple(self.mesh))


def _parts(made: Any) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Split the result of `build` into the model and a sample batch."""
    match made:
        case (model, args, kwargs):
            pass
        case (model, args):
            kwargs = {}
        case model:
            args, kwargs = (), {}
    if not callable(model) or not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise OptionError(
            "dcompile: build() returns the wrapped model, (model, args) or (model, args, kwargs), "
            f"not {type(made).__name__}"
        )
    return model, args, kwargs


def _name_of(model: Any) -> str:
    """Return the class name of the wrapped module, or the name of a function."""
    inner = unwrap_module(model)
    while isinstance(getattr(inner, "module", None), torch.nn.Module):  # DDP's, FSDP1's
        inner = unwrap_module(inner.module)
    return label_of(inner)


def _is_compiled(model: Any) -> bool:
    parts = model.modules() if isinstance(model, torch.nn.Module) else ()
    return any(find_model(thing) is not None for thing in (model, *parts))


def first_step(model: Any, *args: Any, **kwargs: Any) -> None:
    """Call a model. Run a backward from its loss, or from all differentiable results."""
    result = model(*args, **kwargs)
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    found = [loss] if isinstance(loss, torch.Tensor) else tensors_in(result)
    ends = [tensor.float().sum() for tensor in found if tensor.requires_grad]
    if ends:
        torch.stack(ends).sum().backward()  # type: ignore[no-untyped-call, unused-ignore]


def make_report(
    model: str, logs: Mapping[tuple[int, int], BuildLog], mesh: Mapping[str, int], path: str | None
) -> PrecompileReport:
    """Make the report of logs by (world size, rank); write a manifest to `path`. Raises PrecompileError if empty."""
    ranks = [_rank_report(world_size, rank, log) for (world_size, rank), log in logs.items()]
    if not any(rank.programs for rank in ranks):
        why = "; ".join(dict.fromkeys(note for rank in ranks for note in rank.notes))
        raise PrecompileError(f"dcompile: nothing of {model} was compiled: {why or 'no compiled model was called'}")
    if path is not None:
        jobs = [
            PrecompiledJob(model, world_size, tuple(mesh.items()), settings)
            for (world_size, _), log in logs.items()
            for settings in log.settings
        ]
        write_manifest(Path(path), dict.fromkeys(jobs))
    directories = dict.fromkeys(directory for log in logs.values() for directory in log.directories)
    return PrecompileReport(model, tuple(directories), tuple(ranks))


def _rank_report(world_size: int, rank: int, log: BuildLog) -> RankReport:
    told = [reason for receipt in log.receipts.values() for reason in (*receipt.reasons, *receipt.notes)]
    notes = [reason for reason in told if not reason.startswith(GAIN)]
    notes += log.notes
    adapters = dict.fromkeys(receipt.adapter for receipt in log.receipts.values())
    return RankReport(world_size, rank, tuple(log.programs), tuple(adapters), tuple(dict.fromkeys(notes)), log.seconds)


# --- scripts ----------------------------------------------------------------------------------------------------------


class StepsDone(BaseException):
    """Raised when the script has taken its steps. It is no Exception, since scripts catch those."""


def run_script(
    script: str, arguments: Sequence[str], *, world_size: int, rank: int, fake: bool, path: str | None, steps: int
) -> BuildLog:
    """Run a script as Python does, until its optimizers have stepped `steps` times, or it ends by itself.

    With `fake`, the run ends where the script reads a value, if it has run a backward by then. Raises PrecompileError
    if it has not, and for code that needs other ranks. Errors of the script itself are raised, too.
    """
    log = BuildLog()
    try:
        with rank_of_job(world_size, rank, fake=fake, path=path, log=log):
            run_steps(script, arguments, steps)
    except ValueReadError as error:
        if not any("backward" in program.name for program in log.programs):
            raise
        log.notes.append(f"the script was left where it reads a value: {error.where}")
    return log


def run_steps(script: str, arguments: Sequence[str], steps: int) -> None:
    """Run a script as Python does, until its optimizers have stepped `steps` times, or it ends by itself."""
    taken = 0

    def count(*_: Any) -> None:
        nonlocal taken
        taken += 1
        if taken >= steps:
            raise StepsDone

    argv, folder = sys.argv, sys.path[0]
    hook = register_optimizer_step_post_hook(count)
    try:
        sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")
    except StepsDone:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        hook.remove()
        sys.argv, sys.path[0] = argv, folder
