"""Recognize products of few rows and a matrix (skinny GEMM) in a nest, and choose their tile.

Such a nest sums products of two 16-bit loads, one of them over few rows, the other over the rows of a matrix. Several
products of the same sizes may share it. What follows the sums is pointwise. A program of the kernel reads some rows of
each matrix once, whatever the number of rows that it multiplies them by. There may be a batch of such products, as in
attention, where several queries share the keys of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from dcompile.codegen.nest.loop_nest import Axis, Nest, flatten_loop, levels, stride
from dcompile.device_traits import MULTIPROCESSORS
from dcompile.ir.analysis import operands, runtime_refs
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.gemm import TENSOR_CORE_DTYPES
from dcompile.ir.index import ZERO, substitute
from dcompile.ir.nodes import Apply, Load, Loop, Reduce, Ref, Scan, Tile

MAX_ROWS = 16
"""Rows up to which products are loops: a program's tile has all of them."""
MIN_DEPTH = 256
"""Length of a sum from which tensor cores take it: shorter ones are too few steps to prefetch."""
MIN_BATCH_DEPTH = 64
"""The same in a batch, where other programs hide latency."""
ALIGNED_ELEMENTS = 8
"""Elements of 16 bytes: factors are copied to shared memory in such pieces."""
STAGE_BYTES = 96 << 10
"""Shared memory for all stages of a program: GPUs from compute capability 8.0 on have 99 KiB."""
MIN_STAGES, MAX_STAGES = 4, 8
DEPTHS = (256, 128, 64)
"""Depths of a step, of which the first is only measured."""
BUSY_PROGRAMS = MULTIPROCESSORS * 7 // 10
"""Fewest programs that occupy a GPU. 6144 columns in 96 programs took 0.95 of the time of 192 narrower ones. 4096
columns in 64 programs took 1.07 of that of 128 (4096 deep, one H200)."""
MIN_BATCH_PROGRAMS = 2 * BUSY_PROGRAMS
"""Fewest programs of a batch: with less to read, the launch takes most of the time of any kernel."""


@dataclass(frozen=True, slots=True)
class ContractionTerm:
    """One product of a nest: the sum `reduce` of load `left`, which varies by row, times load `right`.

    `right` may load 8-bit integers. `dtype` is that of both on tensor cores.
    """

    reduce: Ref
    left: Ref
    right: Ref
    dtype: str


@dataclass(frozen=True, slots=True)
class Contraction:
    """The products of a nest, and its row variables: those of few rows, of the matrices' rows, and of the batch."""

    products: tuple[ContractionTerm, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    batch: tuple[Axis, ...]
    depth: int

    @property
    def dtype(self) -> str:
        """Dtype of the factors, which all products share."""
        return self.products[0].dtype

    @property
    def row_count(self) -> int:
        return _count(self.rows)

    @property
    def column_count(self) -> int:
        return _count(self.columns)

    def programs(self, width: int) -> int:
        """Return the programs of so many columns each."""
        return _count(self.batch) * -(-self.column_count // width)


@lru_cache(maxsize=512)
def multiplies_few_rows(loop: Loop) -> bool:
    """Return whether a loop is a skinny GEMM, which memory bandwidth bounds."""
    return find_contraction(flatten_loop(loop)) is not None


def find_contraction(nest: Nest) -> Contraction | None:
    """Return the products of a nest; None if it is anything else."""
    sizes = [axis.size for axis in nest.axes]
    if len(nest.elements) != 1 or not all(isinstance(size, int) for size in sizes) or not all(nest.row_stores):
        return None
    (depth,) = nest.elements
    if any(store.mode != "set" for store in nest.stores) or depth.size < MIN_BATCH_DEPTH:  # type: ignore[operator]
        return None
    found = levels(nest)
    live = sorted(found.live)
    reduces = [ref for ref in live if isinstance(nest.body[ref], Reduce)]
    pairs = {ref: _factors(nest, ref, depth) for ref in reduces}
    if not pairs or any(isinstance(nest.body[ref], Scan) for ref in live):
        return None
    used: set[Ref] = set()
    products: list[ContractionTerm] = []
    for ref, pair in pairs.items():
        if pair is None or not (ordered := _ordered(nest, *pair[:2])):
            return None
        products.append(ContractionTerm(ref, *ordered, pair[2]))
        used |= set(_below(nest, ref))
    if any(found.element[ref] and ref not in used for ref in live):
        return None
    made = _contraction(nest, tuple(products), depth)
    return made if made is not None and _is_worth_tiling(made) else None


def _contraction(nest: Nest, products: tuple[ContractionTerm, ...], depth: Axis) -> Contraction | None:
    """Return the contraction if all products have the same dtype, rows and columns, and these cover the space."""
    sides = {(_varying(nest, product.left), _varying(nest, product.right)) for product in products}
    if len(sides) != 1 or len({product.dtype for product in products}) != 1 or not isinstance(depth.size, int):
        return None
    ((left, right),) = sides
    if len(left | right) != len(nest.rows):
        return None
    groups = (left - right, right - left, left & right)
    rows, columns, batch = (tuple(axis for axis in nest.rows if axis.name in group) for group in groups)
    return Contraction(products, rows, columns, batch, depth.size)


def _is_worth_tiling(found: Contraction) -> bool:
    """Is a sum long, or are there many of them? The rows of a small batch are read in no time anyway."""
    if not found.batch:
        return found.depth >= MIN_DEPTH
    return found.programs(64) >= MIN_BATCH_PROGRAMS


def _factors(nest: Nest, ref: Ref, depth: Axis) -> tuple[Ref, Ref, str] | None:
    """Return the loads whose product a reduction sums, contiguous along the sum, and the dtype that holds both.

    None for other reductions.
    """
    reduce = nest.body[ref]
    assert isinstance(reduce, Reduce)
    product = nest.body[reduce.arg]
    if reduce.op != "sum" or not isinstance(product, Apply) or (product.op, product.dtype) != ("mul", "float32"):
        return None
    one, other = (_factor(nest, factor, depth) for factor in product.args)
    if one is None or other is None or len(dtypes := {one[1], other[1]} - {"int8"}) != 1:
        return None
    return one[0], other[0], dtypes.pop()


def _factor(nest: Nest, factor: Ref, depth: Axis) -> tuple[Ref, str] | None:
    """Return the load that a factor is cast from, and the dtype that holds its values; None for other factors.

    8-bit integers are values of any of the dtypes that they may have been cast to on the way.
    """
    casts = []
    while isinstance(value := nest.body[factor], Apply) and value.op == "cast":
        casts.append(value.dtype)
        factor = value.args[0]
    load = nest.body[factor]
    if not isinstance(load, Load) or load.mask is not None or runtime_refs(load.index) or not _is_aligned(load, depth):
        return None
    through = set(casts) - {"float32"}
    if load.dtype == "int8" and through <= set(TENSOR_CORE_DTYPES):
        return factor, through.pop() if len(through) == 1 else "int8"
    return (factor, load.dtype) if load.dtype in TENSOR_CORE_DTYPES and casts == ["float32"] else None


def _is_aligned(load: Load, depth: Axis) -> bool:
    """Is a factor contiguous along the sum, and does each of its rows begin at whole 16 bytes?"""
    rest = substitute(load.index, {depth.name: ZERO}, {})
    whole = all(coefficient % ALIGNED_ELEMENTS == 0 for _, coefficient in rest.terms)
    return whole and stride(load.index, depth.name) == 1


def _ordered(nest: Nest, one: Ref, other: Ref) -> tuple[Ref, Ref] | None:
    """Return the load of few rows, then that of the matrix; None if neither or both have few rows."""
    sides = [_varying(nest, ref) for ref in (one, other)]
    alone = sides[0] ^ sides[1]
    counts = [_count(axis for axis in nest.rows if axis.name in side & alone) for side in sides]
    few = [2 <= count <= MAX_ROWS for count in counts]
    if few == [True, False] and counts[1] > MAX_ROWS:
        return one, other
    return (other, one) if few == [False, True] and counts[0] > MAX_ROWS else None


def _varying(nest: Nest, ref: Ref) -> frozenset[str]:
    """Return the row variables that a load depends on."""
    load = nest.body[ref]
    assert isinstance(load, Load)
    return load.index.variables & {axis.name for axis in nest.rows}


def _below(nest: Nest, ref: Ref) -> Iterator[Ref]:
    """Yield a product's values: the multiplication, its factors in float32, what they are cast from, and loads."""
    reduce = nest.body[ref]
    assert isinstance(reduce, Reduce)
    stack = [reduce.arg]
    while stack:
        yield (at := stack.pop())
        stack += operands(nest.body[at])


def _count(axes: Iterable[Axis]) -> int:
    return prod(axis.size for axis in axes if isinstance(axis.size, int))


# --- tiles ------------------------------------------------------------------------------------------------------------


def choose_tile(found: Contraction) -> Tile:
    """Choose the tile of a skinny GEMM from its sizes alone: as many columns as leave work for every multiprocessor."""
    widest = 64 if len(found.products) <= 2 else 32
    fitting = [width for width in (64, 32, 16) if width <= widest and found.programs(width) >= BUSY_PROGRAMS]
    columns = fitting[0] if fitting else 16
    return next(tile_of(found, columns, depth) for depth in DEPTHS[1:] if _is_deep(found, columns, depth))


def candidate_tiles(found: Contraction) -> tuple[Tile, ...]:
    """Return the tiles to measure, first the one that the sizes suggest."""
    tiles = [choose_tile(found)]
    for columns in (16, 32, 64, 128):
        tiles += [tile_of(found, columns, depth) for depth in DEPTHS if _is_deep(found, columns, depth)]
    return tuple(dict.fromkeys(tiles))


def tile_of(found: Contraction, columns: int, depth: int) -> Tile:
    """Return the tile of so many columns and depth, with as many stages as shared memory has room for."""
    step = depth * _elements_read(found, columns) * ITEMSIZE[found.dtype]
    warps = 8 if columns > 64 else 4
    steps = -(-found.depth // depth)
    return Tile(_padded_rows(found), columns, depth, warps, max(min(STAGE_BYTES // step, MAX_STAGES, steps), 1))


def _is_deep(found: Contraction, columns: int, depth: int) -> bool:
    """Do enough steps of this depth fit shared memory, without a rest at the end? The least depth always counts."""
    step = depth * _elements_read(found, columns) * ITEMSIZE[found.dtype]
    return depth == DEPTHS[-1] or (found.depth % depth == 0 and MIN_STAGES * step <= STAGE_BYTES)


def _elements_read(found: Contraction, columns: int) -> int:
    """Return the elements of all factors at one place of the sum."""
    lefts = len({product.left for product in found.products})
    return len(found.products) * columns + lefts * _padded_rows(found)


def _padded_rows(found: Contraction) -> int:
    """Return the rows of a tile on tensor cores, which multiply by 8 columns."""
    return max(1 << (found.row_count - 1).bit_length(), 8)
