"""The interface of a target: a language, a spelling for each operation, and a function from a loop to its source.

Kernels of all targets are named after their main ops and a digest of their text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from dcompile.device_traits import DeviceTraits
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import Atom, Index, Size
from dcompile.ir.nodes import Apply, Loop, Reduce, Scan, View
from dcompile.ir.ops import OPS


def index_text(index: Index, atom: Callable[[Atom], str], times: str) -> str:
    """Return a position as a sum of products, joined by `times`; `atom` writes their factors."""
    parts = []
    for monomial, coefficient in index.terms:
        factors = [*map(atom, monomial)]
        if coefficient != 1 or not factors:
            factors.append(str(coefficient))
        parts.append(times.join(factors))
    return " + ".join(parts) or "0"


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
    """Tiling of a GPU kernel: `tile_plan.Kind`."""


@dataclass(frozen=True, slots=True)
class LibraryReplacement:
    """A kernel that replaces a library call: a matmul, or on a GPU an operation without a loop form.

    `views` are a CPU kernel's operands and results in its own order, None where one is missing; `sizes` are its other
    arguments. A GPU kernel lists its buffers itself, as those of loops do.
    """

    kernel: KernelSource
    views: tuple[View | None, ...] = ()
    sizes: tuple[Size, ...] = ()


@dataclass(frozen=True, slots=True)
class AllReduceKernel:
    """The kernel of a small all-reduce, for the run time. A program of it has `words` words of 32 bits of the operand.

    `loop` is the position among the program's loops of one that the kernel ends with. `source` then lists its buffers.
    """

    source: KernelSource
    words: int
    loop: int | None = None


@dataclass(frozen=True, slots=True)
class Kernels:
    """All kernels of a program: one for each of its loops, in order, and each distinct one once."""

    calls: tuple[KernelSource, ...] = ()
    products: Mapping[int, LibraryReplacement] = field(default_factory=dict)
    """Library calls replaced by a kernel, by their position among the steps."""
    all_reduces: Mapping[str, AllReduceKernel] = field(default_factory=dict)
    """Kernels of collectives that may be one kernel, by the collective's bucket. The run time launches them."""

    @property
    def sources(self) -> tuple[KernelSource, ...]:
        used = [*self.calls, *(product.kernel for product in self.products.values())]
        used += [kernel.source for kernel in self.all_reduces.values()]
        return tuple({kernel.name: kernel for kernel in used}.values())

    @property
    def epilogues(self) -> Mapping[int, str]:
        """Loops that the kernel of an all-reduce may end with, by their position among loops -> its bucket."""
        return {kernel.loop: bucket for bucket, kernel in self.all_reduces.items() if kernel.loop is not None}

    def with_products(self, found: Mapping[int, LibraryReplacement | None]) -> Kernels:
        """Add kernels that replace library calls, by position among the steps; None leaves a call to the library."""
        kept = {position: product for position, product in found.items() if product is not None}
        return replace(self, products={**self.products, **kept})

    def show(self) -> str:
        """Describe each kernel in a line: what it serves, its name, its buffers, and the programs of its launches."""
        used = [(f"loop {number}", call) for number, call in enumerate(self.calls)]
        used += [(f"step {position}", product.kernel) for position, product in self.products.items()]
        used += [(f"all-reduce {bucket}", kernel.source) for bucket, kernel in self.all_reduces.items()]
        sizes = ("".join(f" {launch.grid}x{launch.warps}" for launch in kernel.launches) for _, kernel in used)
        rows = zip(used, sizes, strict=True)
        return "\n".join(f"{what}: {kernel.name}({', '.join(kernel.arguments)}){size}" for (what, kernel), size in rows)


class Cache(Protocol):
    """Storage of compiled kernels."""

    @property
    def directory(self) -> Path:
        """Directory for the compilers' output, so that publishing it is a rename."""

    def find(self, key: str) -> Path | None:
        """Return the verified library that holds a kernel; None if it must be built."""

    def put(self, keys: Sequence[str], built: Path) -> Path:
        """Take over a library that holds these kernels; return its new path."""


@dataclass(frozen=True, slots=True)
class Built:
    """The library of each kernel, by name; the kernels compiled now; their keys."""

    libraries: Mapping[str, Path]
    compiled: frozenset[str]
    keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def built(self) -> int:
        """Number of kernels compiled now."""
        return len(self.compiled)

    @property
    def cached(self) -> frozenset[str]:
        """Names of the kernels found in the cache."""
        return frozenset(self.libraries) - self.compiled

    @property
    def cache_hits(self) -> int:
        """Number of kernels found in the cache."""
        return len(self.cached)


@dataclass(frozen=True, slots=True)
class EmitRequest:
    """What targets are given beside a program or a loop: each reads what it knows."""

    kind: str = ""
    """The graph's: "forward", "backward" or "inference"."""
    decisions: Sequence[Any] = ()
    """What plans the nests of C++ kernels."""
    arch: int | None = None
    """Compute capability of the GPU, as 90 for 9.0, if it is known."""
    constant: frozenset[str] | None = None
    """Buffers that a loop's kernel may read while the kernel before it ends; None where it starts in its turn."""


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


MAX_WORDS = 4
"""Ops in a name: those that characterize the kernel best."""


def describe_loop(loop: Loop) -> str:
    """Return a loop's reductions and costliest ops, in order of computation: `exp_sum_div`.

    A loop that computes nothing is a `copy`. Equal loops have equal names, whatever modules they came from.
    """
    words: dict[str, float] = {}
    for value in loop.body:
        match value:
            case Reduce(op=op) | Scan(op=op):
                words[op] = math.inf
            case Apply(op=op) if op != "cast":
                words.setdefault(op, OPS[op].cost)
            case _:
                pass
    for store in loop.stores:
        if store.mode != "set":
            words[store.mode] = math.inf
    kept = sorted(words, key=lambda word: -words[word])[:MAX_WORDS]
    return _joined([word for word in words if word in kept]) or "copy"


def _joined(words: Sequence[str]) -> str:
    return "_".join(re.sub(r"\W+", "", word) for word in words)


def kernel_name(described: str, digest: str) -> str:
    """Return the name of a kernel. `digest`: hexadecimal digits of its text, so that equal names have equal texts."""
    return f"fused_{described}_{digest[:16]}"
