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
    as_size,
    bounds,
    contiguous_strides,
    evaluate,
    exact_quotient,
    extreme,
    flatten,
    floordiv,
    is_below,
    is_nonnegative,
    modulo,
    rename,
    size_product,
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
@settings(max_examples=200, deadline=None)
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
@settings(max_examples=150, deadline=None)
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
@settings(max_examples=100, deadline=None)
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
    assert floordiv(I0 * S0 + J0, S0, {}) == I0 + floordiv(J0, S0, {})


ROWS = {"i0": S0, "i1": S1, "j0": 64, "i2": S0 * S1, "i3": 64 * S1}


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (floordiv(I0 * S1 + I1, S1, ROWS), I0),
        (modulo(I0 * S1 + I1, S1, ROWS), I1),
        (floordiv(64 * I0 * S1 + 64 * I1 + J0, 64 * S1, ROWS), I0),
        (floordiv(64 * I0 * S1 + 64 * I1 + J0, 64, ROWS), I0 * S1 + I1),
        (modulo(64 * I0 * S1 + 64 * I1 + J0, 64 * S1, ROWS), 64 * I1 + J0),
        (floordiv(64 * I0 + J0, 64 * S1, {"i0": S0, "j0": 64}), floordiv(I0, S1, {})),
        (modulo(64 * var("i2") + J0, 64 * S1, ROWS), 64 * modulo(var("i2"), S1, ROWS) + J0),
        (floordiv(floordiv(var("i3"), 64, ROWS), S1, ROWS), ZERO),
        (floordiv(floordiv(var("i2"), S1, ROWS), S0, ROWS), ZERO),
        (S1 * floordiv(var("i2"), S1, ROWS) + modulo(var("i2"), S1, ROWS), var("i2")),
        (64 * S1 * floordiv(J1, S1, {}) + 64 * modulo(J1, S1, {}), 64 * J1),
        (floordiv(I0 * S0 + I0 + I1, S0 + 1, {"i1": S0 + 1}), I0),
        (modulo(I0 * S0 + I0 + I1, S0 + 1, {"i1": S0 + 1}), I1),
        ((S0 + 1) * floordiv(J0, S0 + 1, {}) + modulo(J0, S0 + 1, {}), J0),
        (floordiv(S0 - 1 - I0, S0, ROWS), ZERO),
        (modulo(S0 - 1 - I0, S0, ROWS), S0 - 1 - I0),
        (floordiv(modulo(J1, S0 * S1, {}), S1, {}), modulo(floordiv(J1, S1, {}), S0, {})),
        (extreme("max", S0, 2), S0),
        (extreme("min", S0, as_index(1)), as_index(1)),
        (extreme("max", S0, S1), extreme("max", S1, S0)),
    ],
)
def test_rule_for_symbolic_sizes(actual, expected):
    assert actual == expected


# --- random expressions with symbolic sizes and divisors -------------------------------------------------------------

SYMBOLS = {"s0": (2, 3, 5), "s1": (2, 4), "u0": (0, 1, 3)}
symbolic_sizes = st.sampled_from((1, 3, 4, S0, S1, 4 * S0, S0 * S1, S0 + 1, S0 + S1, 4 * S0 * S1))
symbolic_trees = st.recursive(
    st.one_of(st.sampled_from((*NAMES, *SYMBOLS)), st.integers(0, 6)),
    lambda inner: st.one_of(
        st.tuples(st.just("+"), inner, inner),
        st.tuples(st.just("-"), inner, inner),
        st.tuples(st.just("*"), inner, st.integers(0, 5)),
        st.tuples(st.just("x"), inner, st.sampled_from(("a", "s0", "s1"))),
        st.tuples(st.just("//"), inner, symbolic_sizes),
        st.tuples(st.just("%"), inner, symbolic_sizes),
    ),
    max_leaves=7,
)
symbolic_ranges = st.fixed_dictionaries(dict.fromkeys(NAMES, symbolic_sizes))


def naively(tree, values):
    if isinstance(tree, tuple) and tree[0] in ("//", "%"):
        by = evaluate(as_index(tree[2]), values)
        return naively(tree[1], values) // by if tree[0] == "//" else naively(tree[1], values) % by
    if isinstance(tree, tuple):
        a, b = naively(tree[1], values), naively(tree[2], values)
        return a + b if tree[0] == "+" else a - b if tree[0] == "-" else a * b
    return values[tree] if isinstance(tree, str) else tree


def symbolic_points(ranges, data):
    """A few points: all sizes, and of each range its ends and something between."""
    for sizes in itertools.product(*SYMBOLS.values()):
        values = dict(zip(SYMBOLS, sizes, strict=True))
        limits = [evaluate(as_index(ranges[name]), values) for name in NAMES]
        for point in itertools.product(*({0, limit // 2, limit - 1} for limit in limits)):
            yield values | dict(zip(NAMES, point, strict=True))


@given(symbolic_trees, symbolic_ranges, st.data())
@settings(max_examples=150, deadline=None)
def test_simplifying_with_symbolic_sizes_keeps_the_value(tree, ranges, data):
    index = build(tree, ranges)
    low, high = bounds(index, ranges)
    proved, below = is_nonnegative(index, ranges), is_below(index, S0 * 4, ranges)
    for values in symbolic_points(ranges, data):
        expected = naively(tree, values)
        assert evaluate(index, values) == expected
        assert low is None or low <= expected
        assert high is None or expected <= high
        assert expected >= 0 or not proved
        assert expected < 4 * values["s0"] or not below


symbolic_shapes = st.lists(st.sampled_from((1, 2, 5, S0, S1, 4 * S0, S0 + 1)), min_size=1, max_size=4).map(tuple)


@given(symbolic_shapes)
@settings(deadline=None)
def test_symbolic_coordinates_of_a_position_flatten_to_the_position(shape):
    total = size_product(shape)
    coordinates = unflatten(I0, shape, {"i0": total})
    assert flatten(coordinates, contiguous_strides(shape)) == (ZERO if total == 1 else I0)


@given(symbolic_shapes, st.data())
@settings(deadline=None)
def test_a_position_in_a_symbolic_shape_unflattens_to_its_coordinates(shape, data):
    ranges = {f"i{d}": size for d, size in enumerate(shape)}
    coordinates = tuple(var(f"i{d}") if size != 1 else ZERO for d, size in enumerate(shape))
    flat = flatten(coordinates, contiguous_strides(shape))
    assert unflatten(flat, shape, ranges) == coordinates
    cut = data.draw(st.integers(0, len(shape) - 1))
    merged = (*shape[:cut], size_product(shape[cut : cut + 2]), *shape[cut + 2 :])
    assert flatten(unflatten(flat, merged, ranges), contiguous_strides(merged)) == flat


@given(symbolic_sizes, symbolic_sizes)
def test_an_exact_quotient_gives_the_size_back(size, divisor):
    assert exact_quotient(as_size(as_index(size) * divisor), divisor) == size
    found = exact_quotient(size, divisor)
    assert found is None or as_size(as_index(found) * divisor) == size


def test_renaming_and_substituting_reach_divisors():
    index = floordiv(J1, S0, {}) + modulo(J1, S1, {})
    assert rename(index, {"s0": "s1", "s1": "s0"}) == floordiv(J1, S1, {}) + modulo(J1, S0, {})
    fixed = substitute(index, {"s0": as_index(4), "s1": as_index(8)}, {"j1": 6})
    assert fixed == floordiv(J1, 4, {}) + J1
    assert index.variables == {"j1", "s0", "s1"}


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
    assert contiguous_strides((2, S0, 4)) == (4 * S0, 4, 1)


def test_it_is_fast():
    """Lowering divides and substitutes for every load: microseconds each. The limit leaves room for a busy machine."""
    flat = 768 * I0 + 64 * I1 + J1
    started = time.process_time()
    for _ in range(200):
        unflatten(flat, (2048, 12, 64), RANGES)
        substitute(flat, {"i0": 4 * I0 + I1, "i1": J0}, RANGES)
    assert (time.process_time() - started) / 200 < 2e-3


def test_nothing_divided_by_a_size_is_nothing_though_the_size_may_be_anything():
    size = floordiv(S0, 4, {}) * S1
    assert floordiv(0, size, {}) == modulo(0, size, {}) == ZERO
    assert floordiv(size, size, {}) == as_index(1) and modulo(size, size, {}) == ZERO
