"""Build models for generation, split over ranks in one of three ways; each rank reads only its own slices."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attention import register
from common import World
from errors import UserError
from tensor_parallel import COLUMNS, ROWS, check_sizes, shard, split_dim
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from weights import CheckpointWeights, Part, RandomWeights, Weights


def build(
    config: Any, weights: Weights, route: str, rank: int, size: int, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Build this rank's part of the model, for inference, with parameters of `dtype` on `device`."""
    check_sizes(config, size)
    if route == "hf" and size > 1:
        return _build_by_transformers(config, weights, size, dtype, device)
    model = skeleton(config, dtype)
    if size > 1 and route == "manual":
        shard(model, rank, size)
    elif size > 1:
        parallelize_module(model, init_device_mesh(device.type, (size,)), dtensor_plan(config, size))
    fill(model, config, weights, rank, size, device)
    return model


def skeleton(config: Any, dtype: torch.dtype) -> Any:
    """Build the whole model on the meta device: shapes without memory."""
    from transformers import AutoModelForCausalLM

    own = copy.deepcopy(config)
    own.use_cache = True
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(own, dtype=dtype, attn_implementation=register())
    return model.eval().requires_grad_(False)


def dtensor_plan(config: Any, size: int) -> dict[str, Any]:
    """Return the styles of `parallelize_module` for a model of Llama's architecture.

    The output projection is split if its rows divide evenly among ranks and it does not share the embedding's table.
    """
    blocks = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
    styles = {**dict.fromkeys(ROWS, ColwiseParallel()), **dict.fromkeys(COLUMNS, RowwiseParallel())}
    plan: dict[str, Any] = {
        f"model.layers.*.{block}.{name}": styles[name] for block, names in blocks.items() for name in names
    }
    if config.vocab_size % size == 0 and not config.tie_word_embeddings:
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return plan


def fill(model: Any, config: Any, weights: Weights, rank: int, size: int, device: torch.device) -> None:
    """Load parameters, and the tables of rotary positions, into a model on the meta device."""
    for name, parameter in list(model.named_parameters()):
        module_name, _, leaf = name.rpartition(".")
        dim = _sharded_dim(parameter) if isinstance(parameter, DTensor) else split_dim(name) if size > 1 else None
        part = Part() if dim is None else Part(dim, rank, size)
        shape = list(parameter.shape)
        if dim is not None and not isinstance(parameter, DTensor):
            shape[dim] *= size
        tensor = weights.read(name, torch.Size(shape), part).to(device, parameter.dtype).contiguous()
        if isinstance(parameter, DTensor):
            tensor = DTensor.from_local(tensor, parameter.device_mesh, parameter.placements, run_check=False)
        setattr(model.get_submodule(module_name), leaf, nn.Parameter(tensor, requires_grad=False))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)


def _sharded_dim(parameter: DTensor) -> int | None:
    (placement,) = parameter.placements
    return placement.dim if isinstance(placement, Shard) else None


def _build_by_transformers(config: Any, weights: Weights, size: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Call `from_pretrained` with transformers' own plan; random weights are written to a folder on this host first."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError:
        raise UserError("--route hf: this transformers has no DistributedConfig; pip install -U transformers") from None
    how = {"distributed_config": DistributedConfig(tp_size=size), "dtype": dtype, "attn_implementation": register()}
    if isinstance(weights, CheckpointWeights):
        model = AutoModelForCausalLM.from_pretrained(weights.folder, **how)
        return model.to(device).eval().requires_grad_(False)
    with tempfile.TemporaryDirectory() as name:
        shared = [name]
        dist.broadcast_object_list(shared, 0)
        if dist.get_rank() == 0:
            write_random_folder(Path(name), config, weights)
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(shared[0], **how)
        dist.barrier()
    return model.to(device).eval().requires_grad_(False)


def write_random_folder(folder: Path, config: Any, weights: Weights) -> None:
    """Write a checkpoint with parameters of any source."""
    from hf_folder import write_tensors

    shapes = {name: parameter.shape for name, parameter in skeleton(config, torch.float32).named_parameters()}
    write_tensors(folder, {name: weights.read(name, shape, Part()).cpu() for name, shape in shapes.items()}, config)


def open_weights(folder: str | None, seed: int, world: World) -> Weights:
    """Return a source of a checkpoint's parameters, or of random ones."""
    return CheckpointWeights(Path(folder)) if folder else RandomWeights(seed, world.device)
