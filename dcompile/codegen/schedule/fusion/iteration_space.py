"""Iteration spaces: the canonical form of a loop, and the change of a loop to another space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dcompile.ir.analysis import ranges, without_reduction
from dcompile.ir.index import (
    ZERO,
    Div,
    Index,
    Mod,
    Ranges,
    Size,
    Var,
    as_size,
    contiguous_strides,
    exact_quotient,
    flatten,
    floordiv,
    modulo,
    size_product,
    substitute,
    typical,
    unflatten,
    var,
)
from dcompile.ir.nodes import IndexOf, Load, Loop, Reduce, Scan, Value

Shape = tuple[Size, ...]


def space_ranges(outer: Shape, inner: Shape) -> dict[str, Size]:
    """Return the exclusive bound of every variable of a space."""
    return {f"i{k}": n for k, n in enumerate(outer)} | {f"j{k}": n for k, n in enumerate(inner)}


def position(letter: str, shape: Shape) -> Index:
    """Return the row-major position of the variables `letter0, letter1, ...` in `shape`."""
    return flatten([var(f"{letter}{k}") for k in range(len(shape))], contiguous_strides(shape))


def coordinates(letter: str, shape: Shape, flat: Index, bounds: Ranges) -> dict[str, Index]:
    """Return the variables `letter0, ...` of `shape` at row-major position `flat`."""
    return {f"{letter}{k}": c for k, c in enumerate(unflatten(flat, shape, bounds))}


def indices(loop: Loop) -> list[Index]:
    """Return every index expression of the loop."""
    found = [value.index for value in loop.body if isinstance(value, Load | IndexOf)]
    return found + [store.index for store in loop.stores]


def divisions(loop: Loop) -> int:
    """Count the distinct divisions and remainders in the loop's indices: the cost of a badly chosen space."""
    atoms = {atom for index in indices(loop) for monomial, _ in index.terms for atom in monomial}
    return sum(not isinstance(atom, Var) for atom in atoms)


def respace(loop: Loop, outer: Shape, inner: Shape, values: Mapping[str, Index]) -> Loop:
    """Rewrite the loop over another space; `values` gives its old variables in terms of the new ones."""
    bounds = space_ranges(outer, inner)

    def moved(index: Index) -> Index:
        return substitute(index, values, bounds)

    body: list[Value] = [
        replace(value, index=moved(value.index)) if isinstance(value, Load | IndexOf) else value for value in loop.body
    ]
    stores = tuple(replace(store, index=moved(store.index)) for store in loop.stores)
    return replace(loop, outer=outer, inner=inner, body=tuple(body), stores=stores)


def refine(first: Loop, second: Loop) -> tuple[Loop, Loop]:
    """Split axes of both loops of one space until no index divides a bare variable: (12*64,) becomes (12, 64)."""
    for _ in range(6):
        split = _wanted_split((first, second), ranges(first))
        if split is None:
            break
        name, divisor = split
        first, second = _split_axis(first, name, divisor), _split_axis(second, name, divisor)
    return first, second


def _wanted_split(loops: tuple[Loop, Loop], bounds: Ranges) -> tuple[str, Size] | None:
    """Return a variable that some index divides, and the smallest such divisor."""
    found: dict[tuple[str, int, str], tuple[str, Size]] = {}
    for loop in loops:
        for index in indices(loop):
            for monomial, _ in index.terms:
                for atom in monomial:
                    if isinstance(atom, Div | Mod):
                        name, by = str(atom.base), atom.divisor
                        if name in bounds and exact_quotient(bounds[name], by) is not None:
                            found[name, typical(by), str(by)] = (name, by)
    return found[min(found)] if found else None


def _split_axis(loop: Loop, name: str, divisor: Size) -> Loop:
    letter, axis = name[0], int(name[1:])
    shapes = {"i": loop.outer, "j": loop.inner}
    shape = shapes[letter]
    rows = exact_quotient(shape[axis], divisor)
    assert rows is not None, f"{name} cannot be split by {divisor}"
    shapes[letter] = (*shape[:axis], rows, divisor, *shape[axis + 1 :])
    values = {f"{letter}{k}": var(f"{letter}{k + 1}") for k in range(axis + 1, len(shape))}
    values[name] = var(name) * divisor + var(f"{letter}{axis + 1}")
    return respace(loop, shapes["i"], shapes["j"], values)


def canonical(loop: Loop) -> Loop:
    """Remove axes of size 1, and merge neighbouring axes wherever every index allows it."""
    if any(store.mode != "set" for store in loop.stores) and 1 in (*loop.outer, *loop.inner):
        return loop  # a combining store takes one value per row or per element, as its index says, ones included
    loop = elementwise(_drop_ones(loop))
    outer, inner = loop.outer, loop.inner
    used = indices(loop)
    keep_i, keep_j = _mergeable(used, "i", outer), _mergeable(used, "j", inner)
    if len(keep_i) == len(outer) and len(keep_j) == len(inner):
        return loop
    new_outer = tuple(size_product(outer[k] for k in group) for group in keep_i)
    new_inner = tuple(size_product(inner[k] for k in group) for group in keep_j)
    values: dict[str, Index] = {}
    for letter, groups in (("i", keep_i), ("j", keep_j)):
        for new, group in enumerate(groups):
            # every index is linear in the run with the coefficients of one axis: its fastest member stands for all
            values |= {f"{letter}{k}": ZERO for k in group[:-1]}
            values[f"{letter}{group[-1]}"] = var(f"{letter}{new}")
    return respace(loop, new_outer, new_inner, values)


def _drop_ones(loop: Loop) -> Loop:
    outer, inner = loop.outer, loop.inner
    if 1 not in outer and 1 not in inner:
        return loop
    values: dict[str, Index] = {}
    for letter, shape in (("i", outer), ("j", inner)):
        kept = 0
        for k, size in enumerate(shape):
            values[f"{letter}{k}"] = ZERO if size == 1 else var(f"{letter}{kept}")
            kept += size != 1
    new_inner = tuple(n for n in inner if n != 1)
    if inner and not new_inner:
        new_inner = (1,)  # a row of one element is still a row: Reduce needs an inner space
    return respace(loop, tuple(n for n in outer if n != 1), new_inner, values)


def elementwise(loop: Loop) -> Loop:
    """Remove the reductions of a loop without inner space: each reduces one element, at position 0, to itself.

    Over longer rows, these reductions would have another meaning.
    """
    if loop.inner or not any(isinstance(value, (Reduce, Scan)) for value in loop.body):
        return loop
    return replace(loop, body=tuple(without_reduction(value) for value in loop.body))


def _mergeable(used: list[Index], letter: str, shape: Shape) -> list[list[int]]:
    """Group axes into runs that every index treats as one: coefficient(k) == size(k+1) * coefficient(k+1)."""
    groups: list[list[int]] = [[0]] if shape else []
    for k in range(1, len(shape)):
        here, before = f"{letter}{k}", f"{letter}{k - 1}"
        if all(_one_axis(index, before, here, shape[k]) for index in used):
            groups[-1].append(k)
        else:
            groups.append([k])
    return groups


def _one_axis(index: Index, before: str, here: str, size: Size) -> bool:
    if not {before, here} & index.variables:
        return True
    slow, fast = index.coefficient(before), index.coefficient(here)
    return slow is not None and fast is not None and slow == fast * size


def radix(index: Index, bounds: Ranges) -> list[tuple[str, Size]] | None:
    """Return (variable, coefficient) pairs of an index that maps `bounds` one-to-one onto 0..n-1, else None.

    Such an index is a mixed-radix number: in some order of the variables, each coefficient is the product of the faster
    variables' sizes.
    """
    digits: dict[str, Size] = {}
    rest = index
    for name in bounds:
        factor, rest = rest.split(Var(name))
        if factor is None:
            return None
        if factor != ZERO:
            digits[name] = as_size(factor)
    if rest != ZERO:
        return None
    left = dict(digits)
    expected: Size = 1
    while left:
        # a variable of size 1 fits any coefficient: take it first, so that it does not replace a longer one
        found = [name for name, factor in left.items() if factor == expected]
        if not found:
            return None
        name = next((name for name in found if bounds[name] == 1), found[0])
        del left[name]
        expected = as_size(expected * bounds[name])
    if expected != size_product(bounds.values()):
        return None
    return list(digits.items())


def solve(index: Index, own: Ranges, target: Index, bounds: Ranges) -> dict[str, Index] | None:
    """Return own variables where a one-to-one `index` equals `target`, else None. `bounds`: ranges of the target."""
    digits = radix(index, own)
    if digits is None:
        return None
    values = dict.fromkeys(own, ZERO)
    total = size_product(own.values())
    for name, coefficient in digits:
        quotient = floordiv(target, coefficient, bounds)
        last = as_size(coefficient * own[name]) == total
        values[name] = quotient if last else modulo(quotient, own[name], bounds)
    return values


def size_of(space: Iterable[Size]) -> Size:
    """Return the number of points of a space."""
    return size_product(space)
