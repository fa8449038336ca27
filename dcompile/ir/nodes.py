"""The program: frozen nodes that say what one graph computes, step by step.

A `Program` is a list of steps over named buffers. A `Loop` is one fused kernel: a row space (`outer`), a space inside
each row (`inner`), and one body in SSA form. A value of the body belongs to the row if it depends on no inner variable
and no `Scan` except through a `Reduce`, and to the element otherwise; that is all an emitter needs to split the body
into passes over the row. There is no separate form for pointwise kernels, reductions and row programs.

Loop variables are `i0, i1, ...` over `outer` and `j0, j1, ...` over `inner`. An index counts elements from the start of
its buffer. A variable `v7` in an index is the run-time integer computed by value 7 of the same body.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dcompile.ir.collective_kinds import COLLECTIVES, BucketTraits, CollectiveKind, PlannedKind, bucket_traits
from dcompile.ir.float8 import BYTES
from dcompile.ir.index import Index, Size, as_index, as_size

Ref: TypeAlias = int
"""Position of an earlier value in the same body."""


@dataclass(frozen=True, slots=True)
class Const:
    """A literal."""

    value: bool | int | float
    dtype: str


@dataclass(frozen=True, slots=True)
class IndexOf:
    """The integer that an index expression is at this point of the loop."""

    index: Index
    dtype: str = "int64"


@dataclass(frozen=True, slots=True)
class Load:
    """One element of a buffer; 0 without touching memory where `mask` is false."""

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
    """`op` (a key of `ir.ops.REDUCTIONS`) over the whole inner space of the current row."""

    op: str
    arg: Ref
    dtype: str


@dataclass(frozen=True, slots=True)
class Scan:
    """`op` (a key of `ir.ops.SCANS`) over the elements of the current row up to this one, this one included.

    The inner space counts in row-major order. The result belongs to the element, whatever `arg` is. Values are combined
    one after another in `dtype`, so that the result depends on nothing but the row.
    """

    op: str
    arg: Ref
    dtype: str


Value: TypeAlias = Const | IndexOf | Load | Apply | Reduce | Scan


@dataclass(frozen=True, slots=True)
class Store:
    """Writes a value.

    `set` writes each element exactly once. A reduction name (`sum`, `max`, ...) combines all values of the loop that
    fall on the same index, starting from the reduction's identity everywhere in the buffer: a column reduction. A store
    whose index and value both belong to the row happens once per row, any other once per element.
    """

    buffer: str
    index: Index
    value: Ref
    mode: str = "set"


@dataclass(frozen=True, slots=True)
class Tile:
    """How a GPU kernel multiplies: what one of its programs has of the result, and reads of the factors, at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    """How many steps of depth are read ahead."""
    parts: int = 1
    """Runs of columns that what follows the product is done for one after the other: all at once takes registers."""
    programs: int = 0
    """Programs, which walk over the tiles. 0: as many as there are tiles."""
    flat: bool = False
    """Whether a program's tiles and their steps are one loop: the next tile's factors come while one ends."""
    descriptors: bool = False
    """Whether factors are read by the copy engine, which GPUs have from compute capability 9.0 on."""

    def __str__(self) -> str:
        how = f", {self.programs} programs" if self.programs else ""
        return f"{self.rows}x{self.columns}x{self.depth}, {self.warps} warps{how}"


@dataclass(frozen=True, slots=True)
class Matmul:
    """A matrix product that a loop ends: `call` is an mm or addmm whose result nobody but the loop has to see."""

    call: Extern
    dtype: str
    """Of the result, which factors have, too."""
    tile: Tile

    @property
    def out(self) -> str:
        """Name of the result. It is memory only if the loop stores it."""
        (name,) = self.call.outs
        assert name is not None, "a product without a result"
        return name


@dataclass(frozen=True, slots=True)
class Loop:
    """One kernel. `origin` says which module and operation it came from, for people.

    With a `product`, `outer` and `inner` are that matrix's rows and columns; what the body loads of it is at hand.
    """

    name: str
    outer: tuple[Size, ...]
    inner: tuple[Size, ...]
    body: tuple[Value, ...]
    stores: tuple[Store, ...]
    origin: tuple[str, ...] = ()
    product: Matmul | None = None

    @property
    def reads(self) -> frozenset[str]:
        loaded = frozenset(value.buffer for value in self.body if isinstance(value, Load))
        return loaded if self.product is None else loaded - {self.product.out} | self.product.call.reads

    @property
    def writes(self) -> frozenset[str]:
        return frozenset(store.buffer for store in self.stores)


@dataclass(frozen=True, slots=True)
class View:
    """A strided look at a buffer; shape, strides and offset in elements."""

    buffer: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size = 0


@dataclass(frozen=True, slots=True)
class Verbatim:
    """An argument of a library call that has no meaning to the compiler: `torch.float32`, `torch.strided`, ..."""

    text: str


SCALE = Verbatim("_scale")
"""The factor that averages gradients over ranks, by its name in the host program, which asks its `BucketSource` for it:
plans know neither how many ranks there are nor whether a backward is going to reduce."""
REGION = "dcompile.region"
"""Op of a call of what another compiler has made of a part of the graph: region(made, *inputs)."""
SCALED = (("beta", 0), ("alpha", SCALE))
"""Keywords of an `addmm` that is a product times this factor: nothing is added."""

Arg: TypeAlias = "View | Index | Verbatim | bool | int | float | str | tuple[Arg, ...] | None"


@dataclass(frozen=True, slots=True)
class Extern:
    """A library call.

    `op` is an ATen overload such as `aten.mm.default`. mode `out`: writes its result into `outs`, which the compiler
    has placed (the emitter calls the out= overload). `alloc`: the library allocates; `outs` name the results, in order
    (None where a result is not used or not a tensor). `mutate`: works on its arguments in place, in order of `outs`.
    `fallback` is true where a loop of ours was wanted and there is no lowering yet: it is counted in the receipt.
    `effect` is true for what touches more than its results (random numbers, collectives, checks that may raise,
    in-place operations): such calls keep their order among one another and are never dropped. `aliases` is true where
    results may be views of arguments. `tells` are size symbols that have a value from here on, which the results tell.
    `cost_us`, where it is not 0, is what the call takes: for calls that the cost model cannot look into.
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
        """Whether arguments must live as long as results, which may look at them.

        About fallbacks nothing is known, and a functional collective goes on reading until the wait on its result.
        """
        return self.mode == "alloc" and (self.fallback or self.effect or self.aliases)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(view.buffer for arg in (*self.args, *(v for _, v in self.kwargs)) for view in views_of(arg))

    @property
    def writes(self) -> frozenset[str]:
        return frozenset(name for name in self.outs if name is not None)


@dataclass(frozen=True, slots=True)
class Collective:
    """Starts an exchange on a bucket; a later Wait ends it. Every rank starts the same ones in the same order.

    An all_reduce works on `buffers` in place. An all_gather fills them with what every rank holds a shard of. A
    reduce_scatter sums them up over the ranks, and each rank keeps its own shard of the sums, outside of the program;
    what it leaves in `buffers` is of no use.

    One of the model's own has a `call`, the functional collective of torch that its code asks for, and is named after
    its first result. It reads the views among the call's arguments, and writes `buffers`. What it does in place is what
    it reads and writes.
    """

    kind: CollectiveKind
    bucket: str
    group: str
    buffers: tuple[str, ...]
    call: Extern | None = None

    @property
    def reads(self) -> frozenset[str]:
        if self.call is not None:
            return self.call.reads
        return frozenset() if self.gathers_parameters else frozenset(self.buffers)

    @property
    def writes(self) -> frozenset[str]:
        return frozenset(self.buffers)

    @property
    def gathers_parameters(self) -> bool:
        """Whether it is one of dcompile's own that fill buffers from shards; the model's own send results."""
        return self.call is None and bucket_traits(self.kind).gathers

    @property
    def in_place(self) -> bool:
        """Whether it has its results where it reads what it sends, so that it holds no memory of its own."""
        return COLLECTIVES[self.kind].in_place

    @property
    def sent(self) -> tuple[str, ...]:
        """What is read while it is in flight, and stays as it is."""
        return tuple(sorted(self.reads - self.writes))

    @property
    def origin(self) -> tuple[str, ...]:
        """Which module and operation one of the model's own came from, for people."""
        return () if self.call is None else self.call.origin


@dataclass(frozen=True, slots=True)
class Wait:
    """Ends the collective on `bucket`; nothing may touch its buffers before, nor write to what it has `sent`."""

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


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory with a type.

    `storage` is None until memory planning, then the name of what it lies in, at `offset` bytes: "arena" (persistent,
    reused from call to call), "bucket:NAME" (gradient bucket), "out" (escapes to the caller, or is large: allocated in
    each call), "input" (the caller's), "library" (allocated by a library call); LODGED and the name of another buffer:
    a result that is not written yet, or what is allocated or donated and no longer read; or, also before planning,
    WITHIN and the name of another buffer: a part of it, which lives as long as any of its parts.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    device: str = "cpu"
    storage: str | None = None
    offset: Size = 0

    @property
    def is_tensor(self) -> bool:
        """Whether it is memory, not a value of Python's."""
        return self.dtype not in (NUMBER, OBJECT)

    @property
    def extent(self) -> Size:
        """Elements from the first to the last."""
        if 0 in self.shape:
            return 0
        known = 1
        for size, stride in zip(self.shape, self.strides, strict=True):
            if not (isinstance(size, int) and isinstance(stride, int)):
                break
            known += (size - 1) * stride
        else:
            return known
        total = as_index(1)
        for size, stride in zip(self.shape, self.strides, strict=True):
            total = total + (as_index(size) - 1) * stride
        return as_size(total)

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element, for static shapes."""
        extent = self.extent
        assert isinstance(extent, int), f"{self.name} has a dynamic shape"
        return extent * ITEMSIZE[self.dtype]


IN_DONOR = "in:"
"""Before the name of the buffer in whose memory another one lies."""

PART = "dcompile_part"
"""Name under which a traced operation's custom metadata says which part of a whole, by number, its result is, if
several parts should not be there at a time."""

NUMBER = "symint"
"""Dtype of buffers that hold a number of the host program instead of a tensor: library calls alone use them."""
OBJECT = "object"
"""Of such that hold any other Python value."""
ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "uint16": 2, "uint32": 4, "uint64": 8, **dict.fromkeys(BYTES, 1),
    NUMBER: 8, OBJECT: 8,
}  # fmt: skip
"""Bytes of one element."""


WITHIN = "within:"


def holder_of(buffer: Buffer) -> str | None:
    """Name of the buffer that this one is a part of."""
    storage = buffer.storage or ""
    return storage.removeprefix(WITHIN) if storage.startswith(WITHIN) else None


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one collective exchanges. `offsets` and `sizes` in elements.

    Under all_reduce: gradients in one storage of the bucket's own, at fixed offsets. Under all_gather and
    reduce_scatter: units, each of which is cut into one shard for each rank: whole parameters, or several in a row.
    """

    name: str
    dtype: str
    device: str
    group: str
    params: tuple[int, ...]
    """Identity of each parameter: its number in the adapter's parameter order."""
    buffers: tuple[str, ...]
    offsets: tuple[int, ...]
    """Where each parameter begins; units count as laid end to end."""
    numel: int
    wire: str = ""
    """dtype of what is exchanged, if a hook has a say in it: gradients are cast before, and cast back behind."""
    kind: PlannedKind = "all_reduce"
    units: tuple[int, ...] = ()
    """Number of each unit."""
    holders: tuple[str, ...] = ()
    """The buffer that each unit is gathered into, or that its gradients lie in."""
    sizes: tuple[int, ...] = ()
    """Of each unit, padding included: a multiple of the number of shards."""
    gaps: tuple[int, ...] = ()
    """Under reduce_scatter: unit (its place in `units`), start and stop of each part that no gradient is written to,
    one after the other. They are zeroed, for other programs or ranks may know gradients there."""
    scaled: tuple[int, ...] = ()
    """Under all_reduce: parameters whose gradients are written multiplied by the factor that averaging asks for."""
    packed: tuple[int, ...] = ()
    """Under all_gather and reduce_scatter: units (places in `units`) that are copied to one message."""
    idle: tuple[int, ...] = ()
    """Under all_reduce: parameters that have a place, but no gradient in this program: other ranks may have one."""
    idle_offsets: tuple[int, ...] = ()
    marks: int = 0
    """Elements at the end, one for each parameter in the order of places: whether a rank has a gradient of it. None
    where every rank has the same gradients."""

    @property
    def traits(self) -> BucketTraits:
        """What the table of kinds says of its collective."""
        return bucket_traits(self.kind)

    @property
    def carries_units(self) -> bool:
        """Whether it exchanges units of sharded parameters, and not gradients in a storage of its own."""
        return self.traits.carries == "units"

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(parameter, where it begins) of all that have a place, in the order of places."""
        known = zip(self.params, self.offsets, strict=True)
        return tuple(sorted((*known, *zip(self.idle, self.idle_offsets, strict=True)), key=lambda place: place[1]))


@dataclass(frozen=True, slots=True)
class Program:
    """What one graph computes. `inputs` are buffer names, or size symbols for integer inputs, in call order."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[View | Index | int | float | bool | None, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    grads: tuple[tuple[int, int], ...] = ()
    """(position in `outputs`, parameter number) of each output that is a gradient to be kept in step across ranks."""
    buckets: tuple[Bucket, ...] = ()
    arena_bytes: Size = 0
    sizes: tuple[tuple[str, Index], ...] = ()
    """What integer inputs are worth that are not size symbols themselves: expressions of these."""
    donated: tuple[str, ...] = ()
    """Inputs whose memory the program may use for other buffers once it has read them for the last time."""
    parts: tuple[tuple[str, int], ...] = ()
    """(buffer, number) of what belongs to one of several parts: fusion joins no loops that touch different ones, since
    each would be there as long as all of them."""

    @property
    def table(self) -> dict[str, Buffer]:
        return {buffer.name: buffer for buffer in self.buffers}


def views_of(arg: Arg) -> Iterator[View]:
    """All views inside an argument, depth first."""
    if isinstance(arg, View):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from views_of(item)
