"""Trace Hugging Face's experts as grouped matmuls, in place of their fallback operator and of their loop.

While a model is traced, transformers calls `torch.nn.functional.grouped_mm` only for bfloat16 weights, since Inductor
supports no others. Otherwise it calls its own operator, which loops over the experts. Up to transformers 5.18 the
operator's backward reads the offsets on the host while AOTAutograd traces. That fails, and Dynamo breaks the graph at
each call. dcompile's operator has a backward that can be traced. It uses PyTorch's grouped GEMM if that supports the
operands. Otherwise it reads the offsets once for all calls that share them.

The loop (`experts_implementation="eager"`) iterates over the experts with tokens, which no tracer captures. The grouped
form is traced in its place. It computes the same values according to transformers, in the dtype of the loop's linear
layers, which is autocast's where that is on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile.grouped_ops import ALIGNMENT_BYTES, autocast_grouped_mm, grouped_mm
from dcompile.passes import GAIN, PassReport

FALLBACK = "transformers.grouped_mm_fallback"


def group_experts(gm: GraphModule, autocast: bool = False) -> PassReport:
    """Replace calls of the fallback operator in a Dynamo graph and its subgraphs, in place.

    With `autocast`, the new calls follow autocast as linear layers do.
    """
    count = 0
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        calls = [node for node in module.graph.nodes if _is_fallback(node)]
        for node in calls:
            input, weight, offsets = _arguments(node)
            node.target = autocast_grouped_mm if autocast else grouped_mm
            node.args, node.kwargs = (input, weight, offsets), {}
        if calls:
            module.recompile()
        count += len(calls)
    notes = (f"{GAIN}{count} grouped matmuls of experts were captured with their gradients",)
    return PassReport(count, notes if count else ())


def _is_fallback(node: Node) -> bool:
    return node.op == "call_function" and str(node.target).removesuffix(".default") == FALLBACK


def _arguments(node: Node) -> tuple[Any, Any, Any]:
    names = ("input", "weight", "offs")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return given["input"], given["weight"], given["offs"]


class ExpertsInDtype:
    """View of a module of experts with its matrices in another dtype."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return value.to(self.dtype) if name in MATRICES else value


MATRICES = frozenset(("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"))
"""Attributes that autocast casts in a linear layer."""


def group_loop(loop: Callable[..., Any], grouped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward of a module of experts for tracing: `grouped` if it supports the matrices, else `loop`."""

    def forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        kind = hidden_states.device.type
        dtype = self.down_proj.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        wide = ALIGNMENT_BYTES // dtype.itemsize
        if any(size % wide for size in self.down_proj.shape[1:]):
            return loop(self, hidden_states, top_k_index, top_k_weights)
        experts = self if dtype == self.down_proj.dtype else ExpertsInDtype(self, dtype)
        return grouped(experts, hidden_states, top_k_index, top_k_weights)

    return forward
