"""Models of gpu_sweep.py in plain torch: small networks of many fields, written as their users write them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.amp_models import Batch, Model, tokens

# --- sequences and sound ----------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A language model of LSTM layers."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, words)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.embedding(input_ids[:, :-1]))[0])
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates, whose skips are summed."""

    def __init__(self, width: int, dilations: list[int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.dilations = dilations
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=size) for size in dilations)
        self.mixes = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in dilations)
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 256, 1))

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        x = self.embedding(waves[:, :-1]).transpose(1, 2)
        skips = torch.zeros_like(x)
        for dilation, gate, mix in zip(self.dilations, self.gates, self.mixes, strict=True):
            first, second = gate(F.pad(x, (dilation, 0))).chunk(2, 1)
            residual, skip = mix(first.tanh() * second.sigmoid()).chunk(2, 1)
            x, skips = x + residual, skips + skip
        return F.cross_entropy(self.last(skips), waves[:, 1:])


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, a convolution with GLU and BatchNorm, and the other half."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.last: Callable[[torch.Tensor], torch.Tensor] = nn.LayerNorm(width)
        self.halves = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.convolution = nn.Sequential(
            nn.Conv1d(width, 2 * width, 1), nn.GLU(1), nn.Conv1d(width, width, 31, padding=15, groups=width),
            nn.BatchNorm1d(width), nn.SiLU(), nn.Conv1d(width, width, 1), nn.Dropout(0.1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.halves[0](self.norms[0](x))
        q, k, v = self.qkv(self.norms[1](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        x = x + self.out(found.transpose(1, 2).flatten(2))
        kept = self.norms[2](x).masked_fill(~mask[..., None], 0.0)
        x = x + self.convolution(kept.transpose(1, 2)).transpose(1, 2)
        x = x + 0.5 * self.halves[1](self.norms[3](x))
        return self.last(x)


class Conformer(nn.Module):
    """A speech encoder of Conformer blocks on subsampled spectra of various lengths."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU())
        self.project = nn.Linear(20 * width, width)
        self.blocks = nn.ModuleList(ConformerBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 128)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.project(self.first(x[:, None]).transpose(1, 2).flatten(2))
        mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(x).transpose(1, 2), labels.masked_fill(~mask, -100))


def _speech(is_small: bool) -> Batch:
    rows, frames = (2, 64) if is_small else (16, 1024)
    lengths = torch.linspace(frames // 4, frames // 8, rows).long()
    return {
        "x": torch.randn(rows, frames, 80),
        "lengths": lengths,
        "labels": torch.randint(0, 128, (rows, frames // 4)),
    }


class Hyena(nn.Module):
    """Gated long convolutions by FFT, whose filters are networks of the position."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.ins = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.shorts = nn.ModuleList(nn.Conv1d(3 * width, 3 * width, 3, groups=3 * width, padding=2) for _ in self.ins)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(9, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, width))
            for _ in self.ins
        )
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in self.ins)
        self.head = nn.Linear(width, words)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, length = self.embedding(input_ids), input_ids.shape[1]
        time = torch.linspace(0, 1, length, device=x.device)[:, None]
        angles = 2 * math.pi * time * torch.arange(1, 5, device=x.device)
        places = torch.cat([time, angles.sin(), angles.cos()], 1)
        for norm, before, short, network, out in zip(
            self.norms, self.ins, self.shorts, self.filters, self.outs, strict=True
        ):
            first, second, value = short(before(norm(x)).transpose(1, 2))[..., :length].chunk(3, 1)
            kernel = (network(places).float() * torch.exp(-4 * time)).T
            product = torch.fft.rfft((second * value).float(), n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
            x = x + out((torch.fft.irfft(product, n=2 * length)[..., :length] * first).transpose(1, 2))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


# --- graphs, molecules, scenes ----------------------------------------------------------------------------------------


class GraphAttention(nn.Module):
    """Graph attention: a softmax over the edges that end at a node, by scattering."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.values = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scores = nn.ModuleList(nn.Linear(width, 2 * heads) for _ in range(layers))
        self.last = nn.Linear(width, 40)

    def forward(self, x: torch.Tensor, ends: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for values, scores in zip(self.values, self.scores, strict=True):
            first, second = scores(x).float().chunk(2, 1)
            score = F.leaky_relu(first[ends[0]] + second[ends[1]], 0.2)
            index = ends[1][:, None].expand_as(score)
            highest = torch.full_like(first, -torch.inf).scatter_reduce(0, index, score.detach(), "amax")
            weight = (score - highest[ends[1]]).exp()
            weight = weight / torch.zeros_like(first).index_add(0, ends[1], weight)[ends[1]]
            message = values(x).unflatten(1, (self.heads, -1))[ends[0]].float() * weight[..., None]
            x = x + F.elu(torch.zeros_like(x).index_add(0, ends[1], message.flatten(1)))
        return F.cross_entropy(self.last(x), labels)


def _citations(is_small: bool) -> Batch:
    nodes, edges, width = (20, 60, 32) if is_small else (20_000, 200_000, 256)
    return {"x": torch.randn(nodes, width), "ends": torch.randint(0, nodes, (2, edges)),
            "labels": torch.randint(0, 40, (nodes,))}  # fmt: skip


class Radiance(nn.Module):
    """NeRF: a network of encoded positions, and the colors of rays through its volume."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [63, width, width, width, width + 63, width, width, width]
        self.layers = nn.ModuleList(nn.Linear(size, width) for size in sizes)
        self.density = nn.Linear(width, 1)
        self.color = nn.Sequential(nn.Linear(width + 27, width // 2), nn.ReLU(), nn.Linear(width // 2, 3), nn.Sigmoid())

    def forward(
        self, origins: torch.Tensor, directions: torch.Tensor, depths: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        points = _encoded(origins[:, None] + directions[:, None] * depths[..., None], 10)
        x = points
        for number, layer in enumerate(self.layers):
            x = layer(torch.cat([x, points], -1) if number == 4 else x).relu()
        views = _encoded(F.normalize(directions, dim=-1), 4)[:, None].expand(-1, depths.shape[1], -1)
        density = F.softplus(self.density(x).squeeze(-1).float())
        steps = torch.cat([depths.diff(dim=1), torch.full_like(depths[:, :1], 1e10)], 1)
        opaque = 1 - torch.exp(-density * steps)
        passing = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque[:, :-1] + 1e-10], 1), 1)
        found = ((opaque * passing)[..., None] * self.color(torch.cat([x, views], -1))).sum(1)
        return F.mse_loss(found, labels)


def _encoded(x: torch.Tensor, octaves: int) -> torch.Tensor:
    angles = (x[..., None] * 2.0 ** torch.arange(octaves, device=x.device)).flatten(-2)
    return torch.cat([x, angles.sin(), angles.cos()], -1)


def _rays(is_small: bool) -> Batch:
    rays, samples = (8, 16) if is_small else (8192, 96)
    return {"origins": torch.randn(rays, 3), "directions": torch.randn(rays, 3), "labels": torch.rand(rays, 3),
            "depths": torch.rand(rays, samples).sort(1).values * 4 + 2}  # fmt: skip


class PairBlock(nn.Module):
    """AlphaFold's update of pairs: two triangle products, attention along rows and columns, and a transition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(6))
        self.last = nn.LayerNorm(width)
        self.products = nn.ModuleList(nn.Linear(width, 5 * width) for _ in range(2))
        self.qkvg = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.biases = nn.ModuleList(nn.Linear(width, heads, bias=False) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.transition: Callable[[torch.Tensor], torch.Tensor] = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, equation in enumerate(("bikc,bjkc->bijc", "bkic,bkjc->bijc")):
            first, first_gate, second, second_gate, gate = self.products[number](self.norms[number](x)).chunk(5, -1)
            found = torch.einsum(equation, first * first_gate.sigmoid(), second * second_gate.sigmoid())
            x = x + self.outs[number](self.norms[number + 2](found)) * gate.sigmoid()
        for number in range(2):
            turned = self.norms[number + 4](x.transpose(1, 2) if number else x)
            q, k, v, gate = self.qkvg[number](turned).unflatten(-1, (4, self.heads, -1)).unbind(3)
            bias = self.biases[number](turned).permute(0, 3, 1, 2)[:, None]
            scores = torch.einsum("brqhc,brkhc->brhqk", q, k) * q.shape[-1] ** -0.5 + bias
            found = torch.einsum("brhqk,brkhc->brqhc", scores.softmax(-1), v) * gate.sigmoid()
            found = self.outs[number + 2](found.flatten(3))
            x = x + (found.transpose(1, 2) if number else found)
        return x + self.transition(self.last(x))


class Pairs(nn.Module):
    """Blocks of pair updates, and the loss of a distogram."""

    def __init__(self, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairBlock(width, heads) for _ in range(blocks))
        self.last = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        logits = self.last(x + x.transpose(1, 2))
        return F.cross_entropy(logits.flatten(0, 2), labels.flatten())


def _residues(is_small: bool) -> Batch:
    count, width = (16, 32) if is_small else (192, 128)
    return {"x": torch.randn(1, count, count, width), "labels": torch.randint(0, 64, (1, count, count))}


class Physics(nn.Module):
    """A physics-informed network for Burgers' equation, whose loss has second derivatives of the network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [2, *[width] * 6]
        parts = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
        self.network = nn.Sequential(*parts, nn.Linear(width, 1))

    def forward(self, place: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        def first(place: torch.Tensor, time: torch.Tensor) -> Any:
            (by_place, by_time), u = torch.func.grad(self.value, (0, 1), has_aux=True)(place, time)
            return by_place.sum(), (by_place, by_time, u)

        twice, (by_place, by_time, u) = torch.func.grad(first, has_aux=True)(place, time)
        loss: torch.Tensor = (by_time + u * by_place - 0.01 / math.pi * twice).square().mean()
        return loss

    def value(self, place: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the network's values, whose gradients are those of each point, and the values."""
        u = self.network(torch.cat([place, time], 1))
        return u.sum(), u


def _points(is_small: bool) -> Batch:
    count = 32 if is_small else 65536
    return {"place": 2 * torch.rand(count, 1) - 1, "time": torch.rand(count, 1)}


# --- tables and control -----------------------------------------------------------------------------------------------


class Tabular(nn.Module):
    """FT-Transformer: a token for each feature, and attention between the tokens of a row."""

    def __init__(self, width: int, heads: int, layers: int, numbers: int = 24, categories: int = 16) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(numbers, width) / width**0.5) for _ in range(2))
        self.embedding = nn.Embedding(categories * 100, width)
        self.starts: torch.Tensor
        self.register_buffer("starts", torch.arange(categories) * 100, persistent=False)
        self.first = nn.Parameter(torch.randn(1, 1, width) / width**0.5)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width // 3, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        values = numbers[..., None] * self.weight + self.bias
        found = torch.cat([self.first.expand(len(values), -1, -1), values, self.embedding(categories + self.starts)], 1)
        return F.binary_cross_entropy_with_logits(self.head(self.layers(found)[:, 0]).squeeze(1).float(), labels)


def _rows(is_small: bool) -> Batch:
    rows = 8 if is_small else 1536
    return {"numbers": torch.randn(rows, 24), "categories": torch.randint(0, 100, (rows, 16)),
            "labels": torch.rand(rows).round()}  # fmt: skip


class Policy(nn.Module):
    """PPO's clipped loss of an actor and a critic, with the entropy of a Gaussian policy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, size))
            for size in (16, 1)
        )
        self.spread = nn.Parameter(torch.zeros(16))

    def forward(
        self, states: torch.Tensor, actions: torch.Tensor, chances: torch.Tensor, advantages: torch.Tensor,
        values: torch.Tensor, returns: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        policy: Any = torch.distributions.Normal(self.actor(states).float(), self.spread.exp(), validate_args=False)
        ratio: torch.Tensor = (policy.log_prob(actions).sum(1) - chances).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        found: torch.Tensor = self.critic(states).squeeze(1).float()
        clipped = values + (found - values).clamp(-0.2, 0.2)
        errors = torch.max((found - returns).square(), (clipped - returns).square())
        entropy: torch.Tensor = policy.entropy().sum(1).mean()
        return 0.5 * errors.mean() - gain - 0.01 * entropy


def _rollout(is_small: bool) -> Batch:
    rows = 32 if is_small else 131_072
    shapes = {"states": (64,), "actions": (16,), "advantages": (), "values": (), "returns": ()}
    return {"chances": torch.randn(rows) - 22.0, **{name: torch.randn(rows, *shape) for name, shape in shapes.items()}}


def _waves(is_small: bool) -> Batch:
    return {"waves": torch.randint(0, 256, (2, 65) if is_small else (8, 16001))}


MODELS: Mapping[str, Model] = {
    "lstm": Model(lambda small: Recurrent(*((512, 32) if small else (32000, 1024))), tokens(64, 257, 32000)),
    "wavenet": Model(
        lambda small: WaveNet(8, [1, 2, 4]) if small else WaveNet(128, [2**n for n in range(10)] * 2), _waves
    ),
    "conformer": Model(lambda small: Conformer(*((32, 2, 1) if small else (512, 8, 6))), _speech),
    "hyena": Model(lambda small: Hyena(*((32, 2, 512) if small else (768, 6, 32000))), tokens(4, 2048, 32000)),
    "graph_attention": Model(lambda small: GraphAttention(*((32, 2, 2) if small else (256, 8, 4))), _citations),
    "nerf": Model(lambda small: Radiance(32 if small else 256), _rays),
    "evoformer": Model(lambda small: Pairs(*((32, 2, 1) if small else (128, 4, 4))), _residues),
    "physics_informed": Model(lambda small: Physics(16 if small else 256), _points, autocast=False),
    "tabular": Model(lambda small: Tabular(*((32, 2, 1) if small else (192, 8, 6))), _rows),
    "ppo": Model(lambda small: Policy(32 if small else 1024), _rollout),
}
