"""How near float64 a result has to be where two right ones differ: eager itself says, run again with other roundings.

How far a result is from the true one is partly chance: where a few elements are compared, where terms cancel, where a
model magnifies roundings. So eager's distance is drawn three times: as the model is, and twice with a sixteenth of its
parameters' elements moved to their neighbours, which changes roundings everywhere and accuracy nowhere.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.models.checks import objective

Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Witnesses:
    """What float64 finds, and eager with other roundings: gradients and buffers after a step, by name."""

    exact: Values
    others: Sequence[Values]

    def agree(self, name: str, ours: torch.Tensor, eagers: torch.Tensor) -> None:
        """Raises AssertionError unless ours is as near to float64's as eager's."""
        assert_as_near(ours, [eagers, *(other[name] for other in self.others)], self.exact[name], name, unit=2**-24)


def witnesses(model: Any, batch: Any) -> Witnesses:
    """Of a step that starts from `model`, which stays as it is."""
    exact = {key: in_dtype(value, torch.float64) for key, value in batch.items()}
    others = [_after(moved(copy.deepcopy(model), seed), batch) for seed in (1, 2)]
    return Witnesses(_after(copy.deepcopy(model).double(), exact), others)


def _after(model: Any, batch: Any) -> Values:
    model.zero_grad()
    objective(model(**batch)).backward()
    grads = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return grads | {f"buffer {name}": buffer for name, buffer in model.named_buffers()}


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


def assert_as_near(ours: Any, eagers: Sequence[Any], exact: Any, what: str, unit: float, noise: float = 0.0) -> None:
    """At most half as far again from `exact` as the furthest of eager's; `unit`: half of what 1 is from its neighbour.

    A norm over n elements varies by some 1/sqrt(n), and a single number may be its neighbour by chance alone. `noise`
    is what cancelling terms leave behind.
    """
    assert ours.dtype == eagers[0].dtype and ours.shape == eagers[0].shape, what
    off, allowed = distance(ours, exact), max(distance(eager, exact) for eager in eagers)
    few = 1 / math.sqrt(max(1, exact.numel()))
    limit = (1.5 + 2 * few) * allowed + unit * (0.25 + 2 * few) * float(exact.double().norm()) + noise
    assert off <= limit, f"{what}: off by {off:.2e}, eager by {allowed:.2e}"


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """An argument whose floating-point numbers are of this dtype."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
