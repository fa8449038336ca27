"""Piecewise functions of positions: trees of tests `index >= 0` whose leaves are constants and indices.

An attention mask is such a function: `keys <= queries` tests `i2 - i3`, with leaves True and False. Trees are combined
leaf by leaf. Tests that earlier ones or the ranges of variables decide are left out, so that a constant function
becomes one leaf. A failed proof leaves a test in the tree, which is still correct.

Elements of tensors are such functions of their positions, and of values that only a run knows.

`arange(n)[None] <= arange(n)[:, None]` has the element `i1 <= i0` for any n. Elements of inputs, or of an operation
without a form in the index algebra, are reads: variables, if they are booleans or integers. A padding mask, lengths and
numbers of documents are inputs. Their values are unknown, but it is known where a mask reads them:
`documents[b, q] == documents[b, k]` has two reads of one tensor. If the positions of a tensor's elements change, as in
a view or an index, those of the reads in them change too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from dcompile.ir.index import (
    Index,
    Ranges,
    Size,
    as_index,
    as_size,
    bounds,
    divides_only_symbols,
    is_below,
    is_nonnegative,
    is_symbol,
    substitute,
    var,
)
from dcompile.ir.ops import DTYPES

MAX_LEAVES = 512
"""Most leaves that one combination may compute. Masks of causal, windowed and packed attention have fewer than ten."""

Facts: TypeAlias = "tuple[Index, ...]"
"""Indices that are known to be at least 0."""


class TooManyCases(Exception):
    """A combination would have more than MAX_LEAVES leaves."""


@dataclass(frozen=True, slots=True)
class Test:
    """`then` where `condition >= 0`, `otherwise` elsewhere."""

    __test__ = False  # for pytest

    condition: Index
    then: Tree
    otherwise: Tree


Leaf: TypeAlias = "bool | int | float | Index"
Tree: TypeAlias = "bool | int | float | Index | Test"


def decide(condition: Index, facts: Facts, ranges: Ranges) -> bool | None:
    """Whether `condition >= 0` is proved everywhere (True) or nowhere (False); None without a proof."""
    for answer, index in ((True, condition), (False, negate_condition(condition))):
        if is_nonnegative(index, ranges) or any(is_nonnegative(index - fact, ranges) for fact in facts):
            return answer
    return None


def negate_condition(condition: Index) -> Index:
    """Index that is at least 0 exactly where `condition` is below 0."""
    return condition * -1 - 1


def combine(function: Callable[..., Tree], trees: Sequence[Tree], ranges: Ranges) -> Tree:
    """Tree of `function(*leaves)` for each combination of leaves that can occur.

    `function` may return a tree. Raises TooManyCases, and the errors of `function`.
    """
    computed = 0

    def at_leaves(leaves: tuple[Tree, ...], facts: Facts) -> Tree:
        nonlocal computed
        computed += 1
        if computed > MAX_LEAVES:
            raise TooManyCases
        result = function(*leaves)
        return _split((result,), facts, ranges, lambda parts, _: parts[0]) if isinstance(result, Test) else result

    return _split(tuple(trees), (), ranges, at_leaves)


def _split(
    trees: tuple[Tree, ...], facts: Facts, ranges: Ranges, at_leaves: Callable[[tuple[Tree, ...], Facts], Tree]
) -> Tree:
    """Split trees by each test that the facts do not decide, and apply `at_leaves` to each combination of leaves."""
    for place, tree in enumerate(trees):
        if isinstance(tree, Test):

            def part(branch: Tree, known: Facts, place: int = place) -> Tree:
                return _split((*trees[:place], branch, *trees[place + 1 :]), known, ranges, at_leaves)

            answer = decide(tree.condition, facts, ranges)
            if answer is not None:
                return part(tree.then if answer else tree.otherwise, facts)
            then = part(tree.then, (*facts, tree.condition))
            otherwise = part(tree.otherwise, (*facts, negate_condition(tree.condition)))
            return then if _is_same(then, otherwise) else Test(tree.condition, then, otherwise)
    return at_leaves(trees, facts)


def _is_same(one: Tree, other: Tree) -> bool:
    """Equality that distinguishes True from 1 and 0.0 from -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Test) and isinstance(other, Test):
        return (
            one.condition == other.condition
            and _is_same(one.then, other.then)
            and _is_same(one.otherwise, other.otherwise)
        )
    if isinstance(one, float) and isinstance(other, float):
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return one == other


def replace_variables(tree: Tree, values: Mapping[str, Index], ranges: Ranges) -> Tree:
    """Replace variables by indices, all at once; `ranges` are those of the new variables."""
    if not values or values.keys().isdisjoint(variables(tree)):
        return tree

    def replaced(part: Tree) -> Tree:
        if isinstance(part, Test):
            condition = substitute(part.condition, values, ranges)
            return Test(condition, replaced(part.then), replaced(part.otherwise))
        return substitute(part, values, ranges) if isinstance(part, Index) else part

    return combine(lambda leaf: leaf, (replaced(tree),), ranges)


def variables(tree: Tree) -> frozenset[str]:
    """Names of all variables that the tree's tests and leaves depend on."""
    return frozenset(name for index in indices_of(tree) for name in index.variables)


def indices_of(tree: Tree) -> Iterator[Index]:
    """Indices in the tree's tests, in order, and in its leaves."""
    if isinstance(tree, Test):
        yield tree.condition
        yield from indices_of(tree.then)
        yield from indices_of(tree.otherwise)
    elif isinstance(tree, Index):
        yield tree


def leaves(tree: Tree, facts: Facts, ranges: Ranges) -> Iterator[Leaf]:
    """Leaves that may be reached where the facts hold."""
    if not isinstance(tree, Test):
        yield tree
        return
    answer = decide(tree.condition, facts, ranges)
    if answer is not False:
        yield from leaves(tree.then, (*facts, tree.condition), ranges)
    if answer is not True:
        yield from leaves(tree.otherwise, (*facts, negate_condition(tree.condition)), ranges)


# --- elements of tensors ----------------------------------------------------------------------------------------------


READABLE = ("bool", "int64", "int32")
"""Dtypes whose elements may be read: those of masks, lengths and numbers."""
_PREFIX = "z_read"
"""Start of a read's variable. By its first letter, an integer of unknown sign."""


class UnknownElements(Exception):
    """An element has no form as a piecewise function."""


def axis(number: int) -> str:
    """Return the variable of the position in a dimension."""
    return f"i{number}"


@dataclass(frozen=True)
class Elements:
    """A tensor by its element at position (i0, i1, ...)."""

    shape: tuple[Size, ...]
    dtype: str
    tree: Tree

    @property
    def ranges(self) -> dict[str, Size]:
        """Size of each variable's range."""
        return {axis(n): size for n, size in enumerate(self.shape)}


@dataclass(frozen=True)
class Read:
    """An element of a tensor that only a run knows, at a position in each dimension."""

    source: Any
    positions: tuple[Index, ...]


class Reads:
    """All reads of one analysis, each with its variable. Equal reads share theirs."""

    def __init__(self) -> None:
        self._names: dict[Read, str] = {}
        self._reads: dict[str, Read] = {}

    def elements(self, source: Any, shape: tuple[Size, ...], dtype: str) -> Elements:
        """Return a tensor's elements as reads of it: indices, or tests of them for booleans. Raises UnknownElements."""
        if dtype not in READABLE:
            raise UnknownElements
        index = var(self._name(Read(source, positions_of(shape))))
        return Elements(shape, dtype, Test(index - 1, True, False) if dtype == "bool" else index)

    def found(self, name: str) -> Read | None:
        """Return the read that a variable stands for; None for other variables."""
        return self._reads.get(name)

    def positions(self, tree: Tree) -> frozenset[str]:
        """Return the variables of positions that a tree depends on, directly or by reads; sizes are no positions."""
        names = variables(tree)
        reads = [self._reads[name] for name in names if name in self._reads]
        names |= {name for read in reads for index in read.positions for name in index.variables}
        return frozenset(name for name in names if not is_symbol(name))

    def moved(self, tree: Tree, positions: Mapping[str, Index], ranges: Ranges) -> Tree:
        """Replace variables of positions in a tree and in its reads; `ranges` are those of the new variables.

        Raises UnknownElements if positions are divided: tests of quotients decide little, and reads of them more.
        """
        values, indices = dict(positions), list[Index]()
        for name in sorted(variables(tree)):
            if (read := self._reads.get(name)) is not None:
                places = tuple(substitute(index, positions, ranges) for index in read.positions)
                values[name] = var(self._name(Read(read.source, places)))
                indices += places
        found = replace_variables(tree, values, ranges)
        if not all(map(divides_only_symbols, (*indices, *indices_of(found)))):
            raise UnknownElements
        return found

    def _name(self, read: Read) -> str:
        name = self._names.setdefault(read, f"{_PREFIX}{len(self._names)}")
        self._reads[name] = read
        return name


def positions_of(shape: tuple[Size, ...]) -> tuple[Index, ...]:
    """Return the position in each dimension: its variable, or 0 for size 1."""
    return tuple(as_index(0) if size == 1 else var(axis(n)) for n, size in enumerate(shape))


# --- operations -------------------------------------------------------------------------------------------------------


def whole(value: Any) -> Index:
    """Return a whole number as an index. Raises UnknownElements for any other value."""
    if isinstance(value, Index):
        return value
    if isinstance(value, bool | int) or (isinstance(value, float) and value.is_integer()):
        return as_index(int(value))
    raise UnknownElements


def _at_least(one: Any, other: Any) -> Tree:
    return Test(whole(one) - whole(other), True, False)


def _below(one: Any, other: Any) -> Tree:
    return Test(whole(one) - whole(other), False, True)


def _equal(one: Any, other: Any, yes: bool = True) -> Tree:
    difference = whole(one) - whole(other)
    return Test(difference, Test(difference * -1, yes, not yes), not yes)


def _chosen(condition: Any, one: Leaf, other: Leaf) -> Tree:
    assert isinstance(condition, bool), "a condition is a test, and no index"
    return one if condition else other


_ON_INDICES: Mapping[str, Callable[..., Tree]] = MappingProxyType(
    {
        "add": lambda one, other: whole(one) + whole(other),
        "sub": lambda one, other: whole(one) - whole(other),
        "mul": lambda one, other: whole(one) * whole(other),
        "neg": lambda one: whole(one) * -1,
        "abs": lambda one: Test(whole(one), whole(one), whole(one) * -1),
        "min": lambda one, other: Test(whole(one) - whole(other), whole(other), whole(one)),
        "max": lambda one, other: Test(whole(one) - whole(other), whole(one), whole(other)),
        "ge": _at_least,
        "le": lambda one, other: _at_least(other, one),
        "lt": _below,
        "gt": lambda one, other: _below(other, one),
        "eq": _equal,
        "ne": lambda one, other: _equal(one, other, yes=False),
        "where": _chosen,
    }
)
"""Operation of the IR -> its result for operands of which one is an index; the result's dtype must represent it."""


COMPUTING = frozenset(("add", "sub", "mul", "neg", "abs", "cast"))
"""Operations that may leave the range of their dtype."""


def apply_to_indices(op: str, leaves: tuple[Any, ...], dtype: str, ranges: Ranges) -> Tree:
    """Return an operation's result where an operand is an index. Raises UnknownElements."""
    if op == "cast":
        return _equal(leaves[0], 0, yes=False) if dtype == "bool" else whole(leaves[0])
    if op == "within":  # a check of a position, which no read may need
        index, low, high = map(whole, leaves)
        if not is_nonnegative(index - low, ranges) or not is_below(index, as_size(high), ranges):
            raise UnknownElements
        return index
    if op not in _ON_INDICES:
        raise UnknownElements
    return _ON_INDICES[op](*leaves)


def in_range(tree: Tree, dtype: str, ranges: Ranges) -> Tree:
    """Return the tree, if a dtype represents each of its indices exactly. Raises UnknownElements."""

    def fitting(leaf: Leaf) -> Leaf:
        if isinstance(leaf, Index):
            if not _fits(leaf, dtype, ranges):
                raise UnknownElements
            leaf = leaf if leaf.constant is None else leaf.constant
        if isinstance(leaf, int) and not isinstance(leaf, bool) and DTYPES[dtype] == "float":
            return float(leaf)
        return leaf

    return combine(fitting, (tree,), ranges)


def _fits(index: Index, dtype: str, ranges: Ranges) -> bool:
    """Does a dtype provably represent every value of an index exactly?"""
    least, greatest = bounds(index, ranges)
    if dtype == "int64" and (least is None or greatest is None):
        # symbols are sizes, below 2**31, and reads are positions, lengths or numbers of documents, which are as small:
        # a linear form of these with small coefficients is below 2**62
        linear = all(len(monomial) <= 1 for monomial, _ in index.terms) and index.is_affine
        return linear and sum(abs(number) for _, number in index.terms) < 1 << 30
    if dtype == "bool" or least is None or greatest is None:
        return False
    if DTYPES[dtype] == "float":
        return max(-least, greatest) <= LARGEST_WHOLE.get(dtype, 0)
    return int(np.iinfo(dtype).min) <= least and greatest <= int(np.iinfo(dtype).max)


LARGEST_WHOLE = MappingProxyType({"float16": 1 << 11, "bfloat16": 1 << 8, "float32": 1 << 24, "float64": 1 << 53})
"""Dtype of floats -> the number up to which it has each whole number."""
