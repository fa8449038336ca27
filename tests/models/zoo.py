"""Small models of the kinds people train, with the arguments of one batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.device import there

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its batches. `make(dropout)` gives the same weights each time under the same seed."""

    make: Callable[[float], nn.Module]
    draw: Callable[[int, int], Batch]
    """draw(rows, columns), from torch's generator of the CPU."""
    fullgraph: bool = True

    def batch(self, rows: int, columns: int) -> Batch:
        """A batch where the model is."""
        return there(self.draw(rows, columns))


def llama(dropout: float = 0.0, **settings: Any) -> nn.Module:
    config = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_dropout": dropout,
        "use_cache": False,
        "initializer_range": 0.1,
    }
    return LlamaForCausalLM(LlamaConfig(**config | settings))


def gpt2(dropout: float = 0.0, layers: int = 2) -> nn.Module:
    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.1,
    )
    return GPT2LMHeadModel(config)


def bert(dropout: float = 0.0) -> nn.Module:
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
        initializer_range=0.1,
    )
    return BertForSequenceClassification(config)


class Residual(nn.Module):
    """ResNet's basic block. No bias before a normalisation: its true gradient is 0, so only noise would be compared."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_two(self.two(torch.relu(self.norm_one(self.one(x)))))
        return torch.relu(y + self.short(x))


class ResNet(nn.Module):
    """Stem, two residual blocks, pooling, classifier."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(16, 5)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.blocks(self.pool(self.stem(image))).mean((2, 3))
        logits = self.head(self.drop(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class MLP(nn.Module):
    """Linear layers, LayerNorm, GELU."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 48), nn.GELU(), nn.LayerNorm(48), nn.Dropout(dropout), nn.Linear(48, 48), nn.Tanh()
        )
        self.head = nn.Linear(48, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _language(rows: int, columns: int) -> Batch:
    tokens = torch.randint(0, 64, (rows, columns))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _padded(rows: int, columns: int) -> Batch:
    mask = torch.ones(rows, columns, dtype=torch.long)
    mask[0, columns // 2 :] = 0
    tokens = torch.randint(0, 64, (rows, columns))
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.randint(0, 3, (rows,))}


def _images(rows: int, columns: int) -> Batch:
    return {"image": torch.randn(rows, 3, columns, columns), "labels": torch.randint(0, 5, (rows,))}


def _rows(rows: int, columns: int) -> Batch:
    return {"x": torch.randn(rows, 16), "labels": torch.randint(0, 4, (rows,))}


CASES = {
    "mlp": Case(MLP, _rows),
    "resnet": Case(ResNet, _images),
    "llama": Case(llama, _language),
    "gpt2": Case(gpt2, _language, fullgraph=False),  # HF's loss logs, which breaks the graph
    "bert": Case(bert, _padded),
}
