"""Questions about nodes of a captured graph: what they call, with which arguments, and what they change."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.dynamo.higher_order_bodies import BodyCall, NestedGraphs, placeholders
from dcompile.compat.size_expressions import Inexpressible
from dcompile.compat.size_expressions import shape_of as shape_as_sizes
from dcompile.device_traits import traits_of
from dcompile.ir.index import Size

ATTENTION = torch.nn.functional.scaled_dot_product_attention
MASK = 3
"""Position of `attn_mask` among its arguments."""
CAUSAL = 5
"""Position of `is_causal`."""


def value_of(node: Any) -> Any:
    """Return the traced value of a node, or None."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def name_of(node: Node) -> str:
    """Return the name of a node's operation, as a function, a method or a special method: `__eq__` is "eq"."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.removeprefix("__").removesuffix("__") if name.startswith("__") else name


def is_of_torch(node: Node) -> bool:
    """Does a node call a tensor's method, a Python operator or a function of torch, not another one of that name?"""
    if node.op != "call_function":
        return node.op == "call_method"
    module = str(getattr(node.target, "__module__", None) or "torch")  # some functions in C++ have none
    if module.startswith(("torch.ops.", "torch._ops.")):
        return module.endswith(".aten")
    return module in ("_operator", "torch") or module.startswith("torch.")


def argument(node: Node, position: int, name: str) -> Any:
    """Return an argument of a call, positional or by name; None if it is missing."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def shape_of(node: Any) -> tuple[Any, ...]:
    """Return the shape of a node's value; () if it is no tensor."""
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def sizes_of(node: Any) -> tuple[Size, ...]:
    """Return the sizes of a node's tensor, to be compared without guards; () if it is no tensor or they are unknown."""
    value = value_of(node)
    try:
        return shape_as_sizes(value) if isinstance(value, torch.Tensor) else ()
    except Inexpressible:
        return ()


class Changed:
    """The tensors in a nest of graphs that some node writes to."""

    def __init__(self, nest: NestedGraphs) -> None:
        self._memory = {key for node in nest.nodes() if changes(node) for key in self._keys(node)}
        for body in reversed(nest.graphs):  # a change of a body's input changes the operand
            for position, node in enumerate(placeholders(body)):
                if not self._memory.isdisjoint(_storages(node)):
                    for call in nest.calls_of(body):
                        self._memory |= self._outside(call, position)

    def _outside(self, call: BodyCall, position: int) -> set[Any]:
        operand = call.operand(position)
        return set(_storages(operand)) if isinstance(operand, Node) else self._keys(call.node)

    def _keys(self, node: Node) -> set[Any]:
        return {key for given in node.all_input_nodes for key in _storages(given)}

    def __call__(self, node: Node) -> bool:
        """Does anything write to a node's memory, also through another view?"""
        return any(map(changes, node.users)) or not self._memory.isdisjoint(_storages(node))


def _storages(node: Node) -> list[Any]:
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or not compat.tensors.has_storage(value):
        return []
    return [compat.tensors.storage_key(value)]


def changes(node: Node) -> bool:
    """May a node write to its arguments? So do names with a trailing underscore, and the operators of `_IN_PLACE`."""
    name = name_of(node)
    if node.target in (operator.and_, operator.or_, operator.not_):
        return False
    if name.endswith("_") or name in _IN_PLACE or "out" in node.kwargs or "mutation" in name:
        return True
    if node.kwargs.get("inplace") or (str(getattr(node.target, "__module__", "")) == _LAYERS and True in node.args):
        return True
    overloads = getattr(node.target, "overloads", None)
    names = [name for name in overloads() if not name.endswith("out")] if callable(overloads) else []
    ops = [getattr(node.target, name) for name in names] if callable(overloads) else [node.target]
    return any(schema.is_mutable for op in ops if (schema := getattr(op, "_schema", None)) is not None)


_LAYERS = "torch.nn.functional"
"""Module whose functions also take `inplace` as a positional argument: True among their arguments may be it."""
_IN_PLACE = frozenset(
    (
        "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
        "ilshift", "irshift",
    )
)  # fmt: skip


def is_call(node: Node, *names: str) -> bool:
    """Does a node call a function or method of one of these names?"""
    if node.op == "call_method":
        return node.target in names
    return node.op == "call_function" and getattr(node.target, "__name__", "") in names


MATMULS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"})
"""Names of functions and methods that usually become matmuls."""


def multiplies(gm: Any) -> bool:
    """Does a Dynamo graph or a subgraph probably have float32 matmuls on a device with a dcompile GEMM kernel?"""
    graphs = (module.graph for module in gm.modules() if isinstance(module, GraphModule))
    return any(_is_product(node) for graph in graphs for node in graph.nodes)


def _is_product(node: Any) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    value = node.meta.get("example_value")
    if node.op not in ("call_function", "call_method") or name not in MATMULS or not isinstance(value, torch.Tensor):
        return False
    return value.dtype == torch.float32 and traits_of(value.device.type).has_own_sgemm
