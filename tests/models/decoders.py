"""Decoders: causal language models."""

from __future__ import annotations

from typing import Any

from tests.models.architecture import (
    TRACES_LAYERDROP,
    VOCABULARY,
    Architecture,
    language,
    padded_language,
    pretrained,
)

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OLDER = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
OLDER |= {"initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 2}


def decoder(name: str, batch: Any = language, *, config: str = "", **more: Any) -> Architecture:
    """One with the usual names of settings."""
    return pretrained(f"{name}ForCausalLM", config or f"{name}Config", SMALL, batch, **more)


def older(name: str, model: str, **more: Any) -> Architecture:
    """One with GPT-2's names of settings."""
    return pretrained(name + model, f"{name}Config", OLDER, language, **more)


DECODERS = {
    "llama": decoder("Llama", batch=padded_language),
    "mistral": decoder("Mistral", sliding_window=4),
    "qwen2": decoder("Qwen2", batch=padded_language),
    "qwen3": decoder("Qwen3", head_dim=8),
    "gemma": decoder("Gemma", head_dim=8, hidden_act="gelu_pytorch_tanh"),
    "gemma2": decoder("Gemma2", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "gemma3": decoder(
        "Gemma3", head_dim=8, sliding_window=4, query_pre_attn_scalar=8,
        config="Gemma3TextConfig", layer_types=["sliding_attention", "full_attention"],
    ),
    "phi": decoder("Phi"),
    "phi3": decoder("Phi3"),
    "gpt2": older("GPT2", "LMHeadModel"),
    "gpt-bigcode": older("GPTBigCode", "ForCausalLM"),
    "gpt-neox": decoder("GPTNeoX"),
    "gpt-j": older("GPTJ", "ForCausalLM", rotary_dim=4),
    "opt": decoder("OPT", ffn_dim=48, word_embed_proj_dim=32, fullgraph=TRACES_LAYERDROP),
    "bloom": decoder("Bloom", n_layer=2, n_head=4),
    "falcon": decoder("Falcon"),
    "falcon-alibi": decoder("Falcon", alibi=True, multi_query=False, new_decoder_architecture=False, bias=True),
    "mpt": decoder("Mpt", d_model=32, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=64),
    "starcoder2": decoder("Starcoder2"),
    "olmo": decoder("Olmo", clip_qkv=8.0),
    "olmo2": decoder("Olmo2"),
    "cohere": decoder("Cohere", use_qk_norm=True),
    "cohere2": decoder("Cohere2", sliding_window=4),
    "stablelm": decoder("StableLm", use_qkv_bias=True, qk_layernorm=True, use_parallel_residual=True),
    "granite": decoder("Granite", attention_multiplier=0.3, residual_multiplier=0.5, logits_scaling=2.0),
    "nemotron": decoder("Nemotron"),
    "persimmon": decoder("Persimmon"),
    "glm4": decoder("Glm4", head_dim=8),
    "smollm3": decoder("SmolLM3"),
    "exaone4": decoder("Exaone4", sliding_window=4),
    "codegen": older("CodeGen", "ForCausalLM", rotary_dim=4),
    "gpt-neo": decoder(
        "GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4,
    ),
    "xglm": decoder(
        "XGLM", d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, fullgraph=TRACES_LAYERDROP
    ),
    "biogpt": decoder("BioGpt", fullgraph=TRACES_LAYERDROP),
    "minicpm3": decoder(
        "MiniCPM3", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=8,
    ),
}  # fmt: skip
"""Name -> architecture."""

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS = {
    "mixtral": decoder("Mixtral", num_local_experts=4, output_router_logits=True, fullgraph=False),
    "qwen2-moe": decoder("Qwen2Moe", **MOE, shared_expert_intermediate_size=32, decoder_sparse_step=1),
    "qwen3-moe": decoder(
        "Qwen3Moe", **MOE, head_dim=8, norm_topk_prob=True, decoder_sparse_step=1, num_hidden_layers=1,
    ),
    "olmoe": decoder("Olmoe", num_experts=4, num_experts_per_tok=2),
    "deepseek-v3": decoder(
        "DeepseekV3", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=16, first_k_dense_replace=1,
    ),
    "granite-moe": decoder("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    "phimoe": decoder("Phimoe", num_local_experts=4),
    "gpt-oss": decoder("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4),
    "glm4-moe": decoder(
        "Glm4Moe", n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, head_dim=8,
        moe_intermediate_size=16, first_k_dense_replace=1,
    ),
    "dots1": decoder(
        "Dots1", n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=16, first_k_dense_replace=1,
    ),
    "jetmoe": decoder("JetMoe", num_local_experts=4, num_experts_per_tok=2, kv_channels=8, num_key_value_heads=2),
}  # fmt: skip
"""Mixtures of experts."""

MAMBA = {"state_size": 4, "conv_kernel": 3, "expand": 2, "time_step_rank": 4}
RECURRENT = {
    "mamba": decoder("Mamba", **MAMBA, use_associative_scan=False, num_hidden_layers=1, lengths=(4, 6)),
    "falcon-mamba": decoder("FalconMamba", **MAMBA, use_associative_scan=False),
    "mamba2": decoder("Mamba2", state_size=8, conv_kernel=3, num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
    "jamba": decoder(
        "Jamba", num_experts=4, num_experts_per_tok=2, expert_layer_period=2, expert_layer_offset=1,
        attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, mamba_d_state=4, mamba_dt_rank=4,
        use_associative_scan=False,
    ),
    "bamba": decoder(
        "Bamba", mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=4,
        attn_layer_indices=[1],
    ),
    "zamba2": decoder(
        "Zamba2", mamba_d_state=8, mamba_ngroups=2, n_mamba_heads=8, chunk_size=4, num_key_value_heads=4,
        use_mamba_kernels=False, layers_block_type=["mamba", "hybrid"], num_mem_blocks=1,
    ),
    "rwkv": decoder("Rwkv", attention_hidden_size=32),
    "recurrent-gemma": decoder(
        "RecurrentGemma", lru_width=32, attention_window_size=16, block_types=["recurrent", "attention"],
        w_init_variance_scale=1.0,
    ),
    "falcon-h1": decoder(
        "FalconH1", mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=8,
        mamba_chunk_size=4, head_dim=8,
    ),
    "qwen3-next": decoder(
        "Qwen3Next", head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
    ),
    "lfm2": decoder("Lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8),
    "xlstm": decoder("xLSTM", num_heads=4, chunkwise_kernel="chunkwise--native_autograd", chunk_size=4),
}  # fmt: skip
"""State spaces, recurrences, short convolutions, and mixtures of them with attention."""
