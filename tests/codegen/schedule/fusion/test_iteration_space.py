"""Iteration spaces told over one another keep every point."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcompile.codegen.schedule.fusion.iteration_space import (
    canonical,
    coordinates,
    position,
    radix,
    refine,
    solve,
    space_ranges,
)
from dcompile.ir.index import contiguous_strides, evaluate, flatten, var
from dcompile.ir.nodes import Apply, Load, Loop, Store

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def points(bounds):
    for values in product(*(range(n) for n in bounds.values())):
        yield dict(zip(bounds, values, strict=True))


def touched(loop):
    """For every point, which element is read and which written."""
    bounds = space_ranges(loop.outer, loop.inner)
    load = next(value for value in loop.body if isinstance(value, Load))
    return sorted((evaluate(load.index, p), evaluate(loop.stores[0].index, p)) for p in points(bounds))


def permuting(shape, order):
    strides = contiguous_strides(tuple(shape[k] for k in order))
    index = flatten([var(f"i{k}") for k in order], strides)
    body = (Load("x", index, "float32"), Apply("neg", (0,), "float32"))
    return Loop("l", shape, (), body, (Store("y", position("i", shape), 1),))


@settings(max_examples=60, deadline=None)
@given(shapes, st.randoms(use_true_random=False))
def test_canonical_form_touches_the_same_elements(shape, random):
    order = random.sample(range(len(shape)), len(shape))
    loop = permuting(shape, order)
    short = canonical(loop)
    assert touched(short) == touched(loop)
    assert 1 not in short.outer and len(short.outer) <= len(loop.outer)


def test_contiguous_axes_merge_into_one():
    assert canonical(permuting((2, 3, 4), (0, 1, 2))).outer == (24,)
    assert canonical(permuting((2, 3, 4), (1, 0, 2))).outer == (2, 3, 4)
    assert canonical(permuting((2, 3, 4), (1, 2, 0))).outer == (2, 12)


@settings(max_examples=60, deadline=None)
@given(shapes, st.randoms(use_true_random=False))
def test_solving_a_permutation_inverts_it(shape, random):
    order = random.sample(range(len(shape)), len(shape))
    own = space_ranges(shape, ())
    index = flatten([var(f"i{k}") for k in order], contiguous_strides(tuple(shape[k] for k in order)))
    values = solve(index, own, var("n"), {"n": prod(shape)})
    assert values is not None
    for n in range(prod(shape)):
        place = {name: evaluate(value, {"n": n}) for name, value in values.items()}
        assert evaluate(index, place) == n


@pytest.mark.parametrize(
    "index",
    [var("i0") * 2 + var("i1"), var("i0"), var("i0") * 4 + var("i1") + 1, var("i0") * 4 + var("i1") * 4, var("k") * 4],
)
def test_an_index_that_is_not_one_to_one_is_no_radix(index):
    assert radix(index, {"i0": 3, "i1": 4}) is None


def test_splitting_axes_removes_divisions():
    shape = (6, 8)
    bounds = space_ranges(shape, ())
    moved = coordinates("i", (6, 2, 4), position("i", shape), bounds)
    index = flatten([moved["i1"], moved["i0"], moved["i2"]], contiguous_strides((2, 6, 4)))
    body = (Load("x", index, "float32"), Apply("neg", (0,), "float32"))
    loop = Loop("l", shape, (), body, (Store("y", position("i", shape), 1),))
    assert not index.is_affine
    split, _ = refine(loop, loop)
    assert split.outer == (6, 2, 4) and split.body[0].index.is_affine
    assert touched(split) == touched(loop)
