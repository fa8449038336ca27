"""Describe the origin of an FX node for people: module path, op, source line."""

from __future__ import annotations

import re
from functools import lru_cache

from torch.fx import Node

from dcompile.compat.user_line import user_line

_FRAME_NAMES = frozenset(("L", "self", "target", "__self__", "_modules", "module", ""))
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
    path = re.sub(
        r"\bforward\.__closure__\.\d+\.cell_contents\b", "", path
    )  # of the wrapper installed by FSDP1's adapter
    parts = [part for part in path.split(".") if part not in _FRAME_NAMES]
    return ".".join(parts)
