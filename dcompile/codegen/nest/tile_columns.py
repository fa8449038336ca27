"""Tile column reductions for GPU programs: which rows one program combines in registers."""

from __future__ import annotations

from dcompile.codegen.nest.loop_nest import Axis, Nest, flatten_loop, levels, may_exceed, stride
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
from dcompile.ir.analysis import ancestors, inner_names, operands, runtime_refs
from dcompile.ir.index import Div, Index, Size, Var, as_index, is_nonnegative, is_symbol, size_product, typical
from dcompile.ir.nodes import Apply, IndexOf, Load, Loop, Reduce, Scan, Store
from dcompile.ir.ops import OPS

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
