"""The interface of a target: a language, a spelling for each operation, and a function from a loop to its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dcompile.ir.index import Size
from dcompile.ir.nodes import View


@dataclass(frozen=True, slots=True)
class Launch:
    """One GPU launch of a function in a kernel's text: `grid` programs of `warps` times 32 threads.

    `arguments` are positions in the kernel's list of buffers followed by its size symbols; `types` are their types in
    the target's language.
    """

    function: str
    grid: Size
    warps: int
    arguments: tuple[int, ...]
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel. Loops that differ only in names have equal text and name, and share one compiled function.

    `arguments` are the buffers to pass, in order, followed by the size symbols in `sizes` as 64-bit integers. A GPU
    kernel then takes the integers in `numbers`.
    `checked` kernels return non-zero after an integer division by zero or a position out of range.
    `launches` are its launches on a GPU, in order; a C++ kernel is called and has none.
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
    """Decisions about its loops, one line each, for people."""
    kind: str = ""
    """Tiling of a GPU kernel: `gpu_tiling.Kind`."""


@dataclass(frozen=True, slots=True)
class LibraryReplacement:
    """A kernel that replaces a library call: a matmul, or on a GPU an operation without a loop form.

    `views` of a matmul are left, right, result and addend (or None); `sizes` are its arguments besides addresses. A GPU
    kernel lists its buffers itself, as those of loops do.
    """

    kernel: KernelSource
    views: tuple[View | None, ...] = ()
    sizes: tuple[Size, ...] = ()


@dataclass(frozen=True, slots=True)
class Kernels:
    """All kernels of a program: one for each of its loops, in order, and each distinct one once."""

    calls: tuple[KernelSource, ...]
    products: Mapping[int, LibraryReplacement] = field(default_factory=dict)
    """Library calls replaced by a kernel, by their position among the steps."""

    @property
    def sources(self) -> tuple[KernelSource, ...]:
        used = (*self.calls, *(product.kernel for product in self.products.values()))
        return tuple({kernel.name: kernel for kernel in used}.values())


@dataclass(frozen=True, slots=True)
class Emitter:
    """One target. `spelling` maps each op to a format string over {0}, {1}, {2} and {dtype}, the result's."""

    language: str
    spelling: Mapping[str, str]
