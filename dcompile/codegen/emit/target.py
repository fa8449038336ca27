"""What a target supplies: a language, a spelling for each operation, and one function from a loop to its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dcompile.ir.index import Size
from dcompile.ir.nodes import View


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


@dataclass(frozen=True, slots=True)
class Emitter:
    """One target. `spelling` maps each op to a format string over {0}, {1}, {2} and {dtype}, the result's."""

    language: str
    spelling: Mapping[str, str]
