"""Decoding on a GPU, a token at a time, through one CUDA graph: logits and cache against eager's. `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

import dcompile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
LENGTH, START, TOKENS = 96, 5, 12


def decoder(model, compile_step, batch):
    """A step (token, position) -> logits, and the cache that it fills."""
    from transformers import StaticCache

    config = model.config
    cache = StaticCache(config=config, max_cache_len=LENGTH)
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, model.dtype, torch.device("cuda"))

    def step(token, position):
        return model(token, position_ids=position, past_key_values=cache, logits_to_keep=1).logits[:, -1]

    prompt = torch.arange(START, device="cuda").repeat(batch, 1)
    step(prompt, prompt)
    return compile_step(step), cache


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["plain", "cuda graph"])
def test_tokens_and_cache_are_eagers(options, batch):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=1000, max_position_embeddings=LENGTH, tie_word_embeddings=False, use_cache=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to("cuda", torch.bfloat16)
    settings = {"receipt": False, **options}
    ours, cache = decoder(
        model, lambda step: torch.compile(step, backend="dcompile", fullgraph=True, options=settings), batch
    )
    theirs, expected = decoder(model, lambda step: step, batch)
    tokens = torch.randint(0, 1000, (TOKENS, batch, 1), device="cuda")
    for n, token in enumerate(tokens):
        position = torch.full((batch, 1), START + n, device="cuda")
        want, got = theirs(token, position).float(), ours(token, position).float()
        assert (got - want).norm() < 2e-2 * want.norm()
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        for got, want in ((layer.keys, other.keys), (layer.values, other.values)):
            assert (got.float() - want.float()).norm() < 2e-2 * want.float().norm()
            assert not got[:, :, START + TOKENS :].any(), "written beyond its place"
    receipt = dcompile.receipt(ours)
    assert not any("without a CUDA graph" in note for note in receipt.notes) or not options
    assert any("written out" in note for note in receipt.notes)
    assert "aten.mm.default" not in receipt.fallbacks
