"""Single elements (constants and indices in their tensor's dtype) and positions in dimensions.

"Raises Unknown" stands for the exception UnknownElements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dcompile.capture.passes.dynamo.symbolic_elements.elements import (
    Elements,
    Operation,
    UnknownElements,
    axis,
    fits,
    size_of,
)
from dcompile.ir.index import Index, Ranges, Size, as_index, var
from dcompile.ir.piecewise import Leaf, Test, Tree, combine


def number(value: Any) -> Leaf:
    """Return a number of the graph as an element. Raises Unknown."""
    if isinstance(value, bool | int | float):
        return value
    return leaf_of(size_of(value))


def leaf_of(size: Size) -> Leaf:
    """Return a size as an element."""
    return size if isinstance(size, int) or size.constant is None else size.constant


def position_in(dim: int, shape: Sequence[Size]) -> Index:
    """Return the position in a dimension: its variable, or 0 for size 1."""
    return as_index(0) if shape[dim] == 1 else var(axis(dim))


def check_element(operation: Operation, tree: Tree) -> Elements:
    """Return the result, if its dtype represents the element exactly. Raises Unknown."""
    return operation.made(in_range(tree, operation.dtype, operation.ranges))


def in_range(tree: Tree, dtype: torch.dtype, ranges: Ranges) -> Tree:
    """Return the tree, if a dtype represents each of its indices exactly. Raises Unknown."""

    def fitting(leaf: Leaf) -> Leaf:
        if isinstance(leaf, Index):
            if not fits(leaf, dtype, ranges):
                raise UnknownElements
            leaf = leaf if leaf.constant is None else leaf.constant
        if isinstance(leaf, int) and not isinstance(leaf, bool) and dtype.is_floating_point:
            return float(leaf)
        return leaf

    return combine(fitting, (tree,), ranges)


def single(value: Any, dtype: torch.dtype, dims: int) -> torch.Tensor:
    """Make a tensor of one element; it has no dimensions if `dims` is 0, since type promotion depends on that."""
    return torch.tensor(value, dtype=dtype, device="cpu").reshape((1,) if dims else ())


def convert_element(leaf: Leaf, dtype: torch.dtype, ranges: Ranges, before: torch.dtype | None = None) -> Tree:
    """Convert an element of the dtype `before` to `dtype`, as torch does. Raises Unknown."""
    if not isinstance(leaf, Index):
        if isinstance(leaf, float) and not math.isfinite(leaf) and not dtype.is_floating_point and dtype != torch.bool:
            raise UnknownElements  # the result depends on the processor
        return single(leaf, before or dtype, 0).to(dtype).item()
    return equal(leaf, 0, yes=False) if dtype == torch.bool else in_range(leaf, dtype, ranges)


def whole(value: Any) -> Index:
    """Return a whole number as an index. Raises Unknown for any other value."""
    if isinstance(value, Index):
        return value
    if isinstance(value, bool | int) or (isinstance(value, float) and value.is_integer()):
        return as_index(int(value))
    raise UnknownElements


def equal(one: Any, other: Any, yes: bool = True) -> Tree:
    """Return `yes` where two numbers are equal, `not yes` elsewhere. Raises Unknown."""
    difference = whole(one) - whole(other)
    return Test(difference, Test(difference * -1, yes, not yes), not yes)


def dim_of(dim: Any, dims: Sequence[Any]) -> int:
    """Return a dimension relative to the first one. Raises Unknown."""
    if not isinstance(dim, int) or not -len(dims) <= dim < len(dims):
        raise UnknownElements
    return dim % len(dims)


def same_dtype(operation: Operation) -> Elements:
    """Return the first operand's elements, if the result has its dtype. Raises Unknown."""
    source = operation.first
    if source.dtype != operation.dtype:
        raise UnknownElements
    return source
