"""Hugging Face folders of tiny random models, as transformers itself writes them, with a tokenizer of bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

from hf_folder import byte_tokenizer

SHAPE = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 256, "eos_token_id": 256,
    "pad_token_id": 257, "initializer_range": 0.12,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},  # one layer of each kind
    "qwen3": {"head_dim": 16},
}
"""What is particular of each family."""
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}say:{% endif %}"
)


def write(folder: Path, family: str = "llama", **more: Any) -> Path:
    """A checkpoint in several safetensors files; returns its folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **more})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too: whoever leaves one out is found out
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder, max_shard_size="40KB")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
