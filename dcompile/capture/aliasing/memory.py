"""Identify the memory of values of an FX graph."""

from __future__ import annotations

from typing import Any

import torch

from dcompile import compat


def memory_of(node: Any) -> int | None:
    """Return a key of the storage of a node's value, equal for values that share memory; None if it has no storage."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return compat.tensors.storage_key(value)
