"""Hugging Face's experts as grouped matmuls that trace: their operator for "no grouped GEMM here", and their loop.

While a model is traced, transformers does not call `torch.nn.functional.grouped_mm` unless its weights are bfloat16,
since Inductor takes no other, but an operator of its own that loops over the experts. Up to transformers 5.18 its
backward reads the offsets on the host while AOTAutograd traces, which fails, and Dynamo breaks the graph at each call.
Ours has a backward that traces, takes PyTorch's grouped GEMM where that takes the operands, and reads the offsets once
for all calls that share them where it does not.

The loop (`experts_implementation="eager"`) takes the experts that are hit one by one, which no tracer captures. In its
place the grouped form is traced, which transformers holds to the same values, in the dtype of the loop's linear layers:
autocast's where that is on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile.grouped_ops import ALIGNMENT_BYTES, autocast_grouped_mm, grouped_mm
from dcompile.passes import PassReport

FALLBACK = "transformers.grouped_mm_fallback"


def group_experts(gm: GraphModule, autocast: bool = False) -> PassReport:
    """Rewrite the calls in a Dynamo graph and in those inside it. With `autocast`, they obey autocast as linear does.

    The graph is changed in place.
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
    notes = (f"{count} grouped matmuls of experts were captured with their gradients",)
    return PassReport(count, notes if count else ())


def _is_fallback(node: Node) -> bool:
    return node.op == "call_function" and str(node.target).removesuffix(".default") == FALLBACK


def _arguments(node: Node) -> tuple[Any, Any, Any]:
    names = ("input", "weight", "offs")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return given["input"], given["weight"], given["offs"]


class ExpertsInDtype:
    """A module of experts whose matrices are seen in another dtype."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return value.to(self.dtype) if name in MATRICES else value


MATRICES = frozenset(("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"))
"""What a linear layer of autocast's casts."""


def group_loop(loop: Callable[..., Any], grouped: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module of experts for tracing: `grouped` where that takes its matrices, otherwise `loop`."""

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
