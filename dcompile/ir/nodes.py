"""Nodes of a program: frozen data that describe what one graph computes, step by step.

A `Program` is a list of steps over named buffers. A `Loop` is one fused kernel: a row space (`outer`), an inner space
inside each row (`inner`), and one body in SSA form.

A value of the body is a row value if it depends on no inner variable and no `Scan`, except through a `Reduce`.
Otherwise it is an element value. From that, an emitter can split the body into passes over the row. Pointwise kernels,
reductions and row programs have no separate forms.

Loop variables are `i0, i1, ...` over `outer` and `j0, j1, ...` over `inner`. An index counts elements from the start of
its buffer. A variable `v7` in an index is the run-time integer computed by value 7 of the same body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from dcompile.ir.buffers import Bucket, Buffer
from dcompile.ir.collective_kinds import COLLECTIVES, CollectiveKind, bucket_traits
from dcompile.ir.index import Index, Size

Ref: TypeAlias = int
"""Position of an earlier value in the same body."""


@dataclass(frozen=True, slots=True)
class Const:
    """A literal."""

    value: bool | int | float
    dtype: str


@dataclass(frozen=True, slots=True)
class IndexOf:
    """Value of an index expression at this point of the loop."""

    index: Index
    dtype: str = "int64"


@dataclass(frozen=True, slots=True)
class Load:
    """One element of a buffer. Where `mask` is false, 0 without a memory access."""

    buffer: str
    index: Index
    dtype: str
    mask: Ref | None = None


@dataclass(frozen=True, slots=True)
class Apply:
    """An operation of `ir.ops.OPS` on earlier values. `dtype` is that of the result."""

    op: str
    args: tuple[Ref, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduction by `op` (a key of `ir.ops.REDUCTIONS`) over the whole inner space of the current row."""

    op: str
    arg: Ref
    dtype: str


@dataclass(frozen=True, slots=True)
class Scan:
    """Inclusive scan by `op` (a key of `ir.ops.SCANS`): combines the elements of the current row up to this one.

    The inner space is traversed in row-major order. The result is an element value, even if `arg` is a row value.
    Values are combined sequentially in `dtype`, so that the result depends on the row only.
    """

    op: str
    arg: Ref
    dtype: str


Value: TypeAlias = Const | IndexOf | Load | Apply | Reduce | Scan


@dataclass(frozen=True, slots=True)
class Store:
    """Store of a value.

    `set` writes each element exactly once. A reduction's name (`sum`, `max`, ...) makes a column reduction: it combines
    all values of the loop that have the same index. The buffer starts with the reduction's identity everywhere. A store
    whose index and value are row values happens once per row, any other once per element.
    """

    buffer: str
    index: Index
    value: Ref
    mode: str = "set"


@dataclass(frozen=True, slots=True)
class Tile:
    """Tiling of a GEMM on a GPU: rows and columns of the result per program, and depth of the factors per step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    """Number of pipeline stages: depth steps whose factors are prefetched."""
    parts: int = 1
    """Number of column slices in which the epilogue runs, one after another. A single slice needs more registers."""
    programs: int = 0
    """Number of persistent programs, which walk over the tiles. 0: one program per tile."""
    flat: bool = False
    """Whether a program's tiles and their depth steps are one loop, which prefetches the next tile's factors as one
    ends.
    """
    descriptors: bool = False
    """Whether factors are read by the tensor memory accelerator, from compute capability 9.0 on."""

    def __str__(self) -> str:
        how = f", {self.programs} programs" if self.programs else ""
        return f"{self.rows}x{self.columns}x{self.depth}, {self.warps} warps{how}"


@dataclass(frozen=True, slots=True)
class Matmul:
    """GEMM with a loop as its epilogue. `call` is an mm or addmm whose result only the loop must see."""

    call: Extern
    dtype: str
    """Dtype of the result and of the factors."""
    tile: Tile

    @property
    def out(self) -> str:
        """Name of the result. It is stored in memory only if the loop stores it."""
        (name,) = self.call.outs
        assert name is not None, "a product without a result"
        return name


@dataclass(frozen=True, slots=True)
class Loop:
    """One kernel. `origin` names the modules and operations that it came from, for people.

    With a `product`, `outer` and `inner` are the rows and columns of its result. Loads of the result need no memory
    access. `tile` is a measured choice for a loop that sums products of few rows and a matrix; without it, the sizes
    decide (`nest/contraction.py`).
    """

    name: str
    outer: tuple[Size, ...]
    inner: tuple[Size, ...]
    body: tuple[Value, ...]
    stores: tuple[Store, ...]
    origin: tuple[str, ...] = ()
    product: Matmul | None = None
    tile: Tile | None = None

    @property
    def reads(self) -> frozenset[str]:
        loaded = frozenset(value.buffer for value in self.body if isinstance(value, Load))
        return loaded if self.product is None else loaded - {self.product.out} | self.product.call.reads

    @property
    def writes(self) -> frozenset[str]:
        return frozenset(store.buffer for store in self.stores)


@dataclass(frozen=True, slots=True)
class View:
    """Strided view of a buffer; shape, strides and offset in elements."""

    buffer: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size = 0


@dataclass(frozen=True, slots=True)
class Verbatim:
    """An argument of a library call that is opaque to the compiler: `torch.float32`, `torch.strided`, ..."""

    text: str


SCALE = Verbatim("_scale")
"""Factor that averages gradients over ranks, by its name in the host program, which gets its value from a
`BucketSource`. Plans depend neither on the number of ranks nor on whether a backward will reduce.
"""
CALL = "dcompile.call"
"""Op for calls, call(function, *tensors), of ops whose arguments have no text, such as graphs and dictionaries.

The function returns a tensor, or a tuple of several. Without a schema, a tuple of one could not be distinguished from
its element.
"""
REGION = "dcompile.region"
"""Op that calls another compiler's code for a region of the graph: region(made, *inputs)."""
SCALED = (("beta", 0), ("alpha", SCALE))
"""Keywords of an `addmm` that is a product times this factor; nothing is added."""

Arg: TypeAlias = "View | Index | Verbatim | bool | int | float | str | tuple[Arg, ...] | None"


@dataclass(frozen=True, slots=True)
class Extern:
    """A library call.

    `op` is an ATen overload such as `aten.mm.default`. `mode` is one of:

    - `out`: writes its results to `outs`, which the compiler has placed; the emitter calls the out= overload.
    - `alloc`: the library allocates. `outs` name the results in order; None is a result that is unused or not a tensor.
    - `mutate`: works on its arguments in place, in the order of `outs`.

    `fallback` is true where a loop was wanted, but there is no lowering; the receipt counts it. `effect` is true for
    calls that affect more than their results: random numbers, collectives, checks that may raise, in-place operations.
    Such calls keep their order and are never dropped. `aliases` is true where results may be views of arguments.
    `tells` are size symbols whose value the results define, for later steps. `cost_us`, if not 0, is the time of a call
    that the cost model cannot estimate, in microseconds.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outs: tuple[str | None, ...]
    mode: Literal["out", "alloc", "mutate"]
    fallback: bool = False
    origin: tuple[str, ...] = ()
    effect: bool = False
    aliases: bool = False
    tells: tuple[str, ...] = ()
    cost_us: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether arguments must live as long as results, which may be views of them.

        Nothing is known about fallbacks. A functional collective reads its arguments until the wait for its result.
        """
        return self.mode == "alloc" and (self.fallback or self.effect or self.aliases)

    @property
    def leaves(self) -> Iterator[Arg]:
        """Arguments, and keyword arguments after them, with those inside tuples, depth first."""
        for arg in (*self.args, *(value for _, value in self.kwargs)):
            yield from leaves_of(arg)

    @property
    def views(self) -> tuple[View, ...]:
        """All views among the arguments, in this order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, View))

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(view.buffer for view in self.views)

    @property
    def writes(self) -> frozenset[str]:
        return frozenset(name for name in self.outs if name is not None)


@dataclass(frozen=True, slots=True)
class Collective:
    """Start of a collective on a bucket; a later Wait ends it. Every rank starts the same ones in the same order.

    A copy to or from host memory is one by its kind: it has a start, a link of its own and a wait, but no other ranks.

    An all_reduce works on `buffers` in place. An all_gather fills them from the shards that the ranks hold. A
    reduce_scatter sums them over the ranks, and each rank keeps its shard of the sums outside of the program, but for
    the shards that it has in `made`. Afterwards, the content of the other `buffers` is undefined.

    One of the model's own has a `call`, torch's functional collective, and is named after its first result. It reads
    the views among the call's arguments, and writes `buffers`. Buffers that it both reads and writes are changed in
    place.
    """

    kind: CollectiveKind
    bucket: str
    group: str
    buffers: tuple[str, ...]
    call: Extern | None = None
    made: tuple[str, ...] = ()
    """Of `buffers`: the reduced shards that the program itself uses, in memory that the run time allocates."""

    @property
    def reads(self) -> frozenset[str]:
        if self.call is not None:
            return self.call.reads
        return frozenset() if self.gathers_parameters else frozenset(self.buffers).difference(self.made)

    @property
    def writes(self) -> frozenset[str]:
        return frozenset(self.buffers)

    @property
    def gathers_parameters(self) -> bool:
        """Whether it is one of dcompile's own that fill buffers from shards; the model's own send results."""
        return self.call is None and bucket_traits(self.kind).gathers

    @property
    def copies_by_host(self) -> bool:
        """Whether it is a copy to or from host memory, which a rank does alone."""
        return COLLECTIVES[self.kind].result == "copy"

    @property
    def in_place(self) -> bool:
        """Whether it has its results where it reads what it sends, so that it holds no memory of its own."""
        return COLLECTIVES[self.kind].in_place

    @property
    def sent(self) -> tuple[str, ...]:
        """Buffers that it reads while in flight, and does not change."""
        return tuple(sorted(self.reads - self.writes))

    @property
    def origin(self) -> tuple[str, ...]:
        """Module and operation of one of the model's own, for people."""
        return () if self.call is None else self.call.origin


@dataclass(frozen=True, slots=True)
class Wait:
    """End of the collective on `bucket`.

    Before it, no step may touch its buffers, nor write to those that it has `sent`.
    """

    bucket: str
    buffers: tuple[str, ...]
    sent: tuple[str, ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        return frozenset((*self.buffers, *self.sent))

    @property
    def writes(self) -> frozenset[str]:
        return frozenset(self.buffers)


Step: TypeAlias = Loop | Extern | Collective | Wait


PART = "dcompile_part"
"""Key in a traced operation's custom metadata for the number of the part that its result belongs to. Parts of one whole
should not be live at the same time.
"""


@dataclass(frozen=True, slots=True)
class Program:
    """Computation of one graph. `inputs` are buffer names, or size symbols for integer inputs, in call order."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[View | Index | int | float | bool | None, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    grads: tuple[tuple[int, int], ...] = ()
    """(position in `outputs`, parameter number) of each output that is a gradient to be synchronized across ranks."""
    buckets: tuple[Bucket, ...] = ()
    arena_bytes: Size = 0
    sizes: tuple[tuple[str, Index], ...] = ()
    """Values of integer inputs that are not size symbols themselves, as expressions of size symbols."""
    donated: tuple[str, ...] = ()
    """Inputs whose memory the program may reuse after their last read."""
    parts: tuple[tuple[str, int], ...] = ()
    """(buffer, number) of buffers that belong to one of several parts. Fusion does not join loops of different parts,
    since the parts would then be live at the same time.
    """

    @property
    def table(self) -> dict[str, Buffer]:
        return {buffer.name: buffer for buffer in self.buffers}

    @property
    def returned(self) -> frozenset[str]:
        """Buffers that outputs are views of."""
        return frozenset(output.buffer for output in self.outputs if isinstance(output, View))


def leaves_of(arg: Arg) -> Iterator[Arg]:
    """Yield an argument, or what is inside of it if it is a tuple, depth first."""
    if isinstance(arg, tuple):
        for item in arg:
            yield from leaves_of(item)
    else:
        yield arg


def views_of(arg: Arg) -> Iterator[View]:
    """Yield all views inside an argument, depth first."""
    return (leaf for leaf in leaves_of(arg) if isinstance(leaf, View))


def map_arguments(call: Extern, change: Callable[[Arg], Arg]) -> Extern:
    """Return a call with each argument changed; of a tuple, what is inside of it."""

    def changed(arg: Arg) -> Arg:
        return tuple(map(changed, arg)) if isinstance(arg, tuple) else change(arg)

    kwargs = tuple((name, changed(value)) for name, value in call.kwargs)
    return replace(call, args=tuple(map(changed, call.args)), kwargs=kwargs)
