"""The same training with stock PyTorch and with dcompile: what every row of the numerics matrix compares."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.common import worst_of
from tests.distributed.models import batch, loss_of


class Training:
    """One model in training, stock or compiled. The base is for DDP; what is sharded differs in the lower half."""

    clip = 0.0
    """Norm that gradients are clipped to; 0 clips nothing."""

    def __init__(self, call: Any, wrapped: Any, accumulate: bool = False) -> None:
        self.call, self.wrapped, self.accumulate = call, wrapped, accumulate
        self.losses: list[float] = []
        parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        # fused, for torch works out placements for each operation of a step; which takes no mixture of two kinds
        fused = len({isinstance(parameter, DTensor) for parameter in parameters}) == 1
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=fused)

    def run(self, steps: int, first: int = 0) -> None:
        """AdamW steps, then one more forward and backward whose gradients stay.

        Every other step accumulates, if any does: what one does with kept gradients, and the next one without.
        """
        for step in range(first, first + steps + 1):
            self.optimizer.zero_grad()
            if self.accumulate and step % 2 == 0:
                with self.not_synced():
                    self.loss(100 + step).backward()
            loss = self.loss(step)
            loss.backward()
            self.losses.append(loss.item())
            if step < first + steps:
                if self.clip:
                    torch.nn.utils.clip_grad_norm_(self.wrapped.parameters(), self.clip)
                self.optimizer.step()

    def loss(self, step: int) -> torch.Tensor:
        device = next(self.inner.parameters()).device
        values = self.batch_of(step)
        return loss_of(self.call(**{name: value.to(device) for name, value in values.items()}))

    @property
    def inner(self) -> Any:
        """The user's module."""
        module = getattr(self.wrapped, "module", self.wrapped)
        return getattr(module, "_orig_mod", module)

    def batch_of(self, step: int) -> dict[str, Any]:
        return batch(self.inner, dist.get_rank(), step)

    # --- what a sharded model has elsewhere

    def not_synced(self) -> Any:
        return self.wrapped.no_sync()

    def gradients(self) -> dict[str, Any]:
        return {n: None if p.grad is None else p.grad.clone() for n, p in self.inner.named_parameters()}

    def parameters(self) -> dict[str, Any]:
        """Whole parameters, the same on every rank."""
        return {n: p.detach().clone() for n, p in self.inner.named_parameters()}

    def state(self) -> dict[str, Any]:
        """A checkpoint, as stock PyTorch writes it; less the prefix of a module that torch.compile has wrapped."""
        model = {name.replace("_orig_mod.", ""): value for name, value in self.wrapped.state_dict().items()}
        return {"model": model, "optimizer": self.optimizer.state_dict()}

    def write(self, state: dict[str, Any]) -> Any:
        """The checkpoint as another process would find it."""
        return _through_a_file(state)

    def load(self, state: Any) -> None:
        self.inner.load_state_dict({name.removeprefix("module."): value for name, value in state["model"].items()})
        self.optimizer.load_state_dict(state["optimizer"])


def compare(stock: Training, ours: Training, group: Any = None, steps: int = 3) -> dict[str, Any]:
    """Train both; then each goes on from a checkpoint of the other. Largest differences of all that was seen.

    "loss" is absolute, "relative" the same over the loss; "keys" says whether checkpoints have the same keys.
    """
    for training in (stock, ours):
        training.run(steps)
    found = {"grad": largest_difference(stock.gradients(), ours.gradients())}
    found |= {"param": largest_difference(stock.parameters(), ours.parameters())}
    found |= {"buffer": largest_difference(dict(stock.inner.named_buffers()), dict(ours.inner.named_buffers()))}
    states = [training.state() for training in (stock, ours)]
    same_keys = keys(states[0]) == keys(states[1])
    written = [training.write(state) for training, state in zip((stock, ours), states, strict=True)]
    stock.load(written[1])
    ours.load(written[0])
    for training in (stock, ours):
        training.run(1, first=10)
    pairs = list(zip(stock.losses, ours.losses, strict=True))
    return found | {
        "loss": worst_of(abs(a - b) for a, b in pairs),
        "relative": worst_of(abs(a - b) / abs(a) for a, b in pairs),
        "after loading": largest_difference(stock.parameters(), ours.parameters()),
        "ranks": across_ranks(ours.parameters(), group),
        "keys": same_keys,
    }


def apart(trainings: Iterable[Training], steps: int = 3) -> float:
    """How far the losses of the same training are apart, relative: the most that one is from the first."""
    losses = []
    for training in trainings:
        training.run(steps)
        training.run(1, first=10)
        losses.append(training.losses)
    return worst_of(abs(a - b) / abs(a) for other in losses[1:] for a, b in zip(losses[0], other, strict=True))


def keys(value: Any, prefix: str = "") -> list[str]:
    """Every path in nested dictionaries and lists, in order."""
    if isinstance(value, dict):
        return [key for name, item in value.items() for key in (f"{prefix}.{name}", *keys(item, f"{prefix}.{name}"))]
    if isinstance(value, list):
        return [key for n, item in enumerate(value) for key in (f"{prefix}.{n}", *keys(item, f"{prefix}.{n}"))]
    return []


def _through_a_file(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def largest_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest absolute difference; of tensors with values above 1, relative to the largest of them."""
    assert a.keys() == b.keys()
    found = []
    for name, value in a.items():
        other = b[name]
        assert (value is None) == (other is None), f"{name}: only one of the two has a gradient"
        if value is not None and value.numel():
            found.append((value.double() - other.double()).abs().max().item() / max(1, value.abs().max().item()))
    return worst_of(found)


def across_ranks(values: dict[str, Any], group: Any = None) -> float:
    """Largest difference between this rank's values and those of its group's first rank."""
    found = []
    for value in values.values():
        if value is not None and value.is_floating_point():
            other = value.clone()
            dist.broadcast(other, group=group, group_src=0)
            found.append((other - value).abs().max().item())
    return worst_of(found)
