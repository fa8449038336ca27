"""What the FSDP2 tests run on each rank; every function here is one case and returns plain data."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import os
import tempfile
import unittest.mock
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed._composable import checkpoint as checkpoint_by_hooks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

import dcompile
from dcompile.capture.entry import find_model, find_models
from dcompile.machine_model import table_figures
from dcompile.runtime.communication.fsdp_shards import ShardCommunication
from dcompile.runtime.communication.gather_scatter import in_order
from dcompile.runtime.communication.peer_memory.mapped_regions import CudaPeerMemoryAccess
from dcompile.runtime.communication.work import PendingCollective
from tests.distributed import cases, models
from tests.distributed.cases import ATEN, chunks_of_rows, device, largest_difference
from tests.distributed.matrix import MIXED
from tests.distributed.models import batch, loss_of
from tests.distributed.parts import Parts
from tests.distributed.training import Training, apart, compare


class Uneven(nn.Module):
    """Parameters that two or four ranks cannot divide evenly, and some with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 5), nn.Linear(5, 1), nn.Linear(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class Checkpointed(models.Mlp):
    """Computes its first layers again in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def part(y: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.b(torch.relu(self.a(y))))

        return self.c(torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False))


class Block(nn.Module):
    """Two layers and what goes past them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 40), nn.Linear(40, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Halves(nn.Module):
    """Two layers whose weights are gathered as two tensors each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((12, 40), (40, 12)))
        for layer in (self.up, self.down):
            weight = layer.weight.detach()
            layer.weight = nn.Parameter(Parts(weight.clone(), weight.clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)) * 1.5)


class Blocks(nn.Module):
    """Blocks that are run again in the backward, by hooks of theirs."""

    def __init__(self, layers: int = 1, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.last, self.breaks = nn.Linear(12, 4), breaks
        for layer in self.layers:
            checkpoint_by_hooks(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(x)


MAKE: dict[str, Callable[[], nn.Module]] = {
    "composable": Blocks,
    "composable_break": lambda: Blocks(layers=2, breaks=True),
    "mlp": models.Mlp,
    "two": models.Two,
    "uneven": Uneven,
    "shared": models.SharedOverBreak,
    "tied_break": models.TiedOverBreak,
    "layer": lambda: models.BrokenLayers(1),
    "layers": lambda: models.BrokenLayers(2),
    "layers_then_torchs": lambda: models.BrokenLayers(2, last=nn.Linear(12, 4)),
    "llama_broken": models.broken_llama,
    "llama_broken_tied": lambda: models.broken_llama(tied=True),
    "decides": models.Decides,
    "between": models.Between,
    "checkpointed": Checkpointed,
    "nested": models.Nested,
    "decoder_checkpointed": functools.partial(models.checkpointed_decoder, masked=True),
    "classes": models.Classes,
    "classes_tied": lambda: models.Classes(tied=True),
    "decoder": models.Decoder,
    "deep": models.deep_decoder,
    "llama": models.llama,
    "llama_tied": lambda: models.llama(tied=True),
    "llama_one": lambda: models.llama(layers=1),
    "llama_one_tied": lambda: models.llama(tied=True, layers=1),
    "llama_one_wide": lambda: models.llama(vocabulary=8192, layers=1),
}


def make(name: str, wrap: str = "blocks", mesh: tuple[int, ...] = (), replicas: int = 0, **how: Any) -> Any:
    """A module, sharded as a whole ("root"), each of its blocks and then the rest ("blocks"), or in other ways.

    `mesh`: replicas times shards; `replicas`: of them, over all ranks. `placement`: the dimension to be sharded, of
    parameters that have it. "meta" gets its memory only when it is sharded; "ignored" leaves one layer out; "grouped"
    shards two layers together.
    """
    torch.manual_seed(7)
    with torch.device("meta" if wrap == "meta" else "cpu"):
        module = MAKE[name]()
    if replicas:
        mesh = (replicas, dist.get_world_size() // replicas)
    if mesh:
        how["mesh"] = init_device_mesh(device().type, mesh, mesh_dim_names=("replicas", "shards"))
    if (dim := how.pop("placement", None)) is not None:
        how["shard_placement_fn"] = lambda parameter: Shard(dim if parameter.ndim > dim else 0)
    module = module if wrap == "meta" else module.to(device())
    if wrap in ("blocks", "meta", "checkpointed"):
        for block in blocks(module):
            fully_shard(block, **how)
    if wrap == "grouped":
        fully_shard([module.a, module.c], **how)
    if wrap == "ignored":
        how["ignored_params"] = set(module.b.parameters())
    fully_shard(module, **how)
    if wrap == "meta":
        module.to_empty(device=device())
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                parameter._local_tensor.fill_(0.01 * (number + dist.get_rank()))
    return module


def blocks(module: Any) -> list[nn.Module]:
    if isinstance(module, models.Two):
        return [module.b]
    if hasattr(module, "layers"):
        return list(module.layers)
    if hasattr(module, "shared"):
        return [module.a, module.shared]
    return list(module.model.layers) if hasattr(module, "model") else [module.a, module.b]


def compiled(module: Any, order: str = "compile", options: dict[str, Any] | None = None, **more: Any) -> Any:
    """What to call, compiled in one of the ways a user may choose."""
    options = dict(ATEN if options is None else options)
    if order == "compile":
        return dcompile.compile(module, options=options, **more)
    if order == "torch.compile":
        return torch.compile(module, backend="dcompile", options=options, **more)
    assert order == "module.compile", order
    module.compile(backend="dcompile", options=options, **more)
    return module


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    whole = tensor.to(device()).full_tensor() if isinstance(tensor, DTensor) else tensor
    return None if whole is None else whole.detach().clone()


def gradients(module: Any) -> dict[str, Any]:
    return {name: full(p.grad) for name, p in module.named_parameters()}


def parameters(module: Any) -> dict[str, Any]:
    return {name: full(p) for name, p in module.named_parameters()}


def inputs(module: Any, step: int) -> dict[str, Any]:
    tokens = isinstance(module, models.Classes | models.TiedOverBreak | models.Decoder)
    plain = "llama" if hasattr(module, "model") else "classes" if tokens else "mlp"
    found = batch(unsharded(plain), dist.get_rank(), step)
    return {name: value.to(device()) for name, value in found.items()}


@functools.cache
def unsharded(name: str) -> nn.Module:
    """A model that is only asked for its kind of inputs; making it must draw no random numbers."""
    with torch.device("meta"):
        return MAKE[name]()


class FsdpTraining(Training):
    """Gradients and parameters are put together from all ranks; so are checkpoints, unless DCP takes their parts."""

    clip = 0.1
    folder = ""
    """Where torch.distributed.checkpoint writes, if it is to."""

    @property
    def inner(self) -> Any:
        return self.wrapped

    def batch_of(self, step: int) -> dict[str, Any]:
        return inputs(self.wrapped, step)

    @contextlib.contextmanager
    def not_synced(self) -> Iterator[None]:
        self.wrapped.set_requires_gradient_sync(False)
        yield
        self.wrapped.set_requires_gradient_sync(True)

    def gradients(self) -> dict[str, Any]:
        return gradients(self.wrapped)

    def parameters(self) -> dict[str, Any]:
        return parameters(self.wrapped)

    def state(self) -> dict[str, Any]:
        options = StateDictOptions(full_state_dict=not self.folder)
        return dict(
            zip(("model", "optimizer"), get_state_dict(self.wrapped, self.optimizer, options=options), strict=True)
        )

    def write(self, state: dict[str, Any]) -> Any:
        if not self.folder:
            return super().write(state)
        dcp.save(state, checkpoint_id=self.folder)
        return self.folder

    def load(self, state: Any) -> None:
        options = StateDictOptions(full_state_dict=not self.folder)
        if self.folder:
            wanted = self.state()
            dcp.load(wanted, checkpoint_id=state)
            state = wanted
        set_state_dict(
            self.wrapped, self.optimizer, options=options,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip


def against_stock(
    name: str,
    wrap: str = "blocks",
    order: str = "compile",
    accumulate: bool = False,
    options: dict[str, Any] | None = None,
    fullgraph: bool = True,
    saved: str = "whole",
    steps: int = 3,
    **how: Any,
) -> dict[str, Any]:
    """The same training with stock eager FSDP2 and with dcompile: largest differences, and the receipt.

    `saved`: checkpoints hold "whole" tensors, or each rank's "parts" through torch.distributed.checkpoint.
    """
    stock, module = make(name, wrap, **how), make(name, wrap, **how)
    call = compiled(module, order, options, fullgraph=fullgraph)
    trainings = FsdpTraining(stock, stock, accumulate), FsdpTraining(call, module, accumulate)
    # torch takes the norm of sharded tensors, or of others, but not of both; and NCCL has none in CPU memory
    clips = wrap != "ignored" and not (how.get("offload_policy") and device().type == "cuda")
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared, src=0)
        for number, training in enumerate(trainings):
            training.folder = f"{shared[0]}/{number}" if saved == "parts" else ""
            training.clip = training.clip if clips else 0
        found = compare(*trainings, steps=steps)
        dist.barrier()
    found["receipt"] = dcompile.receipt(module)
    if "mp_policy" in how and dist.get_world_size() > 2:
        found["scatter"] = scatter(accumulate=accumulate, name=name, wrap=wrap, **how)
    return found


def with_copied_layers(**how: Any) -> dict[str, Any]:
    """The same, and how many calls of layers Dynamo copied."""
    return cases.with_copied_layers(against_stock, **how)


def scatter(mp_policy: MixedPrecisionPolicy, accumulate: bool, **how: Any) -> float:
    """How far stock is from itself with sums of 32 bits: more than two 16-bit numbers are rounded on the way."""
    policies = (mp_policy, dataclasses.replace(mp_policy, reduce_dtype=torch.float32))
    stocks = (make(mp_policy=policy, **how) for policy in policies)
    return apart(FsdpTraining(stock, stock, accumulate) for stock in stocks)


# --- one thing at a time: each case runs the same steps under stock FSDP2 and under dcompile, and compares


def same_as_stock(
    steps: Callable[[Any, Any], Any], name: str = "two", wrap: str = "blocks", **how: Any
) -> dict[str, Any]:
    """Run `steps(call, module)` both ways: largest difference of gradients and of what it returns, and the receipt."""
    usual = (name, wrap, how) == ("two", "blocks", {})
    stock, module, call = _in_turn.pair() if _in_turn and usual else pair(name, wrap, **how)
    expected, found = steps(stock, stock), steps(call, module)
    return {
        "grad": largest_difference(gradients(stock), gradients(module)),
        "param": largest_difference(parameters(stock), parameters(module)),
        "result": 0.0 if expected is None else largest_difference(expected, found),
        "receipt": dcompile.receipt(module),
    }


def pair(name: str, wrap: str = "blocks", **how: Any) -> tuple[Any, Any, Any]:
    """(stock's module, ours, what to call for ours)."""
    order, options, more = how.pop("order", "compile"), how.pop("options", None), {}
    if "fullgraph" in how:
        more["fullgraph"] = how.pop("fullgraph")
    stock, module = make(name, wrap, **how), make(name, wrap, **how)
    return stock, module, compiled(module, order, options, **more)


class InTurn:
    """One pair of models for several cases, so that what all of them trace is traced once."""

    def __init__(self) -> None:
        self._pair = pair("two")
        self._made = [parameter.detach().clone() for parameter in self._pair[0].parameters()]

    def pair(self) -> tuple[Any, Any, Any]:
        """As it was made, but for what is compiled."""
        for module in self._pair[:2]:
            with torch.no_grad():
                for parameter, made in zip(module.parameters(), self._made, strict=True):
                    parameter.copy_(made)
            module.zero_grad()
        return self._pair


_in_turn: InTurn | None = None


def in_turn(cases: tuple[str, ...], copied: Callable[[], int] = lambda: 0) -> dict[str, Any]:
    """What each case finds, one behind the other with one pair of models, and how many bytes it has `copied`."""
    global _in_turn
    _in_turn, found = InTurn(), {}
    try:
        for case in cases:
            before = copied()
            found[case] = globals()[case]() | {"copied": copied() - before}
    finally:
        _in_turn = None
    return found


def backward(call: Any, module: Any, step: int = 0) -> None:
    loss_of(call(**inputs(module, step))).backward()


def all_gather_extensions(**how: Any) -> dict[str, Any]:
    """Losses of two steps, stock's and ours, of a model whose weights are tensors made of others."""
    losses: list[list[float]] = []
    for compiles in (False, True):
        torch.manual_seed(7)
        module = fully_shard(nn.Sequential(fully_shard(Halves(), **how)), **how)
        call = compiled(module) if compiles else module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        losses.append([])
        for step in range(2):
            loss = call(inputs(models.Mlp(), step)["x"]).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.first.item())
    return {"loss": max(abs(a - b) for a, b in zip(*losses, strict=True)), "receipt": dcompile.receipt(module)}


def counted(warm: bool = False) -> dict[str, Any]:
    """Collectives that torch's mode counts in each of two steps, stock's first; a step without it comes last.

    `warm`: a step without it comes before, too.
    """
    counts = []

    def steps(call: Any, module: Any) -> None:
        if warm:
            backward(call, module)
        for step in range(2):
            with CommDebugMode() as mode:
                backward(call, module, step)
            counts.append({str(name): count for name, count in mode.get_comm_counts().items()})
        backward(call, module, 2)

    return same_as_stock(steps) | {"counts": counts}


def counted_when_warm() -> dict[str, Any]:
    return counted(warm=True)


def counted_backward() -> int:
    """The collectives of a compiled backward, of which the mode sees nothing else."""
    module = make("two")
    call = compiled(module)
    for _ in range(2):
        loss = loss_of(call(**inputs(module, 0)))
        with CommDebugMode() as mode:
            loss.backward()
    return mode.get_total_counts()


def forwards_of_all_kinds() -> dict[str, Any]:
    """Evaluation, forwards without backward, and a submodule called by itself, between training steps."""

    def steps(call: Any, module: Any) -> dict[str, Any]:
        backward(call, module)
        found = {}
        module.eval()
        with torch.no_grad():
            found["eval"] = call(**inputs(module, 1))
        with torch.inference_mode():
            found["inference"] = call(**inputs(module, 2)).clone()
        module.train()
        call(**inputs(module, 3))  # its graph is dropped
        found["part"] = module.b(inputs(module, 4)["x"]).detach()
        backward(call, module, 5)
        return found

    return same_as_stock(steps)


def kept_graph() -> dict[str, Any]:
    """A second backward of one forward; and of parameters that were kept for it, or are gathered again."""

    def steps(call: Any, module: Any) -> None:
        loss = loss_of(call(**inputs(module, 0)))
        loss.backward(retain_graph=True)
        loss.backward()

    return same_as_stock(steps)


def frozen(**how: Any) -> dict[str, Any]:
    """Some parameters without gradients, from the start and later."""

    def steps(call: Any, module: Any) -> None:
        module.a.weight.requires_grad_(False)
        backward(call, module, 0)
        module.b.requires_grad_(False)
        backward(call, module, 1)

    return same_as_stock(steps, **how)


def freed(wrapped: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """What is left of a model that nobody holds, ours and stock; a backward still to come has to come through."""
    return {
        "stock": _left_of((wrapped or make)("mlp"), lambda module: module),
        "ours": _left_of((wrapped or make)("mlp"), compiled),
    }


def _left_of(module: Any, how: Callable[[Any], Any]) -> dict[str, bool]:
    call = how(module)
    for step in range(2):
        call(**inputs(models.Mlp(), step)).sum().backward()
    last, parameter = call(**inputs(models.Mlp(), 2)).sum(), next(module.parameters())
    parameter.grad = None
    gone, part = weakref.ref(module), weakref.ref(parameter)
    del module, call
    last.backward()
    reached = parameter.grad is not None
    del last, parameter
    gc.collect()
    return {"reached": reached, "module": gone() is not None, "parameter": part() is not None}


def autograd_grad() -> dict[str, Any]:
    """Gradients of inputs alone reduce nothing and leave no .grad behind."""

    def steps(call: Any, module: Any) -> dict[str, Any]:
        x = inputs(module, 0)["x"].requires_grad_()
        (found,) = torch.autograd.grad(loss_of(call(x)), [x])
        assert all(p.grad is None for p in module.parameters())
        return {"found": found}

    return same_as_stock(steps)


def visible_parameters() -> dict[str, Any]:
    """Parameters between forward and backward, this rank's gradients of them, and what is left of them afterwards."""

    def steps(call: Any, module: Any) -> dict[str, Any]:
        def shown(name: str) -> None:
            for key, p in module.named_parameters():
                found[f"{name} {key}"] = full(p)
                found[f"{name} {key} is sharded"] = torch.tensor(float(isinstance(p, DTensor)))

        found: dict[str, Any] = {}
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(2):
            loss = loss_of(call(**inputs(module, step)))
            shown(f"{step} forward")
            between = [p for p in module.parameters() if not isinstance(p, DTensor)]
            gradients = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
            for number, gradient in enumerate(gradients):
                found[f"{step} gradient {number}"] = torch.zeros(1) if gradient is None else gradient
            shown(f"{step} grad")
            assert between and all(p.untyped_storage().size() == 0 for p in between)
            loss = loss_of(call(**inputs(module, step)))
            saved = {f"{step} {key}": full(value) for key, value in module.state_dict().items()}
            found |= saved
            shown(f"{step} saved")
            loss.backward()
            loss = loss_of(call(**inputs(module, step)))
            loss = loss + sum(p.square().sum() for p in module.parameters() if not isinstance(p, DTensor))
            loss.backward()
            shown(f"{step} backward")
            optimizer.step()
            optimizer.zero_grad()
        backward(call, module, 3)
        return found

    return same_as_stock(steps)


def parts_for_the_backward() -> dict[str, Any]:
    """Forwards leave parameters over two ranks; over how many ranks each gather was, by what ran.

    Only a backward behind its forward finds the parts: not a second one, nor one after parameters have changed.
    """
    seen: list[int] = []
    found: dict[str, list[int]] = {}

    def noted(what: str, run: Callable[[], Any]) -> Any:
        seen.clear()
        result = run()
        found[what] = sorted(seen)
        return result

    def flight(group: Any, device: Any, label: str, start: Any) -> PendingCollective:
        if label.startswith("all-gather"):
            seen.append(dist.get_world_size(group))
        return PendingCollective(group, device, label, start)

    def steps(call: Any, module: Any) -> None:
        loss = noted("forward", lambda: loss_of(call(**inputs(module, 0))))
        noted("backward", lambda: loss.backward(retain_graph=True))
        noted("again", loss.backward)
        call(**inputs(module, 2))  # its graph is dropped
        for each in (module.a, module.b, module):
            each.reshard()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)
            noted("evaluation", lambda: call(**inputs(module, 1)))
        noted("next", lambda: backward(call, module, 3))

    with unittest.mock.patch("dcompile.runtime.communication.fsdp_shards.PendingCollective", flight):
        return same_as_stock(steps, "mlp", reshard_after_forward=2) | {"over": found}


def left_over() -> dict[str, Any]:
    """Gradients of a step without sync, of a layer that the step with sync does not reach."""

    class Branching(models.Branching):
        def forward(self, x: torch.Tensor, short: bool = False) -> torch.Tensor:
            return super().forward(x, short)

    MAKE["branching"] = Branching

    def steps(call: Any, module: Any) -> None:
        module.set_requires_gradient_sync(False)
        loss_of(call(inputs(module, 0)["x"], False)).backward()
        module.set_requires_gradient_sync(True)
        loss_of(call(inputs(module, 1)["x"], True)).backward()

    return same_as_stock(steps, "branching")


def replicas(mesh: tuple[int, ...] = (2, 1), **how: Any) -> dict[str, Any]:
    """Shards that several ranks hold alike; a step reduces among the shards alone, the next one everywhere."""

    def steps(call: Any, module: Any) -> None:
        backward(call, module, 0)
        module.set_requires_all_reduce(False)
        backward(call, module, 1)
        module.set_requires_all_reduce(True)
        module.set_requires_gradient_sync(False)
        backward(call, module, 2)
        module.set_requires_gradient_sync(True)
        backward(call, module, 3)

    return same_as_stock(steps, mesh=mesh, **how)


def hooks_and_settings() -> dict[str, Any]:
    """Hooks on parameters, replaced parameters, a divisor of one's own, and resharding that is changed on the way."""
    fired: list[str] = []
    graphs: list[int] = []

    def steps(call: Any, module: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
        backward(call, module, 0)
        module.load_state_dict({n: p.detach().clone() * 0.5 for n, p in module.state_dict().items()}, assign=True)
        module.set_gradient_divide_factor(2.0)
        backward(call, module, 1)
        module.set_reshard_after_forward(False)
        backward(call, module, 2)
        module.set_reshard_after_forward(True)
        backward(call, module, 3)
        graphs.append(counters["stats"]["unique_graphs"])
        module.set_reshard_after_forward(False)
        loss = loss_of(call(**inputs(module, 4)))
        module.set_reshard_after_forward(True)
        loss.backward()
        graphs.append(counters["stats"]["unique_graphs"])

    found = same_as_stock(steps)
    half = len(fired) // 2
    return found | {
        "fired": (half, sorted(fired[:half]) == sorted(fired[half:])),
        "again": graphs[-1] - graphs[-2],
    }


def blocks_compiled_each() -> dict[str, Any]:
    """Blocks that are compiled each before they are sharded: some are equal, one is frozen, one stays gathered."""
    before, made = counters["stats"]["unique_graphs"], []
    for compiles in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(12, 12), *(Block() for _ in range(6)))
        model[5].up.weight.requires_grad_(False)
        for block in model[1:]:
            if compiles:
                options = {"kernels": "aten", "promote": False}
                block.compile(backend="dcompile", fullgraph=True, options=options)
            fully_shard(block)
        fully_shard(model).train()
        model[6].set_reshard_after_forward(False)
        made.append(model)
    results: list[list[torch.Tensor]] = [[], []]
    graphs = []
    for step in range(3):
        for model, found in zip(made, results, strict=True):
            x = inputs(models.Mlp(), step)["x"]
            if step == 2:
                model[2].set_all_reduce_hook(lambda gradient: None)  # this block's own hooks run from now on
            model.set_requires_gradient_sync(step != 0)
            with torch.no_grad():
                found.append(model(x))
            model(x).square().mean().backward()
        graphs.append(counters["stats"]["unique_graphs"] - before)
    stock, ours = made
    return {
        "grad": largest_difference(gradients(stock), gradients(ours)),
        "result": largest_difference(dict(enumerate(results[0])), dict(enumerate(results[1]))),
        "graphs": graphs,
        "equal": len({id(find_model(block)) for block in ours[1:5]}),
        "receipt": dcompile.receipt(ours[3]),
    }


def plain_names(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names of parameters without those of torch.compile's modules."""
    return {name.replace("_orig_mod.", ""): value for name, value in found.items()}


def blocks_promoted_in_wrappers() -> dict[str, Any]:
    """The same with torch.compile's module in each block's place."""
    return blocks_promoted("torch.compile")


class Stack(nn.Sequential):
    """Modules of which some may be left out at the end."""

    count = 7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in list(self)[: self.count]:
            x = module(x)
        return x


def blocks_promoted(how: str = "compile") -> dict[str, Any]:
    """The same, promoted: the root is one program until a block's own hook ends that; one block is checkpointed."""
    made: list[Stack] = []
    for compiles in (False, True):
        torch.manual_seed(3)
        model = Stack(nn.Linear(12, 12), *(Block() for _ in range(6)))
        for number, block in enumerate(model[1:], 1):
            if number == 4:
                checkpoint_by_hooks(block)
            if compiles and how == "compile":
                block.compile(backend="dcompile", fullgraph=True, options={"kernels": "aten"})
            elif compiles:
                model[number] = torch.compile(block, backend="dcompile", fullgraph=True, options={"kernels": "aten"})
            fully_shard(model[number])
        fully_shard(model).train()
        made.append(model)
    results: list[list[torch.Tensor]] = [[], []]
    receipts = []
    for step in range(6):
        for model, found in zip(made, results, strict=True):
            x = inputs(models.Mlp(), step)["x"]
            if step == 4:
                model[2].set_all_reduce_hook(lambda gradient: None)
            model.set_requires_gradient_sync(step != 1)
            model.count = 6 if step == 3 else 7
            with torch.no_grad():
                found.append(model(x))
            model(x).square().mean().backward()
        receipts.append(str(dcompile.receipt(made[1])) if step else "")
    stock, ours = made
    return {
        "grad": largest_difference(gradients(stock), plain_names(gradients(ours))),
        "result": largest_difference(dict(enumerate(results[0])), dict(enumerate(results[1]))),
        "receipts": receipts,
        "apart": sum(any(len(part.graphs) for part in find_models(block)) for block in ours[1:]),
    }


class Root(nn.Module):
    """Blocks, with code around them that users do not compile."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.head, self.how = nn.ModuleList(Block() for _ in range(3)), nn.Linear(12, 12), how
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "breaks":
            self.seen.append(x.mean().item())
        for layer in self.layers:
            recomputed = self.how == "compiled late, recomputed"
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        return self.head(x)


def blocks_in(how: str) -> dict[str, Any]:
    """Blocks that are compiled each, in a root that is special in some way: training steps as with stock FSDP2."""
    made = []
    for compiles in (False, True):
        torch.manual_seed(5)
        model = Root(how)
        late = how.startswith("compiled late")
        for layer in model.layers:
            if compiles and not late:
                layer.compile(backend="dcompile", fullgraph=True, options={"kernels": "aten"})
            fully_shard(layer)
        call = torch.compile(model, backend="eager") if compiles and how == "compiled by another" else model
        fully_shard(call)
        for layer in model.layers:
            if compiles and late:
                layer.compile(backend="dcompile", fullgraph=True, options={"kernels": "aten"})
        made.append((model, call))
    results: list[list[torch.Tensor]] = [[], []]
    for step in range(4):
        for (_, call), found in zip(made, results, strict=True):
            found.append(call(inputs(models.Mlp(), step)["x"]))
            found[-1].square().mean().backward()
    (stock, _), (ours, _) = made
    return {
        "grad": largest_difference(gradients(stock), gradients(ours)),
        "result": largest_difference(dict(enumerate(results[0])), dict(enumerate(results[1]))),
        "receipt": str(dcompile.receipt(ours.layers[0])),
        "seen": (len(stock.seen), len(ours.seen)),
    }


def pipelined_stage(options: dict[str, Any] | None = None) -> dict[str, Any]:
    """A stage of a pipeline on each rank, sharded over that rank alone."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "shards"))
    made: list[dict[str, torch.Tensor]] = []
    for compiles in (False, True):
        torch.manual_seed(rank)
        model = Stack(*(Block() for _ in range(2)))
        for block in model:
            if compiles:
                block.compile(backend="dcompile", options={"kernels": "aten", **(options or {})})
            fully_shard(block, mesh=mesh["shards"])
        fully_shard(model, mesh=mesh["shards"])
        stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=mesh.get_group("pipeline"))
        schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
        torch.manual_seed(9)
        x, y = torch.randn(4, 12), torch.randn(4, 12)
        schedule.step(x) if rank == 0 else schedule.step(target=y)
        made.append(gradients(model))
    stock, ours = made
    return {"grad": largest_difference(stock, ours), "count": len(stock), "receipt": str(dcompile.receipt(model[0]))}


class ReturnsWeight(models.Two):
    """Hands out a look at a parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.a.weight.t()
        return super().forward(x) + 0 * self.seen.sum()


class ChangesWeight(models.Two):
    """Writes to a parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.a.weight.mul_(1)
        return super().forward(x)


def stock_by_model(name: str, **how: Any) -> dict[str, Any]:
    """Models that only FSDP's own hooks can serve."""
    MAKE.update(outside=models.UsedOutside, returns=ReturnsWeight, changes=ChangesWeight)

    def steps(call: Any, module: Any) -> None:
        for step in range(2):
            backward(call, module, step)

    return same_as_stock(steps, name, **how)


def between_graphs(hows: tuple[str, ...], accumulate: bool = False, **how: Any) -> dict[str, Any]:
    """Steps with something else between two graphs, of which the last way stays; every other one may not reduce.

    Whether all is compiled is told of each step.
    """
    eligible: list[bool] = []

    def steps(call: Any, module: Any) -> dict[str, Any]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        torch.manual_seed(5 + dist.get_rank())
        found = {}
        for step in range(len(hows) + 1):
            module.how = hows[min(step, len(hows) - 1)]
            module.set_requires_gradient_sync(step % 2 == 1 or not accumulate)
            loss = loss_of(call(**inputs(module, step)))
            loss.backward()
            found[f"loss {step}"] = loss.detach()
            if module._compiled_call_impl is not None:
                eligible.append(dcompile.receipt(module).eligible)
            if step % 2 == 1 or not accumulate:
                optimizer.step()
                optimizer.zero_grad()
        module.set_requires_gradient_sync(True)
        backward(call, module, 90)
        return found | {name: buffer.clone() for name, buffer in module.named_buffers()}

    return same_as_stock(steps, "between", "root", **how) | {"eligible": eligible}


def in_chunks_of_rows(**how: Any) -> dict[str, Any]:
    """`against_stock` of a model that returns its loss, in chunks of rows."""
    with chunks_of_rows():
        return against_stock(**how)


def receipt_of_a_step(name: str) -> Any:
    module = make(name)
    backward(compiled(module), module)
    return dcompile.receipt(module)


def ranks_go_apart(how: str) -> dict[str, Any]:
    """After two steps alike, one rank goes another way than the other, behind its first graph."""
    module = make("between", "root")
    call = compiled(module)
    for step in range(5):
        module.how = how if step >= 2 and dist.get_rank() == 1 else "nothing"
        backward(call, module, step)
    return {"receipt": dcompile.receipt(module)}


def one_rank_fails(where: str) -> None:
    """Rank 1 raises in a forward or a backward; rank 0 is left in a collective."""
    module = make("two")
    call = compiled(module)
    backward(call, module)
    if dist.get_rank() == 1 and where == "forward":
        raise ValueError("mine")
    loss = loss_of(call(**inputs(module, 1)))
    if dist.get_rank() == 1:
        raise ValueError("mine")
    loss.backward()


class RecordedOnce:
    """A recorder for CPUs: runs what is recorded there and then, which is what its first replay would have done."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def record(self, function: Callable[[], list[Any]], pool: int) -> tuple[Callable[[], None], list[Any]]:
        results, replays = function(), iter([None])
        return lambda: next(replays), results

    def can_read(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device


def recorded(accumulate: bool = False, **how: Any) -> dict[str, Any]:
    """Two steps, of which the second is recorded; or one step of two backwards."""
    left: list[ShardCommunication] = []

    def steps(call: Any, module: Any) -> None:
        gc.collect()
        gc.disable()  # what is left in a circle holds results of the recording, which the caller then seems to keep
        try:
            run(call, module)
            left.extend(o for o in gc.get_objects() if issubclass(type(o), ShardCommunication))
        finally:
            gc.enable()

    def run(call: Any, module: Any) -> None:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
        for step in range(2):
            module.set_requires_gradient_sync(step == 1 or not accumulate)
            backward(call, module, step)
            if not accumulate:
                optimizer.step()
                optimizer.zero_grad()

    with (
        unittest.mock.patch("dcompile.compiler.caching.gpus", lambda gm: {"cpu"}),
        unittest.mock.patch("dcompile.runtime.cuda_graphs.recording.CudaRecorder", RecordedOnce),
    ):
        return same_as_stock(steps, options=ATEN | {"triton.cudagraphs": True}, **how) | {"left": len(left)}


def settled(**how: Any) -> dict[str, Any]:
    """Twelve steps of training on a GPU, all but the first of which are the replay of one recording each."""

    def steps(call: Any, module: Any) -> None:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        for step in range(12):
            backward(call, module, step)
            optimizer.step()
            if step < 11:
                optimizer.zero_grad()

    return same_as_stock(steps, options={"triton.cudagraphs": True}, **how)


def checkpoints(folder: str) -> dict[str, Any]:
    """What stock FSDP2 saves is loaded into a compiled module and back; names and values are the same."""
    stock, module = make("two"), make("two")
    call = compiled(module)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (stock, module)]
    for step in range(2):
        for run, m, optimizer in ((stock, stock, optimizers[0]), (call, module, optimizers[1])):
            backward(run, m, step)
            optimizer.step()
            optimizer.zero_grad()
    found = {}
    pairs = ((stock, module, optimizers), (module, stock, optimizers[::-1]))
    for number, (source, target, (theirs, ours)) in enumerate(pairs):
        saved = dict(zip(("model", "optim"), get_state_dict(source, theirs), strict=True))
        dcp.save(saved, checkpoint_id=f"{folder}/{number}")
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
        wanted = dict(zip(("model", "optim"), get_state_dict(target, ours), strict=True))
        dcp.load(wanted, checkpoint_id=f"{folder}/{number}")
        set_state_dict(target, ours, model_state_dict=wanted["model"], optim_state_dict=wanted["optim"])
        found[f"keys{number}"] = list(saved["model"]) == list(wanted["model"])
        found[f"same{number}"] = largest_difference(parameters(source), parameters(target)) == 0
    for run, m in ((stock, stock), (call, module)):
        backward(run, m, 5)
    return found | {"grad": largest_difference(gradients(stock), gradients(module))}


def packed(**how: Any) -> dict[str, Any]:
    """Training on a machine where each further tensor of a collective is said to take a millisecond."""
    slow = dataclasses.replace(table_figures("cpu"), member_us=1000.0)
    seen: list[int] = []

    def order(bucket: Any) -> list[int]:
        seen.append(len(bucket.packed))
        return in_order(bucket)

    with (
        unittest.mock.patch("dcompile.runtime.measure.calibration.table_figures", lambda name: slow),
        unittest.mock.patch("dcompile.runtime.communication.fsdp_shards.in_order", order),
    ):
        return against_stock(**how) | {"packed": max(seen)}


class ProcessReach:
    """Memory of other processes as Linux lets one read it, in place of a GPU's, at addresses beyond `FIRST`."""

    FIRST = 1 << 60
    SPACE = 1 << 48

    def __init__(self) -> None:
        self.copied = 0
        self.closed: list[int] = []
        self._others: list[tuple[int, int]] = []
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv

    def place(self) -> str:
        return "here"

    def export(self, tensor: torch.Tensor) -> tuple[str, int]:
        return f"{os.getpid()} {tensor.data_ptr() - 64}", 64

    def open(self, name: str) -> int:
        process, base = map(int, name.split())
        self._others.append((process, base))
        return self.FIRST + (len(self._others) - 1) * self.SPACE

    def close(self, address: int) -> None:
        self.closed.append(address)

    def copy(self, copies: Any, stream: int) -> None:
        for target, source, nbytes in copies:
            if source < self.FIRST:
                ctypes.memmove(target, source, nbytes)
                continue
            number, offset = divmod(source - self.FIRST, self.SPACE)
            process, base = self._others[number]
            here, there = (ctypes.c_void_p * 2)(target, nbytes), (ctypes.c_void_p * 2)(base + offset, nbytes)
            read = self._read(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            assert read == nbytes, os.strerror(ctypes.get_errno())
            self.copied += nbytes


class CountedReach(CudaPeerMemoryAccess):
    """A GPU's, which counts the bytes that it copies."""

    copied = 0

    def copy(self, copies: Any, stream: int) -> None:
        super().copy(copies, stream)
        self.copied += sum(nbytes for *_, nbytes in copies)


class Unreachable(ProcessReach):
    """On one rank."""

    def open(self, name: str) -> int:
        if dist.get_rank():
            raise RuntimeError("another container")
        return super().open(name)


def unreachable() -> dict[str, Any]:
    """One rank cannot map the other's memory, so none copies."""
    with unittest.mock.patch(f"{__name__}.ProcessReach", Unreachable):
        return copied(name="two", steps=2)


def moved() -> dict[str, Any]:
    """Parameters are given other memory between two steps; ranks copy what lies there now."""

    def steps(call: Any, module: Any) -> None:
        backward(call, module, 0)
        own = {name: 2 * value.detach() for name, value in module.state_dict().items()}
        module.load_state_dict(own, assign=True)
        backward(call, module, 1)

    return same_as_stock(steps)


def _written_through_dtensors(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)


def _written_locally(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter._local_tensor.mul_(0.5)


def _written_through_data(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.add_(0.25)


def _loaded(module: Any) -> None:
    module.load_state_dict({name: value.detach() * 0.75 for name, value in module.state_dict().items()})


def _assigned(module: Any) -> None:
    own = {name: value.detach() * 1.25 for name, value in module.state_dict().items()}
    module.load_state_dict(own, assign=True)


def _set_by_checkpoints(module: Any) -> None:
    whole = {name: full(value) for name, value in module.state_dict().items()}
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(module, {name: 0.5 * value for name, value in whole.items()}, options=options)


def _stepped(module: Any, fused: bool = False) -> None:
    torch.optim.AdamW(module.parameters(), lr=1e-2, fused=fused).step()


def _stepped_compiled(module: Any, compiles: bool = True) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)  # AdamW's step takes longer to trace
    (dcompile.compile(optimizer.step, options=ATEN) if compiles else optimizer.step)()


WRITES: dict[str, Callable[[Any], None]] = {
    "in place": _written_through_dtensors,
    "locally": _written_locally,
    "loaded": _loaded,
    "assigned": _assigned,
    "set by checkpoints": _set_by_checkpoints,
    "optimizer": _stepped,
    "fused optimizer": functools.partial(_stepped, fused=True),
    "compiled optimizer": _stepped_compiled,
    "data": _written_through_data,
}
"""Ways to change sharded parameters."""
IN_PLACE = ("in place", "locally", "optimizer", "fused optimizer", "compiled optimizer", "data")
"""Those that stock's backward runs behind, too, of a layer that its forward has sharded again."""


def written(mp_policy: MixedPrecisionPolicy = MIXED, compiles_optimizer: bool = True, **how: Any) -> dict[str, Any]:
    """Parameters are changed in all ways between steps, and between a forward and its backward where stock can do that.

    Some of these ways are counted by nothing that could tell of stale copies. Stock's optimizer is never compiled.
    """

    def steps(call: Any, module: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        compiles = compiles_optimizer and module._compiled_call_impl is not None
        writes = WRITES | {"compiled optimizer": functools.partial(_stepped_compiled, compiles=compiles)}
        for number, (name, write) in enumerate(writes.items()):
            loss = loss_of(call(**inputs(module, number)))
            loss.backward()
            write(module)
            found[f"{name}: loss"] = loss.detach()
            again = loss_of(call(**inputs(module, number + 20)))
            if name in IN_PLACE:
                write(module.b)
            again.backward()
            found |= {f"{name}: {key}": value for key, value in gradients(module).items()}
            module.zero_grad()
        return found

    return same_as_stock(steps, mp_policy=mp_policy, **how)


def outputs(**how: Any) -> dict[str, Any]:
    """What a model with nested results and arguments of all kinds returns, and its gradients, in one graph."""

    def steps(call: Any, module: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for step in range(2):
            result = call(**inputs(module, step))
            result.loss.backward()
            found |= {f"{step}: loss": result.loss.detach(), f"{step}: states": result.hidden.states.detach()}
            found |= {f"{step}: norm": result.hidden.more["norm"].detach()}
            assert type(result) is models.Answer and type(result.hidden) is models.Hidden
            assert result.hidden.more["none"] is None and result.names == ("a", None)
            dtypes = f"{result.loss.dtype} {result.hidden.states.dtype} {result.hidden.more['norm'].dtype}"
            found[f"{step}: {dtypes}"] = torch.zeros(1)
        return found

    return same_as_stock(steps, name="nested", fullgraph=True, **how)


def divided(factor: float, **how: Any) -> dict[str, Any]:
    """Gradients are divided by another number than that of the ranks."""

    def steps(call: Any, module: Any) -> None:
        module.set_gradient_divide_factor(factor)
        for child in blocks(module):
            child.set_gradient_divide_factor(factor)
        for step in range(3):
            backward(call, module, step)

    return same_as_stock(steps, **how)


@contextlib.contextmanager
def copying() -> Iterator[Any]:
    """Let ranks copy shards from each other's memory, however small."""
    reach = CountedReach() if device().type == "cuda" else ProcessReach()
    with (
        unittest.mock.patch("dcompile.runtime.communication.peer_memory.shards.reach_of", lambda device: reach),
        unittest.mock.patch("dcompile.runtime.communication.peer_memory.shards.MIN_COPIED_BYTES", 0),
    ):
        yield reach


def copied(of: str = "against_stock", **how: Any) -> dict[str, Any]:
    """Another case, where ranks copy shards from each other's memory, however small."""
    with copying() as reach:
        if of == "in_turn":
            how["copied"] = lambda: reach.copied
        found: dict[str, Any] = globals()[of](**how)
    return found | {"copied": reach.copied}


def memory(**how: Any) -> dict[str, Any]:
    """Bytes of gathered parameters that a forward leaves behind, and bytes that a step copies."""
    found: dict[str, Any] = {}
    for reshard in (True, False):
        module = make("mlp", reshard_after_forward=reshard, **how)
        call = compiled(module, options={})
        sizes = {p.numel() * 4 for p in module.parameters() if p.ndim == 2}
        backward(call, module)
        loss = loss_of(call(**inputs(module, 1)))
        node = loss.grad_fn
        while "Compiled" not in type(node).__name__:
            node = node.next_functions[0][0]
        saved = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in node.saved_tensors}
        found["gathered again" if reshard else "kept"] = sorted(n for n in saved.values() if n in sizes)
        found["sharded"] = [*found.get("sharded", []), all(isinstance(p, DTensor) for p in module.parameters())]
        loss.backward()
        assert dcompile.receipt(module).eligible
    return found | {"copied": dcompile.receipt(module).bytes_copied}


def started_again(folder: str) -> dict[str, Any]:
    """The same model compiled twice with one cache: the second takes its graphs from there."""
    options = {"verify": False, "matmul": "aten", "cache_dir": f"{folder}/rank{dist.get_rank()}"}
    modules = [make("two"), make("two")]
    for module in modules:
        backward(compiled(module, options=options), module)
    receipts = [dcompile.receipt(module) for module in modules]
    return {
        "cached": [receipt.graphs_cached for receipt in receipts],
        "built": receipts[1].built,
        "eligible": receipts[1].eligible,
        "grad": largest_difference(*(gradients(module) for module in modules)),
    }
