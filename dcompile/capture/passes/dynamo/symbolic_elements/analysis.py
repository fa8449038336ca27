"""Analyse the elements of a captured graph's tensors, from a node back to its operands, by one rule for each operation.

Rules are found by the names of functions and methods. A rule raises UnknownElements if it does not cover a case. Shapes
and dtypes of results are the traced ones.

Element-wise operations come first: torch itself computes them on constants, and rules here compute them on indices.
Elements of an indexed tensor follow; the index may have slices, integers, None and tensors of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
from dcompile.capture.passes.dynamo.symbolic_elements.elements import (
    DTYPES,
    Elements,
    Operation,
    Read,
    Reads,
    UnknownElements,
    axis,
    check_element,
    convert_element,
    dim_of,
    equal,
    in_range,
    is_of_torch,
    leaf_of,
    name_of,
    number,
    position_in,
    same_dtype,
    shape_of,
    single,
    size_of,
    value_of,
    whole,
)
from dcompile.ir.index import Index, Ranges, Size, as_index, as_size, is_below, is_nonnegative, size_product, var
from dcompile.ir.piecewise import Leaf, Test, TooManyCases, Tree, combine, negate_condition


class ElementsOf:
    """Elements of the nodes in a nest of graphs, each computed once."""

    def __init__(self, nest: NestedGraphs, changed: Callable[[Node], bool]) -> None:
        """Start without results. `changed` is true for nodes whose memory is written: these are unknown."""
        self._nest, self._changed = nest, changed
        self._known: dict[Node, Elements | None] = {}
        self._batched: dict[Graph, frozenset[Node]] = {}
        self.reads = Reads()

    def __call__(self, node: Node) -> Elements | None:
        """Return the elements of a node's tensor; None if they are unknown.

        Where no rule determines them, those of boolean and integer tensors are reads.
        """
        pending = [node]
        while pending:
            top = pending[-1]
            needed = self._needed(top) if top not in self._known else []
            missing = next((other for other in needed or () if other not in self._known), None)
            if top in self._known:
                pending.pop()
            elif needed is None or any(self._known.get(other, top) is None for other in needed):
                self._known[top] = self._read(top)
            elif missing is not None:
                pending.append(missing)
            else:
                self._known[top] = self._worked_out(top, needed)
        return self._known[node]

    def _needed(self, node: Node) -> list[Node] | None:
        """Return the nodes whose elements determine those of `node`; None if its elements are unknown anyway."""
        if not isinstance(value_of(node), torch.Tensor) or self._changed(node):
            return None
        if node.op == "placeholder":
            return self._nest.sources(node)
        if not is_of_torch(node) or "out" in node.kwargs or name_of(node) not in RULES:
            return None
        inputs = [other for other in node.all_input_nodes if isinstance(value_of(other), torch.Tensor)]
        if name_of(node) in LIKE:
            return [other for other in inputs if other is not inputs[0]]  # the fill value may be a tensor's element
        return inputs[:1] if name_of(node) in AS_OTHER else inputs

    def _worked_out(self, node: Node, needed: list[Node]) -> Elements | None:
        known = {other: found for other in needed if (found := self._known[other]) is not None}
        value = value_of(node)
        try:
            if node.op == "placeholder":
                first, *others = known.values()
                same = all(other == first for other in others) and first.shape == shape_of(value)
                return first if same and first.dtype == value.dtype else self._read(node)
            return RULES[name_of(node)](Operation(node, known, self.reads))
        except (UnknownElements, TooManyCases):
            return self._read(node)

    def _read(self, node: Node) -> Elements | None:
        """Return a tensor's elements as reads of it; None if it is written, or of another dtype than masks have."""
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.dtype not in DTYPES or self._changed(node):
            return None
        if node in self._in_vmap(node.graph):
            return None  # its shape lacks the dimensions of batches
        try:
            shape = shape_of(value)
        except UnknownElements:
            return None
        read = Read(node, tuple(position_in(dim, shape) for dim in range(len(shape))))
        return Elements(shape, value.dtype, self.reads.element(read, value.dtype))

    def _in_vmap(self, graph: Graph) -> frozenset[Node]:
        """Return the nodes of a graph that `vmap` maps over batches."""
        if graph not in self._batched:
            depth, inside = 0, []
            for node in graph.nodes:
                depth += {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}.get(name_of(node), 0)
                inside += [node] if depth else []
            self._batched[graph] = frozenset(inside)
        return self._batched[graph]


@dataclass(frozen=True)
class _NodePlaceholder:
    """Placeholder for a node among arguments."""

    number: int


def elementwise(operation: Operation) -> Elements:
    nodes: list[Node] = []

    def slot(node: Node) -> _NodePlaceholder:
        nodes.append(node)
        return _NodePlaceholder(len(nodes) - 1)

    args, kwargs = map_arg((operation.node.args, operation.node.kwargs), slot)  # type: ignore[arg-type]
    trees = [operation.broadcast(operation.known[n]) if n in operation.known else leaf_of(size_of(n)) for n in nodes]

    def computed(*leaves: Leaf) -> Tree:
        if any(isinstance(leaf, Index) for leaf in leaves):
            return _of_indices(operation, args, kwargs, leaves)
        return _of_constants(operation, args, kwargs, nodes, leaves)

    return operation.made(combine(computed, trees, operation.ranges))


def _of_constants(operation: Operation, args: Any, kwargs: Any, nodes: list[Node], leaves: Sequence[Any]) -> Leaf:
    """Compute one element with the operation itself, on tensors of one element on the CPU."""

    def real(argument: Any) -> Any:
        if not isinstance(argument, _NodePlaceholder):
            return argument
        node, leaf = nodes[argument.number], leaves[argument.number]
        return single(leaf, value_of(node).dtype, value_of(node).dim()) if node in operation.known else leaf

    given, named = map_aggregate(args, real), map_aggregate(kwargs, real)
    target: Any = operation.node.target
    if operation.node.op == "call_method":
        target, given = getattr(given[0], target), given[1:]
    try:
        result = target(*given, **named)
    except (RuntimeError, TypeError, ValueError) as wrong:
        raise UnknownElements from wrong
    if not isinstance(result, torch.Tensor) or result.dtype != operation.dtype or result.numel() != 1:
        raise UnknownElements
    return result.item()


def _of_indices(operation: Operation, args: Any, kwargs: Any, leaves: Sequence[Leaf]) -> Tree:
    """Compute one element from operands that depend on positions. Raises UnknownElements."""
    name = name_of(operation.node)
    rule = _ON_INDICES.get(_OTHER_NAMES.get(name, name))
    if rule is None:
        raise UnknownElements
    given = [leaves[argument.number] if isinstance(argument, _NodePlaceholder) else argument for argument in args]
    named = {
        key: leaves[value.number] if isinstance(value, _NodePlaceholder) else value for key, value in kwargs.items()
    }
    if operation.node.op == "call_method" and name_of(operation.node) == "where":
        given[:2] = [given[1], given[0]]
    try:
        result = rule(*given, **named)
    except TypeError as wrong:  # arguments that the rule does not know
        raise UnknownElements from wrong
    return in_range(result, operation.dtype, operation.ranges)


def _at_least(one: Any, other: Any) -> Tree:
    return Test(whole(one) - whole(other), True, False)


def _below(one: Any, other: Any) -> Tree:
    return Test(whole(one) - whole(other), False, True)


def _larger(one: Any, other: Any) -> Tree:
    return Test(whole(one) - whole(other), whole(one), whole(other))


def _smaller(one: Any, other: Any) -> Tree:
    return Test(whole(one) - whole(other), whole(other), whole(one))


def _chosen(condition: Any, one: Any, other: Any) -> Tree:
    if not isinstance(condition, bool):
        raise UnknownElements
    return _whole_or_float(one if condition else other)


def _whole_or_float(value: Any) -> Tree:
    if isinstance(value, bool | int | float | Index):
        return value
    raise UnknownElements


_ON_INDICES: Mapping[str, Callable[..., Tree]] = {
    "add": lambda one, other: whole(one) + whole(other),
    "sub": lambda one, other: whole(one) - whole(other),
    "rsub": lambda one, other: whole(other) - whole(one),
    "mul": lambda one, other: whole(one) * whole(other),
    "neg": lambda one: whole(one) * -1,
    "abs": lambda one: Test(whole(one), whole(one), whole(one) * -1),
    "minimum": _smaller,
    "maximum": _larger,
    "ge": _at_least,
    "le": lambda one, other: _at_least(other, one),
    "lt": _below,
    "gt": lambda one, other: _below(other, one),
    "eq": equal,
    "ne": lambda one, other: equal(one, other, yes=False),
    "where": _chosen,
    "masked_fill": lambda one, mask, value: _chosen(mask, value, one),
    "logical_not": lambda one: equal(one, 0),
}
"""Operation -> its element from those of the operands, which are indices and constants; its dtype must represent it."""
_OTHER_NAMES = {
    "greater_equal": "ge", "less_equal": "le", "less": "lt", "greater": "gt", "subtract": "sub", "multiply": "mul",
    "negative": "neg",
}  # fmt: skip


def conversion(operation: Operation) -> Elements:
    source, dtype, ranges = operation.first, operation.dtype, operation.ranges

    def as_dtype(leaf: Leaf) -> Tree:
        return convert_element(leaf, dtype, ranges, source.dtype)

    if source.shape != operation.shape:
        raise UnknownElements
    return operation.made(combine(as_dtype, (source.tree,), ranges) if dtype != source.dtype else source.tree)


def index_elements(operation: Operation) -> Elements:
    source, index = same_dtype(operation), operation.node.args[1]
    parts: list[Any] = list(index) if isinstance(index, tuple | list) else [index]
    if name_of(operation.node) == "index":  # ATen's operator has None for a dimension that is taken whole
        parts = [slice(None) if part is None else part for part in parts]
    tensors = [part for part in parts if isinstance(value_of(part), torch.Tensor)]
    if any(part not in operation.known for part in tensors):
        raise UnknownElements
    parts = _written_out(parts, len(source.shape))
    places = _IndexedDimensions(operation, parts, [operation.known[part] for part in tensors])
    positions = dict[int, Index]()
    by_tensor = dict[int, Tree]()
    for dim, part, place in places.dims():
        if part in tensors:
            by_tensor[dim] = places.broadcast(operation.known[part])
        elif isinstance(part, slice):
            positions[dim] = _slice_elements(part, source.shape[dim], place, operation.shape)
        else:
            positions[dim] = _from_the_start(size_of(part), source.shape[dim])

    def element(*leaves: Leaf) -> Tree:
        found = dict(positions)
        for dim, leaf in zip(by_tensor, leaves, strict=True):
            if axis(dim) in operation.reads.positions(source.tree):  # negative positions are relative to the end
                found[dim] = _from_the_start(whole(leaf), source.shape[dim], operation.ranges)
            else:
                found[dim] = as_index(0)
        return operation.at(source, found)

    return operation.made(combine(element, [*by_tensor.values()], operation.ranges))


def _written_out(parts: list[Any], dims: int) -> list[Any]:
    """Return an index with a full slice for each dimension that it leaves out."""
    used = sum(part is not None and part is not Ellipsis for part in parts)
    if any(isinstance(part, bool) for part in parts) or used > dims:
        raise UnknownElements
    place = next((n for n, part in enumerate(parts) if part is Ellipsis), None)
    if place is None:
        return [*parts, *[slice(None)] * (dims - used)]
    return [*parts[:place], *[slice(None)] * (dims - used), *parts[place + 1 :]]


class _IndexedDimensions:
    """Map from dimensions of an indexed tensor, and of its index tensors, to dimensions of the result."""

    def __init__(self, operation: Operation, parts: list[Any], tensors: list[Elements]) -> None:
        """`parts`: an index with an entry for each dimension. `tensors`: elements of the tensors in it.

        Raises UnknownElements for index tensors of other dtypes than int32 and int64.
        """
        self.operation, self.parts = operation, parts
        self.count = max((len(tensor.shape) for tensor in tensors), default=0)
        if any(tensor.dtype not in _POSITIONS or (self.count and not tensor.shape) for tensor in tensors):
            raise UnknownElements  # booleans are a mask; a tensor without dimensions acts as an integer
        others = [part for part in parts if part is None or isinstance(part, slice) or _is_tensor(part)]
        places = [n for n, part in enumerate(others) if _is_tensor(part)]
        adjacent = places and places[-1] - places[0] == len(places) - 1
        self.begin = sum(not _is_tensor(part) for part in others[: places[0]]) if adjacent else 0
        """The first dimension of the result that comes from index tensors."""

    def dims(self) -> Iterator[tuple[int, Any, int]]:
        """Yield (dimension of the source, its index, dimension of the result); the last is valid for slices."""
        dim = sliced = 0
        for part in self.parts:
            if part is not None:
                yield dim, part, sliced + (self.count if sliced >= self.begin else 0)
                dim += 1
            sliced += part is None or isinstance(part, slice)

    def broadcast(self, tensor: Elements) -> Tree:
        """Return an index tensor's element at a position of the result."""
        before = self.begin + self.count - len(tensor.shape)
        return self.operation.at(tensor, {n: var(axis(before + n)) for n in range(len(tensor.shape))})


_POSITIONS = (torch.int64, torch.int32)


def _is_tensor(part: Any) -> bool:
    return isinstance(value_of(part), torch.Tensor)


def _slice_elements(part: slice, size: Size, place: int, shape: Sequence[Size]) -> Index:
    step = 1 if part.step is None else part.step
    if not isinstance(step, int) or step < 1:
        raise UnknownElements
    start = as_index(0) if part.start is None else _from_the_start(size_of(part.start), size)
    return start + position_in(place, shape) * step


def _from_the_start(position: Size, size: Size, ranges: Ranges | None = None) -> Index:
    """Return a position relative to the start; a negative one is relative to the end.

    Raises UnknownElements if the sign is unknown.
    """
    index = as_index(position)
    for found, sign in ((index, 1), (index + size, -1)):
        if is_nonnegative(found, ranges or {}) and (sign == 1 or is_nonnegative(negate_condition(index), ranges or {})):
            return found
    raise UnknownElements


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
