"""Grouped matmuls of Hugging Face's experts: their operator for "no grouped GEMM here" becomes one that traces.

While a model is traced, transformers does not call `torch.nn.functional.grouped_mm` unless its weights are bfloat16,
since Inductor takes no other, but an operator of its own that loops over the experts. Up to transformers 5.18 its
backward reads the offsets on the host while AOTAutograd traces, which fails, and Dynamo breaks the graph at each call.
Ours has a backward that traces, takes PyTorch's grouped GEMM where that takes the operands, and reads the offsets once
for all calls that share them where it does not.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from dcompile.grouped_ops import autocast_grouped_mm, grouped_mm

FALLBACK = "transformers.grouped_mm_fallback"


def group_experts(gm: GraphModule, autocast: bool = False) -> list[str]:
    """Rewrite the calls in a Dynamo graph and in those inside it. With `autocast`, they obey autocast as linear does.

    Returns a line for people if anything changed; the graph is changed in place.
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
    return [f"{count} grouped matmuls of experts were captured with their gradients"] if count else []


def _is_fallback(node: Node) -> bool:
    return node.op == "call_function" and str(node.target).removesuffix(".default") == FALLBACK


def _arguments(node: Node) -> tuple[Any, Any, Any]:
    names = ("input", "weight", "offs")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return given["input"], given["weight"], given["offs"]
