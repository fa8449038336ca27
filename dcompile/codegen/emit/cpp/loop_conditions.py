"""Take conditions out of loops over elements, or loops out of functions.

Loops are split into parts of an axis where index comparisons and quotients are constant (index-set splitting). Rows of
masked loads are selected by a pointer: one decision for each row replaces a condition at each element.

Loops that multiply a tensor by a number that equals 1 at run time are skipped, if the result overwrites the tensor. A
loss's backward starts with such a loop where the forward computed its gradient
(`capture/passes/dynamo/loss_gradient_in_forward.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from dcompile.codegen.emit.cpp.ops import memory_type
from dcompile.codegen.emit.cpp.plan import NO_SCANS, NestPlan, Scaling
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.nest.loop_nest import Axis, Nest, may_exceed
from dcompile.ir.analysis import turning_point
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import ZERO, Div, Index, Mod, Var, substitute, var
from dcompile.ir.nodes import Apply, IndexOf, Load, Ref, Store, Value

_WIDER = {"bfloat16": ("float32", "float64"), "float16": ("float32", "float64"), "float32": ("float64",)}
"""Dtypes that hold every value of a dtype, so that a cast there and back changes nothing."""


def skip_identity_scale(plan: NestPlan) -> NestPlan:
    """Return at once where a tensor would be multiplied by 1 in its own memory."""
    scaling = find_scaling(plan.nest)
    return replace(plan, scaling=scaling) if scaling else plan


def find_scaling(nest: Nest) -> Scaling | None:
    """Return a loop's tensor and factor, if it only multiplies them and a factor of 1 changes no element."""
    if len(nest.stores) != 1 or nest.stores[0].mode != "set":
        return None
    (store,) = nest.stores
    at, after = _uncast(nest, store.value)
    product = nest.body[at]
    if not isinstance(product, Apply) or product.op != "mul":
        return None
    for tensor, number in (product.args, product.args[::-1]):
        (source, before), (factor, _) = _uncast(nest, tensor), _uncast(nest, number)
        loaded, by = nest.body[source], nest.body[factor]
        if not (isinstance(loaded, Load) and isinstance(by, Load) and loaded.mask is by.mask is None):
            continue
        exact = {loaded.dtype, *_WIDER.get(loaded.dtype, ())}.issuperset((*before, product.dtype, *after))
        exact = exact and nest.body[store.value].dtype == loaded.dtype
        if exact and loaded.index == store.index and loaded.buffer != store.buffer and not by.index.variables:
            return Scaling(loaded, factor)
    return None


def _uncast(nest: Nest, ref: Ref) -> tuple[Ref, tuple[str, ...]]:
    """Return the value before casts, if there are any, and their dtypes."""
    value = nest.body[ref]
    if not isinstance(value, Apply) or value.op != "cast":
        return ref, ()
    source, dtypes = _uncast(nest, value.args[0])
    return source, (*dtypes, value.dtype)


MAX_PIECES = 8
"""Most parts of a loop."""


def split_loops(plan: NestPlan) -> NestPlan:
    """Split the loops of plain passes that only store, at the positions where comparisons or quotients change."""
    if plan.nest.lane or plan.shared_elements:
        return plan
    found = {number: pieces for number in range(plan.pass_count) if len(pieces := _pieces_of_pass(plan, number)) > 1}
    return replace(plan, pieces=found) if found else plan


def _pieces_of_pass(plan: NestPlan, number: int) -> tuple[tuple[int, int], ...]:
    """Return the parts of a pass's loop; none where it is written in another form."""
    (reduces, stores), axis = plan.pass_roots[number], plan.nest.elements[-1]
    late = plan.late is not None and number == plan.late.number  # its plain loop is for machines without vectors
    if reduces or not stores or number in plan.counters or (number in plan.vectors and not late):
        return ()
    if plan.scans.get(number, NO_SCANS) != NO_SCANS or not isinstance(axis.size, int) or axis == plan.shared_columns:
        return ()
    if any(plan.is_scalar_column(n, axis.name) or not plan.can_store_at_once(n, axis.name) for n in stores):
        return ()
    if any(row.name == axis.name and row.tile > 1 for row in plan.nest.rows):
        return ()
    return tuple(find_pieces(plan.nest, axis, plan.pass_values(number), [plan.nest.stores[n] for n in stores]))


def find_pieces(nest: Nest, axis: Axis, needed: Iterable[Ref], stores: Iterable[Store]) -> list[tuple[int, int]]:
    """Return parts of a whole axis where comparisons of positions with numbers, and quotients, are constant.

    Joined (cat, pad) or rolled tensors are then read without a lookup at each element. Two rows of 2 to 3 KB took 0.45
    to 0.67 of the time, images with a frame 0.85, rolled rows 0.4.
    """
    assert isinstance(axis.size, int)
    values = [nest.body[ref] for ref in needed]
    comparisons = (value.args for value in values if isinstance(value, Apply) and value.op == "lt")
    turns = (turning_point(nest.body[left], nest.body[right]) for left, right in comparisons)
    inside = {at for name, at in filter(None, turns) if name == axis.name and 0 < at < axis.size}
    for index in indices(values, stores):
        found = set(itertools.islice(_turns(index, axis.name, axis.size), MAX_PIECES))
        inside |= found if len(inside | found) < MAX_PIECES else set()
    if not inside or len(inside) >= MAX_PIECES:
        return [(0, axis.size)]
    return list(itertools.pairwise((0, *sorted(inside), axis.size)))


def indices(values: Iterable[Value], stores: Iterable[Store]) -> Iterator[Index]:
    """Yield the indices of loads and stores."""
    yield from (value.index for value in values if isinstance(value, Load | IndexOf))
    yield from (store.index for store in stores)


def _turns(index: Index, name: str, size: int) -> Iterator[int]:
    """Yield the positions where a quotient in an index changes, as `name` goes from 0 to `size`."""
    for atom in {atom for monomial, _ in index.terms for atom in monomial}:
        if not isinstance(atom, Div | Mod) or not isinstance(atom.divisor, int):
            continue
        step, rest = atom.base.split(Var(name))
        by, start = None if step is None else step.constant, rest.constant
        if by is None or start is None or by <= 0:
            continue
        first = (start // atom.divisor + 1) * atom.divisor
        yield from (-((start - whole) // by) for whole in range(first, start + by * (size - 1) + 1, atom.divisor))


def nest_within(nest: Nest, axis: Axis, low: int, high: int) -> Nest:
    """Return the nest restricted to a part of an axis, where quotients are known."""
    known = {a.name: a.size for a in nest.axes} | {axis.name: high - low}
    there, back = {axis.name: var(axis.name) + low}, {axis.name: var(axis.name) - low}

    def rewritten(index: Index) -> Index:
        return substitute(substitute(index, there, known), back, {})

    body = tuple(replace(v, index=rewritten(v.index)) if isinstance(v, Load | IndexOf) else v for v in nest.body)
    return replace(nest, body=body, stores=tuple(replace(s, index=rewritten(s.index)) for s in nest.stores))


ZEROS_BYTES = 16384
"""Length of the library's `zeros`, which rows with a false mask are read from if they are no longer."""


def select_masked_rows(plan: NestPlan) -> NestPlan:
    """Select once a row whether a masked load reads memory or zeros."""
    if plan.nest.lane or plan.shared_elements or len(plan.nest.elements) > 1:
        return plan
    used = (ref for number in range(plan.pass_count) for ref in plan.new_values(number))
    found = frozenset(ref for ref in used if _is_whole_row(plan, ref))
    return replace(plan, selected_rows=found) if found else plan


def _is_whole_row(plan: NestPlan, ref: Ref) -> bool:
    """Is this a load of a whole row, with one mask for all of it?"""
    load, (last,) = plan.nest.body[ref], plan.nest.elements
    if not isinstance(load, Load) or load.mask is None or plan.levels.element[load.mask]:
        return False
    if may_exceed(last.size, ZEROS_BYTES // ITEMSIZE[load.dtype]):
        return False
    unit = load.index.coefficient(last.name)
    varies = any(plan.levels.element[int(v[1:])] for v in load.index.variables if v[0] == "v")
    return unit is not None and unit.constant == 1 and not varies


def print_row_pointers(p: Printer, number: int) -> None:
    """Point to the rows that a pass is the first to read, or to zeros."""
    last = p.nest.elements[-1]
    for ref in p.plan.pass_values(number):
        load, once = p.nest.body[ref], f"row of {ref}"
        if ref not in p.plan.selected_rows or once in p.declared:
            continue
        assert isinstance(load, Load) and load.mask is not None
        p.declared.add(once)
        kind = memory_type(load.dtype)
        start = p.place(load.buffer, substitute(load.index, {last.name: ZERO}, {}))
        row = f"{p.name(load.mask)} ? &{start} : (const {kind}*)zeros"
        p.line(f"const {kind}* const z{p.number(ref)} = {row};")
