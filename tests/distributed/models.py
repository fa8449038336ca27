"""Small models for the two-rank tests, one for each thing that DDP has to get right."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn.modules._functions import SyncBatchNorm


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 40), nn.Linear(40, 40), nn.Linear(40, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class Two(nn.Module):
    """As few layers as leave one that is gathered again for the backward; each takes what the model takes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


@dataclasses.dataclass
class Hidden:
    """What a layer returns."""

    states: torch.Tensor
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Answer:
    """What `Nested` returns."""

    loss: torch.Tensor
    hidden: Hidden
    names: tuple[Any, ...]


for _result in (Hidden, Answer):  # FSDP2 of torch 2.11 finds no tensors in others, and gathers nothing for the backward
    torch.utils._pytree.register_dataclass(_result)


class NestedLayer(nn.Module):
    """Arguments that are None, by position and by name, of any kind; a result with others inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 40)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, earlier: Hidden | None = None, name: Any = None
    ) -> Hidden:
        states = torch.relu(self.linear(x))
        if mask is not None:
            states = states * mask
        if earlier is not None:
            states = states + earlier.states.mean() + earlier.more["norm"]
        return Hidden(states, {"norm": states.pow(2).mean(), "none": None, "name": (name, 1, 0.5)})


class Nested(nn.Module):
    """Layers that are given and return None, dataclasses, mappings and tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = NestedLayer(12), NestedLayer(40), nn.Linear(40, 4)

    def forward(self, x: torch.Tensor, unused: torch.Tensor | None = None, **more: Any) -> Answer:
        first = self.a(x, None, earlier=None, name="a")
        second = self.b(first.states, mask=torch.ones_like(x[:, :1]), earlier=first)
        return Answer(self.c(second.states).pow(2).mean(), second, ("a", unused))


class SharedOverBreak(nn.Module):
    """A layer used before and after a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.shared, self.c = nn.Linear(12, 40), nn.Linear(40, 40), nn.Linear(40, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(torch.relu(self.a(x)))
        torch._dynamo.graph_break()
        return self.c(torch.relu(self.shared(x)))


class TiedOverBreak(nn.Module):
    """Embedding and head share a weight; a graph break lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(30, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.middle(self.embed(tokens)))
        torch._dynamo.graph_break()
        return self.head(x)


class Decides(nn.Module):
    """Goes one of two ways with the same layers, by a number that it has computed; normed by running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(12, 40, bias=False), nn.BatchNorm1d(40)
        self.b, self.c = nn.Linear(40, 40), nn.Linear(40, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.a(x))
        scale = x.abs().mean().item()
        x = torch.relu(self.b(x)) * min(scale, 2.0)
        return self.c(torch.tanh(x) if x.sum() > 0 else torch.relu(x))


class Between(nn.Module):
    """What happens behind its first graph, which has running statistics and random numbers, is chosen by `how`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 4)
        self.how = "nothing"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.norm(self.a(x))))
        how = self.asked()
        if how == "no_grad":
            with torch.no_grad():
                x = self.broken(x)
        if how == "hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
                x = self.broken(x)
        if how == "view":
            return self.seen_later(self.b.weight.t(), x)
        if how == "short":
            return self.c(torch.relu(x))
        if how == "tanh":
            x = torch.tanh(x)
        return self.c(torch.relu(self.b(self.aside(x))))

    @torch._dynamo.disable
    def asked(self) -> str:
        return self.how

    @torch._dynamo.disable
    def aside(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "layer":
            return self.b(x)
        if self.how == "caught":
            try:
                return x * self.b.weight.norm()
            except RuntimeError:
                return x
        if self.how == "memory":
            return x * (2 + float(self.b.weight.data_ptr() < 0))
        if self.how == "unshard":
            self.unshard()  # type: ignore[operator]
        return torch.sin(x) + x

    def broken(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.b(x))
        torch._dynamo.graph_break()
        return x + 1

    def seen_later(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.c(torch.relu(x @ weight))


class BrokenLayer(nn.Module):
    """A graph break lies between its two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        torch._dynamo.graph_break()
        return x + self.down(hidden)


class Last(nn.Module):
    """A linear layer that Dynamo compiles where it is called eagerly: torch's own it passes over."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class BrokenLayers(nn.Module):
    """Equal layers in a loop, each of them with a graph break, so that the loop runs eagerly."""

    def __init__(self, layers: int = 3, last: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(BrokenLayer() for _ in range(layers)), last or Last()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Classes(nn.Module):
    """Returns the loss of a head, in numbers of 64 bits: other orders of sums do not show."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(30, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 30, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(self.embed(tokens)))))
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class DecoderLayer(nn.Module):
    """Causal attention behind a norm, and beside what goes past it."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        split = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(*split.unbind(), attn_mask=mask, is_causal=mask is None)
        return x + nn.functional.silu(self.out(found.transpose(1, 2).flatten(2)))


class Decoder(nn.Module):
    """What Llama is made of, in a tenth of the time that tracing Hugging Face's takes.

    `masked`: layers are given a causal mask that is made outside of them.
    """

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.masked = masked
        self.embed, self.layers = nn.Embedding(30, 16), nn.ModuleList([DecoderLayer()])
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 30, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, mask = self.embed(tokens), None
        if self.masked:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            mask = (places <= places[:, None])[None, None]
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def checkpointed_decoder(reentrant: bool = False, masked: bool = False) -> Decoder:
    """Each layer is computed again in the backward."""
    how, model = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT, Decoder(masked)
    model.layers = nn.ModuleList(checkpoint_wrapper(layer, how) for layer in model.layers)
    return model


def deep_decoder() -> Decoder:
    """With as many layers as Dynamo copies one of; their weights differ."""
    model = Decoder()
    model.layers = nn.ModuleList([DecoderLayer() for _ in range(4)])
    return model


class NormUnused(nn.Module):
    """BatchNorm buffers, and parameters that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.unused, self.head = nn.Linear(5, 5), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class SyncNorm(nn.BatchNorm2d):
    """What SyncBatchNorm does in training, which itself refuses CPUs: there torch has no kernels for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_batches_tracked.add_(1)
        group, statistics = dist.group.WORLD, (self.running_mean, self.running_var)
        return SyncBatchNorm.apply(
            x, self.weight, self.bias, *statistics, self.eps, self.momentum, group, dist.get_world_size(group)
        )


class Normed(nn.Module):
    """Two convolutions, each with a BatchNorm behind it.

    A bias there has a true gradient of zero, so that Adam moves it by a whole step in the direction of the rounding:
    losses do not see that, running means do. Whoever compares those under Adam has convolutions without a bias.
    """

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm2d, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, 8, 3, padding=1, bias=bias) for channels in (3, 8))
        self.norm_a, self.norm_b, self.head = norm(8), norm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm_a(self.a(x)))
        return self.head(torch.relu(self.norm_b(self.b(x))).mean((2, 3)))


class NormedOnce(nn.Module):
    """A convolution with a norm behind it: half of what `Normed` takes to trace."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class UsedOutside(nn.Module):
    """One linear layer is called where Dynamo may not look."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.eager(torch.relu(self.a(x)))

    @torch._dynamo.disable
    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x)


class SometimesOutside(nn.Module):
    """Calls one layer eagerly if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, outside: bool) -> torch.Tensor:
        x = torch.relu(self.a(x))
        return self.eager(x) if outside else self.b(x)

    @torch._dynamo.disable
    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x)


class Branching(nn.Module):
    """Leaves one layer out if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, short: bool) -> torch.Tensor:
        x = torch.relu(self.a(x))
        return self.c(x if short else torch.relu(self.b(x)))


class Tasks(nn.Module):
    """A trunk, and a head for each task; some ways to use it have a graph break, or run a layer eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.middle = nn.Linear(12, 16), nn.Linear(16, 16)
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, task: int, how: str = "") -> torch.Tensor:
        x = torch.relu(self.trunk(x))
        if how == "break":
            torch._dynamo.graph_break()
        if how == "eager":
            x = self.eager(x)
        elif task == 0:
            x = torch.relu(self.middle(x))
        return self.heads[task](x)

    @torch._dynamo.disable
    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.middle(x))


class Lora(nn.Module):
    """Frozen layers, each with a trained product of two thin matrices beside it."""

    def __init__(self, sizes: tuple[int, ...] = (12, 40, 40, 4)) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(sizes))
        self.base = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.down = nn.ModuleList(nn.Linear(a, 3, bias=False) for a, _ in pairs)
        self.up = nn.ModuleList(nn.Linear(3, b, bias=False) for _, b in pairs)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x)))
        return x


def llama(tied: bool = False, vocabulary: int = 64, layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Broken(nn.Module):
    """A module with a graph break behind it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        torch._dynamo.graph_break()
        return x


def broken_llama(tied: bool = False) -> nn.Module:
    """With a graph break in each layer: Hugging Face's loop around them, its embedding and its head run eagerly."""
    model: Any = llama(tied)
    for layer in model.model.layers:
        layer.mlp = Broken(layer.mlp)
    return model  # type: ignore[no-any-return]


def batch(model: nn.Module, rank: int, step: int) -> dict[str, Any]:
    """Inputs of one step: another batch on every rank."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    if isinstance(model, NormUnused | Normed | NormedOnce):
        return {"x": torch.randn(4, 3, 6, 6, generator=generator)}
    if isinstance(model, TiedOverBreak | Classes | Decoder):
        return {"tokens": torch.randint(0, 30, (4, 6), generator=generator)}
    if type(model).__name__.startswith("Llama"):
        tokens = torch.randint(0, 64, (2, 10), generator=generator)
        return {"input_ids": tokens, "labels": tokens}
    x = torch.randn(8, 12, generator=generator)
    return {"x": x.to(next(model.parameters()).dtype)}


def loss_of(result: Any) -> torch.Tensor:
    """A scalar to go backward from."""
    loss = getattr(result, "loss", None)
    if loss is not None:
        return loss
    # as users take it: a loss of 16 bits would hide small differences, or make one last bit look large
    return (result.float() if result.itemsize < 4 else result).pow(2).mean()
