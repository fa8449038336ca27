"""The models of cpu_models.py: sized so that a training step on two cores takes 20 to 300 ms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from torch.nn import functional as F

Batch = Mapping[str, torch.Tensor]
VOCABULARY = 2048


@dataclass(frozen=True, slots=True)
class Model:
    """A model: `make` returns it, `batch` its arguments, both from torch's generator. Its first result is the loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    dtype: torch.dtype = torch.float32
    random: bool = False
    """Whether a step draws random numbers; losses are then compared only roughly."""


# --- language ---------------------------------------------------------------------------------------------------------


class LlamaBlock(nn.Module):
    """One decoder layer with its rotary embedding."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.llama import modeling_llama as llama

        config = transformers.LlamaConfig(hidden_size=512, num_attention_heads=8, intermediate_size=1376)
        config._attn_implementation = "sdpa"
        self.layer, self.rotary = llama.LlamaDecoderLayer(config, 0), llama.LlamaRotaryEmbedding(config)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        y = self.layer(x, position_embeddings=self.rotary(x, positions))
        return (y * y).mean()


class Language(nn.Module):
    """A transformers model with a loss outside of it: transformers' own loss logs, which would break the graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=input_ids, **more).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=6, use_cache=False,
    )  # fmt: skip
    return Language(transformers.LlamaForCausalLM(config))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=256, n_embd=384, n_layer=2, n_head=6, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return Language(transformers.GPT2LMHeadModel(config))


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=6,
        max_position_embeddings=256, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Language(transformers.BertForMaskedLM(config))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=256, d_kv=64, d_ff=1024, num_layers=2, num_heads=4, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return Language(transformers.T5ForConditionalGeneration(config))


class Experts(nn.Module):
    """Top-2 of eight experts with a fixed capacity, so that all sizes are static: dispatch and combine by position."""

    def __init__(self, width: int, inner: int, experts: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, experts = x.shape[0], self.up.shape[0]
        capacity = 2 * tokens // experts * 5 // 4
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        chosen = chosen.flatten()
        rank = (F.one_hot(chosen, experts).cumsum(0) - 1).gather(1, chosen[:, None]).squeeze(1)
        kept = rank < capacity
        slot = torch.where(kept, chosen * capacity + rank, experts * capacity)
        sent = x.new_zeros(experts * capacity + 1, x.shape[1]).index_put((slot,), x.repeat_interleave(2, 0))
        inside = F.silu(torch.bmm(sent[:-1].view(experts, capacity, -1), self.up))
        back = torch.bmm(inside, self.down).flatten(0, 1)
        taken = F.pad(back, (0, 0, 0, 1))[slot].view(tokens, 2, -1)
        return (taken * weights[..., None]).sum(1)


class MixtureOfExperts(nn.Module):
    """Embedding, two expert layers with residuals, output layer."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Experts(width, 2 * width) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids).flatten(0, 1)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x))
        return F.cross_entropy(self.head(self.norms[-1](x)), labels.flatten())


class LSTM(nn.Module):
    """An LSTM over 32 steps with an explicit cell, since Dynamo leaves nn.LSTM to eager."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.input, self.hidden = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.head = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        inputs = self.input(x)
        h = c = x.new_zeros(x.shape[0], x.shape[2])
        for step in range(x.shape[1]):
            i, f, g, o = (inputs[:, step] + self.hidden(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return F.cross_entropy(self.head(h), labels)


class MLP(nn.Module):
    """Linear layers, LayerNorm, GELU."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        layers = [m for _ in range(3) for m in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), labels)


# --- images -----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_two(self.two(torch.relu(self.norm_one(self.one(x)))))
        return torch.relu(y + self.short(x))


class ResNet(nn.Module):
    """Stem, four basic blocks, pooling, classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 64, 1), Residual(64, 128, 2))
        self.head = nn.Linear(128, 100)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(self.pool(self.stem(x))).mean((2, 3))), labels)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, LayerNorm over channels, two linear layers, scaled residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Patches, two blocks, half the resolution, two blocks, classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 48, 4, 4), ConvNeXtBlock(48), ConvNeXtBlock(48), nn.Conv2d(48, 96, 2, 2), ConvNeXtBlock(96),
            ConvNeXtBlock(96),
        )  # fmt: skip
        self.head = nn.Linear(96, 100)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(x).mean((2, 3))), labels)


def _double(inputs: int, outputs: int) -> nn.Module:
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Two levels down, two up, with skip connections; predicts noise."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.down = nn.ModuleList((_double(3, width), _double(width, 2 * width)))
        self.middle = _double(2 * width, 4 * width)
        self.up = nn.ModuleList((_double(6 * width, 2 * width), _double(3 * width, width)))
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = level(torch.cat((F.interpolate(x, scale_factor=2, mode="nearest"), skips.pop()), 1))
        return F.mse_loss(self.last(x), noise)


class ViT(nn.Module):
    """transformers' vision transformer with a loss outside of it."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.ViTConfig(
            hidden_size=384, num_hidden_layers=2, num_attention_heads=6, intermediate_size=1536, image_size=96,
            patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=100,
        )  # fmt: skip
        self.model = transformers.ViTForImageClassification(config)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(pixel_values=x).logits, labels)


# --- batches ----------------------------------------------------------------------------------------------------------


def tokens(rows: int, columns: int, decoder: bool = False) -> Callable[[], Batch]:
    def make() -> Batch:
        found = torch.randint(0, VOCABULARY, (rows, columns))
        labels = torch.randint(0, VOCABULARY, (rows, columns))
        more = {"decoder_input_ids": torch.randint(0, VOCABULARY, (rows, columns))} if decoder else {}
        return {"input_ids": found, "labels": labels, **more}

    return make


def samples(*shape: int, classes: int) -> Callable[[], Batch]:
    return lambda: {"x": torch.randn(shape), "labels": torch.randint(0, classes, shape[:1])}


def noisy(*shape: int) -> Callable[[], Batch]:
    return lambda: {"x": torch.randn(shape), "noise": torch.randn(shape)}


def sequence(rows: int, columns: int, width: int) -> Callable[[], Batch]:
    return lambda: {"x": torch.randn(rows, columns, width), "positions": torch.arange(columns)[None]}


MODELS: Mapping[str, Model] = {
    "llama_block": Model(LlamaBlock, sequence(2, 256, 512)),
    "llama_block_bf16": Model(LlamaBlock, sequence(2, 256, 512), torch.bfloat16),
    "llama": Model(llama, tokens(1, 256)),
    "llama_bf16": Model(llama, tokens(2, 256), torch.bfloat16),
    "gpt2": Model(gpt2, tokens(1, 256), random=True),
    "bert": Model(bert, tokens(1, 256)),
    "vit": Model(ViT, samples(2, 3, 96, 96, classes=100)),
    "resnet": Model(ResNet, samples(4, 3, 128, 128, classes=100)),
    "convnext": Model(ConvNeXt, samples(4, 3, 128, 128, classes=100)),
    "mlp": Model(MLP, samples(256, 1024, classes=64)),
    "lstm": Model(LSTM, samples(32, 32, 256, classes=64)),
    "unet": Model(UNet, noisy(4, 3, 64, 64)),
    "t5": Model(t5, tokens(2, 128, decoder=True)),
    "moe": Model(MixtureOfExperts, tokens(2, 256)),
}
