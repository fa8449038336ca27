"""Tensor parallelism of a Hugging Face Llama: by hand, as gpt-fast does it, and by torch's DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

INTO = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
"""Layers whose output rows are split."""
OUT_OF = ("self_attn.o_proj", "mlp.down_proj")
"""Layers whose input columns are split: each rank computes a partial sum."""


def by_hand(model: Any) -> Any:
    """Slice weights, and add hooks that all-reduce a block's output. Embedding and head stay whole on each rank."""
    from torch.distributed import _functional_collectives as collectives

    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD

    def summed(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(output, "sum", group)

    for layer in model.model.layers:
        for name, dim in (*((name, 0) for name in INTO), *((name, 1) for name in OUT_OF)):
            linear = layer.get_submodule(name)
            part = linear.weight.detach().chunk(world, dim)[rank]
            linear.weight = torch.nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
        layer.self_attn.o_proj.register_forward_hook(summed)
        layer.mlp.register_forward_hook(summed)
    return model


def by_torch(model: Any) -> Any:
    """Apply `parallelize_module`: parameters become DTensors, and the head is split, too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    for number in range(model.config.num_hidden_layers):
        plan |= {f"model.layers.{number}.{name}": ColwiseParallel() for name in INTO}
        plan |= {f"model.layers.{number}.{name}": RowwiseParallel() for name in OUT_OF}
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, plan)


ROUTES: dict[str, Callable[[Any], Any]] = {"manual": by_hand, "dtensor": by_torch}


def local_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes of a parameter on this rank."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(local.nbytes)
