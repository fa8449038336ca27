"""Run a compiled graph: load its kernels and its host program, and give each call its own arena."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import linecache
import re
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dcompile.collectives.contract import APART, AnySource
from dcompile.runtime.measure.instrumentation import CallRecorder, ProgramProbe, instrument
from dcompile.runtime.program import cuda_launch
from dcompile.runtime.program.arena import Arena
from dcompile.runtime.program.argument_table import kernel
from dcompile.runtime.program.artifact import Loadable
from dcompile.runtime.program.fast_aten import set_grad_enabled
from dcompile.runtime.program.graph_partition import HostPart, called, host_statements, parts_text, split_statements
from dcompile.runtime.program.workspace import Call, Workspace, Workspaces

MAX_LEARNED = 8
"""Library calls that may fail in recordings before the program runs without CUDA graphs. Each costs one recording."""


class HostProgram:
    """Compiled graph as an executable; see `collectives.contract.Executable`.

    A call takes a workspace from `workspaces`, which the programs of one model share, and returns it.
    """

    def __init__(self, name: str, loadable: Loadable, workspaces: Workspaces | None = None) -> None:
        graph = loadable.graph
        said = graph.report
        self.report = dataclasses.replace(said, notes=[*said.notes], fallbacks={**said.fallbacks})
        self.buckets = graph.buckets
        self.source = graph.source
        self.mutated = graph.mutated
        self.late_sizes = graph.late_sizes
        self.libraries = loadable.libraries
        self._constants = [loadable.constants[constant] for constant in graph.constants]
        self.on_gpu = graph.device == "cuda"
        for symbol, path in self.libraries.items():
            if path.suffix == ".so":
                kernel(path, symbol)  # a library that cannot be loaded fails now, not in the first step
        self.name = name
        text = _load(graph.source, name)
        self._sizes: Callable[[list[Any]], tuple[int, ...]] | None = text.get("sizes")
        self.marked = APART in graph.source
        """Whether the compiler has found steps that cannot be recorded."""
        self._learned: frozenset[str] = frozenset()
        """Library calls that have failed in a recording, by their names in the text."""
        self.make: Callable[..., Call] = text["make"]
        self._quiet: bool = text.get("quiet", False)
        """Whether the program ignores grad mode. Reading and setting the mode takes 3 us where the caches
        were evicted.
        """
        fixed = graph.arena_bytes
        self.needs: Callable[..., int] = text.get("arena_bytes", lambda: fixed)
        """Bytes of the arena, given the sizes."""
        self._workspaces = Workspaces() if workspaces is None else workspaces

    def __call__(self, args: list[Any], *, buckets: AnySource | None = None, sync: bool = False) -> list[Any]:
        """Run the program; `args` is emptied.

        It makes as few Python calls as possible: where kernels have evicted the caches, each takes 2 to 4 us.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self(args, buckets=buckets, sync=sync)
        device = self._device(args) if self.on_gpu else -1
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(args, buckets=buckets, sync=sync)
        if device >= 0 and torch.cuda.is_current_stream_capturing():
            # the caller's own CUDA graph, which may outlive an arena that is shared with other calls
            return self.once(args, buckets, sync)
        if self._constants:
            args.extend(self._constants)
        idle = self._workspaces.idle[device]
        try:
            workspace = idle.pop()
        except IndexError:
            workspace = self._workspaces.another(device)
        try:
            call = workspace.fixed.get(self)
            if call is None:
                call = workspace.call(self, () if self._sizes is None else self._sizes(args))
            return call(args, buckets, sync)
        except (RuntimeError, IndexError) as error:
            self._explain(error)
            raise
        finally:
            if workspace.lasting:
                idle.append(workspace)

    @property
    def direct(self) -> Callable[..., list[Any]] | None:
        """Function that compiled code may call instead of `__call__`; None if there is none."""
        return None if self.on_gpu or self.buckets else self._run_direct

    def _run_direct(self, *given: Any) -> list[Any]:
        """Run on a CPU, without collectives, from the arguments as compiled code has them.

        It repeats `__call__`, because shared code would cost each of them one more Python call.
        """
        args = [*given, *self._constants]
        recording, idle = not self._quiet and torch.is_grad_enabled(), self._workspaces.idle[-1]
        try:
            workspace = idle.pop()
        except IndexError:
            workspace = self._workspaces.another(-1)
        try:
            if recording:
                set_grad_enabled(False)
            call = workspace.fixed.get(self)
            if call is None:
                call = workspace.call(self, () if self._sizes is None else self._sizes(args))
            return call(args, None, False)
        except (RuntimeError, IndexError) as error:
            self._explain(error)
            raise
        finally:
            if recording:
                set_grad_enabled(True)
            if workspace.lasting:
                idle.append(workspace)

    def _explain(self, error: Exception) -> None:
        name_collective(error, self.source)
        name_kernel(error, self.source)

    def _device(self, args: list[Any]) -> int:
        return cuda_launch.device_of([*args, *self._constants]) if self.on_gpu else -1

    def once(self, args: list[Any], buckets: AnySource | None = None, sync: bool = False) -> list[Any]:
        """Run with an arena that is freed after the call: for a recording, with memory of the recorder's pool."""
        # held during the call, which knows addresses in it
        workspace = Workspace(self._device(args), host=self._workspaces.host)
        args.extend(self._constants)
        sizes = () if self._sizes is None else self._sizes(args)
        with torch.no_grad():
            return workspace.call(self, sizes)(args, buckets, sync)

    @functools.cached_property
    def in_parts(self) -> HostParts | None:
        """The program in parts, if some steps cannot be recorded."""
        if not self.marked and not self._learned:
            return None
        return HostParts(self, split_statements(host_statements(self.source, self._learned)), self._constants)

    def set_apart(self, error: BaseException) -> str:
        """Leave the library call at which a recording failed out of later ones; return its name, or "" if unknown."""
        callee = "" if isinstance(error, torch.OutOfMemoryError) else failed_call(error)
        if not callee or callee in self._learned or len(self._learned) >= MAX_LEARNED:
            return ""
        self._learned |= {callee}
        self.__dict__.pop("in_parts", None)
        found = re.search(rf"^    {callee} = .*?(?:torch\.ops\.|')([\w.]+)", self.source, re.MULTILINE)
        return found[1].removesuffix(".default") if found else callee

    def release(self) -> None:
        """Free the arenas of earlier calls; a later call allocates anew."""
        self._workspaces.release()

    def measure(self, recorder: CallRecorder | None) -> None:
        """Report each step to `recorder` from the next call on, by an instrumented text; None restores the usual."""
        self._workspaces.release()  # prepared calls belong to the other text
        if recorder is None:
            self.make = _load(self.source, self.name)["make"]
        else:
            source, statements = instrument(self.source)
            probe = ProgramProbe(self.name, statements, recorder)
            self.make = _load(source, f"{self.name} measured", _probe=probe)["make"]


class HostParts:
    """A host program whose call is a list of functions; see `graph_partition`. Each recording prepares it."""

    def __init__(self, program: HostProgram, parts: tuple[HostPart, ...], constants: list[Any]) -> None:
        self.parts, self.source = parts, parts_text(program.source, parts)
        text = _load(self.source, f"{program.name} in parts")
        self.make: Callable[..., Any] = text["make"]
        self.libraries, self.report, self.needs = program.libraries, program.report, program.needs
        self._sizes: Callable[[list[Any]], tuple[int, ...]] | None = text.get("sizes")
        self._constants, self._on_gpu = constants, program.on_gpu

    def begin(self, args: list[Any]) -> tuple[int, tuple[int, ...]]:
        """Complete the arguments. Return the device (-1: the CPU) and the sizes, for which a call is prepared."""
        args.extend(self._constants)
        return cuda_launch.device_of(args) if self._on_gpu else -1, () if self._sizes is None else self._sizes(args)

    def prepare(self, device: int, sizes: tuple[int, ...]) -> tuple[list[Call], Arena]:
        """Prepare a call. Return its functions, and the owner of the arena that they address."""
        workspace, arena = Workspace(device), Arena(self.needs(*sizes), "cpu" if device < 0 else f"cuda:{device}")
        workspace.arena = arena.borrowed()
        functions: Any = workspace.call(self, sizes)
        return functions, arena


def failed_call(error: BaseException | None) -> str:
    """Name, in a host program's text, of the library call that raised first; empty if none did.

    A capture that has failed raises once more as it ends.
    """
    callee = ""
    while error is not None:
        places = ((frame.f_code.co_filename, at) for frame, at in traceback.walk_tb(error.__traceback__))
        place = next((place for place in places if place[0].startswith("<dcompile ")), None)
        callee = (place is not None and called(linecache.getline(*place))) or callee
        error = error.__context__
    return callee


def name_kernel(error: Exception, source: str) -> None:
    """Add a note to an error that a kernel reported: the kernel's operations, and where the user wrote them."""
    lines, at = source.split("\n"), _line_of(error)
    if at is None or "run.failed(" not in lines[at - 1]:
        return
    comment = next((line.strip() for line in reversed(lines[: at - 1]) if line.strip().startswith("# ")), "")
    error.add_note(f"dcompile: found by a kernel that does {comment[2:]}" if comment else "dcompile: found by a kernel")


def _line_of(error: Exception) -> int | None:
    """Line of a host program in which an error was raised; None if it was not in one."""
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<dcompile "):
        trace = trace.tb_next
    return None if trace is None else trace.tb_lineno


def name_collective(error: Exception, source: str) -> None:
    """Add a note to an error of this host program that came from one of the model's own collectives.

    For a wait, the note names the collective's start. Other collectives name themselves (`PendingCollective`).
    """
    lines, at = source.split("\n"), _line_of(error)
    if at is None:
        return
    callee = re.search(r"\b(_(?:op|collective)\d+)(?:\(|\.wait\()", lines[at - 1])
    found = callee and re.search(rf"^ *{callee[1]} = .*\b(_c10d_functional\.[\w.]+)", source, re.MULTILINE)
    if callee and found:
        start = next((n for n in range(at - 1, 0, -1) if f"{callee[1]}(" in lines[n]), at - 1)
        comment = lines[start - 1].strip()
        origin = f" ({comment[2:]})" if comment.startswith("# ") else ""
        error.add_note(
            f"dcompile: rank {dist.get_rank()} was in the model's own collective {found[1]}{origin}; "
            "another rank has failed, stalled, or does not run this step"
        )


def _load(source: str, name: str, **names: Any) -> dict[str, Any]:
    """Execute a host program that may use `names`, and return its functions.

    Tracebacks and debuggers find its lines.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    filename = f"<dcompile {name} {digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {**names}
    exec(compile(source, filename, "exec"), namespace)
    return namespace
