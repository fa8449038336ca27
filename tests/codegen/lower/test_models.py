"""Whole models against eager: losses, gradients, and which ops were left to the library."""

from __future__ import annotations

import copy
import sys
import warnings

import pytest
import torch
import transformers
from torch import nn

from dcompile.compat.dynamo import tracing_settings
from tests.codegen.lower.lowered import Seen, compile_with

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


class ConvNet(nn.Module):
    """Convolution, batch norm in training, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.features(x)), y, label_smoothing=0.1)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4), nn.Softmax(-1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def language_model(kind: str) -> nn.Module:
    if kind == "llama":
        config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=64)
        return transformers.LlamaForCausalLM(config)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64)
        return transformers.GPT2LMHeadModel(config)
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, max_position_embeddings=64))


def case(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    if kind == "mlp":
        return Mlp(), {"x": torch.randn(6, 12), "y": torch.randn(6, 4)}
    if kind == "conv":
        return ConvNet(), {"x": torch.randn(2, 3, 8, 8), "y": torch.tensor([1, 4])}
    ids = torch.randint(0, 64, (2, 9))
    return language_model(kind), {"input_ids": ids, "labels": ids}


def loss_of(result: object) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.loss


RANDOM = {"aten.bernoulli.p"}
EMBEDDING = {"aten.embedding_dense_backward.default"}
ALLOWED = {
    "mlp": set(),
    "conv": set(),
    "bert": RANDOM | EMBEDDING,
    "gpt2": RANDOM | EMBEDDING,
    "llama": EMBEDDING,
}
WHOLE_IN_TESTS_MODELS = ("bert", "gpt2", "llama")
"""A usual run trains these through the whole compiler in tests/models, which lowers the same operators."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.full if kind in WHOLE_IN_TESTS_MODELS else ()) for kind in ALLOWED]
)
def test_model_trains_as_in_eager(kind: str) -> None:
    model, batch = case(kind)
    other = copy.deepcopy(model)
    seen = Seen()
    compiled = compile_with(seen, lambda **kwargs: loss_of(other(**kwargs)))
    for step in range(2):
        torch.manual_seed(step)
        expected = loss_of(model(**batch))
        expected.backward()
        torch.manual_seed(step)
        with tracing_settings():
            actual = compiled(**batch)
        actual.backward()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    for (name, b), c in zip(model.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(c, b, msg=lambda m, name=name: f"{name}: {m}")
    print(kind, seen.loops, dict(seen.fallbacks), dict(seen.library), f"{1000 * seen.seconds / seen.nodes:.3f} ms/node")
    assert set(seen.fallbacks) <= ALLOWED[kind]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in sys.argv[1:] or ALLOWED:
        test_model_trains_as_in_eager(name)
