"""Models to simulate: Llama shapes by name, or any Hugging Face configuration of a causal language model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcompile.errors import OptionError
from dcompile.settings import suggestion

SHAPES: Mapping[str, dict[str, Any]] = {
    "llama-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    # those of benchmarks/gpu_train.py
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "160M": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
}


def configuration(name: str, length: int) -> Any:
    """Configuration of a named model, or from a JSON file. Raises OptionError."""
    from transformers import AutoConfig, LlamaConfig

    if name in SHAPES:
        return LlamaConfig(**SHAPES[name], max_position_embeddings=length, tie_word_embeddings=False, use_cache=False)
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        near = suggestion(name, SHAPES, "give a file, or one of these")
        raise OptionError(f"dcompile: no configuration {name!r}{near}")
    try:
        content = json.loads(path.read_text())
        kind = content.pop("model_type")
    except (ValueError, KeyError, AttributeError) as error:
        raise OptionError(f"dcompile: {path} is no configuration of a Hugging Face model: {error!r}") from error
    config = AutoConfig.for_model(kind, **content)
    config.use_cache = False
    return config


def with_layers(config: Any, layers: int) -> Any:
    """Copy of a configuration with another number of layers."""
    shallow = type(config).from_dict(config.to_dict())
    shallow.num_hidden_layers = layers
    if getattr(shallow, "layer_types", None):
        shallow.layer_types = shallow.layer_types[:layers]
    return shallow
