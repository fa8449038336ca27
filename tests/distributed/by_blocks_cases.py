"""FSDP2 as trainers use it, compiled as a whole or block by block: each function is a case of `matrix.py`."""

from __future__ import annotations

import contextlib
import importlib
import time
import unittest.mock
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import compile_regions
from torch import nn
from torch.distributed._composable import checkpoint as checkpoint_by_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import dcompile
from dcompile.runtime.communication.fsdp_shards import ShardCommunication
from tests.distributed import cases
from tests.distributed.cases import ATEN, device
from tests.distributed.fsdp_cases import FsdpTraining, copying
from tests.distributed.models import Mlp, batch
from tests.distributed.training import Training, compare


class Block(nn.Module):
    """Two layers and what goes past them; `recomputed`: the second of them, in the backward."""

    recomputed = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 40), nn.Linear(40, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.up(y)))

        return x + (checkpoint(inner, x, use_reentrant=False) if self.recomputed else inner(x))


class Stack(nn.Module):
    """Equal blocks, of which a batch may leave one out, and a head."""

    recomputed = False
    left_out: tuple[int, ...] = ()
    ahead = 0
    """How many blocks further its forward gathers by hand."""
    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(12, 12), nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if isinstance(self.layers, nn.Sequential):
            return self.last(self.layers(x))
        for number, layer in enumerate(self.layers):
            if number in self.left_out:
                continue
            if self.breaks:
                torch._dynamo.graph_break()
            for further in self.layers[number + 1 : number + 1 + self.ahead]:
                further.unshard(async_op=True)
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        return self.last(x)


# --- activation checkpointing, before anything is compiled or sharded


def _outside(model: Stack) -> None:
    model.recomputed = True


def _inside(model: Stack) -> None:
    for layer in model.layers:
        layer.recomputed = True


def _by_wrapper(model: Stack) -> None:
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)


def _by_hooks(model: Stack) -> None:
    for layer in model.layers:
        checkpoint_by_hooks(layer)


CHECKPOINTED: Mapping[str, Callable[[Stack], None]] = {
    "outside": _outside,
    "inside": _inside,
    "wrapper": _by_wrapper,
    "hooks": _by_hooks,
}


# --- settings of FSDP2, behind `fully_shard`


def _prefetch_forward(model: Any) -> None:
    layers = list(model.layers)
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 3])
    model.set_modules_to_forward_prefetch(layers[:1])


def _prefetch_backward(model: Any) -> None:
    layers = list(model.layers)
    for number, layer in enumerate(layers):
        layer.set_modules_to_backward_prefetch(layers[max(number - 2, 0) : number][::-1])


def _break(model: Any) -> None:
    model.breaks = True


def _unshard_ahead(model: Any) -> None:
    model.ahead = 1


SETTINGS: Mapping[str, Callable[[Any], None]] = {
    "breaks": _break,
    "unshard ahead": _unshard_ahead,
    "forward prefetch": _prefetch_forward,
    "backward prefetch": _prefetch_backward,
}


# --- ways to train


class Evaluating(FsdpTraining):
    """Evaluates before each step and behind its forward, without gradients and in inference mode by turns."""

    def loss(self, step: int) -> torch.Tensor:
        self._evaluate(step + 50, torch.no_grad)
        loss = super().loss(step)
        self._evaluate(step + 60, torch.inference_mode)
        return loss

    def _evaluate(self, step: int, mode: Callable[[], Any]) -> None:
        self.wrapped.eval()
        with mode():
            self.losses.append(super().loss(step).item())
        self.wrapped.train()


class Unsharding(FsdpTraining):
    """Gathers by hand before the forward: the root's parameters and the first block's; evaluates eagerly at times."""

    def loss(self, step: int) -> torch.Tensor:
        if step:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                self.losses.append(super().loss(step + 50).item())
        handle = self.wrapped.unshard(async_op=True)
        self.wrapped.layers[0].unshard(async_op=True)
        if step % 2:
            handle.wait()
        return super().loss(step)


class KeepingGathered(FsdpTraining):
    """Accumulates with parameters that stay gathered until the last micro-batch."""

    @contextlib.contextmanager
    def not_synced(self) -> Iterator[None]:
        for set_to in (self.wrapped.set_is_last_backward, self.wrapped.set_reshard_after_backward):
            set_to(False)
        with super().not_synced():
            yield
        for set_to in (self.wrapped.set_is_last_backward, self.wrapped.set_reshard_after_backward):
            set_to(True)


class LeavingOut(FsdpTraining):
    """Leaves another block out in every second batch, the same on each rank."""

    def loss(self, step: int) -> torch.Tensor:
        self.inner.left_out = ((), (1,), (), (2,))[step % 4]
        return super().loss(step)


class EndingEarly(FsdpTraining):
    """Evaluates the first blocks alone; then parameters change, and it evaluates the last blocks alone."""

    def loss(self, step: int) -> torch.Tensor:
        with torch.no_grad():
            for left_out in ((), (), (2, 3)):
                self.inner.left_out = left_out
                super().loss(step + 50)
            for parameter in self.wrapped.parameters():
                parameter.mul_(0.9)
            self.inner.left_out = (0, 1)
            self.losses.append(super().loss(step + 50).item())
        self.inner.left_out = ()
        return super().loss(step)


def eager_by_turns(case: str, first: bool, **how: Any) -> dict[str, Any]:
    """Another case, with FSDP's own hooks in the micro-batch that reduces nothing, or in that which reduces both's."""
    usual = Training.loss

    def loss(self: Training, step: int) -> torch.Tensor:
        with torch.compiler.set_stance("force_eager" if (step >= 100) == first else "default"):
            return usual(self, step)

    with unittest.mock.patch.object(Training, "loss", loss):
        train: Callable[..., Any] = importlib.import_module(f"tests.distributed.{case}").against_stock
        return train(accumulate=True, **how)


TRAININGS: Mapping[str, type[FsdpTraining]] = {
    "plain": FsdpTraining,
    "evaluating": Evaluating,
    "unsharding": Unsharding,
    "keeping gathered": KeepingGathered,
    "leaving out": LeavingOut,
    "ending early": EndingEarly,
}


def _as_it_is(layer: nn.Module, options: dict[str, Any]) -> None:
    del layer, options


COMPILED: Mapping[str, Callable[[nn.Module, dict[str, Any]], Any]] = {
    "block.compile": lambda layer, options: layer.compile(backend="dcompile", fullgraph=True, options=options),
    "apart": lambda layer, options: layer.compile(
        backend="dcompile", fullgraph=True, options=options | {"promote": False}
    ),
    "dcompile.compile": lambda layer, options: dcompile.compile(layer, options=options),
    "torch.compile": lambda layer, options: torch.compile(
        layer, backend="dcompile", options=options | {"in_place": True}
    ),
}
"""Ways to compile blocks each."""


def made(
    by: str,
    options: dict[str, Any],
    replicas: int = 0,
    checkpointed: str = "",
    setting: str = "",
    fullgraph: bool = True,
    sequential: bool = False,
    **how: Any,
) -> Any:
    """A stack that is compiled before it is sharded; `by`: "" for stock, "whole", or a way to compile blocks."""
    torch.manual_seed(7)
    model = Stack().to(device())
    if checkpointed in CHECKPOINTED:
        CHECKPOINTED[checkpointed](model)
    if sequential:
        model.layers = nn.Sequential(*model.layers)
    if replicas:
        shape = replicas, dist.get_world_size() // replicas
        how["mesh"] = init_device_mesh(device().type, shape, mesh_dim_names=("replicas", "shards"))
    for number, layer in enumerate(model.layers):
        COMPILED.get(by, _as_it_is)(layer, options)
        if checkpointed == "wrapper around":
            model.layers[number] = checkpoint_wrapper(layer)
    if by.endswith("regions"):  # "stock regions" have the same names
        backend: dict[str, Any] = (
            {"backend": "dcompile", "options": options} if by == "regions" else {"backend": "eager"}
        )
        model.layers = compile_regions(model.layers, fullgraph=True, **backend)
    for layer in model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    if by == "late":
        for layer in model.layers:
            layer.compile(backend="dcompile", fullgraph=True, options=options)
    if setting:
        SETTINGS[setting](model)
    return dcompile.compile(model, options=options, fullgraph=fullgraph) if by == "whole" else model


def against_stock(
    by: str = "whole",
    train: str = "plain",
    accumulate: bool = False,
    steps: int = 3,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> dict[str, Any]:
    """The same training with stock eager FSDP2 and with dcompile: largest differences, and the receipt."""
    options = dict(ATEN if options is None else options)
    kind, stock = TRAININGS[train], "stock regions" if by == "regions" else ""
    pair = [made(compiled_by, options, **how) for compiled_by in (stock, by)]
    found = compare(*(kind(model, model, accumulate) for model in pair), steps=steps)
    return found | {"receipt": dcompile.receipt(pair[1])}


def with_copied_layers(**how: Any) -> dict[str, Any]:
    """The same, and how many calls of blocks Dynamo copied."""
    return cases.with_copied_layers(against_stock, **how)


def partly_reduced_eagerly() -> None:
    """A first micro-batch, which runs eagerly, reduces among the shards' ranks alone."""
    model = made("late", dict(ATEN), replicas=2)
    for step in range(2):
        model.set_requires_all_reduce(step > 0)
        model(batch(Mlp(), dist.get_rank(), step)["x"]).square().mean().backward()


def copied(**how: Any) -> dict[str, Any]:
    """The same, where ranks copy shards from each other's memory, however small."""
    with copying() as reach:
        return against_stock(**how) | {"copied": reach.copied}


def ranks_leave_out(by: str, alike: int = 1, **how: Any) -> None:
    """After steps alike, each rank leaves another block out."""
    model = made(by, dict(ATEN), **how)
    for step in range(alike + 60):  # equal blocks exchange shards of equal sizes: a comparison in the background tells
        if step >= alike:
            model.left_out = (1 + dist.get_rank(),)
            time.sleep(0.1)
        x = batch(Mlp(), dist.get_rank(), step)["x"]
        model(x).square().mean().backward()


class Traced(contextlib.AbstractContextManager[None]):
    """Starts of gathers and reductions, waits for them, and matmuls, in the order in which this rank runs them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._patches = contextlib.ExitStack()
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def __enter__(self) -> None:
        for name in ("begin_gather", "wait_gather", "start_scatter", "wait_scatter"):
            noted = _named(name, getattr(ShardCommunication, name))
            self._patches.enter_context(unittest.mock.patch.object(ShardCommunication, name, noted))
        self._profile.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        self._patches.close()
        events: Any = self._profile.events()
        kept = [event for event in events if event.name.startswith("dcompile: ") or event.name in MATMULS]
        kept.sort(key=lambda event: event.time_range.start)
        self.events = [event.name.removeprefix("dcompile: ").removeprefix("aten::") for event in kept]


MATMULS = ("aten::addmm", "aten::mm", "aten::mkldnn_linear")


def _named(what: str, original: Callable[..., None]) -> Callable[..., None]:
    def noted(self: ShardCommunication, bucket: str, *args: Any) -> None:
        units = {self.shards.units[number].name.rpartition(".")[0] for number in self.buckets[bucket].units}
        text = what.replace("_", " ").replace("begin", "start")
        modules = {name.removesuffix(".up").removesuffix(".down") for name in units}
        with torch.profiler.record_function(f"dcompile: {text} of {', '.join(sorted(modules))}"):
            original(self, bucket, *args)

    return noted


def order(by: str, **how: Any) -> dict[str, list[str]]:
    """What a rank runs in the forward and the backward of a step, with an evaluation in between; and in a later one."""
    model, found = made(by, dict(ATEN), **how), {}
    for step in range(3):
        for phase in ("evaluation", "forward", "evaluation between", "backward"):
            with (traced := Traced()):
                if phase == "forward":
                    loss = model(batch(Mlp(), dist.get_rank(), step)["x"]).square().mean()
                elif phase == "backward":
                    loss.backward()
                else:
                    with torch.no_grad():
                        model(batch(Mlp(), dist.get_rank(), step + 50)["x"])
            found[phase] = [*found.get(phase, []), traced.events]
    return {phase: events[-1] for phase, events in found.items() if events[-1] == events[-2]}
