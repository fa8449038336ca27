"""Tile loops for GPU programs: choose the variables that a tile spans, its extents, and the number of warps.

All decisions follow from the loop's sizes and strides alone. So a kernel is the same on every rank and on every device
of one kind. Block sizes are numbers. Where sizes are symbols, blocks are chosen for a typical size, and a row of
symbolic length is read in several blocks, whatever its length.

Loops over rows take whole rows, at once or in blocks. Column reductions combine some rows of a program in registers.

A transposed matrix of bytes is stored by words, four rows at a time. Its tile is read along one dimension and stored
along the other, so values change threads through shared memory. One by one, bytes take an instruction each there, and
more to pack them for a store. The thread that computes the bytes of four adjacent rows packs them before they move: a
copy takes 1.9 instructions a byte in place of 5.9.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dcompile.codegen.nest.contraction import Contraction, choose_tile, find_contraction
from dcompile.codegen.nest.loop_nest import (
    Axis,
    Nest,
    accesses,
    flatten_loop,
    levels,
    may_exceed,
    reindex,
    renumber,
    stride,
    unit_strides,
)
from dcompile.codegen.nest.row_matmul import RowMatmul, RowTile, choose_row_tile, find_row_matmul
from dcompile.codegen.nest.tile_plan import (
    MAX_PERSISTENT_ELEMENTS,
    PROGRAMS,
    ROW_ELEMENTS,
    TileDim,
    TilePlan,
    about,
    count,
    power_of_two,
    row_number,
    typical_stride,
    warps_of,
)
from dcompile.ir.analysis import ancestors, inner_names, operands, outer_names, runtime_refs
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import (
    Div,
    Index,
    Size,
    Var,
    as_index,
    exact_quotient,
    is_nonnegative,
    is_symbol,
    size_product,
    typical,
    var,
)
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Loop, Reduce, Ref, Scan, Store, Tile, Value
from dcompile.ir.ops import OPS

FLAT_ELEMENTS = 1024
"""Elements of a pointwise tile: 8 for each of 128 threads, so one access moves 16 bytes of a 16-bit dtype."""
TRANSPOSE_SIDES = (32, 64)
"""Sides of a transpose tile."""
BYTE_TRANSPOSE_SIDES = (64, 64)
"""Sides of a transpose tile of four warps where all stores have one byte (docs/lab/constants.md, K3)."""
WORD_TRANSPOSE_SIDES = (128, 64)
"""Sides of a transpose tile of eight warps whose bytes are stored by words (docs/lab/constants.md, K3)."""
NARROW_SIDES = range(3, 16)
"""Short sides of transposed runs: positions of a filter, channels of an image."""
MIN_WIDE_SIDE = 64
"""Least length of the other side."""
NARROW_ELEMENTS = 2048
"""Elements of a transpose tile with a short side, rounded up to a power of two (docs/lab/constants.md, K22)."""
MANY_ACCESSES = 3
"""Whole matrices that a loop reads, or stores across, from which its tile of words has half as many rows: otherwise its
values, 32 of each in a thread, would not fit registers."""
MIN_UNKNOWN_ROW = 64
"""Length from which rows are separate tiles where sizes are symbolic; a symbol counts as long."""


def make_plan(loop: Loop, row_tile: RowTile | None = None) -> TilePlan:
    """Choose the tiling of a loop, unless it was measured. `row_tile`: that of products of one row, to measure it."""
    in_pieces = may_exceed(size_product(loop.inner), MAX_PERSISTENT_ELEMENTS) and all(
        store.mode == "set" for store in loop.stores
    )
    nest = flatten_loop(loop, in_one_pass=in_pieces)
    if (found := find_contraction(nest)) is not None:
        return _skinny(nest, found, loop.tile)
    combining = [n for n, store in enumerate(nest.stores) if store.mode != "set"]
    chunk = rows_of_program(nest, combining)
    if combining and chunk:
        return tile_columns(nest, chunk)
    if (product := find_row_matmul(nest)) is not None and (tile := row_tile or choose_row_tile(product)) is not None:
        return _row_matmul(nest, product, tile)
    plan = tile_rows(nest) if nest.elements and _needs_rows(nest) else _pointwise(nest)
    return replace(plan, atomic=bool(combining))


def _needs_rows(nest: Nest) -> bool:
    return any(nest.row_stores) or any(isinstance(value, (Reduce, Scan)) for value in nest.body)


def _skinny(nest: Nest, found: Contraction, tile: Tile | None) -> TilePlan:
    if tile is None:
        tile = choose_tile(found)
    assert tile.rows >= found.row_count, f"a tile of {tile.rows} rows has not all {found.row_count}"
    x, y = TileDim("x", found.columns, tile.columns), TileDim("y", found.rows, tile.rows)
    return TilePlan("skinny", nest, (x, y), tile.warps, found.batch, skinny=(found, tile))


def _row_matmul(nest: Nest, found: RowMatmul, tile: RowTile) -> TilePlan:
    dims = TileDim("x", nest.rows, tile.rows), TileDim("r", nest.elements, tile.depth)
    return TilePlan("rows", nest, dims, tile.warps, row_matmul=(found, tile))


def _pointwise(nest: Nest) -> TilePlan:
    axes = (*nest.rows, *nest.elements)
    nest = replace(nest, rows=(), elements=axes, row_stores=(False,) * len(nest.stores))
    used = _full(axes, accesses(nest.body, nest.stores))
    near = {axis.name: unit_strides(axis.name, used) for axis in axes}
    scores = {axis.name: near[axis.name] - 100 * (about([axis]) < 8) for axis in axes}
    best = max(reversed(axes), key=lambda axis: scores[axis.name], default=None)
    if best and not near[best.name]:  # a short contiguous run, such as a group of few channels, beats a long stride
        best = max(reversed(axes), key=lambda axis: near[axis.name])
    rest = [axis for axis in axes if axis is not best]
    other = max(rest, key=lambda axis: scores[axis.name], default=None)
    if best and other and min(about([best]), about([other])) >= 16 and _both_ways(nest, best.name, other.name):
        batch = tuple(axis for axis in rest if axis is not other)
        for along, across in ((best, other), (other, best)):
            if (found := by_words(nest, along, across)) is not None:
                return _turn_words(*found, along, across, batch)
        sides, per_warp = (BYTE_TRANSPOSE_SIDES, 1024) if _stores_bytes(nest) else (TRANSPOSE_SIDES, 512)
        y, x = TileDim("y", (other,), _side(other, sides[0])), TileDim("x", (best,), _side(best, sides[1]))
        return TilePlan("turn", nest, (y, x), max(y.block * x.block // per_warp, 1), batch)
    if (pair := _narrow_sides(axes, used)) is not None:
        return _turn_narrow(nest, *pair)
    if best and rest and (block := _row_block(nest, best)):
        y, x = TileDim("y", tuple(rest), 1), TileDim("x", (best,), block)
        return TilePlan("turn", nest, (y, x), max(block // 256, 1))
    size = about(axes)
    block = FLAT_ELEMENTS
    while block > 128 and size < block * PROGRAMS:
        block //= 2
    block = min(block, power_of_two(size))
    # concurrent programs touch adjacent memory: rotary embedding's rows of 256 bytes took 0.9 of the time in address
    # order (8192 tokens, one H200)
    rest.sort(key=lambda axis: -reach(nest, axis.name))
    ordered = (*rest, best) if best else ()
    return TilePlan("flat", nest, (TileDim("x", ordered, block),), max(block // 256, 1))


def _turn_words(
    nest: Nest, words: tuple[tuple[int, ...], ...], best: Axis, across: Axis, batch: tuple[Axis, ...]
) -> TilePlan:
    """Tile a nest of four rows at a time; `across` is the axis of its rows before."""
    groups = next(axis for axis in nest.elements if axis.name == across.name)
    loads = {
        value.buffer
        for value in nest.body
        if isinstance(value, Load) and {best.name, across.name} <= value.index.variables
    }
    rows, columns = WORD_TRANSPOSE_SIDES
    rows //= 2 if max(len(loads), len(words)) >= MANY_ACCESSES else 1
    y, x = TileDim("y", (groups,), _side(groups, rows // WORD)), TileDim("x", (best,), _side(best, columns))
    return TilePlan("turn", nest, (y, x), min(max(y.block * x.block * WORD // 512, 1), 8), batch, words=words)


def _narrow_sides(axes: tuple[Axis, ...], used: list[tuple[Index, int]]) -> tuple[Axis, Axis] | None:
    """Return a short and a long axis whose runs some accesses have one way round, and all others the other way.

    Elements in the order of the store would read each cache line once for each position of the short axis.
    """
    for narrow in axes:
        for wide in axes:
            if narrow.size not in NARROW_SIDES or not isinstance(wide.size, int) or wide.size < MIN_WIDE_SIDE:
                continue
            steps = {(stride(index, narrow.name), stride(index, wide.name)) for index, _ in used}
            far = {step for step in steps if step[1] == 1 and isinstance(step[0], int) and step[0] >= wide.size}
            if far and steps - far == {(1, narrow.size)}:
                return narrow, wide
    return None


def _turn_narrow(nest: Nest, narrow: Axis, wide: Axis) -> TilePlan:
    height = power_of_two(about([narrow]))
    y, x = TileDim("y", (narrow,), height), TileDim("x", (wide,), _side(wide, NARROW_ELEMENTS // height))
    batch = tuple(axis for axis in nest.elements if axis not in (narrow, wide))
    return TilePlan("turn", nest, (y, x), power_of_two(max(about([narrow]) * x.block // 512, 1)), batch)


def reach(of: Nest | Loop, name: str) -> int:
    """Return the distance in memory between neighbours along a variable, summed over all accesses."""
    return distance(of.body, of.stores, name)


def distance(body: Iterable[Value], stores: Iterable[Store], name: str) -> int:
    """Return this distance summed over some stores and the loads among some values."""
    steps = [(stride(index, name), weight) for index, weight in accesses(tuple(body), tuple(stores))]
    return sum(abs(typical_stride(step)) * weight for step, weight in steps if step is not None)


def _full(axes: tuple[Axis, ...], used: list[tuple[Index, int]]) -> list[tuple[Index, int]]:
    """Return the accesses that depend on the most variables: a value for each row does not determine the tile."""
    names = {axis.name for axis in axes}
    most = max((len(index.variables & names) for index, _ in used), default=0)
    return [(index, weight) for index, weight in used if len(index.variables & names) == most]


def _stores_bytes(nest: Nest) -> bool:
    return all(ITEMSIZE[nest.body[store.value].dtype] == 1 for store in nest.stores)


def _both_ways(nest: Nest, best: str, other: str) -> bool:
    """Are some accesses contiguous along one variable and others only along the other?"""
    indices = [index for index, _ in _full((*nest.rows, *nest.elements), accesses(nest.body, nest.stores))]
    return any(stride(index, other) == 1 and stride(index, best) not in (None, 0, 1) for index in indices)


def _row_block(nest: Nest, best: Axis) -> int:
    """Return the elements of one row in a tile of part of a row, where some loads belong to the row and are read once.

    0 where tiles over all elements are better: short rows, rows not of whole 16 bytes, or rows slightly longer than a
    tile. With symbolic sizes, such a tile computes coordinates, which need divisions, once and not for each element.
    """
    if not isinstance(count((*nest.rows, *nest.elements)), int):
        size = about([best])
        return 0 if size < MIN_UNKNOWN_ROW else min(FLAT_ELEMENTS, max(power_of_two(size), FLAT_ELEMENTS // 4))
    names = {axis.name for axis in nest.elements}
    indices = [index for index, _ in accesses(nest.body, nest.stores)]
    if not any(index.variables & names and best.name not in index.variables for index in indices):
        return 0
    size = about([best])
    fitting = [
        block
        for block in (FLAT_ELEMENTS, FLAT_ELEMENTS // 2, FLAT_ELEMENTS // 4)
        if -(-size // block) * block <= 1.15 * size
    ]
    return fitting[0] if fitting and size % 8 == 0 else 0


def _side(axis: Axis, most: int) -> int:
    return min(most, power_of_two(about([axis])))


# --- columns ----------------------------------------------------------------------------------------------------------


PAIRED = (2048, 4096)
"""Lengths of rows that are faster in pairs: a program then has 32 elements for each thread."""
READ_ELEMENTS = 4096
"""Elements of a row that 256 threads read at a time if only row values are stored. This takes 0.96 of the time of 512
threads at once (docs/lab/constants.md, K1)."""
PIECE_ELEMENTS = 2048
"""Elements of a longer row that 128 threads read at a time. This takes 0.91 of the time of twice as many elements and
threads (docs/lab/constants.md, K2)."""
OUTER_ROWS = 64
"""Rows of a tile where adjacent rows, not elements, are contiguous."""
MAX_ELEMENT_LOADS = 8
"""Loads for each element up to which a thread has 32 elements in registers."""


def tile_rows(nest: Nest) -> TilePlan:
    rows, size = about(nest.rows), about(nest.elements)
    known = isinstance(count(nest.elements), int)
    whole = power_of_two(size)
    if _is_lane(nest):
        x = min(OUTER_ROWS, power_of_two(rows))
        while x > 16 and rows < x * PROGRAMS:
            x //= 2
        # few programs: a double block, or all elements, since nothing else hides memory latency
        few = rows < 2 * x * PROGRAMS
        # windows of nine loads in 32 elements of each thread spill: 16 of them take 130 to 170 registers
        wide = _reads_windows(nest)
        most = MAX_PERSISTENT_ELEMENTS // 2 if wide else MAX_PERSISTENT_ELEMENTS
        if wide and few and most < x * whole <= 2 * most and x > 16:
            x //= 2
        r = min(ROW_ELEMENTS * (2 if few else 1) // x, whole)
        if known and few and r < whole and x * whole <= most:
            dims = TileDim("x", nest.rows, x), TileDim("r", nest.elements, whole)
            return TilePlan("rows", nest, dims, max(min(x * whole // 512, 16), 1))
        dims = TileDim("x", nest.rows, x), TileDim("r", nest.elements, r)
        warps = max(min(x * r // 512, 8 if wide else 4), 1)
        return TilePlan("rows", nest, dims, warps, looped=r < size or not known)
    if not known:
        piece = min(max(4 * whole, PIECE_ELEMENTS // 8), PIECE_ELEMENTS)
        dims = TileDim("x", nest.rows, 1), TileDim("r", nest.elements, piece)
        return TilePlan("rows", nest, dims, max(piece // 512, 1), looped=True)
    if whole > MAX_PERSISTENT_ELEMENTS:
        return TilePlan(
            "rows", nest, (TileDim("x", nest.rows, 1), TileDim("r", nest.elements, PIECE_ELEMENTS)), 4, looped=True
        )
    x = max(min(ROW_ELEMENTS // whole, power_of_two(rows)), 1)
    while x > 1 and rows < x * PROGRAMS:
        x //= 2
    if all(nest.row_stores) and whole > READ_ELEMENTS and _in_one_pass(nest):
        return TilePlan(
            "rows",
            nest,
            (TileDim("x", nest.rows, x), TileDim("r", nest.elements, READ_ELEMENTS)),
            warps_of(READ_ELEMENTS),
            looped=True,
        )
    if x == 1 and PAIRED[0] <= whole <= PAIRED[1] and rows >= PROGRAMS and not all(nest.row_stores):
        # two rows at once are slower for maxima: softmax takes 154 us for 139, RMSNorm 37.2 for 37.6 (one H200)
        sums = all(value.op == "sum" for value in nest.body if isinstance(value, (Reduce, Scan)))
        x = 2 if sums and rows >= 2 * PROGRAMS else 1
        return TilePlan(
            "rows", nest, (TileDim("x", nest.rows, x), TileDim("r", nest.elements, whole)), max(x * whole // 1024, 1)
        )
    return TilePlan("rows", nest, (TileDim("x", nest.rows, x), TileDim("r", nest.elements, whole)), warps_of(x * whole))


def _in_one_pass(nest: Nest) -> bool:
    """Is every element of a row needed only once, unlike for a variance, which needs the mean first?"""
    reduces = [ref for ref, value in enumerate(nest.body) if isinstance(value, Reduce)]
    below = ancestors(nest.body, [value.arg for value in nest.body if isinstance(value, Reduce)])
    return not any(isinstance(value, Scan) for value in nest.body) and not below.intersection(reduces)


def _is_lane(nest: Nest) -> bool:
    """Are adjacent rows, rather than elements of a row, contiguous in memory?"""
    if not nest.rows or about(nest.rows[-1:]) < 8 or not any(isinstance(value, (Reduce, Scan)) for value in nest.body):
        return False
    # weighted by traffic: in a weighted sum over a matrix's rows, the weights count little beside the matrix
    often = [
        (index, weight * _points(nest, index))
        for index, weight in accesses(nest.body, nest.stores)
        if index.variables & nest.element_names
    ]
    return unit_strides(nest.rows[-1].name, often) > unit_strides(nest.elements[-1].name, often)


def _reads_windows(nest: Nest) -> bool:
    """Does an element read many others, such as a window of 3 x 3?"""
    names = nest.element_names
    loads = [value for value in nest.body if isinstance(value, Load) and value.index.variables & names]
    return len(loads) > MAX_ELEMENT_LOADS


def _points(nest: Nest, index: Index) -> int:
    """Return the number of elements that an index reaches; a run-time value may reach all."""
    return about(axis for axis in nest.axes if axis.name in index.variables or runtime_refs(index))


COLUMN_ROWS = 8
"""Rows of the tile of a column reduction that needs no whole rows."""
COLUMNS = 256
"""Columns of such a tile."""
MIN_FUNCTION_COST = 14
"""Cost of the functions and divisions of an element, in additions, from which a thread has 8 elements and not 16: more
warps hide their latency (docs/lab/constants.md, K21)."""
HEAVY_PROGRAMS = 6 * PROGRAMS
"""Programs of such a kernel."""
MIN_PIECE_COLUMNS = 32
"""Columns of the narrowest tile that keeps to one piece: two sectors of 16-bit elements (docs/lab/constants.md,
K23)."""
REGISTERS = 1 << 16
"""Registers of a multiprocessor, which the threads of one program may have at most."""
IN_FLIGHT = 2
"""Values of each element that functions take beside those that a thread keeps (docs/lab/constants.md, K24)."""
TRANSPOSED_ROWS = 32
"""Rows of a tile of as many elements where rows, not columns, are neighbours in memory of a load: two sectors of 16-bit
elements."""


def tile_columns(nest: Nest, chunk: Size) -> TilePlan:
    whole = power_of_two(about(nest.elements))
    if sees_whole_rows(nest):
        x = min(max(ROW_ELEMENTS // whole, 1), power_of_two(typical(chunk)))
        return TilePlan(
            "columns",
            nest,
            (TileDim("x", nest.rows, x), TileDim("r", nest.elements, whole)),
            warps_of(x * whole),
            chunk=chunk,
        )
    x, r = tile_sides(nest)
    x = min(x, power_of_two(typical(chunk)))
    warps = max(x * r // (256 if _is_heavy(nest) else 512), 1)
    return TilePlan("columns", nest, (TileDim("x", nest.rows, x), TileDim("r", nest.elements, r)), warps, chunk=chunk)


def tile_sides(nest: Nest) -> tuple[int, int]:
    """Return rows and columns of the tile of a column reduction that needs no whole rows."""
    size, elements = about(nest.elements), COLUMN_ROWS * COLUMNS
    if _reads_across(nest):
        columns = elements // TRANSPOSED_ROWS
    elif _is_heavy(nest):
        columns = COLUMNS // 2
        elements //= 2
    else:  # 384 columns are three tiles of 128, not two of 256
        columns = COLUMNS // 2 if -(-size // COLUMNS) * COLUMNS > size + COLUMNS // 2 - 1 else COLUMNS
    r = min(columns, power_of_two(size), _piece_width(nest))
    return elements // r, r


def programs_wanted(nest: Nest) -> int:
    """Return how many programs a column reduction should have that needs no whole rows."""
    return HEAVY_PROGRAMS if _is_heavy(nest) else 2 * PROGRAMS


def _is_heavy(nest: Nest) -> bool:
    """Do functions take longer than memory?"""
    element = levels(nest).element
    costs = [OPS[value.op].cost for ref, value in enumerate(nest.body) if isinstance(value, Apply) and element[ref]]
    return sum(cost for cost in costs if cost > 1) >= MIN_FUNCTION_COST


def _piece_width(nest: Nest) -> int:
    """Return the widest tile that reads from one piece of what a concatenation along columns joins.

    A program then tests once which piece it is in. It would otherwise load each element from every piece, under a mask.
    Columns of a tile also are neighbours in one run of the pieces, such as the width of a head.
    """
    masks = [value.mask for value in nest.body if isinstance(value, Load) and value.mask is not None]
    causes = [nest.body[ref] for ref in ancestors(nest.body, masks)]
    tested = {name for value in causes if isinstance(value, IndexOf) for name in value.index.variables}
    places = [place for place, axis in enumerate(nest.elements) if axis.name in tested]
    behind = nest.elements[places[-1] + 1 :] if places else ()
    widths = [_even_part(count(axes)) for axes in (behind[-1:], behind) if axes]
    return next((width for width in widths if width >= MIN_PIECE_COLUMNS), COLUMNS)


def _even_part(size: Size) -> int:
    """Return the largest power of two that divides a size; 0 for a symbol."""
    return size & -size if isinstance(size, int) else 0


def _reads_across(nest: Nest) -> bool:
    """Is a whole matrix read whose rows are neighbours in memory?"""
    if not nest.rows or not nest.elements:
        return False
    row, element = nest.rows[-1].name, nest.elements[-1].name
    steps = [(stride(value.index, row), stride(value.index, element)) for value in nest.body if isinstance(value, Load)]
    return any(along_rows == 1 and along not in (None, 0, 1) for along_rows, along in steps)


def rows_of_program(nest: Nest, combining: list[int]) -> Size:
    """Return the rows of one program, if it can accumulate every combining store in registers; else 0."""
    sizes: set[Size] = set()
    rows = count(nest.rows)
    for number in combining:
        found = chunk_of(nest.stores[number], nest.rows, nest.elements, nest.row_stores[number])
        if found is None:
            return 0
        sizes.add(found or (max(rows, 1) if isinstance(rows, int) else rows))
    if len(sizes) != 1 or (may_exceed(count(nest.elements), MAX_PERSISTENT_ELEMENTS) and sees_whole_rows(nest)):
        return 0
    return sizes.pop()


def sums_overflow(loop: Loop) -> bool:
    """Would a program that has whole rows and combines columns keep more values than its threads have registers for?

    It keeps the sums, what all rows share, and values that are needed before and after a reduction of a row.
    """
    names = set(inner_names(loop))
    sums = sum(store.mode != "set" and bool(store.index.variables & names) for store in loop.stores)
    if not sums or typical(size_product(loop.inner)) <= MAX_PERSISTENT_ELEMENTS // 4:
        return False  # there is room for 16 values of each element
    nest = flatten_loop(loop)
    if not sees_whole_rows(nest):
        return False
    whole = power_of_two(about(nest.elements))
    loads = [value.index.variables for value in nest.body if isinstance(value, Load)]
    row_names = {axis.name for axis in nest.rows}
    shared = sum(bool(used & nest.element_names) and not used & row_names for used in loads)
    registers = (sums + shared + _kept(nest) + IN_FLIGHT * _is_heavy(nest)) * whole
    return registers > REGISTERS or whole > MAX_PERSISTENT_ELEMENTS


def _kept(nest: Nest) -> int:
    """Return how many values of an element are computed before a reduction of its row and used after it."""
    of = levels(nest)
    pairs = ((used, ref) for ref, value in enumerate(nest.body) if of.element[ref] for used in operands(value))
    return len({used for used, ref in pairs if of.element[used] and of.known[used] < of.known[ref]})


def sees_whole_rows(nest: Nest) -> bool:
    """Does anything happen once a row, so that no two programs may share one?"""
    if any(nest.row_stores) or any(isinstance(value, (Reduce, Scan)) for value in nest.body):
        return True
    return any(store.mode != "set" and not store.index.variables & nest.element_names for store in nest.stores)


def chunk_of(store: Store, rows: tuple[Axis, ...], elements: tuple[Axis, ...], row_store: bool) -> int | None:
    """Return how many consecutive rows a store combines: 0 for all, None for any other pattern.

    Its index may contain the chunk's number, which is the row's number divided by the chunk's size. It contains all
    variables of the element or none.
    """
    if runtime_refs(store.index):
        return None
    names = {axis.name for axis in elements}
    used = store.index.variables & names
    if used and (row_store or used != names or not _spreads(store.index, elements)):
        return None
    chunk = 0
    for monomial, _ in store.index.terms:
        for atom in monomial:
            if isinstance(atom, Var) and (atom.name in names or is_symbol(atom.name)):
                continue
            if not isinstance(atom, Div) or atom.base != row_number(rows) or not isinstance(atom.divisor, int):
                return None
            if chunk not in (0, atom.divisor):
                return None
            chunk = atom.divisor
    return chunk


def leaves_gaps(plan: TilePlan, store: Store, extent: Size) -> bool:
    """Return whether a column reduction may leave elements of its buffer unwritten; these get the sum of no values.

    An example is the gradient of an embedding with only one row in use: no other row is part of the sum.
    """
    spread = store.index.variables & plan.nest.element_names
    return size_product((plan.parts, count(plan.nest.elements) if spread else 1)) != extent


def _spreads(index: Index, elements: tuple[Axis, ...]) -> bool:
    """Does every element have an address of its own?"""
    strides: list[tuple[Size, Size]] = []
    for axis in elements:
        step = stride(index, axis.name)
        if not step:
            return False
        strides.append((step, axis.size))
    reach = as_index(0)
    for step, size in sorted(strides, key=lambda pair: typical_stride(pair[0])):
        if not is_nonnegative(as_index(step) - reach - 1, {}):
            return False
        reach = reach + as_index(step) * (as_index(size) - 1)
    return True


WORD = 4
"""Bytes of a word."""
MAX_VALUES = 80
"""Values of a loop that is repeated for four rows: more would take Triton long to compile."""


def by_words(nest: Nest, along: Axis, across: Axis) -> tuple[Nest, tuple[tuple[int, ...], ...]] | None:
    """Repeat the nest's body for four positions of `across`; return that, and the stores that make words.

    `along` is the dimension in which the tile is read. None where no bytes are stored across it, or not in whole words,
    and where values are read across it.
    """
    moving = [n for n, store in enumerate(nest.stores) if _is_across(store.index, along, across)]
    if not isinstance(across.size, int) or across.size % WORD or len(nest.body) > MAX_VALUES or not moving:
        return None
    if not all(_makes_words(nest, nest.stores[n], across) for n in moving):
        return None
    places = [value.index for value in nest.body if isinstance(value, (Load, IndexOf))]
    if any(map(runtime_refs, (*places, *(store.index for store in nest.stores)))):
        return None
    if any(isinstance(value, Load) and _is_across(value.index, along, across) for value in nest.body):
        return None
    groups = tuple(tuple(range(n * WORD, (n + 1) * WORD)) for n in moving)
    return _repeated(nest, across, across.size // WORD), groups


def scatters_bytes(loop: Loop) -> bool:
    """Would a program with whole rows in its registers store bytes across these rows, one or two at a place?

    With RMSNorm's backward of 32768 x 768 elements that takes 230 us, where each alone is below 60 (one H200).
    """
    if not loop.outer or not loop.inner or not any(isinstance(value, Reduce) for value in loop.body):
        return False
    row, element = outer_names(loop)[-1], inner_names(loop)[-1]
    reads_rows = any(
        isinstance(value, Load) and row in value.index.variables and stride(value.index, element) == 1
        for value in loop.body
    )
    return reads_rows and any(
        store.mode == "set"
        and ITEMSIZE[loop.body[store.value].dtype] == 1
        and stride(store.index, row) == 1
        and stride(store.index, element) not in (None, 0, 1)
        for store in loop.stores
    )


def _is_across(index: Index, along: Axis, across: Axis) -> bool:
    return stride(index, across.name) == 1 and stride(index, along.name) != 0


def _makes_words(nest: Nest, store: Store, across: Axis) -> bool:
    """Are four bytes stored to each aligned word?"""
    one = ITEMSIZE[nest.body[store.value].dtype] == 1 and store.mode == "set"
    return one and exact_quotient(store.index - var(across.name), WORD) is not None


def _repeated(nest: Nest, across: Axis, size: int) -> Nest:
    body: list[Value] = []
    known: dict[tuple[Value, str], Ref] = {}
    stores: list[list[Store]] = [[] for _ in nest.stores]
    for row in range(WORD):
        values, placed = reindex(nest.body, nest.stores, {across.name: var(across.name) * WORD + row})
        number: dict[Ref, Ref] = {}
        for ref, value in enumerate(values):
            value = renumber(value, number)
            # 0 and False, 0.0 and -0.0 compare equal: the text distinguishes them
            key = value, repr(value.value) if isinstance(value, Const) else ""
            if key not in known:
                known[key] = len(body)
                body.append(value)
            number[ref] = known[key]
        for made, store in zip(stores, placed, strict=True):
            made.append(replace(store, value=number[store.value]))
    shorter = tuple(replace(axis, size=size) if axis == across else axis for axis in nest.elements)
    every = tuple(store for made in stores for store in made)
    return replace(nest, elements=shorter, body=tuple(body), stores=every, row_stores=(False,) * len(every))
