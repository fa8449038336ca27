"""Training steps with the optimizer's update in a program, on each rank: under stock and under dcompile."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import dcompile
from dcompile.capture.entry import find_model
from dcompile.capture.train_step.pending_gradient import PendingScalar

STEPS = 5


class _Broken(nn.GELU):
    """An activation behind a graph break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def _wrapped(way: str, kind: str = "") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    )
    if kind == "Muon":  # for matrices
        layers = [nn.Linear(rows, columns, bias=False) for rows, columns in ((16, 32), (32, 32), (32, 4))]
        model = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])
    if way == "ddp":
        return DDP(model, bucket_cap_mb=0.004)
    if way == "uneven":  # the second rank has no element of a bias, and fewer rows of others
        model[3], model[5] = nn.Linear(32, 7), nn.Sequential(nn.Linear(7, 1), nn.Linear(1, 4))
    if way == "broken":
        model[4] = _Broken()
    if way == "frozen":
        model[3].weight.requires_grad_(False)
    settings: dict[str, Any] = {}
    if way == "mixed":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if way == "kept":
        settings["reshard_after_forward"] = False
    if way == "hsdp":
        settings["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    if way == "offloaded":
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in (model[3], model[5]):
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    if way == "factor":
        for layer in (model, model[3], model[5]):
            layer.set_gradient_divide_factor(3.0)
            layer.set_force_sum_reduction_for_comms(True)  # Gloo multiplies by no factor
    return model


def _batches(count: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    return [torch.randn(8, 20, generator=generator) for _ in range(count)]


def _loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[:, :16]), batch[:, 16:])


def _full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()


@contextlib.contextmanager
def _reducing(model: Any, last: bool) -> Any:
    if last or not isinstance(model, DDP):
        if not last:
            model.set_requires_gradient_sync(False)
        yield
        if not last:
            model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            yield


def _clipped(model: Any, clip: float | None, reads: str) -> Any:
    """Clip gradients; look at them, or at their norm, before the step if `reads` says so. Return the norm."""
    parameters = list(model.parameters())
    if reads == "gradient":
        gradient = parameters[0].grad
        assert _full(gradient).shape == parameters[0].shape and gradient.to_local().device.type == "cpu"
    if not clip:
        return torch.zeros(())
    if reads == "by hand":  # as torchtitan does it
        norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = _full(norm)
        nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        return norm
    norm = nn.utils.clip_grad_norm_(parameters, clip)
    if reads == "norm" or (reads == "norm on a rank" and dist.get_rank() == 0 and isinstance(norm, PendingScalar)):
        float(_full(norm))
    return norm


def _train(
    model: Any,
    optimizer: Any,
    clip: float | None,
    accumulate: int,
    steps: int = STEPS,
    skipping: int | None = None,
    reads: str = "",
    sums: bool = False,
) -> list[float]:
    """Train; return losses and norms. Rank `skipping` makes no update in its third step, as where it found a fault.

    `reads`: see `_clipped`. `sums`: each micro-batch reduces its gradients, and the next adds to them.
    """
    found, schedule = [], torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = iter(_batches(steps * accumulate, dist.get_rank()))
    for step in range(steps):
        for micro in range(accumulate):
            with _reducing(model, sums or micro + 1 == accumulate):
                loss = _loss(model, next(data)) / accumulate
                loss.backward()
        norm = _clipped(model, clip, reads)
        if not (step == 2 and dist.get_rank() == skipping):
            optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found += [float(loss.detach()), float(_full(norm))]
    return found


def _state(model: Any, optimizer: Any) -> list[torch.Tensor]:
    values = [p.detach() for p in model.parameters()]
    values += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return [_full(value.detach()) for value in values]


def _make(way: str, kind: str, compiled: bool, joins: bool = True) -> tuple[Any, Any]:
    model = _wrapped(way, kind)
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9} if kind == "SGD" else {"lr": 1e-3}
    kind, _, fused = kind.partition(" ")
    settings |= {"fused": True} if fused else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), **settings)
    if compiled:
        dcompile.compile(model, optimizer=optimizer if joins else None, options={"receipt": False})
    return model, optimizer


def parity(way: str, kind: str, clip: float | None = None, accumulate: int = 1, **more: Any) -> dict[str, Any]:
    """Train twice. Return the largest differences of losses and state, and how steps ran. `more`: see `_train`.

    With 16-bit gradients, whose rounding differs from stock's, the first training is dcompile's with torch's own steps.
    """
    losses, states = [], []
    for joins in (False, True):
        model, optimizer = _make(way, kind, joins or way == "mixed", joins)
        losses.append(_train(model, optimizer, clip, accumulate, **more))
        states.append(_state(model, optimizer))
    found = find_model(model)
    assert found is not None and found.step is not None
    return {
        "losses": max(abs(a - b) for a, b in zip(*losses, strict=True)),
        "state": max(float((a - b).abs().max()) for a, b in zip(*states, strict=True)),
        "joined": found.step.joined,
        "updated": found.step.updated,
        "eager": dict(found.step.eager),
        "separate": dict(found.step.separate),
        "lines": found.step.remarks(),
        "checksum": [float(x.double().sum()) for x in states[1][:3]],
    }


def resumed(way: str) -> bool:
    """Five steps, against three that are saved and two after loading into new objects: are parameters equal?"""
    results = []
    for saves in (False, True):
        model, optimizer = _make(way, "AdamW", True)
        _train(model, optimizer, 0.5, 1, 3)
        if saves:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model, optimizer = _make(way, "AdamW", True)
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        _train(model, optimizer, 0.5, 1, 2)
        results.append(_state(model, optimizer))
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*results, strict=True))


class _WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.body(batch[:, :16]), batch[:, 16:])


def _of_model(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch)
    return loss


def _read(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch)
    loss.detach().add(0)
    return loss


def whole(kind: str, clip: float | None, accumulate: int, alone: int | None = None) -> dict[str, Any]:
    """Train by `train_step` under DDP with the forward in the step's program, and by itself.

    On rank `alone`, every other step looks at the loss, so that its forward runs by itself.
    """
    found, states, counts = [], [], []
    for loss_fn in (_read, _of_model):
        model = DDP(_WithLoss(), bucket_cap_mb=0.004)
        settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9} if kind == "SGD" else {"lr": 1e-3}
        optimizer = getattr(torch.optim, kind)(model.parameters(), **settings)
        step = dcompile.train_step(
            model, loss_fn, optimizer, clip_norm=clip, accumulate=accumulate, options={"receipt": False}
        )
        data, said = iter(_batches(STEPS * accumulate, dist.get_rank())), []
        for number in range(STEPS):
            if loss_fn is _of_model and alone == dist.get_rank():
                step.loss_fn = (_read, _of_model)[number % 2]
            batch = [next(data) for _ in range(accumulate)]
            result = step(batch[0] if accumulate == 1 else batch)
            said += [float(result.loss), float(result.norm) if result.norm is not None else 0.0]
        found.append(said)
        states.append(_state(model, optimizer))
        made = find_model(model)
        assert made is not None and made.step is not None
        counts.append((made.step.whole, made.step.joined, made.adapter.eligible))
    difference = max(float((a - b).abs().max()) for a, b in zip(*states, strict=True))
    checksum = [float(x.double().sum()) for x in states[1][:3]]
    return {"losses": found, "state": difference, "counts": counts, "checksum": checksum}


def by_step(way: str, clip: float | None, accumulate: int) -> dict[str, Any]:
    """The same through `train_step`."""
    losses, states = [], []
    for compiled in (False, True):
        model, optimizer = _make(way, "AdamW", False)
        if not compiled:
            losses.append(_train(model, optimizer, clip, accumulate))
        else:
            step = dcompile.train_step(
                model, _loss, optimizer, clip_norm=clip, accumulate=accumulate, options={"receipt": False}
            )
            data, schedule = (
                iter(_batches(STEPS * accumulate, dist.get_rank())),
                torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
            )
            said = []
            for _ in range(STEPS):
                batch = [next(data) for _ in range(accumulate)]
                said.append(step(batch[0] if accumulate == 1 else batch))
                schedule.step()
            losses.append([float(_full(result.norm)) if clip else 0.0 for result in said])
            losses[0] = losses[0][1::2]
        states.append(_state(model, optimizer))
    return {
        "norms": max(abs(a - b) for a, b in zip(*losses, strict=True)),
        "state": max(float((a - b).abs().max()) for a, b in zip(*states, strict=True)),
    }
