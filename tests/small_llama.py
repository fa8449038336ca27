"""What stands for Hugging Face's Llama where a test is about the script around it: it is traced in a tenth of the time.

`python -m tests.small_llama MODULE ARGUMENTS...` runs a module that then finds it in transformers.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from dataclasses import dataclass
from typing import Any

import torch
import transformers  # noqa: F401  it replaces itself in sys.modules
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass
class Answer:
    """The result, of which callers take the loss."""

    loss: torch.Tensor


torch.utils._pytree.register_dataclass(Answer)  # FSDP2 of torch 2.11 finds no tensors in others


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


class Inner(nn.Module):
    """What `model.model` is: the table and the blocks."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        blocks = (Block(config.hidden_size, config.intermediate_size) for _ in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(blocks)
        self.checkpointed = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed and self.training else layer(x)
        return x


class SmallLlama(nn.Module):
    """Made of a LlamaConfig, and called as LlamaForCausalLM is; there is no attention in it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = Inner(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Answer:
        logits = self.head(self.model(input_ids))[:, :-1].float()
        return Answer(F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, bool]) -> None:
        assert gradient_checkpointing_kwargs == {"use_reentrant": False}
        self.model.checkpointed = True


def take_its_place() -> None:
    """Whoever imports LlamaForCausalLM from transformers gets the small one."""
    sys.modules["transformers"].LlamaForCausalLM = SmallLlama  # type: ignore[attr-defined]  a module that was replaced


def main() -> None:
    importlib.import_module("tests.small_llama").take_its_place()  # this module goes, and Dynamo looks classes up there
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
