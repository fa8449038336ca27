"""How operations of a captured graph make elements: one rule for each, by the names of functions and methods.

A rule raises Unknown where it cannot follow. Shapes and dtypes of results are those that were traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from dcompile.capture.elements import Elements, Operation, Unknown, axis, fits, name_of, size_of, value_of
from dcompile.ir.index import Index, Ranges, Size, as_index, as_size, is_below, is_nonnegative, size_product, var
from dcompile.ir.piecewise import Leaf, Test, Tree, combine, negated, replace_variables, variables

Rule: TypeAlias = Callable[[Operation], Elements]


# --- tensors that are made of numbers ---------------------------------------------------------------------------------


def _arange(operation: Operation) -> Elements:
    given = [size_of(argument) for argument in operation.node.args]
    named = {name: size_of(operation.node.kwargs[name]) for name in ("start", "step") if name in operation.node.kwargs}
    start = given[0] if len(given) > 1 else named.get("start", 0)
    step = given[2] if len(given) > 2 else named.get("step", 1)
    return _checked(operation, as_index(start) + _position(0, operation.shape) * step)


def _filled_with(place: int, name: str = "fill_value") -> Rule:
    def rule(operation: Operation) -> Elements:
        value = operation.argument(place, name)
        return _checked(operation, _converted(_number(value), operation.dtype, operation.ranges))

    return rule


def _filled(value: int) -> Rule:
    return lambda operation: _checked(operation, _converted(value, operation.dtype, operation.ranges))


def _number(value: Any) -> Leaf:
    if isinstance(value, bool | int | float):
        return value
    return _leaf(size_of(value))


def _leaf(size: Size) -> Leaf:
    return size if isinstance(size, int) or size.constant is None else size.constant


def _position(dim: int, shape: Sequence[Size]) -> Index:
    """The position in a dimension."""
    return as_index(0) if shape[dim] == 1 else var(axis(dim))


def _checked(operation: Operation, tree: Tree) -> Elements:
    """The result, if its dtype holds what it should. Raises Unknown."""
    return operation.made(_in_range(tree, operation.dtype, operation.ranges))


def _in_range(tree: Tree, dtype: torch.dtype, ranges: Ranges) -> Tree:
    def checked(leaf: Leaf) -> Leaf:
        if isinstance(leaf, Index) and leaf.constant is not None:
            leaf = leaf.constant
        if isinstance(leaf, Index):
            if not fits(leaf, dtype, ranges):
                raise Unknown
            return leaf
        if isinstance(leaf, int) and not isinstance(leaf, bool) and dtype.is_floating_point:
            return float(leaf)
        return leaf

    return combine(checked, (tree,), ranges)


# --- element by element -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slot:
    """Stands for a node among arguments."""

    number: int


def _elementwise(operation: Operation) -> Elements:
    nodes: list[Node] = []

    def slot(node: Node) -> _Slot:
        nodes.append(node)
        return _Slot(len(nodes) - 1)

    args, kwargs = map_arg((operation.node.args, operation.node.kwargs), slot)  # type: ignore[arg-type, misc]
    trees = [operation.broadcast(operation.known[n]) if n in operation.known else _leaf(size_of(n)) for n in nodes]

    def computed(*leaves: Leaf) -> Tree:
        if any(isinstance(leaf, Index) for leaf in leaves):
            return _of_indices(operation, args, kwargs, leaves)
        return _of_constants(operation, args, kwargs, nodes, leaves)

    return operation.made(combine(computed, trees, operation.ranges))


def _of_constants(operation: Operation, args: Any, kwargs: Any, nodes: list[Node], leaves: Sequence[Any]) -> Leaf:
    """One element, computed by the operation itself, on tensors of one element on the CPU."""

    def real(argument: Any) -> Any:
        if not isinstance(argument, _Slot):
            return argument
        node, leaf = nodes[argument.number], leaves[argument.number]
        return _single(leaf, value_of(node).dtype, value_of(node).dim()) if node in operation.known else leaf

    given, named = map_aggregate(args, real), map_aggregate(kwargs, real)
    target: Any = operation.node.target
    if operation.node.op == "call_method":
        target, given = getattr(given[0], target), given[1:]  # type: ignore[index]
    try:
        result = target(*given, **named)  # type: ignore[misc]
    except (RuntimeError, TypeError, ValueError) as wrong:
        raise Unknown from wrong
    if not isinstance(result, torch.Tensor) or result.dtype != operation.dtype or result.numel() != 1:
        raise Unknown
    return result.item()


def _single(value: Any, dtype: torch.dtype, dims: int) -> torch.Tensor:
    """A tensor of one element; one of no dimensions takes another part in what dtype a result has."""
    return torch.tensor(value, dtype=dtype, device="cpu").reshape((1,) if dims else ())


def _of_indices(operation: Operation, args: Any, kwargs: Any, leaves: Sequence[Leaf]) -> Tree:
    """One element where operands depend on positions."""
    name = name_of(operation.node)
    rule = _ON_INDICES.get(_OTHER_NAMES.get(name, name))
    if rule is None:
        raise Unknown
    given = [leaves[argument.number] if isinstance(argument, _Slot) else argument for argument in args]
    named = {key: leaves[value.number] if isinstance(value, _Slot) else value for key, value in kwargs.items()}
    if operation.node.op == "call_method" and name_of(operation.node) == "where":
        given[:2] = [given[1], given[0]]
    try:
        result = rule(*given, **named)
    except TypeError as wrong:  # arguments that the rule does not know
        raise Unknown from wrong
    return _in_range(result, operation.dtype, operation.ranges)


def _whole(value: Any) -> Index:
    """A whole number as an index. Raises Unknown for any other."""
    if isinstance(value, Index):
        return value
    if isinstance(value, bool | int) or (isinstance(value, float) and value.is_integer()):
        return as_index(int(value))
    raise Unknown


def _at_least(one: Any, other: Any) -> Tree:
    return Test(_whole(one) - _whole(other), True, False)


def _below(one: Any, other: Any) -> Tree:
    return Test(_whole(one) - _whole(other), False, True)


def _equal(one: Any, other: Any, yes: bool = True) -> Tree:
    difference = _whole(one) - _whole(other)
    return Test(difference, Test(difference * -1, yes, not yes), not yes)


def _larger(one: Any, other: Any) -> Tree:
    return Test(_whole(one) - _whole(other), _whole(one), _whole(other))


def _smaller(one: Any, other: Any) -> Tree:
    return Test(_whole(one) - _whole(other), _whole(other), _whole(one))


def _chosen(condition: Any, one: Any, other: Any) -> Tree:
    if not isinstance(condition, bool):
        raise Unknown
    return _whole_or_float(one if condition else other)


def _whole_or_float(value: Any) -> Tree:
    if isinstance(value, bool | int | float | Index):
        return value
    raise Unknown


_ON_INDICES: Mapping[str, Callable[..., Tree]] = {
    "add": lambda one, other: _whole(one) + _whole(other),
    "sub": lambda one, other: _whole(one) - _whole(other),
    "rsub": lambda one, other: _whole(other) - _whole(one),
    "mul": lambda one, other: _whole(one) * _whole(other),
    "neg": lambda one: _whole(one) * -1,
    "abs": lambda one: Test(_whole(one), _whole(one), _whole(one) * -1),
    "minimum": _smaller,
    "maximum": _larger,
    "ge": _at_least,
    "le": lambda one, other: _at_least(other, one),
    "lt": _below,
    "gt": lambda one, other: _below(other, one),
    "eq": _equal,
    "ne": lambda one, other: _equal(one, other, yes=False),
    "where": _chosen,
    "masked_fill": lambda one, mask, value: _chosen(mask, value, one),
    "logical_not": lambda one: _equal(one, 0),
}
"""Of operations on indices and constants: the element, whose dtype has to hold it."""
_OTHER_NAMES = {
    "greater_equal": "ge", "less_equal": "le", "less": "lt", "greater": "gt", "subtract": "sub", "multiply": "mul",
    "negative": "neg",
}  # fmt: skip


def _conversion(operation: Operation) -> Elements:
    source, dtype, ranges = operation.first, operation.dtype, operation.ranges

    def converted(leaf: Leaf) -> Tree:
        return _converted(leaf, dtype, ranges, source.dtype)

    if source.shape != operation.shape:
        raise Unknown
    return operation.made(combine(converted, (source.tree,), ranges) if dtype != source.dtype else source.tree)


def _converted(leaf: Leaf, dtype: torch.dtype, ranges: Ranges, before: torch.dtype | None = None) -> Tree:
    if not isinstance(leaf, Index):
        if isinstance(leaf, float) and not math.isfinite(leaf) and not dtype.is_floating_point and dtype != torch.bool:
            raise Unknown  # each processor has a number of its own for that
        return _single(leaf, before or dtype, 0).to(dtype).item()
    return _equal(leaf, 0, yes=False) if dtype == torch.bool else _in_range(leaf, dtype, ranges)


# --- moved about ------------------------------------------------------------------------------------------------------


def _same_dtype(operation: Operation) -> Elements:
    """The tensor that is looked at, if as what it is. Raises Unknown."""
    source = operation.first
    if source.dtype != operation.dtype:
        raise Unknown
    return source


def _broadcast(operation: Operation) -> Elements:
    return operation.made(operation.broadcast(_same_dtype(operation)))


def _reshaped(operation: Operation) -> Elements:
    """Sizes of 1 come and go; others stay, or are merged and split where elements do not depend on them."""
    source = _same_dtype(operation)
    before = [n for n, size in enumerate(source.shape) if size != 1]
    after = [n for n, size in enumerate(operation.shape) if size != 1]
    positions = dict[int, Index]()
    while before and after:
        old, new = [before.pop(0)], [after.pop(0)]
        while (left := _extent(source.shape, old)) != (right := _extent(operation.shape, new)):
            shorter, rest = (old, before) if _is_shorter(left, right) else (new, after)
            if not rest or not (shorter is old or _is_shorter(right, left)):
                raise Unknown
            shorter.append(rest.pop(0))
        if len(old) == len(new) == 1:
            positions[old[0]] = var(axis(new[0]))
    if before or after:
        raise Unknown
    return operation.made(operation.at(source, positions))


def _extent(shape: Sequence[Size], dims: list[int]) -> Size:
    return size_product(shape[n] for n in dims)


def _is_shorter(one: Size, other: Size) -> bool:
    return is_below(as_index(one), other, {})


def _permuted(operation: Operation) -> Elements:
    source = _same_dtype(operation)
    dims = operation.node.args[1:] or (operation.node.kwargs.get("dims"),)
    order = [*dims[0]] if isinstance(dims[0], tuple | list) else [*dims]
    if not all(isinstance(dim, int) for dim in order) or len(order) != len(source.shape):
        raise Unknown
    return operation.made(operation.at(source, {_dim(d, order): var(axis(n)) for n, d in enumerate(order)}))


def _transposed(operation: Operation) -> Elements:
    source = _same_dtype(operation)
    order = [*range(len(source.shape))]
    names = [("dim0", "dim1"), ("axis0", "axis1")][name_of(operation.node) == "swapaxes"]
    one, other = (_dim(operation.argument(place, name), order) for place, name in enumerate(names, 1))
    order[one], order[other] = order[other], order[one]
    return operation.made(operation.at(source, {d: var(axis(n)) for n, d in enumerate(order)}))


def _turned(operation: Operation) -> Elements:
    source = _same_dtype(operation)
    last = len(source.shape) - 1
    return operation.made(operation.at(source, {n: var(axis(last - n)) for n in range(last + 1)}))


def _dim(dim: Any, dims: Sequence[Any]) -> int:
    """A dimension counted from the first one. Raises Unknown."""
    if not isinstance(dim, int) or not -len(dims) <= dim < len(dims):
        raise Unknown
    return dim % len(dims)


def _triangle(lower: bool) -> Rule:
    def rule(operation: Operation) -> Elements:
        source, shape = _same_dtype(operation), operation.shape
        offset = size_of(operation.argument(1, "diagonal", 0))
        above = _position(len(shape) - 1, shape) - _position(len(shape) - 2, shape) - offset
        nothing = _converted(0, operation.dtype, operation.ranges)

        def kept(leaf: Leaf) -> Tree:
            return Test(above * -1, leaf, nothing) if lower else Test(above, leaf, nothing)

        return operation.made(combine(kept, (source.tree,), operation.ranges))

    return rule


def _joined(operation: Operation) -> Elements:
    parts = operation.argument(0, "tensors")
    dim = operation.argument(1, "dim", 0)
    if not isinstance(parts, tuple | list):
        raise Unknown
    sources = [operation.elements(part) for part in parts]
    tree = _end_to_end(operation, sources, _dim(dim, operation.shape), operation.ranges)
    return operation.made(tree)


def _side_by_side(operation: Operation) -> Elements:
    parts = operation.argument(0, "tensors")
    sources = [operation.elements(part) for part in parts]
    return operation.made(_end_to_end(operation, sources, min(len(operation.shape) - 1, 1), operation.ranges))


def _end_to_end(operation: Operation, sources: Sequence[Elements], dim: int, ranges: Ranges) -> Tree:
    """The elements of tensors one behind the other in a dimension, all others being the same."""
    if any(source.dtype != operation.dtype or len(source.shape) != len(operation.shape) for source in sources):
        raise Unknown
    begin, tree = as_index(0), None
    for source in sources:
        positions = {n: var(axis(n)) for n in range(len(source.shape))} | {dim: var(axis(dim)) - begin}
        part = operation.at(source, positions, ranges)
        tree = part if tree is None else Test(var(axis(dim)) - begin, part, tree)
        begin = begin + source.shape[dim]
    if tree is None:
        raise Unknown
    return combine(lambda leaf: leaf, (tree,), ranges)


def _sums_so_far(operation: Operation) -> Elements:
    source = operation.first
    dim = _dim(operation.argument(1, "dim"), operation.shape)
    if axis(dim) in variables(source.tree) or operation.dtype.is_floating_point:
        raise Unknown
    count = _position(dim, operation.shape) + 1
    return _checked(operation, combine(lambda leaf: _whole(leaf) * count, (source.tree,), operation.ranges))


def _differences(operation: Operation) -> Elements:
    source, node = operation.first, operation.node
    if operation.argument(1, "n", 1) != 1 or operation.argument(4, "append") is not None:
        raise Unknown
    if source.dtype == torch.bool or source.dtype.is_floating_point:
        raise Unknown
    dim = _dim(operation.argument(2, "dim", -1), operation.shape)
    prepended = node.args[3] if len(node.args) > 3 else node.kwargs.get("prepend")
    sources = [source] if prepended is None else [operation.elements(prepended), source]
    longer = as_size(sum((as_index(part.shape[dim]) for part in sources), as_index(0)))
    ranges = operation.ranges | {axis(dim): longer}
    here = _end_to_end(operation, sources, dim, ranges)
    position = _position(dim, operation.shape)
    before = replace_variables(here, {axis(dim): position}, operation.ranges)
    behind = replace_variables(here, {axis(dim): position + 1}, operation.ranges)
    return _checked(operation, combine(lambda a, b: _whole(a) - _whole(b), (behind, before), operation.ranges))


def _repeated(operation: Operation) -> Elements:
    """Repeated along dimensions of size 1, or along those that elements do not depend on."""
    source = _same_dtype(operation)
    before = len(operation.shape) - len(source.shape)
    same = [n for n, size in enumerate(source.shape) if size == operation.shape[before + n]]
    return operation.made(operation.at(source, {n: var(axis(before + n)) for n in same}))


# --- indexing ---------------------------------------------------------------------------------------------------------


def _indexed(operation: Operation) -> Elements:
    source, index = _same_dtype(operation), operation.node.args[1]
    parts = list(index) if isinstance(index, tuple | list) else [index]
    tensors = [part for part in parts if isinstance(value_of(part), torch.Tensor)]
    if any(part not in operation.known for part in tensors):
        raise Unknown
    parts = _written_out(parts, len(source.shape))
    places = _Places(operation, parts, [operation.known[part] for part in tensors])
    positions = dict[int, Index]()
    by_tensor = dict[int, Tree]()
    for dim, part, place in places.dims():
        if part in tensors:
            by_tensor[dim] = places.broadcast(operation.known[part])
        elif isinstance(part, slice):
            positions[dim] = _sliced(part, source.shape[dim], place, operation.shape)
        else:
            positions[dim] = _from_the_start(size_of(part), source.shape[dim])

    def element(*leaves: Leaf) -> Tree:
        found = dict(positions)
        for dim, leaf in zip(by_tensor, leaves, strict=True):
            if axis(dim) in variables(source.tree):  # negative ones count from the end
                found[dim] = _from_the_start(_whole(leaf), source.shape[dim], operation.ranges)
            else:
                found[dim] = as_index(0)
        return operation.at(source, found)

    return operation.made(combine(element, [*by_tensor.values()], operation.ranges))


def _written_out(parts: list[Any], dims: int) -> list[Any]:
    """An index with a slice for each dimension that it leaves out."""
    used = sum(part is not None and part is not Ellipsis for part in parts)
    if any(isinstance(part, bool) for part in parts) or used > dims:
        raise Unknown
    place = next((n for n, part in enumerate(parts) if part is Ellipsis), None)
    if place is None:
        return [*parts, *[slice(None)] * (dims - used)]
    return [*parts[:place], *[slice(None)] * (dims - used), *parts[place + 1 :]]


class _Places:
    """Where in the result each dimension of an indexed tensor is, and those of the tensors that it is indexed by."""

    def __init__(self, operation: Operation, parts: list[Any], tensors: list[Elements]) -> None:
        """`parts` is an index with a slice for each dimension that is taken whole, `tensors` what is among them."""
        self.operation, self.parts = operation, parts
        self.count = max((len(tensor.shape) for tensor in tensors), default=0)
        if any(tensor.dtype not in _POSITIONS or (self.count and not tensor.shape) for tensor in tensors):
            raise Unknown  # truth values choose; one without dimensions is a number to torch
        others = [part for part in parts if part is None or isinstance(part, slice) or _is_tensor(part)]
        places = [n for n, part in enumerate(others) if _is_tensor(part)]
        adjacent = places and places[-1] - places[0] == len(places) - 1
        self.begin = sum(not _is_tensor(part) for part in others[: places[0]]) if adjacent else 0
        """The first dimension of the result that is theirs."""

    def dims(self) -> Iterator[tuple[int, Any, int]]:
        """(dimension of the source, its index, dimension of the result) of each; the last is of use for slices."""
        dim = sliced = 0
        for part in self.parts:
            if part is not None:
                yield dim, part, sliced + (self.count if sliced >= self.begin else 0)
                dim += 1
            sliced += part is None or isinstance(part, slice)

    def broadcast(self, tensor: Elements) -> Tree:
        """An index's element at a position of the result."""
        before = self.begin + self.count - len(tensor.shape)
        return self.operation.at(tensor, {n: var(axis(before + n)) for n in range(len(tensor.shape))})


_POSITIONS = (torch.int64, torch.int32)


def _is_tensor(part: Any) -> bool:
    return isinstance(value_of(part), torch.Tensor)


def _sliced(part: slice, size: Size, place: int, shape: Sequence[Size]) -> Index:
    step = 1 if part.step is None else part.step
    if not isinstance(step, int) or step < 1:
        raise Unknown
    start = as_index(0) if part.start is None else _from_the_start(size_of(part.start), size)
    return start + _position(place, shape) * step


def _from_the_start(position: Size, size: Size, ranges: Ranges | None = None) -> Index:
    """A position that may be counted from the end. Raises Unknown where it is not known which."""
    index = as_index(position)
    for found, sign in ((index, 1), (index + size, -1)):
        if is_nonnegative(found, ranges or {}) and (sign == 1 or is_nonnegative(negated(index), ranges or {})):
            return found
    raise Unknown


# --- torch.func.vmap --------------------------------------------------------------------------------------------------


def _into_batch(operation: Operation) -> Elements:
    source = _same_dtype(operation)
    dim, level = operation.argument(1, "batch_dim"), operation.argument(2, "level")
    shape, batch = source.shape, f"b{level}"
    own = _dim(dim, shape)
    others = [n for n in range(len(shape)) if n != own]
    if batch in dict(source.batches):
        raise Unknown
    positions = {n: var(axis(place)) for place, n in enumerate(others)} | {own: var(batch)}
    batches = tuple(sorted([*source.batches, (batch, shape[own])]))
    ranges = operation.ranges | {batch: shape[own]}
    return Elements(operation.shape, operation.dtype, operation.at(source, positions, ranges), batches)


def _out_of_batch(operation: Operation) -> Elements:
    source = _same_dtype(operation)
    level, place = operation.argument(1, "level"), operation.argument(3, "out_dim")
    batch, shape = f"b{level}", operation.shape
    own = _dim(place, shape)
    others = [n for n in range(len(shape)) if n != own]
    values = {axis(n): var(axis(other)) for n, other in enumerate(others)} | {batch: _position(own, shape)}
    batches = tuple(item for item in source.batches if item[0] != batch)
    ranges = {axis(n): size for n, size in enumerate(shape)} | dict(batches)
    return Elements(shape, operation.dtype, replace_variables(source.tree, values, ranges), batches)


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
        _elementwise,
    ),
    **dict.fromkeys(
        (
            "to", "bool", "float", "double", "half", "bfloat16", "int", "long", "type", "type_as", "contiguous",
            "clone", "detach", "cpu", "cuda",
        ),
        _conversion,
    ),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _broadcast),
    **dict.fromkeys(
        ("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshaped
    ),
    "permute": _permuted, "transpose": _transposed, "swapaxes": _transposed, "t": _turned,
    "tril": _triangle(lower=True), "triu": _triangle(lower=False),
    "cat": _joined, "concat": _joined, "hstack": _side_by_side, "repeat": _repeated,
    "cumsum": _sums_so_far, "diff": _differences,
    "getitem": _indexed,
    "_add_batch_dim": _into_batch, "_remove_batch_dim": _out_of_batch,
}  # fmt: skip
"""Operations by the names of functions and methods."""
LIKE = frozenset(("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"))
"""Those whose first argument tells no more than a shape, a dtype and a device."""
AS_OTHER = frozenset(("expand_as", "view_as", "reshape_as", "type_as", "to"))
"""Those whose other arguments do."""
