"""Runs a compiled graph: loads its kernels and its host program, and gives every call an arena of its own."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import linecache
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dcompile.collectives.params import BucketSource
from dcompile.errors import BuildError
from dcompile.runtime import checks, gpu
from dcompile.runtime.arena import Arena, Fresh, Recycled
from dcompile.runtime.compiled import Loadable
from dcompile.runtime.probe import Probe, Recorder, instrument

Call = Callable[[list[Any], BucketSource | None, bool], list[Any]]


SIZES_KEPT = 16
"""Sizes for which a dynamic program keeps its prepared calls; preparing one takes about as long as running it once."""


class HostProgram:
    """A compiled graph; see `collectives.params.Executable`.

    A call takes a workspace from the idle ones and gives it back; if there is none (a second thread, or a call within
    a call), it prepares another, with another arena, and drops it afterwards.
    """

    def __init__(self, name: str, loadable: Loadable) -> None:
        graph = loadable.graph
        self.report = dataclasses.replace(graph.report, notes=[*graph.report.notes])
        self.buckets = graph.buckets
        self.source = graph.source
        self.mutated = graph.mutated
        self._arena_bytes = graph.arena_bytes
        self._libraries = loadable.libraries
        self._constants = [loadable.constants[constant] for constant in graph.constants]
        self.on_gpu = graph.device != "cpu"
        for symbol, path in self._libraries.items():
            if path.suffix == ".so":
                kernel(path, symbol)  # a library that cannot be loaded shows now, not in the first step
        self.name = name
        self._text = _load(graph.source, name)
        self._sizes: Callable[[list[Any]], tuple[int, ...]] | None = self._text.get("sizes")
        self._idle: dict[int, list[_Workspace]] = {}
        """For each GPU; -1 is none."""

    def __call__(self, args: list[Any], *, buckets: BucketSource | None = None, sync: bool = False) -> list[Any]:
        """Run the program; `args` is emptied."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self(args, buckets=buckets, sync=sync)
        args.extend(self._constants)
        device = self._device(args)
        if device < 0 or device == torch.cuda.current_device():
            return self._run(args, buckets, sync, device)
        with torch.cuda.device(device):
            return self._run(args, buckets, sync, device)

    def _device(self, args: list[Any]) -> int:
        return gpu.device_of(args) if self.on_gpu else -1

    def _run(self, args: list[Any], buckets: BucketSource | None, sync: bool, device: int) -> list[Any]:
        sizes = () if self._sizes is None else self._sizes(args)
        lasting = True
        try:
            workspace = self._idle[device].pop()
        except (KeyError, IndexError):
            lasting = device not in self._idle
            self._idle.setdefault(device, [])
            workspace = _Workspace(self._text, self._arena_bytes, self._libraries, device)
        try:
            return workspace.call(sizes)(args, buckets, sync)
        finally:
            if lasting:
                self._idle.setdefault(device, []).append(workspace)

    def once(self, args: list[Any], buckets: BucketSource | None = None, sync: bool = False) -> list[Any]:
        """Run with an arena that ends with the call: to be recorded, with memory of the recorder's pool."""
        args.extend(self._constants)
        sizes = () if self._sizes is None else self._sizes(args)
        with torch.no_grad():
            workspace = _Workspace(self._text, self._arena_bytes, self._libraries, self._device(args))
            return workspace.call(sizes)(args, buckets, sync)

    def release(self) -> None:
        """Let go of the arenas of earlier calls; a later call makes one anew."""
        self._idle.clear()

    def measure(self, recorder: Recorder | None) -> None:
        """From the next call on, run a text that tells `recorder` of each step; with None, the program's own again."""
        self._idle = {}  # calls that are prepared belong to the other text
        if recorder is None:
            self._text = _load(self.source, self.name)
        else:
            source, statements = instrument(self.source)
            probe = Probe(self.name, statements, recorder)
            self._text = _load(source, f"{self.name} measured", _probe=probe)


class _Workspace:
    """An arena, and the calls prepared in it: one, or where sizes vary, one for each of the sizes met last."""

    def __init__(self, text: Mapping[str, Any], arena_bytes: int, libraries: Mapping[str, Path], device: int) -> None:
        self._device = device
        self._make = text["make"]
        self._needed: Callable[..., int] = text.get("arena_bytes", lambda: arena_bytes)
        self._libraries = libraries
        self._run: _Run | None = None
        """Owns the arena, of which calls know only addresses."""
        self._calls: OrderedDict[tuple[int, ...], Call] = OrderedDict()

    def call(self, sizes: tuple[int, ...]) -> Call:
        """The call for these sizes."""
        found = self._calls.get(sizes)
        if found is None:
            found = self._prepare(sizes)
        elif len(self._calls) > 1:
            self._calls.move_to_end(sizes)
        return found

    def _prepare(self, sizes: tuple[int, ...]) -> Call:
        with torch.inference_mode(False):  # views of the arena outlive the mode of the call that made them
            needed = self._needed(*sizes)
            if self._run is None or self._run.arena.nbytes < needed:
                self._calls.clear()  # before the arena goes to which they point
                recycled = {} if self._run is None else self._run.results
                self._run = None
                self._run = _Run(needed, self._libraries, recycled, self._device)
            call: Call = self._make(self._run, *sizes)
        self._calls[sizes] = call
        if len(self._calls) > SIZES_KEPT:
            self._calls.popitem(last=False)
        return call


class _Run:
    """What a host program asks for while it prepares itself, and for rare cases while it runs."""

    def __init__(
        self, arena_bytes: int, libraries: Mapping[str, Path], results: dict[str, Recycled], device: int
    ) -> None:
        self.device = device
        self.arena = Arena(arena_bytes, "cpu" if device < 0 else f"cuda:{device}")
        self.libraries = libraries
        self.results = results
        """Memory of results whose size varies, by name."""
        self._stream: torch.cuda.Stream | None = None

    def at(self, offset: int) -> gpu.Address:
        """An address in the arena, for a launch table."""
        return gpu.Address(self.arena.address + offset)

    def launches(self, count: int, kernels: list[tuple[str, str, int, tuple[int, ...]]]) -> gpu.Launches:
        """A run of kernels: each its name, function, grid and arguments, which are addresses or one of `count`."""
        found = [(self.libraries[name], function, grid, arguments) for name, function, grid, arguments in kernels]
        launcher = gpu.launcher(library(self.libraries[gpu.LAUNCHER]))
        return gpu.Launches(launcher, self.device, count, found)

    def stream(self) -> int:
        """The stream to launch on. The arena follows: what another stream still does with it is waited for."""
        now = gpu.stream_of(self.device)
        if self._stream is None or self._stream.cuda_stream != now:
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None and not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(self._stream)
                self.arena.used_on(stream)
            self._stream = stream
        return now

    @staticmethod
    def realigned(call: Call, args: list[Any], written: tuple[int, ...], buckets: Any, sync: bool) -> list[Any]:
        """Call again with copies of those arguments that do not start at whole 16 bytes, as kernels expect.

        Arguments at the positions `written` get what the program wrote back.
        """
        given = [*args]
        for place, arg in enumerate(given):
            if isinstance(arg, torch.Tensor) and arg.is_cuda and arg.data_ptr() % 16:
                args[place] = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device).copy_(
                    arg
                )
        copies = {place: args[place] for place in written if args[place] is not given[place]}
        results = call(args, buckets, sync)
        for place, copy in copies.items():
            given[place].copy_(copy)
        return results

    @property
    def address(self) -> int:
        """Where the arena begins."""
        return self.arena.address

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
        """A tensor in the arena."""
        return self.arena.view(dtype, shape, strides, offset)

    def fresh(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Fresh:
        """An allocator of one large result."""
        return Fresh(dtype, shape, strides)

    def recycled(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Callable[[], torch.Tensor]:
        """An allocator of one result whose size varies from call to call."""
        memory = self.results.setdefault(name, Recycled())
        return functools.partial(memory, dtype, shape, strides)

    def kernel(self, name: str, addresses: int, sizes: int = 0) -> Any:
        """A compiled kernel that takes this many addresses, and after them this many sizes."""
        function = kernel(self.libraries[name], name)
        function.argtypes = [ctypes.c_void_p] * addresses + [ctypes.c_int64] * sizes
        return function

    @staticmethod
    def numbers(*values: int) -> ctypes.Array[ctypes.c_int64]:
        """Integers in memory, for a kernel that takes their address."""
        return (ctypes.c_int64 * len(values))(*values)

    @staticmethod
    def function(op: str) -> Callable[..., Any]:
        """A function that is not in `torch.ops`."""
        return checks.function(op)

    @staticmethod
    def bucket_view(
        memory: Any, name: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """A tensor in bucket memory, built once for each memory."""
        key = (name, shape, strides, offset)
        found = memory.tensors.get(key)
        if found is None:
            found = memory.tensors[key] = memory.flat.as_strided(shape, strides, offset)
        return found  # type: ignore[no-any-return]

    @staticmethod
    def fit(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        """A library result with the strides that kernels were made for; strides of single elements do not matter."""
        pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
        fits = tensor.numel() == 0 or all(size == 1 or actual == planned for size, actual, planned in pairs)
        if fits and not (tensor.is_cuda and tensor.data_ptr() % 16):
            return tensor
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    @staticmethod
    def division_by_zero() -> None:
        """What eager says after an integer division by zero."""
        raise RuntimeError("ZeroDivisionError")


@cache
def library(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"dcompile: cannot load compiled kernels from {path}: {error}; delete it to build it again"
        ) from error


def kernel(path: Path, name: str) -> Any:
    """A function of a compiled library, returning an integer."""
    try:
        function = getattr(library(path), name)
    except AttributeError:
        raise BuildError(f"dcompile: {path} has no kernel {name}; delete it to build it again") from None
    function.restype = ctypes.c_long
    return function


def _load(source: str, name: str, **names: Any) -> dict[str, Any]:
    """The functions of a host program, which may use `names`. Tracebacks and debuggers find its lines."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    filename = f"<dcompile {name} {digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {**names}
    exec(compile(source, filename, "exec"), namespace)
    return namespace
