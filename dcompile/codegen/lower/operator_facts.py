"""Facts of operators that torch's schemas tell: names, what they write, and what else they affect."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from dcompile import compat


def op_text(target: Any) -> str:
    """Return the name that the emitter calls: `aten.mm.default`, `higher_order.cond`, `operator.mul`, ..."""
    if hasattr(target, "_schema"):
        return str(target)
    if hasattr(target, "namespace"):
        return f"{target.namespace}.{target}"
    module = getattr(target, "__module__", None) or "builtins"
    return f"{module.lstrip('_')}.{getattr(target, '__name__', target)}"


def in_order(target: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return `args` followed by positional arguments given by keyword, which are removed from `kwargs`."""
    schema = getattr(target, "_schema", None)
    if schema is None or not kwargs:
        return args
    places = [argument for argument in schema.arguments if not argument.kwarg_only]
    last = max((n for n, argument in enumerate(places) if argument.name in kwargs), default=-1)
    missing = places[len(args) : last + 1]
    return args + [kwargs.pop(argument.name, argument.default_value) for argument in missing]


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
