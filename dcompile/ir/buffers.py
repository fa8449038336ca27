"""Memory of a program: buffers, the buckets that collectives work on, and names for where they are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dcompile.ir.collective_kinds import BucketTraits, PlannedKind, bucket_traits
from dcompile.ir.float8 import BYTES
from dcompile.ir.index import Size, as_index, as_size, typical


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory with a dtype and a layout.

    `storage` is None before memory planning. Afterwards it names the memory that contains the buffer, at `offset`
    bytes:

    - "arena": temporaries, reused from call to call.
    - IN_BUCKET and the name of a gradient bucket.
    - "out": allocated in each call, because it escapes to the caller or is large.
    - "input": memory of the caller.
    - "library": allocated by a library call.
    - IN_DONOR and the name of a donor buffer: a result that is not written yet, or memory that is no longer read. The
      donor was allocated or donated.
    - WITHIN and the name of another buffer, also before planning: a part of it, which lives as long as any of its
      parts.
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
        """Whether it is memory, rather than a Python value."""
        return self.dtype not in (NUMBER, OBJECT)

    @property
    def extent(self) -> Size:
        """Elements from the first to the last, gaps included."""
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

    @property
    def typical_bytes(self) -> int:
        """Bytes from the first to the last element, where a symbolic size counts as a typical one."""
        return typical(self.extent) * ITEMSIZE[self.dtype]

    @property
    def bucket(self) -> str | None:
        """Name of the gradient bucket that it is stored in, or None."""
        return self._named_behind(IN_BUCKET)

    @property
    def donor(self) -> str | None:
        """Name of the donor buffer in whose memory it is placed, or None."""
        return self._named_behind(IN_DONOR)

    @property
    def holder(self) -> str | None:
        """Name of the buffer that contains it, or None."""
        return self._named_behind(WITHIN)

    def _named_behind(self, prefix: str) -> str | None:
        storage = self.storage or ""
        return storage.removeprefix(prefix) if storage.startswith(prefix) else None


IN_BUCKET = "bucket:"
"""Prefix of the name of a bucket, in whose memory a buffer is placed."""
IN_DONOR = "in:"
"""Prefix of the name of a donor buffer, in whose memory another buffer is placed."""
NUMBER = "symint"
"""Dtype of buffers that hold a number of the host program instead of a tensor. Only library calls use them."""
OBJECT = "object"
"""Dtype of buffers that hold any other Python value."""
ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "uint16": 2, "uint32": 4, "uint64": 8, **dict.fromkeys(BYTES, 1),
    NUMBER: 8, OBJECT: 8,
}  # fmt: skip
"""Bytes of one element."""
WITHIN = "within:"
"""Prefix of the name of the buffer that contains another one."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Memory that one collective works on. `offsets` and `sizes` are in elements.

    Under all_reduce: gradients in one storage of the bucket's own, at fixed offsets. Under all_gather and
    reduce_scatter: units, each of which is split into one shard per rank. A unit is one parameter or several
    consecutive ones.
    """

    name: str
    dtype: str
    device: str
    group: str
    params: tuple[int, ...]
    """Number of each parameter in the adapter's parameter order."""
    buffers: tuple[str, ...]
    offsets: tuple[int, ...]
    """Offset of each parameter. Units count as if stored end to end."""
    numel: int
    wire: str = ""
    """Dtype in which gradients are reduced, if a hook sets it: they are cast before, and cast back afterwards."""
    kind: PlannedKind = "all_reduce"
    units: tuple[int, ...] = ()
    """Number of each unit."""
    holders: tuple[str, ...] = ()
    """Buffer that each unit is gathered into, or that holds its gradients."""
    sizes: tuple[int, ...] = ()
    """Size of each unit, padding included: a multiple of the number of shards."""
    gaps: tuple[int, ...] = ()
    """Under reduce_scatter: unit (its place in `units`), start and stop of each part without a gradient, one after
    another. They are zeroed, because other programs or ranks may have gradients there.
    """
    scaled: tuple[int, ...] = ()
    """Under all_reduce: parameters whose gradients are scaled for the average as they are written."""
    packed: tuple[int, ...] = ()
    """Under all_gather and reduce_scatter: units (places in `units`) that are packed into one message."""
    taken: tuple[int, ...] = ()
    """Under reduce_scatter: units whose reduced shards the program uses itself; the others become gradients."""
    idle: tuple[int, ...] = ()
    """Under all_reduce: parameters with a place but without a gradient in this program; other ranks may have one."""
    idle_offsets: tuple[int, ...] = ()
    marks: int = 0
    """Number of presence flags at the end, one for each parameter in the order of places: whether a rank has its
    gradient. 0 where every rank has the same gradients.
    """

    @property
    def traits(self) -> BucketTraits:
        """What the table of kinds says of its collective."""
        return bucket_traits(self.kind)

    @property
    def carries_units(self) -> bool:
        """Whether it exchanges units of sharded parameters, and not gradients in a storage of its own."""
        return self.traits.carries == "units"

    @property
    def exchanged(self) -> Bucket:
        """The bucket as other ranks see it, without what each program chooses: names, what is scaled early, or used."""
        return replace(self, buffers=(), scaled=(), taken=())

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(parameter, offset) of all parameters with a place, in the order of places."""
        known = zip(self.params, self.offsets, strict=True)
        return tuple(sorted((*known, *zip(self.idle, self.idle_offsets, strict=True)), key=lambda place: place[1]))
