"""Piecewise functions of positions: trees of tests `index >= 0` whose leaves are constants and indices.

An attention mask is such a function: `keys <= queries` tests `i2 - i3`, with leaves True and False. Trees are combined
leaf by leaf. Tests that earlier ones or the ranges of variables decide are left out, so that a constant function
becomes one leaf. A failed proof leaves a test in the tree, which is still correct.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dcompile.ir.index import Index, Ranges, is_nonnegative, substitute

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
