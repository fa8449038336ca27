"""Element-wise operations: torch itself computes them on constants, rules here compute them on indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from dcompile.capture.passes.dynamo.symbolic_elements.elements import (
    Elements,
    Operation,
    UnknownElements,
    name_of,
    size_of,
    value_of,
)
from dcompile.capture.passes.dynamo.symbolic_elements.values import (
    convert_element,
    equal,
    in_range,
    leaf_of,
    single,
    whole,
)
from dcompile.ir.index import Index
from dcompile.ir.piecewise import Leaf, Test, Tree, combine


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
