"""train_step(): forward, loss, backward, reduction, clipping and update of one step as a function of its batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from dcompile import api
from dcompile.capture.entry import find_model
from dcompile.capture.train_step.deferred_forward import SCALED
from dcompile.errors import DcompileError


class StepResult(NamedTuple):
    """Results of one step, on the model's device: reading them waits for it."""

    loss: torch.Tensor
    """The mean over micro-batches, as `loss_fn` returned it; 0-dimensional, detached."""
    norm: torch.Tensor | None
    """The gradients' 2-norm before clipping; None without `clip_norm`."""


class TrainStep:
    """A training step; see `train_step`."""

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        accumulate: int,
        scaler: Any,
    ) -> None:
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.clip_norm, self.accumulate, self.scaler = clip_norm, accumulate, scaler

    def __call__(self, batch: Any) -> StepResult:
        """Run one step. `batch`: what `loss_fn` takes; with `accumulate`, a sequence of so many of them.

        Raises DcompileError for another number of micro-batches. If `loss_fn` or the backward raises, parameters and
        state are those of the last step, and no gradient is left.
        """
        batches = [batch] if self.accumulate == 1 else self._micro_batches(batch)
        try:
            losses = [self._backward(each) for each in batches[:-1]]
            loss, is_planned = self._last(batches[-1])
            norm = self._finish(is_planned)
            losses.append(loss.detach())
        except BaseException:
            self._step.drop()
            self.optimizer.zero_grad(set_to_none=True)
            raise
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(losses[0] if len(losses) == 1 else torch.stack(losses).mean(), norm)

    def _micro_batches(self, batch: Any) -> Sequence[Any]:
        if not isinstance(batch, Sequence) or len(batch) != self.accumulate:
            got = f"{len(batch)}" if isinstance(batch, Sequence) else f"a {type(batch).__name__}"
            raise DcompileError(
                f"dcompile: train_step(accumulate={self.accumulate}) takes a sequence of {self.accumulate} "
                f"micro-batches, and got {got}; give it a list, or another `accumulate`"
            )
        return batch

    def _backward(self, batch: Any) -> torch.Tensor:
        """Run forward and backward of a micro-batch that others follow; it reduces no gradients."""
        with self._reducing(False):
            loss = self._loss(batch)
            self._run_backward(loss)
        return loss.detach()

    def _last(self, batch: Any) -> tuple[torch.Tensor, bool]:
        """Run forward and backward of the last micro-batch, or plan both as one program with the update.

        Return the loss, and whether they are planned.
        """
        forwards, parts = self._step.forwards, self.accumulate
        with forwards.allowed() if self.scaler is None else contextlib.nullcontext():
            loss = self._loss(batch)
        if self.scaler is None:
            is_planned = self._step.begin_whole(loss, self.clip_norm, parts)
        else:
            is_planned, forwards.reason = False, SCALED
            forwards.separate[SCALED] += 1
        if not is_planned:
            self._run_backward(loss)
        return loss, is_planned

    def _loss(self, batch: Any) -> torch.Tensor:
        loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
            what = f"{tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise DcompileError(
                f"dcompile: train_step's loss_fn(model, batch) must return a loss without dimensions that depends "
                f"on the model's parameters, and returned {what}; return, for example, loss.mean()"
            )
        return loss

    def _run_backward(self, loss: torch.Tensor) -> None:
        scaled = loss if self.accumulate == 1 else loss / self.accumulate
        (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()

    @contextlib.contextmanager
    def _reducing(self, last: bool) -> Iterator[None]:
        model = self.model
        if last:
            yield
        elif isinstance(model, DistributedDataParallel):
            with model.no_sync():
                yield
        elif hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                model.set_requires_gradient_sync(True)
        else:
            yield

    def _finish(self, is_planned: bool) -> torch.Tensor | None:
        """Clip and update; `is_planned`: as one program with forward and backward."""
        if is_planned:
            self.optimizer.step()
            norm: torch.Tensor | None = self._step.newest_norm
            return norm
        if self.scaler is not None and self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
        clipped = None
        if self.clip_norm is not None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            clipped = self._step.clip(parameters, self.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return None if clipped is None else self._step.known(clipped)

    @property
    def _step(self) -> Any:
        model = find_model(self.model)
        assert model is not None and model.step is not None, "train_step has compiled the model"
        return model.step


def train_step(
    model: Any,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    clip_norm: float | None = None,
    accumulate: int = 1,
    scaler: Any = None,
    **settings: Any,
) -> TrainStep:
    """Compile a model in place, with its optimizer; return the function of a batch that makes one training step.

    `model`: plain, in DistributedDataParallel, or sharded by fully_shard. `loss_fn(model, batch)`: calls the model and
    returns the loss, a tensor without dimensions. `clip_norm`: largest 2-norm of all gradients; infinity measures the
    norm and scales nothing. `accumulate`: micro-batches of a step, whose gradients are averaged. `scaler`:
    torch.amp.GradScaler, whose unscaling, check and skipped update are part of the step. `settings`: those of
    `dcompile.compile`. Model, optimizer, scheduler and scaler stay the caller's objects, and
    `docs/guide/train-step.md` says which steps are one program: with the forward, if `loss_fn` returns the model's own
    loss as it is.

    Raises DcompileError for settings that make no sense.
    """
    if accumulate < 1:
        raise DcompileError(f"dcompile: train_step(accumulate={accumulate}) needs at least one micro-batch")
    if clip_norm is not None and not clip_norm > 0:
        raise DcompileError(f"dcompile: train_step(clip_norm={clip_norm}) must be above 0, or None")
    api.compile(model, optimizer=optimizer, **settings)
    return TrainStep(model, loss_fn, optimizer, clip_norm, accumulate, scaler)
