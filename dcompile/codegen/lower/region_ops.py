"""Find the operations of a graph that another compiler may compile: plain functions of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from dcompile import compat
from dcompile.codegen.lower.operator_facts import has_effect, is_in_place, op_text, returns_alias


def is_view(node: Node) -> bool:
    """Return whether an operation only returns views of its argument."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return (
        node.op == "call_function"
        and returns_alias(node.target)
        and not is_in_place(node.target)
        and str(node.target) not in compat.storage_offsets.FROM_STORAGE
        and all(isinstance(item, torch.Tensor) for item in tensors)
    )


_OUR_OWN = "dcompile"
_KEPT = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def can_compile_in_region(node: Node, custom_ops: bool) -> bool:
    """Return whether an operation is a plain function of tensors: no effect, no dcompile op, sizes known in advance.

    `custom_ops`: whether to accept operators registered outside torch.
    """
    target: Any = node.target
    value = node.meta.get("val")
    tensors = [item for item in (value if isinstance(value, (tuple, list)) else (value,)) if item is not None]
    if not hasattr(target, "_schema") or not tensors or (has_effect(node) and not _draws_nothing(node)):
        return False
    namespace = op_text(target).partition(".")[0]
    if namespace.startswith(_OUR_OWN) or not (custom_ops or namespace in ("aten", "prims")):
        return False
    if any(tag in target.tags for tag in _KEPT) or str(target) in compat.storage_offsets.FROM_STORAGE:
        return False
    return all(isinstance(item, torch.Tensor) and item.layout == torch.strided for item in tensors)


def _draws_nothing(node: Node) -> bool:
    """Return whether an operation is attention with a dropout probability of 0, which draws no random numbers."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names or is_in_place(node.target):
        return False
    place = names.index("dropout_p")
    given = node.args[place] if len(node.args) > place else node.kwargs.get("dropout_p", 0.0)
    return isinstance(given, (int, float)) and given == 0
