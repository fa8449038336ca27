"""Index maps of reshapes and views, against NumPy on every element."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcompile.codegen.lower.symbolic.strides import (
    affine_strides,
    contiguous,
    is_dense,
    lower_bound,
    ranges_of,
    reshape_coords,
    simplify,
    variables,
    view_strides,
)
from dcompile.ir.index import evaluate, flatten, floordiv, modulo, var

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def splits(total: int) -> list[tuple[int, ...]]:
    sizes = [n for n in range(1, total + 1) if total % n == 0]
    return [s for rank in (1, 2, 3) for s in product(sizes, repeat=rank) if prod(s) == total]


@settings(deadline=None)  # a busy machine is no error
@given(shapes, st.data())
def test_reshape_keeps_row_major_order(source: tuple[int, ...], data: st.DataObject) -> None:
    target = data.draw(st.sampled_from(splits(prod(source))))
    coords = reshape_coords(variables("i", target), target, source, ranges_of("i", target))
    read = simplify(flatten(coords, contiguous(source)))
    for number, place in enumerate(np.ndindex(*target)):
        values = {f"i{n}": p for n, p in enumerate(place)}
        assert tuple(evaluate(c, values) for c in coords) == tuple(np.unravel_index(number, source)) or not source
        assert evaluate(read, values) == number


@settings(deadline=None)  # a busy machine is no error
@given(shapes, st.data())
def test_view_strides_decides_as_torch(shape: tuple[int, ...], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    x = torch.zeros([s + data.draw(st.integers(0, 1)) for s in shape])[tuple(slice(s) for s in shape)].permute(order)
    target = data.draw(st.sampled_from(splits(x.numel())))
    found = view_strides(tuple(x.shape), x.stride(), target)
    try:
        expected = x.view(target).stride()
    except RuntimeError:
        assert found is None
        return
    assert found is not None
    assert all(a == b for a, b, n in zip(found, expected, target, strict=True) if n > 1)


def test_a_reshape_that_is_undone_leaves_nothing() -> None:
    ranges = {"i0": 24}
    i = var("i0")
    assert simplify(floordiv(i, 4, ranges) * 4 + modulo(i, 4, ranges)) == i
    inner = modulo(floordiv(i, 2, ranges), 3, ranges) * 2 + modulo(i, 2, ranges)
    assert simplify(floordiv(i, 6, ranges) * 6 + inner) == i
    assert simplify(inner * 5) == modulo(i, 6, ranges) * 5


def test_bounds_from_below() -> None:
    assert lower_bound(var("i0") - 3, {"i0": 5}) == -3
    assert lower_bound(var("i0") * -2 + 7, {"i0": 4}) == 1
    assert lower_bound(var("s0") * -1, {}) is None


def test_affine_strides() -> None:
    assert affine_strides(var("i0") * 6 + var("i1") + 3, (4, 2)) == ((6, 1), 3)
    assert affine_strides(var("i1") * 2, (4, 2)) == ((0, 2), 0)
    assert affine_strides(var("i0") * -1 + 3, (4,)) is None, "torch has no negative strides"
    assert affine_strides(modulo(var("i0"), 3, {}), (4,)) is None


@pytest.mark.parametrize(("shape", "strides", "dense"), [
    ((2, 3), (3, 1), True), ((2, 3), (1, 2), True), ((2, 3), (4, 1), False), ((2, 3), (0, 1), False),
    ((2, 1, 3), (3, 99, 1), True), ((), (), True), ((0, 3), (7, 7), True),
])  # fmt: skip
def test_is_dense(shape: tuple[int, ...], strides: tuple[int, ...], dense: bool) -> None:
    assert is_dense(shape, strides) is dense
