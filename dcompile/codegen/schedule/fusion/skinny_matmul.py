"""Measured choices for products of few rows: the tile of a kernel, or the library's GEMM and a separate loop.

Such products are loops from the start (`lower/rules/small_matmul.py`), with a tile that follows from their sizes.
`autotune.py` measures others. This file finds the loops and rewrites the chosen ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dcompile.codegen.nest.contraction import Contraction, find_contraction
from dcompile.codegen.nest.loop_nest import Axis, Nest, flatten_loop, reindex, renumber, renumber_values, stride
from dcompile.codegen.schedule.fusion.merge import without
from dcompile.device_traits import loop_traits
from dcompile.ir.analysis import operands
from dcompile.ir.buffers import Buffer
from dcompile.ir.canonical_names import nameless
from dcompile.ir.index import ZERO, Index, as_size, substitute, var
from dcompile.ir.nodes import Apply, Const, Extern, Load, Loop, Program, Reduce, Ref, Step, Tile, Value, View

LIBRARY = Tile(0, 0, 0, 0, 0)
"""Choice of the library's GEMM in place of a tile."""


@dataclass(frozen=True, slots=True)
class LibraryForm:
    """A loop's products as library calls, and the loop that uses their results, unless that only copies them."""

    calls: tuple[Extern, ...]
    rest: Loop | None
    buffers: tuple[Buffer, ...]
    """The calls' results."""


def choose_skinny_matmuls(program: Program, chosen: Mapping[Loop, Tile]) -> Program:
    """Give products of few rows the tiles that were chosen for them, or to the library.

    Guarantees: the same values, up to the order of summation in these products.
    Relies on: `chosen` is the same on every rank.
    """
    if not any(loop.product is None for loop in chosen):
        return program
    table = dict(program.table)
    steps: list[Step] = []
    for step in program.steps:
        tile = chosen.get(kind_of(step)) if isinstance(step, Loop) and step.product is None else None
        if tile is None or not isinstance(step, Loop):
            steps.append(step)
        elif tile != LIBRARY:
            steps.append(replace(step, tile=tile))
        else:
            form = library_form(step, table)
            assert form is not None, "the library was measured"
            steps += [*form.calls, *([] if form.rest is None else [form.rest])]
            table |= {buffer.name: buffer for buffer in form.buffers}
    return replace(program, steps=tuple(steps), buffers=tuple(table.values()))


def skinny_loops(program: Program) -> dict[Loop, list[Loop]]:
    """Return the loops that are products of few rows on GPUs, by kind: equal layers share one."""
    table = program.table
    found: dict[Loop, list[Loop]] = {}
    for step in program.steps:
        if isinstance(step, Loop) and loop_traits(step, table).has_row_matmul and contraction_of(step) is not None:
            found.setdefault(kind_of(step), []).append(step)
    return found


def contraction_of(loop: Loop) -> Contraction | None:
    """Return the products of a loop, if it has only such."""
    return find_contraction(flatten_loop(loop)) if loop.product is None else None


def kind_of(loop: Loop) -> Loop:
    """Return a loop without names and tile: the key of a choice."""
    return replace(nameless(loop, {})[0], tile=None)


def library_form(loop: Loop, table: Mapping[str, Buffer]) -> LibraryForm | None:
    """Return a loop with its products as library calls; None where rows have no common stride, or sums are not rounded.

    A sum that a bias is added to before rounding would be rounded twice.
    """
    nest = flatten_loop(loop)
    found = find_contraction(nest)
    if found is None or found.batch or len(found.rows) != 1 or len(found.columns) != 1 or not _are_rounded(nest, found):
        return None
    rows, columns, depth = found.row_count, found.column_count, found.depth
    names = {axis.name: var(f"i{place}") for place, axis in enumerate(nest.rows)}
    place = names[found.rows[0].name] * columns + names[found.columns[0].name]
    calls: list[Extern] = []
    results: dict[Ref, Load] = {}
    for number, product in enumerate(found.products):
        left, right = _load(nest, product.left), _load(nest, product.right)
        if {left.dtype, right.dtype} != {product.dtype}:
            return None  # the library would need the integers' casts in memory
        name = _new_name(f"{loop.name}_product{number or ''}", table)
        factors = (
            _view(left, (rows, depth), (found.rows[0], *nest.elements)),
            _view(right, (depth, columns), (*nest.elements, found.columns[0])),
        )
        calls.append(Extern("aten.mm.default", factors, (), (name,), "out", origin=loop.origin))
        results[product.reduce] = Load(name, place, left.dtype)
    device = table[loop.stores[0].buffer].device
    made = [Buffer(load.buffer, load.dtype, (rows, columns), (columns, 1), device) for load in results.values()]
    rest = _with_results(loop, nest, names, results)
    if _only_copies(rest, made, table):
        return LibraryForm((replace(calls[0], outs=(rest.stores[0].buffer,)),), None, ())
    return LibraryForm(tuple(calls), rest, tuple(made))


def _only_copies(rest: Loop, made: Sequence[Buffer], table: Mapping[str, Buffer]) -> bool:
    """Could the only product be written where the loop copies it to?"""
    loads = [value for value in rest.body if isinstance(value, Load)]
    if len(rest.stores) != 1 or len(loads) != 1 or loads[0].index != rest.stores[0].index:
        return False
    into = table[rest.stores[0].buffer]
    same = (into.dtype, into.shape, into.strides) == (made[0].dtype, made[0].shape, made[0].strides)
    return same and all(
        isinstance(value, Load) or (isinstance(value, Apply) and value.op == "cast") for value in rest.body
    )


def _are_rounded(nest: Nest, found: Contraction) -> bool:
    """Is every use of a sum a cast to the factors' dtype?"""
    sums = {product.reduce: product.dtype for product in found.products}
    users = [(value, ref) for value in nest.body for ref in operands(value) if ref in sums]
    stored = any(store.value in sums for store in nest.stores)
    return not stored and all(isinstance(v, Apply) and v.op == "cast" and v.dtype == sums[ref] for v, ref in users)


def _view(load: Load, shape: tuple[int, int], axes: tuple[Axis, ...]) -> View:
    """Return what a load reads along two variables as a matrix."""
    strides = tuple(stride(load.index, axis.name) for axis in axes)
    offset = as_size(substitute(load.index, {axis.name: ZERO for axis in axes}, {}))
    assert None not in strides, "loads of a contraction are affine"
    return View(load.buffer, shape, tuple(step for step in strides if step is not None), offset)


def _with_results(loop: Loop, nest: Nest, names: Mapping[str, Index], results: Mapping[Ref, Load]) -> Loop:
    """Return the loop over rows and columns that loads its sums."""
    body, stores = reindex(nest.body, nest.stores, dict(names))
    number: dict[Ref, Ref] = {}
    values: list[Value] = []
    for ref, value in enumerate(body):
        if ref in results:
            values += [results[ref], Apply("cast", (len(values),), "float32")]
        else:
            values.append(Const(0.0, value.dtype) if isinstance(value, Reduce) else renumber(value, number))
        number[ref] = len(values) - 1
    stores = tuple(replace(s, value=number[s.value], index=renumber_values(s.index, number)) for s in stores)
    sizes = tuple(axis.size for axis in nest.rows)
    kept = without(replace(loop, outer=sizes, inner=(), body=tuple(values), stores=stores, tile=None), frozenset())
    assert kept is not None, "a loop stores something"
    return kept


def _load(nest: Nest, ref: Ref) -> Load:
    load = nest.body[ref]
    assert isinstance(load, Load), "factors are loads"
    return load


def _new_name(name: str, table: Mapping[str, Buffer]) -> str:
    """Return a name that no buffer has."""
    while name in table:
        name += "_"
    return name
