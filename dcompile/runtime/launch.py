"""Runs a compiled graph: loads its kernels and its host program, and gives every call an arena of its own."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dcompile.collectives.params import BucketSource
from dcompile.errors import BuildError
from dcompile.runtime import checks
from dcompile.runtime.arena import Arena, Fresh
from dcompile.runtime.compiled import Loadable

Call = Callable[[list[Any], BucketSource | None, bool], list[Any]]


class HostProgram:
    """A compiled graph; see `collectives.params.Executable`.

    A call takes a prepared host program from the idle ones and gives it back; if there is none (a second thread, or a
    call within a call), it prepares another, with another arena, and drops it afterwards.
    """

    def __init__(self, name: str, loadable: Loadable) -> None:
        graph = loadable.graph
        self.report = dataclasses.replace(graph.report, notes=[*graph.report.notes])
        self.buckets = graph.buckets
        self.source = graph.source
        self._arena_bytes = graph.arena_bytes
        self._libraries = loadable.libraries
        self._constants = [loadable.constants[constant] for constant in graph.constants]
        for symbol, path in self._libraries.items():
            kernel(path, symbol)  # a library that cannot be loaded shows now, not in the first step
        self._make = _load(graph.source, name)
        self._idle: list[tuple[Call, _Run]] = []
        """Prepared calls; each with what owns the arena, of which the call itself knows only addresses."""
        self._prepared = False

    def __call__(self, args: list[Any], *, buckets: BucketSource | None = None, sync: bool = False) -> list[Any]:
        """Run the program; `args` is emptied."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self(args, buckets=buckets, sync=sync)
        args.extend(self._constants)
        try:
            call, run = self._idle.pop()
            lasting = True
        except IndexError:
            lasting = not self._prepared
            self._prepared = True
            with torch.inference_mode(False):  # views of the arena outlive the mode of the call that made them
                run = _Run(self._arena_bytes, self._libraries)
                call = self._make(run)
        try:
            return call(args, buckets, sync)
        finally:
            if lasting:
                self._idle.append((call, run))


@dataclass(frozen=True, eq=False)
class _Run:
    """What a host program asks for while it prepares itself, and for rare cases while it runs."""

    arena: Arena
    libraries: Mapping[str, Path]

    def __init__(self, arena_bytes: int, libraries: Mapping[str, Path]) -> None:
        object.__setattr__(self, "arena", Arena(arena_bytes))
        object.__setattr__(self, "libraries", libraries)

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

    def kernel(self, name: str, arguments: int) -> Any:
        """A compiled kernel that takes this many addresses."""
        function = kernel(self.libraries[name], name)
        function.argtypes = [ctypes.c_void_p] * arguments
        return function

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
        if tensor.numel() == 0 or all(size == 1 or actual == planned for size, actual, planned in pairs):
            return tensor
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    @staticmethod
    def division_by_zero() -> None:
        """What eager says after an integer division by zero."""
        raise RuntimeError("ZeroDivisionError")


@cache
def _library(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"dcompile: cannot load compiled kernels from {path}: {error}; delete it to build it again"
        ) from error


def kernel(path: Path, name: str) -> Any:
    """A function of a compiled library, returning an integer."""
    try:
        function = getattr(_library(path), name)
    except AttributeError:
        raise BuildError(f"dcompile: {path} has no kernel {name}; delete it to build it again") from None
    function.restype = ctypes.c_long
    return function


def _load(source: str, name: str) -> Callable[[_Run], Call]:
    """The `make` of a host program. Tracebacks and debuggers find its lines."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    filename = f"<dcompile {name} {digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace)
    return namespace["make"]  # type: ignore[no-any-return]
