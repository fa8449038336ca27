"""Detect matmuls in a captured graph before it is traced."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from dcompile.device_traits import traits_of

NAMES = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"})
"""Names of functions and methods that usually become matmuls."""


def multiplies(gm: Any) -> bool:
    """Does a Dynamo graph or a subgraph probably have float32 matmuls on a device with a dcompile GEMM kernel?"""
    graphs = (module.graph for module in gm.modules() if isinstance(module, GraphModule))
    return any(_is_product(node) for graph in graphs for node in graph.nodes)


def _is_product(node: Any) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    value = node.meta.get("example_value")
    if node.op not in ("call_function", "call_method") or name not in NAMES or not isinstance(value, torch.Tensor):
        return False
    return value.dtype == torch.float32 and traits_of(value.device.type).has_own_sgemm
