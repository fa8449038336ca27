"""How near the exact result ours has to be where two right ones differ: eager says, run again with other roundings.

How far a result is from the exact one is partly chance: where a few elements are compared, where terms cancel, where a
model magnifies roundings or one of them decides on which side of a ReLU an element lies. So eager's distance is drawn
several times: as the model is, and with a sixteenth of its parameters' elements moved to their neighbours, which
changes roundings everywhere and accuracy nowhere.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests.models.checks import objective, tensors_of

Values = dict[str, torch.Tensor]
DRAWS = (3, 9)
"""How often eager is run: first, and where ours is further off than that."""


@dataclass
class Witnesses:
    """What a step comes to: exactly, and in eager with other roundings; outputs, gradients and buffers by name."""

    exact: Values
    draw: Callable[[int], Values]
    """draw(seed): eager's; 0 is the model as it is."""
    unit: float
    """Half of what 1 is from its neighbour."""
    drawn: list[Values] = field(default_factory=list)

    def agree(self, name: str, ours: torch.Tensor, floor: float = 0.0) -> None:
        """Raises AssertionError unless ours is as near to the exact value as eager's."""
        for count in DRAWS:
            self.drawn += [self.draw(seed) for seed in range(len(self.drawn), count)]
            eagers = [values[name] for values in self.drawn]
            try:
                assert_as_near(ours, eagers, self.exact[name], name, self.unit, floor)
            except AssertionError:
                if count == DRAWS[-1]:
                    raise
            else:
                return


def witnesses(model: Any, batch: Any, exact: Any, exact_batch: Any, unit: float) -> Witnesses:
    """Of a step that starts from `model`, and the same in exact arithmetic; both models stay as they are."""
    values = after(copy.deepcopy(exact), exact_batch)
    return Witnesses(values, partial(_drawn, model, batch), unit)


def in_float64(model: Any, batch: Any) -> Witnesses:
    """Of a float32 step."""
    exact = {key: in_dtype(value, torch.float64) for key, value in batch.items()}
    return witnesses(model, batch, copy.deepcopy(model).double(), exact, unit=2**-24)


def _drawn(model: Any, batch: Any, seed: int) -> Values:
    other = copy.deepcopy(model)
    return after(moved(other, seed) if seed else other, batch)


def after(call: Any, batch: Any, model: Any = None) -> Values:
    """Outputs, gradients and buffers of a step of `call`, which is `model` or that compiled."""
    model = call if model is None else model
    model.zero_grad()
    result = call(**batch)
    objective(result).backward()
    values = {f"output {place}": value.detach() for place, value in tensors_of(result)}
    values |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return values | {f"buffer {name}": buffer for name, buffer in model.named_buffers()}


def moved(model: Any, seed: int) -> Any:
    """The model with a sixteenth of its parameters' elements moved to a neighbouring number."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            chosen, up = torch.rand(2, *p.shape, generator=generator).to(p.device)
            towards = torch.where(up < 0.5, -math.inf, math.inf).to(p.dtype)
            p.copy_(torch.where(chosen < 1 / 16, torch.nextafter(p, towards), p))
    return model


def distance(value: Any, exact: Any) -> float:
    return float((value.double() - exact.double()).norm())


def assert_as_near(ours: Any, eagers: Sequence[Any], exact: Any, what: str, unit: float, floor: float = 0.0) -> None:
    """At most half as far again from `exact` as the furthest of eager's.

    A norm over n elements varies by some 1/sqrt(n), and a single number may be its neighbour by chance alone.
    Cancelling terms may leave as much again behind, up to `floor`.
    """
    assert ours.dtype == eagers[0].dtype and ours.shape == eagers[0].shape, what
    off, allowed = distance(ours, exact), max(distance(eager, exact) for eager in eagers)
    few = 1 / math.sqrt(max(1, exact.numel()))
    limit = (1.5 + 2 * few) * allowed + unit * (0.25 + 2 * few) * float(exact.double().norm()) + min(2 * allowed, floor)
    assert off <= limit, f"{what}: off by {off:.2e}, eager by {allowed:.2e}"


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """An argument whose floating-point numbers are of this dtype."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
