"""Training steps that are interrupted on a rank: what parameters and state are then, and how training goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import dcompile
from dcompile.capture.graph_programs import GraphBackward
from tests.distributed.step_cases import _batches, _loss, _make, _state

FAILS = 3
"""Number of the step that is interrupted, from 0: programs with the update exist by then."""


class Unlucky(Exception):
    """What loss_fn raises."""


def _steps(way: str, loss_fn: Callable[[Any, Any], torch.Tensor], scaler: Any = None) -> tuple[Any, Any, Any]:
    model, optimizer = _make(way, "AdamW", False)
    step = dcompile.train_step(model, loss_fn, optimizer, clip_norm=0.5, scaler=scaler, options={"receipt": False})
    return model, optimizer, step


def _uninterrupted(way: str, data: list[torch.Tensor]) -> list[torch.Tensor]:
    """State after eager steps with these batches."""
    model, optimizer = _make(way, "AdamW", False)
    for batch in data:
        _loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return _state(model, optimizer)


def _equal(one: list[torch.Tensor], other: list[torch.Tensor], tolerance: float = 0.0) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in zip(one, other, strict=True))


def interrupted(way: str, by: str, where: str) -> dict[str, Any]:
    """Steps of which all ranks' fourth fails. `by`: "error", "interrupt". `where`: "loss", "after loss", "program"."""
    number = -1

    def fail() -> None:
        if by == "interrupt":
            signal.raise_signal(signal.SIGINT)
        raise Unlucky

    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        if number == FAILS and where == "loss":
            fail()
        loss = _loss(model, batch)
        if number == FAILS and where == "after loss":
            fail()
        return loss

    model, optimizer, step = _steps(way, loss_fn)
    data, said = _batches(6, dist.get_rank()), ""
    take = GraphBackward.take

    def failing(*args: Any) -> Any:
        if number == FAILS and where == "program":
            fail()
        return take(*args)

    GraphBackward.take = failing  # type: ignore[method-assign]
    before: list[torch.Tensor] = []
    kept = is_clean = True
    try:
        for number, batch in enumerate(data):
            if number == FAILS:
                before = _state(model, optimizer)
            try:
                step(batch)
            except (Unlucky, KeyboardInterrupt) as error:
                said += f"{number} {type(error).__name__}"
                kept = _equal(before, _state(model, optimizer))
                is_clean = all(p.grad is None for p in model.parameters())
    finally:
        GraphBackward.take = take  # type: ignore[method-assign]
    others = [batch for number, batch in enumerate(data) if number != FAILS]
    goes_on = _equal(_state(model, optimizer), _uninterrupted(way, others), 1e-6)
    return {"said": said, "kept": kept, "no_gradients": is_clean, "goes_on": goes_on}


def not_a_number(way: str) -> dict[str, Any]:
    """A loss that is no number on rank 1 alone, with GradScaler: is its step left out on all ranks?"""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)
    model, optimizer, step = _steps(way, _loss, scaler)
    data, losses = _batches(6, dist.get_rank()), []
    if dist.get_rank() == 1:
        data[FAILS] = data[FAILS] * torch.nan
    before, kept = [], False
    for number, batch in enumerate(data):
        if number == FAILS:
            before = _state(model, optimizer)
        losses.append(float(step(batch).loss))
        if number == FAILS:
            kept = _equal(before, _state(model, optimizer))
    others = [batch for number, batch in enumerate(data) if number != FAILS]
    goes_on = _equal(_state(model, optimizer), _uninterrupted(way, others), 1e-6)
    numbers = [number for number, loss in enumerate(losses) if loss != loss]
    return {"kept": kept, "nan": numbers, "scale": scaler.get_scale(), "goes_on": goes_on}
