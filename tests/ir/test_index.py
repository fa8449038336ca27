import itertools
import time
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcompile.ir.index import (
    ZERO,
    Div,
    Index,
    Mod,
    Var,
    as_index,
    bounds,
    contiguous_strides,
    evaluate,
    flatten,
    floordiv,
    modulo,
    rename,
    substitute,
    unflatten,
    upper_bound,
    var,
)

I0, I1, J0, J1, S0, S1 = map(var, ("i0", "i1", "j0", "j1", "s0", "s1"))
NAMES = ("a", "b", "c")


# --- random expressions: built once with the algebra and once as plain Python arithmetic ----------------------------

leaves = st.one_of(st.sampled_from(NAMES), st.integers(0, 12))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.just("+"), inner, inner),
        st.tuples(st.just("*"), inner, st.integers(0, 9)),
        st.tuples(st.just("x"), inner, st.sampled_from(NAMES)),
        st.tuples(st.just("//"), inner, st.integers(1, 12)),
        st.tuples(st.just("%"), inner, st.integers(1, 12)),
        st.tuples(st.just("-"), inner, inner),
    ),
    max_leaves=8,
)
range_maps = st.fixed_dictionaries({}, optional={name: st.integers(1, 6) for name in NAMES})


def build(tree, ranges):
    if isinstance(tree, str):
        return var(tree)
    if isinstance(tree, int):
        return as_index(tree)
    op, left, right = tree
    a = build(left, ranges)
    match op:
        case "//":
            return floordiv(a, right, ranges)
        case "%":
            return modulo(a, right, ranges)
    b = build(right, ranges)
    return a + b if op == "+" else a - b if op == "-" else a * b


def naive(tree, values):
    if isinstance(tree, str):
        return values[tree]
    if isinstance(tree, int):
        return tree
    op, left, right = tree
    a, b = naive(left, values), naive(right, values)
    match op:
        case "+":
            return a + b
        case "-":
            return a - b
        case "//":
            return a // b
        case "%":
            return a % b
    return a * b


def points(ranges):
    """Every point of the ranges, and a few for variables without one."""
    return [
        dict(zip(NAMES, point, strict=True))
        for point in itertools.product(*(range(ranges[n]) if n in ranges else (0, 1, 5, 13) for n in NAMES))
    ]


@given(trees, range_maps)
@settings(max_examples=400, deadline=None)
def test_simplifying_keeps_the_value_and_bounds_hold(tree, ranges):
    index = build(tree, ranges)
    low, high = bounds(index, ranges)
    for values in points(ranges):
        expected = naive(tree, values)
        assert evaluate(index, values) == expected
        assert low is None or low <= expected
        assert high is None or expected <= high
    assert upper_bound(index, ranges) == high


strides = st.sampled_from((1, 2, 3, 4, 6, 8, 12, 24))


@given(st.tuples(strides, strides, strides), st.integers(-5, 30), strides, strides, range_maps)
@settings(max_examples=300, deadline=None)
def test_dividing_positions_keeps_the_value(steps, start, by, again, ranges):
    """Sums of strides with common factors, divided by multiples and divisors of these."""
    flat = flatten(map(var, NAMES), steps) + start
    quotient, rest = floordiv(flat, by, ranges), modulo(flat, by * again, ranges)
    coarse, inside = floordiv(quotient, again, ranges), modulo(quotient, again, ranges)
    for values in points(ranges):
        expected = sum(values[name] * step for name, step in zip(NAMES, steps, strict=True)) + start
        found = [evaluate(index, values) for index in (quotient, rest, coarse, inside)]
        assert found == [expected // by, expected % (by * again), expected // by // again, expected // by % again]


@given(trees, trees, range_maps)
@settings(max_examples=200, deadline=None)
def test_substitution_and_renaming_keep_the_value(tree, inner, ranges):
    index = build(tree, {})
    wide = {name: size for name, size in ranges.items() if name != "a"}
    replaced = substitute(index, {"a": build(inner, ranges)}, ranges)
    cycle = {"a": "b", "b": "c", "c": "a"}
    renamed = rename(index, cycle)
    assert rename(rename(renamed, cycle), cycle) == index
    for values in points(wide):
        assert evaluate(renamed, {cycle[n]: v for n, v in values.items()}) == evaluate(index, values)
        if all(values[n] < ranges.get(n, 99) for n in NAMES) and (at := naive(inner, values)) >= 0:
            assert evaluate(replaced, values) == naive(tree, {**values, "a": at})


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@given(shapes)
def test_coordinates_of_a_position_flatten_to_the_position(shape):
    coordinates = unflatten(I0, shape, {"i0": prod(shape)})
    assert flatten(coordinates, contiguous_strides(shape)) == (I0 if prod(shape) > 1 else ZERO)


@given(shapes)
def test_position_of_coordinates_unflattens_to_the_coordinates(shape):
    ranges = {f"i{d}": size for d, size in enumerate(shape)}
    coordinates = tuple(var(f"i{d}") if size > 1 else ZERO for d, size in enumerate(shape))
    assert unflatten(flatten(coordinates, contiguous_strides(shape)), shape, ranges) == coordinates


@given(shapes, st.data())
def test_merging_dimensions_and_splitting_them_again_is_nothing(shape, data):
    ranges = {f"i{d}": size for d, size in enumerate(shape)}
    coordinates = tuple(var(f"i{d}") if size > 1 else ZERO for d, size in enumerate(shape))
    flat = flatten(coordinates, contiguous_strides(shape))
    cut = data.draw(st.integers(0, len(shape) - 1))
    merged = (*shape[:cut], prod(shape[cut : cut + 2]), *shape[cut + 2 :])
    there = unflatten(flat, merged, ranges)
    assert all(index.is_affine for index in there)
    assert flatten(there, contiguous_strides(merged)) == flat


# --- single rules ---------------------------------------------------------------------------------------------------


def test_canonical_form():
    assert I0 + J0 == J0 + I0
    assert str(768 * I0 + J0) == str(J0 + I0 * 768)
    assert I0 - I0 == ZERO and not ZERO.terms
    assert (I0 + 1) * (I0 - 1) == I0 * I0 - 1
    assert hash(I0 * 2 + 1) == hash(1 + 2 * I0)


RANGES = {"i0": 2048, "j0": 768, "i1": 12, "j1": 64}


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (floordiv(768 * I0 + J0, 768, RANGES), I0),
        (modulo(768 * I0 + J0, 768, RANGES), J0),
        (floordiv(768 * I0 + J0, 393216, RANGES), floordiv(I0, 512, RANGES)),
        (modulo(768 * I0 + J0, 768 * 512, RANGES), 768 * modulo(I0, 512, RANGES) + J0),
        (modulo(768 * I0 + J0, 64, RANGES), modulo(J0, 64, RANGES)),
        (floordiv(768 * I0 + 64 * I1 + J1, 64, RANGES), 12 * I0 + I1),
        (floordiv(8 * I0 + 5, 64, RANGES), floordiv(I0, 8, RANGES)),
        (modulo(8 * I0 + 5, 64, RANGES), 8 * modulo(I0, 8, RANGES) + 5),
        (modulo(8 * I0 + 13, 64, RANGES), 8 * modulo(I0 + 1, 8, RANGES) + 5),
        (modulo(floordiv(768 * I0 + 64 * I1 + J1, 64, RANGES), 12, RANGES), I1),
        (floordiv(floordiv(J0, 3, RANGES), 4, RANGES), floordiv(J0, 12, RANGES)),
        (floordiv(modulo(J0, 12, RANGES), 4, RANGES), modulo(floordiv(J0, 4, RANGES), 3, RANGES)),
        (modulo(modulo(J0, 12, RANGES), 4, RANGES), modulo(J0, 4, RANGES)),
        (4 * floordiv(J0, 4, RANGES) + modulo(J0, 4, RANGES), J0),
        (S0 * modulo(J0, 4, RANGES) + 4 * S0 * floordiv(J0, 4, RANGES), S0 * J0),
        (floordiv(16 * (15 - I0) + 15 - J0, 16, {"i0": 16, "j0": 16}), 15 - I0),
        (modulo(16 * (15 - I0) + 15 - J0, 16, {"i0": 16, "j0": 16}), 15 - J0),
        (floordiv(I0 + 5, 4, {"i0": 3}), as_index(1)),
        (modulo(I0 + 4, 4, {"i0": 4}), I0),
        (floordiv(as_index(7), 2, {}), as_index(3)),
        (modulo(as_index(7), 2, {}), as_index(1)),
        (floordiv(J0, 768, RANGES), ZERO),
        (floordiv(I0, 1, {}), I0),
        (modulo(I0, 1, {}), ZERO),
    ],
)
def test_rule(actual, expected):
    assert actual == expected


def test_sizes_known_at_run_time():
    """A stride may be a product of sizes, and constants divide what they can."""
    flat = I0 * S0 * S1 + I1 * S1 + J0
    assert flat.coefficient("i0") == S0 * S1
    assert flat.coefficient("i1") == S1
    assert flat.coefficient("s1") == I0 * S0 + I1
    assert (I0 * I0).coefficient("i0") is None
    assert floordiv(4 * I0 * S0 + J0, 4, {"j0": 4}) == I0 * S0
    assert modulo(4 * I0 * S0 + J0, 4, {"j0": 4}) == J0
    assert floordiv(768 * I0 * S0 + J0, 768 * 512, {"j0": 768}) == floordiv(I0 * S0, 512, {})
    assert upper_bound(I0 * S0, {"i0": 1}) == 0
    assert upper_bound(I0 * S0, {"i0": 2}) is None
    assert upper_bound(10 - I0 * S0, {}) == 10


def test_a_symbolic_size_cancels_where_it_divides():
    assert floordiv(6 * I0 * S0 * S1, 3 * S0, {}) == 2 * I0 * S1
    assert modulo(6 * I0 * S0, S0, {}) == ZERO
    with pytest.raises(AssertionError, match="not a multiple"):
        floordiv(I0 * S0 + J0, S0, {})


def test_division_by_nonsense():
    with pytest.raises(AssertionError):
        floordiv(I0, 0, {})
    with pytest.raises(AssertionError):
        modulo(I0, -2, {})


def test_coefficient_inside_a_division_is_not_linear():
    assert floordiv(I0, 4, {}).coefficient("i0") is None
    assert (floordiv(I0, 4, {}) + J0).coefficient("j0") == as_index(1)
    assert J0.coefficient("i0") == ZERO


def test_variables_and_is_affine():
    index = floordiv(I0 + S0, 4, {}) + J0
    assert index.variables == {"i0", "s0", "j0"}
    assert not index.is_affine and (I0 * S0 + 3).is_affine


def test_a_name_does_not_bind_twice():
    """Substitution is simultaneous."""
    assert substitute(I0 + 2 * I1, {"i0": I1, "i1": I0}, {}) == I1 + 2 * I0
    assert rename(I0 + 2 * I1, {"i0": "i1", "i1": "i0"}) == I1 + 2 * I0


def test_repr_rebuilds():
    index = floordiv(768 * I0 + J0, 100, {}) * S0 + modulo(I1, 3, {})
    assert eval(repr(index), {"Index": Index, "Var": Var, "Div": Div, "Mod": Mod}) == index


def test_contiguous_strides():
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides(()) == ()
    assert contiguous_strides((2, 0, 4)) == (4, 4, 1)
    assert contiguous_strides((2, S0, 4)) == (4 * S0, as_index(4), 1) or contiguous_strides((2, S0, 4)) == (
        4 * S0,
        4,
        1,
    )


def test_it_is_fast():
    """Lowering divides and substitutes for every load: microseconds each. The limit leaves room for a busy machine."""
    flat = 768 * I0 + 64 * I1 + J1
    started = time.process_time()
    for _ in range(200):
        unflatten(flat, (2048, 12, 64), RANGES)
        substitute(flat, {"i0": 4 * I0 + I1, "i1": J0}, RANGES)
    assert (time.process_time() - started) / 200 < 2e-3
