"""Lazy tensors: a shape, a dtype and a function that traces one element into a loop body; views compose index maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.symbolic.strides import (
    Shape,
    affine_strides,
    contiguous,
    ranges_of,
    same_layout,
    variables,
)
from dcompile.compat.size_expressions import Inexpressible
from dcompile.ir.index import ZERO, Size, as_index, flatten, is_below, is_nonnegative, modulo, size_product, typical
from dcompile.ir.nodes import Apply, Const, IndexOf, Ref, View
from dcompile.ir.ops import OPS

At = Callable[[Body, Coords], Ref]
Remap = Callable[[Body, Coords], Coords]

MAX_OPS = 64
"""Operations inlined into one body before a value is stored: more of them cost compile time and registers."""
MAX_LOADS = 16
"""Distinct loads inlined into one body: a row's working set should stay in L1."""

MAX_REPEATED_COST = 8
"""Additions that one element may cost to be recomputed in every row that reads it, which saves a kernel. On GPUs twice
as much: each program's division in float64 makes a cast 0.3 us longer, and a kernel takes 2 us (one H200)."""

LONG_FUNCTION_COST = 10
"""Additions from which one operation counts as a long function: exponentials, logarithms, powers, sines."""
MIN_TABLE_READS = 64
"""Reads of each element of a table, whose bytes are then few beside those that the reader writes."""
MIN_TABLE_READER = 1 << 22
"""Elements of a table's reader: long functions of fewer take less time than the kernel that stores the table, 2 us."""


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensor:
    """A tensor of the graph. `view` is set if its elements are in a buffer; `strides` is torch's layout.

    `ops`, `loads` and `heavy` (transcendental or division) estimate the cost of inlining one element. A view of a lazy
    tensor keeps its `base` and the function `again` that views it, so that the base can be stored instead. A stored
    tensor keeps the tensor it was `made` from, for readers of a few elements. It keeps the cheap one that it was
    `cast_from`, or computed from by a little more, for kernels that only memory bounds. `sources` are all buffers that
    recomputing it would read. A tensor that reads no memory, such as a range, is computed at its uses, but stored on
    its `device`.
    """

    shape: Shape
    dtype: str
    at: At
    view: View | None = None
    strides: Shape = ()
    ops: int = 0
    loads: int = 1
    heavy: bool = False
    reads: frozenset[str] = frozenset()
    base: LazyTensor | None = None
    rebuilt_on: Callable[[LazyTensor], LazyTensor] | None = field(default=None, repr=False)
    made: LazyTensor | None = None
    cast_from: LazyTensor | None = None
    sources: frozenset[str] = frozenset()
    device: str | None = None

    @property
    def is_cheap(self) -> bool:
        """Whether recomputing it costs less than a store and a load."""
        return self.loads <= 1 and self.ops <= 2 and not self.heavy

    @property
    def numel(self) -> Size:
        return size_product(self.shape)


def from_view(view: View, dtype: str) -> LazyTensor:
    """Return the tensor stored in a buffer."""
    shape, strides = view.shape, view.strides
    offset = as_index(view.offset)

    def at(body: Body, coords: Coords) -> Ref:
        return body.load(view.buffer, flatten(coords, strides) + offset, dtype)

    reads = frozenset((view.buffer,))
    return LazyTensor(shape, dtype, at, view, strides, reads=reads, sources=reads)


def constant(value: bool | int | float, shape: Shape, dtype: str) -> LazyTensor:
    """Return a tensor filled with one number."""
    return LazyTensor(shape, dtype, lambda body, _: body.const(value, dtype), strides=contiguous(shape), loads=0)


def remap_view(base: LazyTensor, shape: Shape, remap: Remap) -> LazyTensor:
    """View `base` through a map from coordinates in `shape` to its own; a strided view of a buffer stays one."""
    view = None if base.view is None else _view_through(base.view, shape, remap)
    if view is not None:
        seen = from_view(view, base.dtype)
        if base.cast_from is not None:
            seen = replace(seen, cast_from=remap_view(base.cast_from, shape, remap))
        return (
            seen if base.made is None else replace(seen, made=remap_view(base.made, shape, remap), sources=base.sources)
        )
    return LazyTensor(
        shape,
        base.dtype,
        lambda body, coords: body.trace(base, remap(body, coords)),
        strides=contiguous(shape),
        ops=base.ops,
        loads=base.loads,
        heavy=base.heavy,
        reads=base.reads,
        sources=base.sources,
        base=base,
        rebuilt_on=lambda stored: remap_view(stored, shape, remap),
    )


def _view_through(view: View, shape: Shape, remap: Remap) -> View | None:
    if 0 in shape:
        return View(view.buffer, shape, contiguous(shape), view.offset)
    body = Body(ranges_of("i", shape))
    index = flatten(remap(body, variables("i", shape)), view.strides) + view.offset
    found = affine_strides(index, shape)
    return None if found is None else View(view.buffer, shape, *found)


def make_lazy(
    shape: Shape, dtype: str, at: At, args: tuple[LazyTensor, ...], *, ops: int = 1, heavy: bool = False
) -> LazyTensor:
    """Return a lazy tensor computed from `args`."""
    return LazyTensor(
        shape,
        dtype,
        at,
        strides=contiguous(shape),
        ops=ops + sum(arg.ops for arg in args),
        loads=sum(arg.loads for arg in args),
        heavy=heavy or any(arg.heavy for arg in args),
        reads=frozenset().union(*(arg.reads for arg in args)),
        sources=frozenset().union(*(arg.sources for arg in args)),
    )


def broadcast(tensor: LazyTensor, shape: Shape) -> LazyTensor:
    """Expand `tensor` to `shape` by torch's broadcasting rules."""
    if tensor.shape == shape:
        return tensor
    lead = len(shape) - len(tensor.shape)
    kinds = [_expanded(size, wanted) for size, wanted in zip(tensor.shape, shape[lead:], strict=True)]

    def remap(_: Body, coords: Coords) -> Coords:
        places = zip(tensor.shape, kinds, coords[lead:], strict=True)
        return tuple(ZERO if kind else modulo(c, size, {}) if kind is None else c for size, kind, c in places)

    return remap_view(tensor, shape, remap)


def _expanded(size: Size, wanted: Size) -> bool | None:
    """Return whether a size is 1 and repeated; None if only a call can decide, where the remainder by it is right.

    torch has checked that the sizes match, so a size other than 1 is equal, even if its expression differs.
    """
    if size == 1:
        return True
    if isinstance(size, int) and isinstance(wanted, int) and size != wanted:
        raise Inexpressible(f"a size of {size} where {wanted} is wanted")
    return False if size == wanted or is_nonnegative(as_index(size) - 2, {}) else None


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    """Return the common shape to which tensors of these shapes broadcast."""
    rank = max(map(len, shapes))
    result: list[Size] = []
    for places in zip(*((*(1,) * (rank - len(shape)), *shape) for shape in shapes), strict=True):
        others = dict.fromkeys(size for size in places if size != 1)
        if len(others) > 1:
            raise Inexpressible(f"which of {', '.join(map(str, others))} is 1")
        result.append(next(iter(others), 1))
    return tuple(result)


def is_within(tensor: LazyTensor, low: Size, high: Size) -> bool:
    """Is the tensor an index expression of its coordinates, such as arange, with all values in [low, high)?"""
    if tensor.loads or 0 in tensor.shape:
        return False
    body = Body(ranges_of("i", tensor.shape))
    value = body.values[body.trace(tensor, variables("i", tensor.shape))]
    if isinstance(value, Const):
        index = as_index(int(value.value))
    elif isinstance(value, IndexOf):
        index = value.index
    else:
        return False
    return is_nonnegative(index - low, body.ranges) and is_below(index, high, body.ranges)


def constant_of(tensor: LazyTensor) -> bool | int | float | None:
    """Return the number that all elements equal, if it is known."""
    if tensor.loads or 0 in tensor.shape:
        return None
    body = Body(ranges_of("i", tensor.shape))
    value = body.values[body.trace(tensor, variables("i", tensor.shape))]
    return value.value if isinstance(value, Const) else None


def is_cheap_to_repeat(tensor: LazyTensor, *, many_threads: bool) -> bool:
    """Is it one element, computed from memory by a few additions or one division?"""
    most = MAX_REPEATED_COST * (2 if many_threads else 1)
    if tensor.numel != 1 or tensor.ops > most or tensor.loads > 2:
        return False
    return sum(_costs(tensor)) <= most


def is_worth_a_table(tensor: LazyTensor, reader: int) -> bool:
    """Is it a long function of positions, which a loop over `reader` elements would compute many times on a GPU?"""
    if not tensor.heavy or reader < max(MIN_TABLE_READER, MIN_TABLE_READS * typical(tensor.numel)):
        return False
    return max(_costs(tensor), default=0) >= LONG_FUNCTION_COST


def _costs(tensor: LazyTensor) -> list[int]:
    """Return the costs of the operations that compute an element."""
    body = Body(ranges_of("i", tensor.shape))
    body.trace(tensor, variables("i", tensor.shape))
    return [OPS[value.op].cost for value in body.values if isinstance(value, Apply)]


def has_layout(tensor: LazyTensor, strides: Shape) -> bool:
    """Return whether the tensor is in memory with these strides."""
    if tensor.view is None:
        return False
    return same_layout(tensor.shape, tensor.view.strides, strides)


def copy_of(tensor: LazyTensor) -> LazyTensor:
    """Return a copy: when stored, it shares no memory with its source."""
    return make_lazy(tensor.shape, tensor.dtype, lambda body, coords: body.trace(tensor, coords), (tensor,), ops=0)
