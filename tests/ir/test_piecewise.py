"""Trees of tests: what is combined or left out changes no value."""

import operator
import random
from itertools import product

import pytest

from dcompile.ir.index import Index, evaluate, var
from dcompile.ir.piecewise import (
    MAX_LEAVES,
    Test,
    TooManyCases,
    combine,
    decide,
    leaves,
    negate_condition,
    replace_variables,
    variables,
)

I0, I1, N = var("i0"), var("i1"), var("s0")


def evaluate_tree(tree, values):
    """Value of a tree for given variables: the reference semantics."""
    while isinstance(tree, Test):
        tree = tree.then if evaluate(tree.condition, values) >= 0 else tree.otherwise
    return evaluate(tree, values) if isinstance(tree, Index) else tree


def number(leaf, position):
    return evaluate_tree(leaf, position) if isinstance(leaf, Index) else leaf


@pytest.mark.parametrize(
    ("condition", "facts", "answer"),
    [
        (I0, (), True),
        (I0 - N, (), False),
        (N - 1 - I0, (), True),
        (I0 - I1, (), None),
        (I0 - I1 + 1, (I0 - I1,), True),
        (I1 - I0 - 1, (I0 - I1,), False),
        (I1 - I0, (I0 - I1,), None),
    ],
)
def test_conditions_are_decided_by_ranges_and_facts(condition, facts, answer):
    ranges = {"i0": N, "i1": N}
    assert decide(condition, facts, ranges) is answer
    opposite = None if answer is None else not answer
    assert decide(negate_condition(condition), facts, ranges) is opposite


def random_tree(source, depth):
    if depth == 0 or source.random() < 0.2:
        return source.choice((0, 1, 5, I0, I1 - 2))
    condition = source.choice((I0 - I1, I1 - I0, I0 - 2, I1 * 2 - 3, I0 + I1 - 4)) + source.randint(-2, 2)
    return Test(condition, random_tree(source, depth - 1), random_tree(source, depth - 1))


@pytest.mark.parametrize("seed", range(20))
def test_combined_trees_have_the_combined_values(seed):
    source, ranges = random.Random(seed), {"i0": 4, "i1": 5}
    one, other = random_tree(source, 3), random_tree(source, 3)
    together = combine(operator.add, (one, other), ranges)
    turned = replace_variables(together, {"i0": I1, "i1": I0 + 1}, {"i0": 4, "i1": 4})
    for a, b in product(range(4), range(5)):
        at = {"i0": a, "i1": b}
        assert evaluate_tree(together, at) == evaluate_tree(one, at) + evaluate_tree(other, at)
    for a, b in product(range(4), range(4)):
        assert evaluate_tree(turned, {"i0": a, "i1": b}) == evaluate_tree(together, {"i0": b, "i1": a + 1})
    reached = {evaluate_tree(together, {"i0": a, "i1": b}) for a, b in product(range(4), range(5)) if a >= b}
    possible = [*leaves(together, (I0 - I1,), ranges)]
    for value in reached:
        assert any(number(leaf, {"i0": a, "i1": b}) == value for leaf in possible for a in range(4) for b in range(5))


def test_what_is_the_same_on_both_sides_needs_no_test():
    tree = combine(lambda leaf: leaf * 0, (Test(I0 - I1, 1, 2),), {})
    assert tree == 0
    assert isinstance(combine(lambda leaf: leaf * -0.0, (Test(I0 - I1, 1.0, -1.0),), {}), Test), "0.0 is not -0.0"
    assert variables(Test(I0, I1, 0)) == {"i0", "i1"}


def test_large_combinations_are_given_up():
    tree = True
    for step in range(10):
        tree = Test(var(f"i{step}") - var(f"j{step}"), tree, step)
    other = replace_variables(tree, {f"i{step}": var(f"k{step}") for step in range(10)}, {})
    third = replace_variables(tree, {f"i{step}": var(f"l{step}") for step in range(10)}, {})
    assert MAX_LEAVES < 11**3
    with pytest.raises(TooManyCases):
        combine(lambda a, b, c: (a, b, c), (tree, other, third), {})
