"""Training steps under GradScaler with the update in a program, on each rank: under stock and under dcompile."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import dcompile
from dcompile.capture.entry import find_model
from tests.distributed.step_cases import _batches, _full, _loss, _make, _reducing, _state

STEPS, BAD = 6, 3
"""Number of steps, and of the one whose gradients are infinite."""


def _is_bad(step: int, where: str) -> bool:
    """Is the loss of this step infinite on this rank?"""
    return step == BAD and (where == "all ranks" or (where == "rank 1" and dist.get_rank() == 1))


def _by_hand(model: Any, optimizer: Any, scaler: Any, clip: Any, accumulate: int, where: str, more: str) -> Any:
    """Return a function of a step's number and its batches, which makes the step and returns the norm."""

    def step(number: int, batches: list[torch.Tensor]) -> Any:
        for micro, batch in enumerate(batches):
            with _reducing(model, where == "shard" or micro + 1 == accumulate):
                loss = _loss(model, batch) / accumulate
                scaler.scale(loss * torch.inf if _is_bad(number, where) else loss).backward()
            if where == "shard" and number == BAD and not micro and dist.get_rank() == 1:
                next(model.parameters()).grad.to_local()[-1] = torch.inf  # in the shard of one rank alone
        norm = torch.zeros(())
        if clip or more in ("unscaled", "a gradient's norm read"):
            scaler.unscale_(optimizer)
        if more == "a gradient's norm read":
            norm = torch.linalg.vector_norm(next(model.parameters()).grad)
            float(_full(norm))
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            if more == "norm read on rank 0" and dist.get_rank() == 0 and find_model(model) is not None:
                float(_full(norm))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return norm

    return step


def _by_call(model: Any, optimizer: Any, scaler: Any, clip: Any, accumulate: int, where: str) -> Any:
    """The same by `train_step`."""
    now = [0]

    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = _loss(model, batch)
        return loss * torch.inf if _is_bad(now[0], where) else loss

    made = dcompile.train_step(
        model, loss_fn, optimizer, clip_norm=clip, accumulate=accumulate, scaler=scaler, options={"receipt": False}
    )

    def step(number: int, batches: list[torch.Tensor]) -> Any:
        now[0] = number
        norm = made(batches[0] if accumulate == 1 else batches).norm
        return torch.zeros(()) if norm is None else norm

    return step


def parity(way: str, kind: str, clip: Any, accumulate: int, where: str, more: str = "") -> dict[str, Any]:
    """Train twice. `where`: infinite losses on "all ranks" or "rank 1", or an infinite gradient in its "shard".

    `more`: "unscaled" calls `unscale_` also without clipping, "train_step" makes steps by that, "norm read on rank 0",
    "a gradient's norm read" on all ranks, "sharded scaler" has FSDP1's.
    """
    norms, states, said, kept = [list[float](), list[float]()], [], [], True
    for number, compiled in enumerate((False, True)):
        model, optimizer = _make(way, kind, compiled and more != "train_step")
        kind_of_scaler = ShardedGradScaler if more == "sharded scaler" else torch.amp.GradScaler
        scaler = kind_of_scaler("cpu", init_scale=2.0**10, growth_interval=2)
        given = model, optimizer, scaler, clip, accumulate, where
        step = _by_call(*given) if compiled and more == "train_step" else _by_hand(*given, more)
        data, scales = iter(_batches(STEPS * accumulate, dist.get_rank())), []
        for at in range(STEPS):
            before = copy.deepcopy(_state(model, optimizer))
            norm = float(_full(step(at, [next(data) for _ in range(accumulate)])))
            if at == BAD:
                kept &= all(map(torch.equal, before, _state(model, optimizer)))
            else:
                norms[number].append(norm)
            scales.append(scaler.get_scale())
        states.append(_state(model, optimizer))
        said.append((scales, scaler.state_dict()))
    found = find_model(model)
    assert found is not None and found.step is not None
    return {
        "norms": max(abs(a - b) for a, b in zip(*norms, strict=True)),
        "state": max(float((a - b).abs().max()) for a, b in zip(*states, strict=True)),
        "scalers": said[0] == said[1],
        "halved": said[1][0][BAD] == said[1][0][BAD - 1] / 2,
        "kept": kept,
        "joined": found.step.joined,
        "separate": dict(found.step.separate),
    }
