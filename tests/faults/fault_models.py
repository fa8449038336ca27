"""Thirty small models for planted faults, with one input each: blocks of networks, losses, and single mechanisms.

The first three are what the test suite plants faults in; `python -m tests.faults.campaign` takes all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Perceptron(nn.Module):
    """Linear layers, GELU, a LayerNorm and a Softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 48), nn.LayerNorm(48), nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.gelu(self.up(x)))).softmax(-1)


class Attention(nn.Module):
    """One block of a transformer, whose attention is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(16), nn.Linear(16, 48, bias=False), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)) / 4.0
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return x + self.out(weights @ v) * torch.sigmoid(x)


class Gated(nn.Module):
    """A gated product, and statistics that change in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.norm = nn.Linear(8, 32), nn.Linear(8, 32), nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(F.silu(self.gate(x)) * self.up(x))
        return (hidden * hidden).mean(-1).exp().log1p()


class Around(nn.Module):
    """Layers, and a function of their result and the input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.function = nn.Sequential(*layers), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layers(x), x)


class Recurrent(nn.Module):
    """A cell over a few steps."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x[:, 0])
        for step in range(1, x.shape[1]):
            state = self.cell(x[:, step], state)
        return state[0] * state[1] if isinstance(state, tuple) else state


class Words(nn.Module):
    """A language model of one block, and its loss: it takes numbers of words, of which some are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(20, 12), nn.Linear(12, 24), nn.Linear(24, 20)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.down(F.relu(self.up(self.words(x)))[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), x[:, 1:].flatten(), ignore_index=0)


class Rotary(nn.Module):
    """Attention of torch's, with rotated queries and keys of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        angle = torch.arange(x.shape[1])[:, None] / 10.0 ** (torch.arange(4) / 2.0)
        cos, sin = angle.cos().repeat(1, 2).to(x.dtype), angle.sin().repeat(1, 2).to(x.dtype)
        q, k = (part * cos + torch.cat((-part[..., 4:], part[..., :4]), -1) * sin for part in (q, k))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Three experts and a gate; each row is the weighted sum of all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weight = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 10) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("be,bi,eio->bo", self.gate(x).softmax(-1), x, self.weight).tanh()


class Bottleneck(nn.Module):
    """A variational autoencoder: random numbers, an exponential, and a divergence in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.inward(x).chunk(2, -1)
        found = self.outward(mean + torch.randn_like(mean) * (log / 2).exp())
        return F.mse_loss(found, x) - 0.5 * (1 + log - mean.square() - log.exp()).mean()


class Ladder(nn.Module):
    """Downwards by a stride, upwards by interpolation, and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv1d(3, 6, 3, stride=2, padding=1), nn.Conv1d(9, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.cat((F.interpolate(F.leaky_relu(self.down(x)), scale_factor=2), x), 1))


class Residual(nn.Module):
    """Normalized blocks behind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.mish(layer(norm(x)))
        return x


class Graph(nn.Module):
    """Messages along the edges of a ring, added where they end."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.out = nn.Linear(12, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        start = torch.arange(x.shape[0])
        end = (start + 1) % x.shape[0]
        sent = F.elu(self.message(torch.cat((x[start], x[end]), -1)))
        return self.out(torch.zeros(x.shape[0], 10, dtype=sent.dtype).index_add(0, end, sent))


def _contrast(y: Tensor, _: Tensor) -> Tensor:
    unit = F.normalize(y, dim=-1)
    return torch.logsumexp(unit @ unit.T / 0.3, -1) - unit.square().sum(-1) / 0.3


def _waves(y: Tensor, x: Tensor) -> Tensor:
    return y.sin() * x.cos() + (2 * y).cos().square()


def _powers(y: Tensor, x: Tensor) -> Tensor:
    size = y.abs() + 0.5
    return size.sqrt() + size.rsqrt() * x + size.pow(1.7) - size.reciprocal()


def _statistics(y: Tensor, _: Tensor) -> Tensor:
    return torch.cat((y.mean(-1), y.var(-1), y.amax(-1), y.std(-1).log()), -1)


def _margin(y: Tensor, x: Tensor) -> Tensor:
    return F.smooth_l1_loss(y, x) + torch.where(y > x, (y - x).clamp(max=1.5), 0.1 * y).mean()


def _sums(y: Tensor, x: Tensor) -> Tensor:
    return y.cumsum(-1) * x + y.flip(-1).cumsum(0)


def _chosen(y: Tensor, x: Tensor) -> Tensor:
    best = y.topk(3, dim=-1)
    return best.values * x.gather(-1, best.indices)


def _divergence(y: Tensor, x: Tensor) -> Tensor:
    return F.kl_div(y.log_softmax(-1), x.softmax(-1), reduction="batchmean") + F.softplus(y).mean()


def _shuffled(y: Tensor, _: Tensor) -> Tensor:
    return F.pixel_shuffle(y, 2).tanh()


def _joined(y: Tensor, x: Tensor) -> Tensor:
    return F.cosine_similarity(y, x, dim=-1) * torch.hypot(y, x).mean(-1) + torch.atan2(y, x).mean(-1)


def _pooled(y: Tensor, _: Tensor) -> Tensor:
    return F.avg_pool2d(y, 2).flatten(1).log_softmax(-1)


def _same(y: Tensor, _: Tensor) -> Tensor:
    return y


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)


@dataclass(frozen=True)
class FaultModel:
    """How to make a model, and its input."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: int = 0
    """Number of words that the input consists of; 0 for an input of real numbers, whose gradient is wanted."""
    draws: bool = False
    """Whether it draws random numbers."""


MODELS: dict[str, FaultModel] = {
    "perceptron": FaultModel(Perceptron, (12, 8)),
    "attention": FaultModel(Attention, (2, 10, 16)),
    "gated": FaultModel(Gated, (12, 8)),
    "pictures": FaultModel(
        lambda: Around(_pooled, nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)), (3, 3, 10, 10)
    ),
    "depthwise": FaultModel(
        lambda: Around(torch.add, nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.GroupNorm(2, 4), nn.SiLU()),
        (2, 4, 6, 6),
    ),
    "instances": FaultModel(
        lambda: Around(_same, nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4, affine=True), nn.Hardswish()), (2, 3, 6, 6)
    ),
    "encoder": FaultModel(_encoder, (2, 7, 16)),
    "dropout": FaultModel(
        lambda: Around(torch.mul, nn.Linear(10, 10), nn.Dropout(0.3), nn.GELU()), (16, 10), draws=True
    ),
    "lstm": FaultModel(lambda: Recurrent(nn.LSTMCell(6, 8)), (4, 3, 6)),
    "gru": FaultModel(lambda: Recurrent(nn.GRUCell(6, 8)), (4, 3, 6)),
    "words": FaultModel(Words, (3, 9), words=20),
    "rotary": FaultModel(Rotary, (2, 6, 16)),
    "swiglu": FaultModel(
        lambda: Around(torch.add, nn.Linear(12, 32), nn.GLU(), nn.RMSNorm(16), nn.Linear(16, 12)), (9, 12)
    ),
    "experts": FaultModel(Experts, (10, 8)),
    "bottleneck": FaultModel(Bottleneck, (12, 8), draws=True),
    "ladder": FaultModel(Ladder, (2, 3, 12)),
    "residual": FaultModel(Residual, (7, 12)),
    "graph": FaultModel(Graph, (9, 6)),
    "contrast": FaultModel(lambda: Around(_contrast, nn.Linear(8, 12), nn.Tanh()), (10, 8)),
    "waves": FaultModel(lambda: Around(_waves, nn.Linear(12, 12)), (8, 12)),
    "powers": FaultModel(lambda: Around(_powers, nn.Linear(12, 12)), (8, 12)),
    "statistics": FaultModel(lambda: Around(_statistics, nn.Linear(6, 20), nn.ELU()), (4, 5, 6)),
    "margin": FaultModel(lambda: Around(_margin, nn.Linear(12, 12)), (10, 12)),
    "sums": FaultModel(lambda: Around(_sums, nn.Linear(12, 12), nn.Sigmoid()), (8, 12)),
    "chosen": FaultModel(lambda: Around(_chosen, nn.Linear(12, 12), nn.Softsign()), (8, 12)),
    "divergence": FaultModel(lambda: Around(_divergence, nn.Linear(12, 12), nn.LogSigmoid()), (8, 12)),
    "shuffled": FaultModel(lambda: Around(_shuffled, nn.Conv2d(2, 8, 3, padding=1), nn.PReLU()), (2, 2, 6, 6)),
    "joined": FaultModel(lambda: Around(_joined, nn.Linear(12, 12)), (8, 12)),
    "normalized": FaultModel(
        lambda: Around(torch.sub, nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Hardtanh(), nn.LayerNorm(12)), (16, 12)
    ),
    "mixer": FaultModel(
        lambda: Around(torch.add, nn.Conv1d(8, 8, 1), nn.GELU("tanh"), nn.Linear(12, 12), nn.Softmin(1)), (2, 8, 12)
    ),
}
"""Name -> model. Sizes are such that a step takes a millisecond."""
FEW = ("perceptron", "attention", "gated")
"""Those in which the test suite plants faults."""


def make(name: str) -> tuple[nn.Module, Tensor]:
    """A model, and an input, whose gradient is wanted if it has one."""
    model = MODELS[name]
    torch.manual_seed(0)
    module = model.build()
    return module, make_input(name)


def make_input(name: str) -> Tensor:
    """Another input of a model, by torch's generator."""
    model = MODELS[name]
    if model.words:
        return torch.randint(model.words, model.shape)
    return torch.randn(model.shape, requires_grad=True)
