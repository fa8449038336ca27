"""The ways in which every architecture is used: training, inference, bfloat16, changing sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch

from tests.models.architecture import Architecture, Batch
from tests.models.checks import (
    LOSS,
    TENSOR,
    assert_close,
    assert_same_outputs,
    assert_same_state,
    compiled,
    objective,
    twins,
)
from tests.models.nearness import after, in_dtype, in_float64, witnesses
from tests.subject import BACKEND

ROWS = 2
LR = 1e-2


def train(architecture: Architecture, backend: str = BACKEND) -> Any:
    """Two steps of gradient descent."""
    model, theirs = twins(architecture.make)
    call = compiled(model.train(), backend=backend, fullgraph=architecture.fullgraph)
    batches = [architecture.batch(ROWS, architecture.lengths[0]) for _ in range(2)]
    _assert_steps(model, theirs.train(), call, batches)
    return call


def dynamic(architecture: Architecture, backend: str = BACKEND) -> Any:
    """A step each at two lengths, with sizes symbolic from the start."""
    model, theirs = twins(architecture.make)
    call = compiled(model.train(), backend=backend, fullgraph=architecture.fullgraph, dynamic=True)
    batches = [architecture.batch(ROWS + n, length) for n, length in enumerate(architecture.lengths)]
    _assert_steps(model, theirs.train(), call, batches)
    return call


def infer(architecture: Architecture, backend: str = BACKEND, mode: Any = torch.no_grad) -> Any:
    """Evaluation without gradients."""
    model, theirs = twins(architecture.make)
    batch = architecture.batch(ROWS, architecture.lengths[0])
    call = compiled(model.eval(), backend=backend, fullgraph=architecture.fullgraph)
    with mode():
        assert_same_outputs(call(**batch), theirs.eval()(**batch), what=mode.__name__)
    assert_same_state(model, theirs)
    return call


inference_mode = partial(infer, mode=torch.inference_mode)
"""A graph of its own; tests/models/test_models.py has one mode after the other."""


def bfloat16(architecture: Architecture, backend: str = BACKEND) -> Any:
    """Forward and backward, held to eager's own distance from float32: at most half as much again.

    Eager's distance is drawn several times (`tests.models.nearness`). Cancelling terms may leave as much again behind,
    though never more than a rounding of the model's largest gradient.
    """
    exact, theirs = twins(architecture.make)
    theirs = theirs.bfloat16()
    model = copy.deepcopy(theirs)
    batch = architecture.batch(ROWS, architecture.lengths[0])
    rounded = {key: in_dtype(value, torch.bfloat16) for key, value in batch.items()}
    call = compiled(model, backend=backend, fullgraph=architecture.fullgraph)
    ours, found = after(call, rounded, model), witnesses(theirs, rounded, exact, batch, unit=2**-8)
    assert ours.keys() == found.exact.keys()
    grads = {name: value for name, value in found.exact.items() if name.startswith("gradient")}
    floor = 2**-8 * max(float(grad.abs().max()) for grad in grads.values())
    for name, value in ours.items():
        if not name.startswith("buffer"):
            found.agree(name, value, floor if name in grads else 0.0)
    return call


ASPECTS: Mapping[str, Callable[[Architecture], Any]] = {
    "train": train,
    "infer": infer,
    "inference_mode": inference_mode,
    "bfloat16": bfloat16,
    "dynamic": dynamic,
}
"""Name -> check; it returns the compiled callable."""


def _assert_steps(model: Any, theirs: Any, call: Any, batches: list[Batch]) -> None:
    """A step per batch with both, each from the same state.

    (A step of Adam divides a gradient by its own size, which makes a step of the noise that is left where it is 0.)
    """
    optimizers = [torch.optim.SGD(m.parameters(), lr=LR) for m in (model, theirs)]
    start = copy.deepcopy(theirs)  # never run: some models keep what cannot be copied
    for number, batch in enumerate(batches):
        _synchronise(start, theirs)
        output, expected = call(**batch), theirs(**batch)
        assert_same_outputs(output, expected, what=f"step {number}:")
        losses = objective(output), objective(expected)
        assert_close(*losses, LOSS, f"loss of step {number}", noise=1e-7)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        assert_same_state(model, theirs, what=f"step {number}:", witnesses=cache(partial(in_float64, start, batch)))
        moves = _stepped(model, optimizers[0])
        for (name, p), move in zip(model.named_parameters(), moves, strict=True):
            wanted = torch.zeros_like(p) if p.grad is None else -LR * p.grad
            rounding = 2**-22 * float(p.detach().abs().max()) if p.numel() else 0.0
            assert_close(move, wanted, TENSOR, f"step {number}: how {name} moved", noise=rounding)
        optimizers[1].step()
        _synchronise(model, theirs)


def _synchronise(model: Any, theirs: Any) -> None:
    """The same parameters and buffers again, or models that magnify roundings would move apart."""
    with torch.no_grad():
        for mine, other in ((model.parameters, theirs.parameters), (model.buffers, theirs.buffers)):
            for p, q in zip(mine(), other(), strict=True):
                if not torch.equal(p, q):
                    p.copy_(q)


def _stepped(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """How each parameter moves in a step."""
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    return [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]
