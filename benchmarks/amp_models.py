"""The models of gpu_models.py: known architectures at the sizes people train, and small sizes to test a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = Mapping[str, torch.Tensor]
CLASSES = 1000


@dataclass(frozen=True, slots=True)
class Model:
    """A model: `make(small)` returns a module, which returns the loss of `batch(small)`; both use torch's generator."""

    make: Callable[[bool], nn.Module]
    batch: Callable[[bool], Batch]
    autocast: bool = True
    """Whether it runs under bfloat16 autocast, as its users do; otherwise parameters have the dtype of computation."""
    training: bool = True
    """Whether it is trained; otherwise it is called without gradients, and returns a result in place of a loss."""


class WithLoss(nn.Module):
    """Wrapper of a model whose result contains its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss


class Classifier(nn.Module):
    """A model of images with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), labels)


# --- language ---------------------------------------------------------------------------------------------------------


def language(kind: str, config: str, head: str, small: Mapping[str, Any], **full: Any) -> Callable[[bool], nn.Module]:
    """Return a function that makes a transformers model. `small`: sizes to test a script."""

    def make(is_small: bool) -> nn.Module:
        import transformers

        sizes = {**full, **(small if is_small else {})}
        return WithLoss(getattr(transformers, kind + head)(getattr(transformers, kind + config)(**sizes)))

    return make


def in_bfloat16(make: Callable[[bool], nn.Module]) -> Callable[[bool], nn.Module]:
    """Return a function that makes the same model with bfloat16 parameters."""
    return lambda is_small: make(is_small).bfloat16()


def tokens(rows: int, length: int, vocabulary: int) -> Callable[[bool], Batch]:
    def make(is_small: bool) -> Batch:
        found = torch.randint(5, 500 if is_small else vocabulary, (2, 32) if is_small else (rows, length))
        return {"input_ids": found, "labels": found.clone()}

    return make


def _encoder(inner: str = "intermediate_size", width: str = "hidden_size", layers: str = "num_hidden_layers",
             heads: str = "num_attention_heads") -> dict[str, Any]:  # fmt: skip
    return {width: 64, layers: 2, heads: 2, inner: 128, "vocab_size": 512}


_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
_OPT = {**_encoder("ffn_dim"), "word_embed_proj_dim": 64}
_T5 = {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2, "vocab_size": 512}
DECODER = {**_encoder(), "num_key_value_heads": 1}
_EXPERTS = {**DECODER, "moe_intermediate_size": 64, "head_dim": 32, "num_experts": 4,
            "num_experts_per_tok": 2}  # fmt: skip
_DEEPSEEK = {**_EXPERTS, "num_hidden_layers": 1, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32,
             "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4, "n_group": 2,
             "topk_group": 1, "num_experts_per_tok": 2}  # fmt: skip
del _DEEPSEEK["head_dim"], _DEEPSEEK["num_experts"]
_OLMOE = language(
    "Olmoe", "Config", "ForCausalLM", {**DECODER, "num_experts": 4, "num_experts_per_tok": 2}, hidden_size=1024,
    intermediate_size=1024, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=16, num_experts=16,
    num_experts_per_tok=4, use_cache=False,
)  # fmt: skip


# --- images -----------------------------------------------------------------------------------------------------------


def _torchvision(name: str) -> Callable[[bool], nn.Module]:
    def make(is_small: bool) -> nn.Module:
        from torchvision import models  # type: ignore[import-not-found, unused-ignore]

        return Classifier(models.get_model(name, num_classes=10 if is_small else CLASSES))

    return make


def _vit(is_small: bool) -> nn.Module:
    import transformers

    small = {**_encoder(), "image_size": 64, "patch_size": 16}
    del small["vocab_size"]
    config = transformers.ViTConfig(num_labels=10 if is_small else CLASSES, **(small if is_small else {}))
    return WithLoss(transformers.ViTForImageClassification(config))


def _images(rows: int, name: str = "x") -> Callable[[bool], Batch]:
    def make(is_small: bool) -> Batch:
        count, side = (2, 64) if is_small else (rows, 224)
        labels = torch.randint(0, 10 if is_small else CLASSES, (count,))
        return {name: torch.randn(count, 3, side, side), "labels": labels}

    return make


MODELS: Mapping[str, Model] = {
    "bert": Model(language("Bert", "Config", "ForMaskedLM", _encoder()), tokens(32, 512, 30522)),
    "distilbert": Model(
        language("DistilBert", "Config", "ForMaskedLM", _encoder("hidden_dim", "dim", "n_layers", "n_heads")),
        tokens(32, 512, 30522),
    ),
    "roberta": Model(
        language("Roberta", "Config", "ForMaskedLM", _encoder(), vocab_size=50265, max_position_embeddings=514),
        tokens(32, 512, 50265),
    ),
    "gpt2": Model(language("GPT2", "Config", "LMHeadModel", _GPT2, use_cache=False), tokens(8, 1024, 50257)),
    "opt": Model(language("OPT", "Config", "ForCausalLM", _OPT, use_cache=False), tokens(8, 1024, 50272)),
    "t5": Model(
        language("T5", "Config", "ForConditionalGeneration", _T5, use_cache=False, decoder_start_token_id=0),
        tokens(32, 512, 32128),
    ),
    "llama": Model(
        language("Llama", "Config", "ForCausalLM", DECODER, hidden_size=1024, intermediate_size=2816,
                  num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16, use_cache=False),
        tokens(8, 1024, 32000),
    ),
    "qwen2": Model(
        language("Qwen2", "Config", "ForCausalLM", DECODER, hidden_size=896, intermediate_size=4864,
                  num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, vocab_size=151936,
                  use_cache=False),
        tokens(4, 1024, 151936),
    ),
    "olmoe": Model(_OLMOE, tokens(4, 1024, 50304)),
    "olmoe_bfloat16": Model(in_bfloat16(_OLMOE), tokens(4, 1024, 50304)),
    "mixtral": Model(
        language("Mixtral", "Config", "ForCausalLM", {**DECODER, "num_local_experts": 4}, hidden_size=1024,
                  intermediate_size=3584, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
                  num_local_experts=8, use_cache=False),
        tokens(4, 1024, 32000),
    ),
    "qwen3_moe": Model(
        language("Qwen3Moe", "Config", "ForCausalLM", _EXPERTS, hidden_size=1024, moe_intermediate_size=384,
                  num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, head_dim=128, num_experts=64,
                  num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936, use_cache=False),
        tokens(4, 1024, 151936),
    ),
    "deepseek_v3": Model(  # one layer, with fewer experts and a smaller vocabulary, so that all peers fit in memory
        language("DeepseekV3", "Config", "ForCausalLM", _DEEPSEEK, num_hidden_layers=1, first_k_dense_replace=0,
                  n_routed_experts=16, vocab_size=32000, use_cache=False),
        tokens(2, 1024, 32000),
    ),
    "vit": Model(_vit, _images(64, "pixel_values")),
    "resnet50": Model(_torchvision("resnet50"), _images(128)),
    "convnext_tiny": Model(_torchvision("convnext_tiny"), _images(64)),
    "mobilenet_v3_large": Model(_torchvision("mobilenet_v3_large"), _images(128)),
    "efficientnet_b0": Model(_torchvision("efficientnet_b0"), _images(128)),
    "swin_t": Model(_torchvision("swin_t"), _images(64)),
}  # fmt: skip


def without_dropout(module: nn.Module) -> nn.Module:
    """Disable all random layers of a module, so that gradients can be compared; return it."""
    for part in module.modules():
        for name in (
            "p",
            "drop_prob",
            "dropout",
            "dropout_prob",
            "attention_dropout",
            "activation_dropout",
            "layerdrop",
        ):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return module
