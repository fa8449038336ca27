"""transformers' own `generate` with a static cache and dcompile as the backend: eager's tokens."""

from __future__ import annotations

import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import dcompile
from tests.subject import BACKEND, IS_DCOMPILE, anew

SHAPE = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.12,
}  # fmt: skip


def compile_config() -> CompileConfig:
    """What a user passes on a CPU, where `generate` compiles only when it is told to."""
    config = CompileConfig(backend=BACKEND, mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    return config


def test_a_padded_batch_with_a_static_cache_gives_eagers_tokens() -> None:
    """One sequence without padding is in docs/guide/launch.md."""
    with anew():
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
        ids = torch.randint(1, 128, (2, 7))
        mask = torch.ones_like(ids)
        mask[-1, :3] = 0
        how = {
            "attention_mask": mask,
            "max_new_tokens": 12,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        expected = model.generate(ids, **how)
        got = model.generate(ids, **how, cache_implementation="static", compile_config=compile_config())
        assert torch.equal(got, expected) and len(set(got[0, 7:].tolist())) > 3
        if IS_DCOMPILE:
            receipt = dcompile.receipt(model)
            assert (receipt.graphs, receipt.graph_breaks, receipt.fallbacks) == (1, 0, {})
            assert receipt.kernels > 0
