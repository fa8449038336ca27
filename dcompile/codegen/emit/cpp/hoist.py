"""Values that are the same in every row are computed once, before all rows: where to read, and with which weights."""

from __future__ import annotations

from dcompile.codegen.nest.loop_nest import Levels, Nest, cone_cost, may_exceed
from dcompile.ir.analysis import ancestors, operands
from dcompile.ir.index import is_symbol, size_product
from dcompile.ir.nodes import ITEMSIZE, Apply, Const, IndexOf, Ref, Value

TABLE_ROWS = 8
"""Rows from which on a table is worth its memory."""
TABLE_BYTES = 32768
"""Memory of all tables of a kernel, on the stack."""
TABLE_COST = 4
"""Additions from which on a value is read from a table: what a load and a store cost, and a conversion."""


def find_tables(nest: Nest, levels: Levels) -> tuple[Ref, ...]:
    """Values of elements that depend on nothing but the place in the row, and are used together with what does."""
    if nest.lane or len(nest.elements) != 1 or not nest.rows:
        return ()
    (axis,) = nest.elements
    if not isinstance(axis.size, int) or not may_exceed(size_product(row.count for row in nest.rows), TABLE_ROWS):
        return ()
    same = [False] * len(nest.body)
    for ref, value in enumerate(nest.body):
        same[ref] = _is_same(value, same, axis.name)
    used = {store.value for store in nest.stores} | {r for s in nest.stores for r in _refs(s.index.variables)}
    used |= {arg for ref in levels.live if not same[ref] for arg in operands(nest.body[ref])}
    found, size = list[Ref](), 0
    for ref in sorted(used & levels.live):
        number = same[ref] and levels.element[ref] and nest.body[ref].dtype != "bool"  # conditions divide loops
        costly = number and cone_cost(ref, nest.body, frozenset()) >= TABLE_COST
        if costly and (size := size + axis.size * ITEMSIZE[nest.body[ref].dtype]) <= TABLE_BYTES:
            found.append(ref)
    return tuple(found)


def computation(nest: Nest, tables: tuple[Ref, ...]) -> list[Ref]:
    """All values that tables are made of, in order."""
    return sorted(ancestors(nest.body, tables))


def _refs(names: frozenset[str]) -> set[Ref]:
    return {int(name[1:]) for name in names if name[0] == "v"}


def _is_same(value: Value, same: list[bool], name: str) -> bool:
    match value:
        case Const():
            return True
        case IndexOf(index, _):
            return all(v == name or is_symbol(v) for v in index.variables)
        case Apply(_, args, _):
            return all(same[arg] for arg in args)
    return False
