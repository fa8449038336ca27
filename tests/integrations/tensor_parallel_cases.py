"""Decoding with a tensor-parallel Hugging Face Llama, on each rank: by hand, by torch, by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.distributed.configuration_utils import DistributedConfig

import dcompile
from dcompile.capture.entry import find_model

LAYERS = 1
TOKENS = 6
PROMPT = (1, 5, 9)
INTO = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
"""Layers whose output rows are split."""
OUT_OF = ("self_attn.o_proj", "mlp.down_proj")
"""Layers whose input columns are split: each rank has a part of their sums."""


def whole() -> LlamaForCausalLM:
    """The same on every rank, with weights so large that tokens differ."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model.eval()


def by_hand(folder: str) -> LlamaForCausalLM:
    """As gpt-fast does it: slices of weights, and a hook that sums up what leaves a block."""
    del folder
    model, rank, world = whole(), dist.get_rank(), dist.get_world_size()
    for layer in model.model.layers:
        for name, dim in (*((name, 0) for name in INTO), *((name, 1) for name in OUT_OF)):
            linear = layer.get_submodule(name)
            linear.weight = torch.nn.Parameter(linear.weight.detach().chunk(world, dim)[rank].clone())
        layer.self_attn.o_proj.register_forward_hook(_summed)
        layer.mlp.register_forward_hook(_summed)
    return model


def _summed(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return collectives.all_reduce(output, "sum", dist.group.WORLD)


def by_torch(folder: str) -> LlamaForCausalLM:
    """By `parallelize_module`: parameters are DTensors."""
    del folder
    plan: dict[str, Any] = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    for number in range(LAYERS):
        plan |= {f"model.layers.{number}.{name}": ColwiseParallel() for name in INTO}
        plan |= {f"model.layers.{number}.{name}": RowwiseParallel() for name in OUT_OF}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(whole(), mesh, plan)


def by_transformers(folder: str) -> LlamaForCausalLM:
    """From a checkpoint, of which each rank loads its parts."""
    if dist.get_rank() == 0:
        whole().save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(tp_size=dist.get_world_size())
    return LlamaForCausalLM.from_pretrained(Path(folder), distributed_config=config).eval()


ROUTES: dict[str, Callable[[str], LlamaForCausalLM]] = {
    "manual": by_hand, "dtensor": by_torch, "hf": by_transformers,
}  # fmt: skip


def decode(step: Callable[..., Any], model: LlamaForCausalLM) -> list[int]:
    """Greedy tokens: the prompt eagerly, then one at a time by `step`, into a static cache that changes in place."""
    cache = StaticCache(config=model.config, max_cache_len=16)
    token, tokens, place = torch.tensor([PROMPT]), list[int](), torch.arange(len(PROMPT))[None]
    with torch.no_grad():
        for number in range(TOKENS):
            run = model if number == 0 else step
            logits = run(token, past_key_values=cache, use_cache=True, position_ids=place).logits
            token, place = logits[:, -1:].argmax(-1), torch.tensor([[len(PROMPT) + number]])
            tokens.append(int(token))
    return tokens


def decoded(route: str, folder: str) -> dict[str, Any]:
    """Tokens of one process, of this route, and of this route compiled in two starts; receipts of both."""
    single, model = whole(), ROUTES[route](f"{folder}/checkpoint")
    options = {"verify": False, "cache_dir": f"{folder}/rank{dist.get_rank()}"}
    found: dict[str, Any] = {"single": decode(single, single), "eager": decode(model, model)}
    for start in ("first", "second"):
        torch._dynamo.reset()
        step = dcompile.compile(lambda *args, **kwargs: model(*args, **kwargs), options=options, fullgraph=True)
        found[start] = decode(step, model)
        compiled = find_model(step)
        assert compiled is not None
        found[f"{start} receipt"], found[f"{start} graphs"] = dcompile.receipt(step), len(compiled.graphs)
    return found
