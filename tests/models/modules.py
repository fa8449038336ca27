"""Models written in plain torch.nn: recurrent and convolutional ones, and what real code does beside layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.models.architecture import VOCABULARY, Architecture, Batch, tokens

LSTMS_STATES_DIFFER = torch.__version__ < "2.13"
"""torch 2.11 traces an LSTM's states as (layers, 1, rows, features), also for aot_eager; eager has no such 1 there."""


def sequences(rows: int, length: int) -> Batch:
    """Sequences of vectors."""
    return {"x": torch.randn(rows, length, 8)}


def packed(rows: int, length: int) -> Batch:
    """Sequences with a length each, the longest first."""
    return {**sequences(rows, length), "lengths": torch.arange(length, length - rows, -1)}


def pictures(rows: int, size: int) -> Batch:
    """Images of three channels."""
    return {"x": torch.randn(rows, 3, size, size)}


def volumes(rows: int, size: int) -> Batch:
    """Volumes of one channel."""
    return {"x": torch.randn(rows, 1, size, size, size)}


def vectors(rows: int, length: int) -> Batch:
    """Vectors of 8 elements; as many more rows as the length says."""
    return {"x": torch.randn(rows * length, 8)}


def bags(rows: int, length: int) -> Batch:
    """Bags of tokens, one of them empty."""
    offsets = torch.cat([torch.tensor([0, 0]), torch.arange(1, rows) * length])
    return {"ids": tokens(1, rows * length)[0], "offsets": offsets}


def weighted_bags(rows: int, length: int) -> Batch:
    """Bags with a weight for each token."""
    batch = bags(rows, length)
    return {**batch, "weights": torch.randn(batch["ids"].numel())}


def graphs(rows: int, length: int) -> Batch:
    """Nodes and edges of a graph."""
    return {"x": torch.randn(length, 8), "edges": torch.randint(0, length, (2, rows * length))}


class Recurrent(nn.Module):
    """A recurrent layer and a head on all of its outputs and its last state.

    For LSTMs whose input needs no gradient, PyTorch traces oneDNN's layer, which is for inference alone: hence `lift`.
    """

    def __init__(self, layer: Callable[..., nn.Module], **settings: Any) -> None:
        super().__init__()
        self.lift = nn.Linear(8, 8)
        self.layer = layer(8, 12, batch_first=True, **settings)
        self.head = nn.Linear(settings.get("proj_size", 24 if settings.get("bidirectional") else 12), 4)

    def forward(self, x: torch.Tensor) -> Any:
        output, state = self.layer(self.lift(x))
        if LSTMS_STATES_DIFFER and isinstance(state, tuple):
            state = tuple(part.flatten(0, -3) for part in state)
        return self.head(output), state


class Packed(nn.Module):
    """Sequences of different lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 12, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        output, _ = self.layer(pack_padded_sequence(x, lengths, batch_first=True))
        return self.head(pad_packed_sequence(output, batch_first=True)[0])


class Cells(nn.Module):
    """A loop over time written by hand, with states in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(8, 12), nn.GRUCell(12, 12), nn.RNNCell(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 12), x.new_zeros(x.shape[0], 12)
        second, outputs = x.new_zeros(x.shape[0], 12), []
        for step in range(4):
            state = self.lstm(x[:, step], state)
            second = self.gru(state[0], second)
            outputs.append(self.rnn(second))
        return torch.stack(outputs, 1)


class UNet(nn.Module):
    """Two levels down and up again; `bilinear` interpolates where the other one uses transposed convolutions."""

    def __init__(self, bilinear: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.bottom = self._pair(3, 8), self._pair(8, 12), self._pair(12, 16)
        up = self._interpolated if bilinear else self._transposed
        self.raise_bottom, self.raise_second = up(16, 12), up(12, 8)
        self.join_second, self.join_first = self._pair(24, 12), self._pair(16, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def _interpolated(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(inputs, outputs, 1))

    def _transposed(self, inputs: int, outputs: int) -> nn.Module:
        return nn.ConvTranspose2d(inputs, outputs, 2, 2)

    def _pair(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        bottom = self.bottom(F.avg_pool2d(second, 2))
        second = self.join_second(torch.cat([second, self.raise_bottom(bottom)], 1))
        return self.head(self.join_first(torch.cat([first, self.raise_second(second)], 1)))


class Bags(nn.Module):
    """Embedding bags."""

    def __init__(self, mode: str, **settings: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, 8, mode=mode, **settings)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.bag(ids, offsets, weights))


class Temporal(nn.Module):
    """Dilated causal convolutions with gated units and instance normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(8, 16, 3, dilation=d) for d in (1, 2))
        self.norm = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = x + F.glu(layer(F.pad(x, (2 * layer.dilation[0], 0))), 1)
        return self.norm(x).transpose(1, 2)


class Volume(nn.Module):
    """Convolution, normalisation and pooling in three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, 6, 3, padding=1, bias=False), nn.BatchNorm3d(6), nn.LeakyReLU(0.1), nn.MaxPool3d(2),
            nn.Conv3d(6, 4, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Upscaling(nn.Module):
    """Super-resolution: pixel shuffle, reflection and replication padding, PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(3, 12, 3), nn.PReLU(12), nn.PixelShuffle(2), nn.ReplicationPad2d(1),
            nn.Conv2d(3, 3, 3, groups=3), nn.Hardswish(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + F.interpolate(x, scale_factor=2, mode="bicubic")


class Fourier(nn.Module):
    """Fourier neural operator: complex weights on the lowest modes of a real transform."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 4, 4, dtype=torch.cfloat) * 0.2)
        self.local = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfft2(x)
        low = torch.einsum("bixy,ioxy->boxy", modes[:, :, :4, :4], self.weight)
        spectrum = torch.zeros_like(modes)
        spectrum[:, :, :4, :4] = low
        return F.gelu(torch.fft.irfft2(spectrum, s=x.shape[-2:]) + self.local(x)) + modes.abs().mean()


class Transformer(nn.Module):
    """torch.nn's own transformer, with an encoder, a decoder and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.model(x, x.flip(1), tgt_mask=mask)


class Attention(nn.Module):
    """torch.nn.MultiheadAttention with its weights returned, padding and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x: torch.Tensor) -> Any:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        padding[:, -1] = True
        return self.attention(x, x, x, key_padding_mask=padding)


class Messages(nn.Module):
    """Message passing on a graph: gather, scatter-add, scatter-max, degree."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(16, 8), nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        messages = torch.relu(self.message(torch.cat([x[source], x[target]], -1)))
        total = torch.zeros_like(x).index_add(0, target, messages)
        index = target[:, None].expand_as(messages)
        largest = torch.zeros_like(x).scatter_reduce(0, index, messages, "amax", include_self=True)
        degree = torch.zeros(x.shape[0], device=x.device, dtype=x.dtype).index_add(
            0, target, torch.ones_like(messages[:, 0])
        )
        return self.update(total / degree.clamp(min=1)[:, None] + largest, x)


class Normalised(nn.Module):
    """Weights that are functions of others: weight and spectral normalisation, an orthogonal matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.one = parametrizations.weight_norm(nn.Linear(8, 12))
        self.two = parametrizations.spectral_norm(nn.Linear(12, 12))
        self.three = parametrizations.orthogonal(nn.Linear(12, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(torch.tanh(self.two(torch.relu(self.one(x)))))


class Branching(nn.Module):
    """Python's `if` on a tensor's value, which breaks the graph, and on the training flag, which does not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.one(x))
        y = self.two(y) if y.sum() > 0 else self.two(-y)
        for _ in range(int(y.detach().abs().max().item()) % 3 + 1):
            y = torch.sin(y)
        return y * 2 if self.training else y


class Conditional(nn.Module):
    """Control flow inside one graph: torch.where over both branches, a masked update, torch.cond."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        y = torch.where(y > 0, y.exp() - 1, torch.log1p(-y))
        y = y.masked_fill(y > 1, 1.0)
        return torch.cond(y.sum() > 0, lambda z: z.sin(), lambda z: z.cos(), (y,))


class Pair(NamedTuple):
    """Two tensors under names."""

    mean: torch.Tensor
    spread: torch.Tensor


class Nested(nn.Module):
    """Results in a named tuple, a list and a dictionary inside one another, with an input, a constant and None."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.one(x)
        return {"pair": Pair(y.mean(0), y.std(0)), "list": [y, x, None, (y.detach(), 3)], "view": y.t(), "same": y}


class Ensemble(nn.Module):
    """torch.func: one functional call vectorised over stacked parameters, and a gradient inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.member = nn.Linear(8, 4)
        self.weights = nn.Parameter(torch.randn(3, 4, 8))
        self.biases = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(self.member, {"weight": weight, "bias": bias}, (x,))

        together = torch.func.vmap(run)(self.weights, self.biases)
        slope = torch.func.grad(lambda z: self.member(z).square().sum())(x)
        return together.mean(0) + slope.sum(-1, keepdim=True)


class Hooked(nn.Module):
    """Forward hooks that change inputs and outputs, inside and outside, and a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.blocks = nn.Sequential(self.one, nn.ReLU(), nn.ModuleDict({"inner": self.one})["inner"])
        self.one.register_forward_pre_hook(_halve)
        self.one.register_forward_hook(_add_one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def _halve(_module: nn.Module, args: Any) -> Any:
    return (args[0] / 2,)


def _add_one(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 1


class Statistics(nn.Module):
    """Running statistics of every kind of batch normalisation, and a moving codebook as in VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.BatchNorm1d(8)
        self.two = nn.BatchNorm1d(8, momentum=None, affine=False)
        self.three = nn.BatchNorm1d(8, track_running_stats=False)
        self.lift = nn.Linear(8, 8, bias=False)
        self.register_buffer("codes", torch.randn(6, 8))
        self.register_buffer("sizes", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.three(self.two(self.one(x) + x.square()) + self.lift(x))
        nearest = (y.detach()[:, None] - self.codes).square().sum(-1).argmin(-1)
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest, 6).to(y.dtype)
                self.sizes.lerp_(chosen.sum(0), 0.1)
                self.codes.copy_(self.codes * 0.9 + 0.1 * (chosen.t() @ y) / self.sizes.clamp(min=1e-3)[:, None])
        return y + (self.codes[nearest] - y).detach()


class InPlace(nn.Module):
    """Intermediates and slices of them written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        y.mul_(0.5).add_(x)
        y[:, 2:4] = y[:, 4:6] * 2
        y[y > 1] = 0.5
        z = torch.zeros(y.shape[0], 8, device=y.device, dtype=y.dtype)
        z[:, ::2] = y[:, :4]
        z.t()[1].copy_(y[:, 7])
        return z.clamp_(-1, 1)


class Mixer(nn.Module):
    """MLP-Mixer with einsum, permutations and unusual activations."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Unfold(4, stride=4)
        self.embed = nn.Linear(48, 8)
        self.across = nn.Parameter(torch.randn(4, 4) / 2)
        self.norm, self.head = nn.RMSNorm(8), nn.Bilinear(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(self.patch(x).transpose(1, 2))
        y = y + torch.einsum("bsd,st->btd", F.mish(self.norm(y)), self.across)
        y = y + F.selu(y) * F.softplus(y) - F.hardtanh(y) + F.softsign(y) + F.tanhshrink(y)
        return self.head(y.amax(1), y.logsumexp(1))


class Losses(nn.Module):
    """Many losses at once, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.weights = nn.Parameter(torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, target = self.one(x), x.roll(1, 0)
        classes, weight = x.argmax(-1), torch.arange(1.0, 9.0, device=x.device).to(y.dtype)
        parts = (
            F.mse_loss(y, target), F.l1_loss(y, target), F.smooth_l1_loss(y, target),
            F.huber_loss(y, target, delta=0.5), F.binary_cross_entropy_with_logits(y, target.sigmoid()),
            F.binary_cross_entropy(y.sigmoid(), target.sigmoid()),
            F.kl_div(y.log_softmax(-1), target.softmax(-1), reduction="batchmean"),
            F.cross_entropy(y, classes, label_smoothing=0.1, weight=weight),
            F.multilabel_soft_margin_loss(y, (x > 0).to(y.dtype)),
            F.cosine_embedding_loss(y, target, torch.ones_like(classes)),
            F.triplet_margin_loss(y, target, x), F.gaussian_nll_loss(y, target, y.exp()),
        )  # fmt: skip
        return (torch.stack(parts) * self.weights).sum()


def module(make: Callable[[], nn.Module], batch: Any, **more: Any) -> Architecture:
    """One of the models above."""
    return Architecture(make, batch, **more)


def _grads_in_inference_mode() -> bool:
    """Whether eager's `torch.func.grad` gives more than zeros there; torch 2.11's does not."""
    with torch.inference_mode():
        return bool(torch.func.grad(lambda x: x * x)(torch.ones(())))


MODULES = {
    "lstm": module(lambda: Recurrent(nn.LSTM, num_layers=2), sequences, bfloat16=False),
    "lstm-bidirectional": module(lambda: Recurrent(nn.LSTM, bidirectional=True), sequences),
    "lstm-projected": module(lambda: Recurrent(nn.LSTM, proj_size=6), sequences),
    "lstm-packed": module(Packed, packed, fullgraph=False, on_cpu=frozenset({"lengths"})),
    "gru": module(lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True), sequences),
    "rnn": module(lambda: Recurrent(nn.RNN, nonlinearity="relu"), sequences),
    "cells": module(Cells, sequences),
    "u-net": module(UNet, pictures, lengths=(16, 24)),
    "u-net-bilinear": module(lambda: UNet(bilinear=True), pictures, lengths=(16, 24)),
    "bag-sum": module(lambda: Bags("sum"), bags),
    "bag-mean": module(lambda: Bags("mean", padding_idx=5), bags),
    "bag-max": module(lambda: Bags("max"), bags),
    "bag-weighted": module(lambda: Bags("sum"), weighted_bags),
    "temporal": module(Temporal, sequences),
    "volume": module(Volume, volumes, lengths=(6, 8)),
    "upscaling": module(Upscaling, pictures),
    "fourier": module(Fourier, pictures, lengths=(8, 12), bfloat16=False),
    "transformer": module(Transformer, sequences, fullgraph=False),
    "attention": module(Attention, sequences),
    "messages": module(Messages, graphs),
    "normalised": module(Normalised, vectors, bfloat16=False),
    "branching": module(Branching, vectors, fullgraph=False),
    "conditional": module(Conditional, vectors),
    "nested": module(Nested, vectors),
    "ensemble": module(Ensemble, vectors, inference_mode=_grads_in_inference_mode()),
    "hooked": module(Hooked, vectors),
    "statistics": module(Statistics, vectors, fullgraph=False),
    "in-place": module(InPlace, vectors),
    "mixer": module(Mixer, pictures, lengths=(8, 8)),
    "losses": module(Losses, vectors, fullgraph=False),
}
"""Name -> architecture."""
