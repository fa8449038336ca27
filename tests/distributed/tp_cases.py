"""What the tests of FSDP2 over tensor parallelism run on each rank: a mesh of data-parallel times parallel ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import dcompile
from tests.distributed import models
from tests.distributed.cases import device
from tests.distributed.fsdp_cases import Uneven, blocks, compiled, full
from tests.distributed.models import batch, loss_of
from tests.distributed.training import Training, compare, largest_difference


class Sequence(nn.Module):
    """A block whose activations are spread along the sequence between its products, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 16)
        self.last, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(self.last(x + self.b(torch.relu(self.a(self.norm(x))))))


class Checkpointed(models.Two):
    """Computes all of it again in the backward: a body in the captured graph, which takes DTensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class ReturnsWeight(models.Two):
    """Hands out a parameter that is a DTensor."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.a.weight


class ChangesWeight(models.Two):
    """Writes to a parameter that is a DTensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.a.weight.mul_(1)
        return super().forward(x)


SEQUENCE = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "a": ColwiseParallel(input_layouts=Shard(1)),
    "b": RowwiseParallel(output_layouts=Shard(1)),
    "last": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
MLP = {"a": ColwiseParallel(), "b": RowwiseParallel(), "c": ColwiseParallel(output_layouts=Replicate())}
TWO = {"a": ColwiseParallel(), "b": RowwiseParallel()}
ATTENTION = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
MLP_LAYER = {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")} | {"mlp.down_proj": RowwiseParallel()}
LLAMA = {f"model.layers.*.{name}": style for name, style in (ATTENTION | MLP_LAYER).items()}
UNEVEN = {
    "a": ColwiseParallel(use_local_output=False),
    "b": RowwiseParallel(),
    "c": ColwiseParallel(output_layouts=Replicate()),
}
PLANS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mlp": (models.Mlp, MLP),
    "two": (models.Two, TWO),
    "checkpointed": (Checkpointed, TWO),
    "mixed": (models.Mlp, {"a": ColwiseParallel(), "b": RowwiseParallel()}),
    "uneven": (Uneven, UNEVEN),
    "sequence": (Sequence, SEQUENCE),
    "loss": (Sequence, SEQUENCE | {"head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)}),
    "llama": (models.llama, LLAMA),
    "returns": (ReturnsWeight, TWO),
    "changes": (ChangesWeight, TWO),
}
"""Model, and how each of its modules is spread over the parallel ranks."""


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    """Data-parallel times parallel ranks; of three sizes the first counts replicas."""
    return init_device_mesh(device().type, shape, mesh_dim_names=("replicas", "shards", "tp")[-len(shape) :])


def make(name: str, shape: tuple[int, ...], wrap: str = "blocks", **how: Any) -> Any:
    """A module spread over the parallel ranks, then sharded as a whole ("root"), or each of its blocks and the rest."""
    mesh, (model, plan) = mesh_of(shape), PLANS[name]
    if (dim := how.pop("placement", None)) is not None:
        how["shard_placement_fn"] = lambda parameter: Shard(dim if parameter.ndim > dim else 0)
    torch.manual_seed(7)
    module = parallelize_module(model().to(device()), mesh["tp"], plan)
    data = mesh["shards"] if len(shape) == 2 else mesh["replicas", "shards"]
    if wrap == "blocks":
        for block in blocks(module):
            fully_shard(block, mesh=data, **how)
    return fully_shard(module, mesh=data, **how)


class ParallelTraining(Training):
    """Ranks of one parallel group see the same batch. Gradients and checkpoints are put together from all ranks."""

    shape: tuple[int, ...] = ()

    @property
    def inner(self) -> Any:
        return self.wrapped

    def batch_of(self, step: int) -> dict[str, Any]:
        return batch_of(self.wrapped, self.shape, step)

    @contextlib.contextmanager
    def not_synced(self) -> Iterator[None]:
        self.wrapped.set_requires_gradient_sync(False)
        yield
        self.wrapped.set_requires_gradient_sync(True)

    def gradients(self) -> dict[str, Any]:
        return {name: full(parameter.grad) for name, parameter in self.wrapped.named_parameters()}

    def parameters(self) -> dict[str, Any]:
        return {name: full(parameter) for name, parameter in self.wrapped.named_parameters()}

    def state(self) -> dict[str, Any]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.wrapped, self.optimizer, options=options)
        return everywhere({"model": model, "optimizer": optimizer})

    def load(self, state: dict[str, Any]) -> None:
        options = StateDictOptions(full_state_dict=True)
        set_state_dict(
            self.wrapped, self.optimizer, options=options,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip


def everywhere(value: Any) -> Any:
    """What rank 0 has: full checkpoints with cpu_offload are there alone."""
    found = [value]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def batch_of(module: Any, shape: tuple[int, ...], step: int) -> dict[str, Any]:
    """The inputs of this rank's data-parallel place."""
    place = dist.get_rank() // shape[-1]
    if hasattr(module, "embed"):
        generator = torch.Generator().manual_seed(1000 * place + step)
        return {"tokens": torch.randint(0, 32, (2, 8), generator=generator).to(device())}
    plain = models.llama() if hasattr(module, "model") else models.Mlp()
    return {name: value.to(device()) for name, value in batch(plain, place, step).items()}


def against_stock(
    name: str,
    shape: tuple[int, ...],
    wrap: str = "blocks",
    order: str = "compile",
    accumulate: bool = False,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> dict[str, Any]:
    """The same training with stock eager FSDP2 and with dcompile: largest differences, and the receipt."""
    stock, module = make(name, shape, wrap, **how), make(name, shape, wrap, **how)
    call = compiled(module, order, options, fullgraph=True)
    pair = ParallelTraining(stock, stock, accumulate), ParallelTraining(call, module, accumulate)
    for training in pair:
        training.shape = shape
    return compare(*pair, steps=2) | {"receipt": dcompile.receipt(call)}


def same_as_stock(name: str, shape: tuple[int, ...], **how: Any) -> dict[str, Any]:
    """Two backwards both ways: largest difference of gradients, and the receipt."""
    stock, module = make(name, shape, **how), make(name, shape, **how)
    call = compiled(module)
    for step in range(2):
        for run, each in ((stock, stock), (call, module)):
            backward(run, each, shape, step)
    return {"grad": largest_difference(gradients(stock), gradients(module)), "receipt": dcompile.receipt(module)}


def backward(call: Any, module: Any, shape: tuple[int, ...], step: int) -> None:
    result = call(**batch_of(module, shape, step))
    loss_of(result[0] if isinstance(result, tuple) else result).backward()


def gradients(module: Any) -> dict[str, Any]:
    return {name: full(parameter.grad) for name, parameter in module.named_parameters()}


def loss_in_parallel(shape: tuple[int, ...]) -> dict[str, Any]:
    """The model returns a DTensor, which the loss is computed from without putting it together."""
    stock, module = make("loss", shape), make("loss", shape)
    call = compiled(module, fullgraph=True)
    losses = []
    for run in (stock, call):
        tokens = batch_of(module, shape, 0)["tokens"]
        with loss_parallel():
            loss = nn.functional.cross_entropy(run(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
        losses.append(full(loss.detach()))
    return {
        "loss": (losses[0] - losses[1]).abs().item(),
        "grad": largest_difference(gradients(stock), gradients(module)),
        "receipt": dcompile.receipt(module),
    }


def frozen_and_evaluated(shape: tuple[int, ...]) -> dict[str, Any]:
    """Parameters without gradients, evaluation in between, and the whole norm of the gradients."""
    stock, module = make("sequence", shape), make("sequence", shape)
    call = compiled(module)
    found: dict[str, list[Any]] = {"norm": [], "eval": []}
    for run, each in ((stock, stock), (call, module)):
        each.a.weight.requires_grad_(False)
        backward(run, each, shape, 0)
        each.eval()
        with torch.no_grad():
            found["eval"].append(run(**batch_of(each, shape, 1)))
        each.train()
        each.a.weight.requires_grad_(True)
        backward(run, each, shape, 2)
        found["norm"].append(full(nn.utils.clip_grad_norm_(each.parameters(), 0.01)))
    return {
        "grad": largest_difference(gradients(stock), gradients(module)),
        "norm": (found["norm"][0] - found["norm"][1]).abs().item(),
        "eval": (found["eval"][0] - found["eval"][1]).abs().max().item(),
        "receipt": dcompile.receipt(module),
    }


def checkpoints(shape: tuple[int, ...], folder: str) -> dict[str, Any]:
    """What DCP saves of a stock model is loaded into a compiled one, and back."""
    import torch.distributed.checkpoint as dcp

    stock, module = make("two", shape), make("two", shape)
    call = compiled(module)
    pairs = [
        (run, each, torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True))
        for run, each in ((stock, stock), (call, module))
    ]
    found = {}
    for number, ((run, source, theirs), (_, target, ours)) in enumerate((pairs, pairs[::-1])):
        backward(run, source, shape, number)
        theirs.step()
        saved = dict(zip(("model", "optim"), get_state_dict(source, theirs), strict=True))
        dcp.save(saved, checkpoint_id=f"{folder}/{number}")
        wanted = dict(zip(("model", "optim"), get_state_dict(target, ours), strict=True))
        dcp.load(wanted, checkpoint_id=f"{folder}/{number}")
        set_state_dict(target, ours, model_state_dict=wanted["model"], optim_state_dict=wanted["optim"])
        found[f"keys{number}"] = list(saved["model"]) == list(wanted["model"])
        found[f"same{number}"] = largest_difference(
            *({n: full(p) for n, p in m.named_parameters()} for m in (source, target))
        )
    for run, each, _ in pairs:
        each.zero_grad()
        backward(run, each, shape, 5)
    return found | {
        "grad": largest_difference(gradients(stock), gradients(module)),
        "receipt": dcompile.receipt(module),
    }


def started_again(shape: tuple[int, ...], folder: str) -> dict[str, Any]:
    """The same model compiled twice; ranks share what is compiled, and the second takes its graphs from the cache."""
    options = {"verify": False, "matmul": "aten", "cache_dir": f"{folder}/rank{dist.get_rank()}"}
    modules = [make("sequence", shape), make("sequence", shape)]
    for module in modules:
        backward(compiled(module, options=options), module, shape, 0)
    receipts = [dcompile.receipt(module) for module in modules]
    return {
        "received": receipts[0].graphs_received,
        "cached": [receipt.graphs_cached for receipt in receipts],
        "built": receipts[1].built,
        "notes": receipts[0].notes,
        "group": mesh_of(shape)["tp"].get_group().group_name,
        "grad": largest_difference(*(gradients(module) for module in modules)),
        "receipt": receipts[1],
    }
