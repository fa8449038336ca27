"""Which values of an FX graph share memory."""

from __future__ import annotations

from typing import Any

import torch

from dcompile import compat


def memory_of(node: Any) -> int | None:
    """What tells the memory of a node's value from that of others; None if it is no tensor that has any."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return compat.tensors.storage_key(value)
