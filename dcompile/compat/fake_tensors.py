"""Graphs on a GPU that need not be there: their tensors have shapes and devices, and no data."""

from __future__ import annotations

from typing import Any


def move_graph_to_gpu(gm: Any) -> None:
    """Move a functional graph from the CPU to a GPU: devices among arguments, and the traced values of all nodes.

    Values keep the strides that they were traced with on the CPU. A library call that returns others on the GPU is
    copied at run time, as everywhere (`HostProgramServices.fit`).
    """
    import torch
    from torch.fx.node import map_aggregate
    from torch.utils import _pytree

    gpu = torch.device("cuda")

    def device(argument: Any) -> Any:
        return gpu if isinstance(argument, torch.device) and argument.type == "cpu" else argument

    def value(traced: Any) -> Any:
        with traced.fake_mode:
            return torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype, device=gpu)

    for node in gm.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, device), map_aggregate(node.kwargs, device)
        if "val" in node.meta:
            node.meta["val"] = _pytree.tree_map_only(torch.Tensor, value, node.meta["val"])
    gm.recompile()
