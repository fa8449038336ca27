"""Facts of an FX graph's nodes and of their operators.

Of a node: its origin, for people, and the users of its value through views, which decide where it is computed. Of an
operator, by torch's schema: its name, what it writes, and what else it affects.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from dcompile import compat
from dcompile.compat.aot_metadata import user_line
from dcompile.compat.size_expressions import estimate

_FRAME_NAMES = frozenset(
    ("L", "self", "target", "__self__", "_modules", "module", "_orig_mod", "_compiled_call_impl", "")
)
"""Prefixes that Dynamo adds to a module's path."""


def origin_of(node: Node) -> tuple[str, ...]:
    """Return the origin of a node: `("layers.0.mlp: aten.mul.Tensor (model.py:88)",)`."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    module = ""
    if stack:
        module = _module_path(next(reversed(stack.values()))[0])
    line = user_line(node)
    text = f"{module}: {node.target}" if module else str(node.target)
    return (f"{text} ({line})",) if line else (text,)


@lru_cache(maxsize=4096)
def _module_path(path: str) -> str:
    """Turn Dynamo's `L['self'].model.layers[0].mlp` into `model.layers.0.mlp`."""
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    path = re.sub(r"\(.*?\)", "", path)
    # wrappers of FSDP1's adapter and of compiled modules inside
    path = re.sub(r"\b(?:\w+\._torchdynamo_inline|forward)\.__closure__\.\d+\.cell_contents\b", "", path)
    parts = [part for part in path.split(".") if part not in _FRAME_NAMES]
    return ".".join(parts)


Kind = Literal["view", "loop", "memory"]
"""How an op takes its arguments: as a view, element by element in a loop, or from memory."""


@dataclass(frozen=True, slots=True)
class Uses:
    """Number of final users, whether one needs memory, and the most elements that one of them computes."""

    count: int = 0
    memory: bool = False
    numel: int = 0
    last: int = -1
    """Position of the last user in the graph."""
    total: int = 0
    """Element reads of all users together: two halves of a tensor read each element once."""


def find_uses(graph: Graph, kind_of: Callable[[Node], Kind]) -> dict[Node, Uses]:
    """Return the final users of every node; a view's users count as users of its base."""
    found: dict[Node, Uses] = {}
    nodes = list(graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    for node in reversed(nodes):
        uses = [_use(user, node, kind_of(user), found, position) for user in node.users]
        found[node] = Uses(
            sum(use.count for use in uses),
            any(use.memory for use in uses),
            max((use.numel for use in uses), default=0),
            max((use.last for use in uses), default=-1),
            sum(use.total for use in uses),
        )
    return found


def _use(user: Node, node: Node, kind: Kind, found: dict[Node, Uses], position: dict[Node, int]) -> Uses:
    if kind == "view":
        through = found[user]
        numel = 0 if user.target is operator.getitem else numel_of(user.meta.get("val"))
        last = max(through.last, position[user])
        return Uses(through.count, through.memory, max(through.numel, numel), last, through.total)
    # a reduction computes each element of its argument once, a pointwise op each element of its result
    numel = max(numel_of(user.meta.get("val")), numel_of(node.meta.get("val")))
    asked = numel_of(node.meta.get("val")) if str(user.target) == "aten.cat.default" else numel
    return Uses(1, kind == "memory", numel, position[user], asked)


def numel_of(value: Any) -> int:
    """Return the number of elements of the largest tensor in a node's value."""
    if isinstance(value, torch.Tensor):
        return prod(map(estimate, value.shape))
    return max(map(numel_of, value), default=0) if isinstance(value, (tuple, list)) else 0


def in_order(target: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return `args` followed by positional arguments given by keyword, which are removed from `kwargs`."""
    schema = getattr(target, "_schema", None)
    if schema is None or not kwargs:
        return args
    places = [argument for argument in schema.arguments if not argument.kwarg_only]
    last = max((n for n, argument in enumerate(places) if argument.name in kwargs), default=-1)
    missing = places[len(args) : last + 1]
    return args + [kwargs.pop(argument.name, argument.default_value) for argument in missing]


def op_text(target: Any) -> str:
    """Return the name that the emitter calls: `aten.mm.default`, `higher_order.cond`, `operator.mul`, ..."""
    if hasattr(target, "_schema"):
        return str(target)
    if hasattr(target, "namespace"):
        return f"{target.namespace}.{target}"
    module = getattr(target, "__module__", None) or "builtins"
    return f"{module.lstrip('_')}.{getattr(target, '__name__', target)}"


def is_in_place(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and (bool(schema.is_mutable) or compat.storage_offsets.resizes(target))


def written_names(schema: Any) -> list[str]:
    """Return the arguments that a call changes, also those that it resizes without saying so in its schema."""
    if schema.name == compat.storage_offsets.RESIZE:
        return [schema.arguments[0].name]
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def written_arguments(node: Node) -> list[Node]:
    """Return the nodes that a call overwrites, if it returns exactly these, unchanged in shape (unlike squeeze_)."""
    schema = getattr(node.target, "_schema", None)
    if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
        return []
    if schema is None or not schema.is_mutable or any(result.alias_info is None for result in schema.returns):
        return []
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    written = [given.get(name) for name in written_names(schema)]
    return [n for item in written for n in (item if isinstance(item, (tuple, list)) else [item]) if isinstance(n, Node)]


def returns_alias(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


COMPUTING = {"aten._conj.default": "aten._conj_physical.default", "aten._neg_view.default": "aten.neg.default"}
"""Views that change values when read -> the operation that computes these, into the same layout."""


def copying_variant(target: Any) -> str | None:
    """Return the copying variant of a view op if it exists: `aten.view_copy.dtype` for `aten.view.dtype`."""
    if str(target) in COMPUTING:
        return COMPUTING[str(target)]
    namespace, name, overload = str(target).split(".")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_copy", None)
    return f"{namespace}.{name}_copy.{overload}" if packet is not None and overload in packet.overloads() else None


def has_effect(node: Node) -> bool:
    """Return whether a call affects more than its results: random numbers, collectives, assertions, mutation."""
    target: Any = node.target
    tags = getattr(target, "tags", ())
    return bool(
        "c10d" in op_text(target)
        or torch.Tag.nondeterministic_seeded in tags
        or node.meta.get("val") is None
        or is_in_place(target)
        or node.is_impure()
    )
