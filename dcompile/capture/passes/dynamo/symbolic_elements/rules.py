"""Rules for elements of operations' results, one for each operation, by the names of functions and methods.

A rule raises UnknownElements if it does not cover a case. Shapes and dtypes of results are the traced ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from dcompile.capture.passes.dynamo.symbolic_elements.arithmetic import conversion, elementwise
from dcompile.capture.passes.dynamo.symbolic_elements.elements import (
    Elements,
    Operation,
    UnknownElements,
    axis,
    name_of,
    size_of,
)
from dcompile.capture.passes.dynamo.symbolic_elements.indexing import index_elements
from dcompile.capture.passes.dynamo.symbolic_elements.values import (
    check_element,
    convert_element,
    dim_of,
    number,
    position_in,
    same_dtype,
    whole,
)
from dcompile.ir.index import Index, Ranges, Size, as_index, as_size, is_below, size_product, var
from dcompile.ir.piecewise import Leaf, Test, Tree, combine

Rule: TypeAlias = Callable[[Operation], Elements]


# --- constant tensors -------------------------------------------------------------------------------------------------


def _arange(operation: Operation) -> Elements:
    given = [size_of(argument) for argument in operation.node.args]
    named = {name: size_of(operation.node.kwargs[name]) for name in ("start", "step") if name in operation.node.kwargs}
    start = given[0] if len(given) > 1 else named.get("start", 0)
    step = given[2] if len(given) > 2 else named.get("step", 1)
    return check_element(operation, as_index(start) + position_in(0, operation.shape) * step)


def _filled_with(place: int, name: str = "fill_value") -> Rule:
    def rule(operation: Operation) -> Elements:
        value = operation.argument(place, name)
        return check_element(operation, convert_element(number(value), operation.dtype, operation.ranges))

    return rule


def _filled(value: int) -> Rule:
    return lambda operation: check_element(operation, convert_element(value, operation.dtype, operation.ranges))


# --- movement of elements ---------------------------------------------------------------------------------------------


def _broadcast(operation: Operation) -> Elements:
    return operation.made(operation.broadcast(same_dtype(operation)))


def _reshaped(operation: Operation) -> Elements:
    """Reshape: add or remove sizes of 1, keep other dimensions, merge or split those that elements do not depend on."""
    source = same_dtype(operation)
    before = [n for n, size in enumerate(source.shape) if size != 1]
    after = [n for n, size in enumerate(operation.shape) if size != 1]
    positions = dict[int, Index]()
    while before and after:
        old, new = [before.pop(0)], [after.pop(0)]
        while (left := _extent(source.shape, old)) != (right := _extent(operation.shape, new)):
            shorter, rest = (old, before) if _is_shorter(left, right) else (new, after)
            if not rest or not (shorter is old or _is_shorter(right, left)):
                raise UnknownElements
            shorter.append(rest.pop(0))
        if len(old) == len(new) == 1:
            positions[old[0]] = var(axis(new[0]))
    if before or after:
        raise UnknownElements
    return operation.made(operation.at(source, positions))


def _extent(shape: Sequence[Size], dims: list[int]) -> Size:
    return size_product(shape[n] for n in dims)


def _is_shorter(one: Size, other: Size) -> bool:
    return is_below(as_index(one), other, {})


def _permuted(operation: Operation) -> Elements:
    source = same_dtype(operation)
    dims = operation.node.args[1:] or (operation.node.kwargs.get("dims"),)
    order = [*dims[0]] if isinstance(dims[0], tuple | list) else [*dims]
    if not all(isinstance(dim, int) for dim in order) or len(order) != len(source.shape):
        raise UnknownElements
    return operation.made(operation.at(source, {dim_of(d, order): var(axis(n)) for n, d in enumerate(order)}))


def _transposed(operation: Operation) -> Elements:
    source = same_dtype(operation)
    order = [*range(len(source.shape))]
    names = [("dim0", "dim1"), ("axis0", "axis1")][name_of(operation.node) == "swapaxes"]
    one, other = (dim_of(operation.argument(place, name), order) for place, name in enumerate(names, 1))
    order[one], order[other] = order[other], order[one]
    return operation.made(operation.at(source, {d: var(axis(n)) for n, d in enumerate(order)}))


def _t(operation: Operation) -> Elements:
    source = same_dtype(operation)
    last = len(source.shape) - 1
    return operation.made(operation.at(source, {n: var(axis(last - n)) for n in range(last + 1)}))


def _triangle(lower: bool) -> Rule:
    def rule(operation: Operation) -> Elements:
        source, shape = same_dtype(operation), operation.shape
        offset = size_of(operation.argument(1, "diagonal", 0))
        above = position_in(len(shape) - 1, shape) - position_in(len(shape) - 2, shape) - offset
        nothing = convert_element(0, operation.dtype, operation.ranges)

        def kept(leaf: Leaf) -> Tree:
            return Test(above * -1, leaf, nothing) if lower else Test(above, leaf, nothing)

        return operation.made(combine(kept, (source.tree,), operation.ranges))

    return rule


def _joined(operation: Operation) -> Elements:
    parts = operation.argument(0, "tensors")
    dim = operation.argument(1, "dim", 0)
    if not isinstance(parts, tuple | list):
        raise UnknownElements
    sources = [operation.elements(part) for part in parts]
    tree = _end_to_end(operation, sources, dim_of(dim, operation.shape), operation.ranges)
    return operation.made(tree)


def _side_by_side(operation: Operation) -> Elements:
    parts = operation.argument(0, "tensors")
    sources = [operation.elements(part) for part in parts]
    return operation.made(_end_to_end(operation, sources, min(len(operation.shape) - 1, 1), operation.ranges))


def _end_to_end(operation: Operation, sources: Sequence[Elements], dim: int, ranges: Ranges) -> Tree:
    """Return the elements of tensors concatenated in a dimension."""
    if any(source.dtype != operation.dtype or len(source.shape) != len(operation.shape) for source in sources):
        raise UnknownElements
    begin, tree = as_index(0), None
    for source in sources:
        positions = {n: var(axis(n)) for n in range(len(source.shape))} | {dim: var(axis(dim)) - begin}
        part = operation.at(source, positions, ranges)
        tree = part if tree is None else Test(var(axis(dim)) - begin, part, tree)
        begin = begin + source.shape[dim]
    if tree is None:
        raise UnknownElements
    return combine(lambda leaf: leaf, (tree,), ranges)


def _sums_so_far(operation: Operation) -> Elements:
    source = operation.first
    dim = dim_of(operation.argument(1, "dim"), operation.shape)
    if axis(dim) in operation.reads.positions(source.tree) or operation.dtype.is_floating_point:
        raise UnknownElements
    count = position_in(dim, operation.shape) + 1
    return check_element(operation, combine(lambda leaf: whole(leaf) * count, (source.tree,), operation.ranges))


def _differences(operation: Operation) -> Elements:
    source, node = operation.first, operation.node
    if operation.argument(1, "n", 1) != 1 or operation.argument(4, "append") is not None:
        raise UnknownElements
    if source.dtype == torch.bool or source.dtype.is_floating_point:
        raise UnknownElements
    dim = dim_of(operation.argument(2, "dim", -1), operation.shape)
    prepended = node.args[3] if len(node.args) > 3 else node.kwargs.get("prepend")
    sources = [source] if prepended is None else [operation.elements(prepended), source]
    longer = as_size(sum((as_index(part.shape[dim]) for part in sources), as_index(0)))
    ranges = operation.ranges | {axis(dim): longer}
    here = _end_to_end(operation, sources, dim, ranges)
    position = position_in(dim, operation.shape)
    before = operation.reads.replace(here, {axis(dim): position}, operation.ranges)
    behind = operation.reads.replace(here, {axis(dim): position + 1}, operation.ranges)
    return check_element(operation, combine(lambda a, b: whole(a) - whole(b), (behind, before), operation.ranges))


def _repeated(operation: Operation) -> Elements:
    """Repeat along dimensions of size 1, or along those that elements do not depend on."""
    source = same_dtype(operation)
    before = len(operation.shape) - len(source.shape)
    same = [n for n, size in enumerate(source.shape) if size == operation.shape[before + n]]
    return operation.made(operation.at(source, {n: var(axis(before + n)) for n in same}))


# --- torch.func.vmap --------------------------------------------------------------------------------------------------


def _into_batch(operation: Operation) -> Elements:
    source = same_dtype(operation)
    dim, level = operation.argument(1, "batch_dim"), operation.argument(2, "level")
    shape, batch = source.shape, f"b{level}"
    own = dim_of(dim, shape)
    others = [n for n in range(len(shape)) if n != own]
    if batch in dict(source.batches):
        raise UnknownElements
    positions = {n: var(axis(place)) for place, n in enumerate(others)} | {own: var(batch)}
    batches = tuple(sorted([*source.batches, (batch, shape[own])]))
    ranges = operation.ranges | {batch: shape[own]}
    return Elements(operation.shape, operation.dtype, operation.at(source, positions, ranges), batches)


def _out_of_batch(operation: Operation) -> Elements:
    source = same_dtype(operation)
    level, place = operation.argument(1, "level"), operation.argument(3, "out_dim")
    batch, shape = f"b{level}", operation.shape
    own = dim_of(place, shape)
    others = [n for n in range(len(shape)) if n != own]
    values = {axis(n): var(axis(other)) for n, other in enumerate(others)} | {batch: position_in(own, shape)}
    batches = tuple(item for item in source.batches if item[0] != batch)
    ranges = {axis(n): size for n, size in enumerate(shape)} | dict(batches)
    return Elements(shape, operation.dtype, operation.reads.replace(source.tree, values, ranges), batches)


# --- the table --------------------------------------------------------------------------------------------------------

RULES: Mapping[str, Rule] = {
    "arange": _arange,
    "ones": _filled(1), "ones_like": _filled(1), "new_ones": _filled(1),
    "zeros": _filled(0), "zeros_like": _filled(0), "new_zeros": _filled(0),
    "full": _filled_with(1), "full_like": _filled_with(1), "new_full": _filled_with(2),
    "tensor": _filled_with(0, "data"), "scalar_tensor": _filled_with(0, "s"),
    **dict.fromkeys(
        (
            "le", "lt", "ge", "gt", "eq", "ne", "less", "less_equal", "greater", "greater_equal",
            "and", "and_", "or", "or_", "xor", "invert", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not",
            "logical_and", "logical_or", "logical_not", "logical_xor", "where", "masked_fill", "isinf", "isneginf",
            "add", "sub", "subtract", "mul", "multiply", "neg", "negative", "rsub", "abs", "truediv", "div", "exp",
            "log", "floordiv", "mod", "floor_divide", "remainder", "clamp", "minimum", "maximum", "nan_to_num",
        ),
        elementwise,
    ),
    **dict.fromkeys(
        (
            "to", "bool", "float", "double", "half", "bfloat16", "int", "long", "type", "type_as", "contiguous",
            "clone", "detach", "cpu", "cuda",
        ),
        conversion,
    ),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _broadcast),
    **dict.fromkeys(
        ("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshaped
    ),
    "permute": _permuted, "transpose": _transposed, "swapaxes": _transposed, "t": _t,
    "tril": _triangle(lower=True), "triu": _triangle(lower=False),
    "cat": _joined, "concat": _joined, "hstack": _side_by_side, "repeat": _repeated,
    "cumsum": _sums_so_far, "diff": _differences,
    "getitem": index_elements, "index": index_elements,
    "_add_batch_dim": _into_batch, "_remove_batch_dim": _out_of_batch,
}  # fmt: skip
"""Name of a function or method -> its rule."""
FROM_NUMBERS = ("ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "empty", "empty_like")
"""Functions that make a tensor with memory of its own."""
LIKE = frozenset(("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"))
"""Functions that use only the shape, dtype and device of their first argument."""
AS_OTHER = frozenset(("expand_as", "view_as", "reshape_as", "type_as", "to"))
"""Functions that use only the shape, dtype and device of their other arguments."""
