"""What a target supplies: a language, a spelling for each operation, and one function from a loop to its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dcompile.device_traits import DeviceTraits
from dcompile.ir.index import Size
from dcompile.ir.nodes import Buffer, Loop, View


@dataclass(frozen=True, slots=True)
class Launch:
    """How a GPU runs one function of a kernel's text: `grid` programs of `warps` times 32 threads.

    `arguments` are positions in the kernel's list of buffers and, behind those, its size symbols; `types` are their
    types, as the language spells them.
    """

    function: str
    grid: Size
    warps: int
    arguments: tuple[int, ...]
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel. Loops that differ only in names have equal text, and so one name: they share one compiled function.

    `arguments` are the buffers to pass, in order, and after them the size symbols in `sizes`, as 64-bit integers.
    A GPU kernel has the integers `numbers` behind those.
    `checked` kernels return non-zero after an integer division by zero, or where a position lay outside.
    `launches` is what runs it on a GPU, in order; a C++ kernel is called and has none.
    """

    name: str
    text: str
    arguments: tuple[str, ...] = field(compare=False)
    cost: int
    """Number of operations, for balancing the compiler's work."""
    checked: bool
    origin: tuple[str, ...] = field(default=(), compare=False)
    sizes: tuple[str, ...] = field(default=(), compare=False)
    launches: tuple[Launch, ...] = ()
    numbers: tuple[int, ...] = field(default=(), compare=False)
    plan: tuple[str, ...] = field(default=(), compare=False)
    """What was decided about its loops, a line each, for people."""
    kind: str = ""
    """How a kernel for GPUs goes through its loop: `gpu_tiling.Kind`."""


@dataclass(frozen=True, slots=True)
class LibraryReplacement:
    """A library call that a kernel of ours does instead: a matrix product, or on a GPU what no loop says.

    `views` of a product are left, right, result and what is added (or None), `sizes` what it is told beside addresses.
    A GPU's kernel names its buffers itself, as those of loops do.
    """

    kernel: KernelSource
    views: tuple[View | None, ...] = ()
    sizes: tuple[Size, ...] = ()


@dataclass(frozen=True, slots=True)
class Kernels:
    """All kernels of a program: one for each of its loops, in order, and each different one once."""

    calls: tuple[KernelSource, ...]
    products: Mapping[int, LibraryReplacement] = field(default_factory=dict)
    """Library calls, by their position among the steps, that a kernel of ours does instead."""

    @property
    def sources(self) -> tuple[KernelSource, ...]:
        used = (*self.calls, *(product.kernel for product in self.products.values()))
        return tuple({kernel.name: kernel for kernel in used}.values())


class Cache(Protocol):
    """Where compiled kernels are kept."""

    @property
    def directory(self) -> Path:
        """Compilers write their output below here, so that publishing it is a rename."""

    def find(self, key: str) -> Path | None:
        """The library that holds a kernel, checked; None if it has to be built."""

    def put(self, keys: Sequence[str], built: Path) -> Path:
        """Take over a library that holds these kernels; returns where it is now."""


@dataclass(frozen=True, slots=True)
class Built:
    """Where each kernel is, by name; which were compiled now; their keys."""

    libraries: Mapping[str, Path]
    compiled: frozenset[str]
    keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def built(self) -> int:
        """How many were compiled now."""
        return len(self.compiled)

    @property
    def cached(self) -> frozenset[str]:
        """Names of those that were there already."""
        return frozenset(self.libraries) - self.compiled

    @property
    def cache_hits(self) -> int:
        """How many were there already."""
        return len(self.cached)


@dataclass(frozen=True, slots=True)
class EmitRequest:
    """What targets are given beside a loop: each reads what it knows."""

    decisions: Sequence[Any] = ()
    """What plans the nests of C++ kernels."""
    constant: frozenset[str] | None = None
    """Buffers that no step of the program writes; None where kernels start in turn."""


@dataclass(frozen=True, slots=True)
class Target:
    """What makes kernels for one type of device, which `traits` describe to all other stages.

    `spelling` maps each op to a format string over {0}, {1}, {2} and {dtype}, the result's. `emit` writes the kernel of
    a loop whose buffers are in the table.
    """

    language: str
    spelling: Mapping[str, str]
    traits: DeviceTraits
    emit: Callable[[Loop, Mapping[str, Buffer], EmitRequest], KernelSource]
