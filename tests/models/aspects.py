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
    tensors_of,
    twins,
)
from tests.models.nearness import assert_as_near, distance, in_dtype, moved, witnesses
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


def infer(architecture: Architecture, backend: str = BACKEND) -> Any:
    """Evaluation without gradients, then in inference mode."""
    model, theirs = twins(architecture.make)
    batch = architecture.batch(ROWS, architecture.lengths[0])
    call = compiled(model.eval(), backend=backend, fullgraph=architecture.fullgraph)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same_outputs(call(**batch), theirs.eval()(**batch), what=mode.__name__)
    assert_same_state(model, theirs)
    return call


def bfloat16(architecture: Architecture, backend: str = BACKEND) -> Any:
    """Forward and backward, held to eager's own distance from float32: at most half as much again.

    Eager's distance is drawn three times (`tests.models.nearness`). Cancelling terms may leave as much again behind,
    though never more than a rounding of the model's largest gradient.
    """
    exact, theirs = twins(architecture.make)
    theirs = theirs.bfloat16()
    model, others = copy.deepcopy(theirs), [moved(copy.deepcopy(theirs), seed) for seed in (1, 2)]
    batch = architecture.batch(ROWS, architecture.lengths[0])
    rounded = {key: in_dtype(value, torch.bfloat16) for key, value in batch.items()}
    call = compiled(model, backend=backend, fullgraph=architecture.fullgraph)
    results = call(**rounded), exact(**batch), *(eager(**rounded) for eager in (theirs, *others))
    ours, reference, *eagers = (dict(tensors_of(result)) for result in results)
    assert all(places.keys() == ours.keys() for places in (reference, *eagers))
    for place, value in ours.items():
        assert_as_near(value, [places[place] for places in eagers], reference[place], place, unit=2**-8)
    for result in results:
        objective(result).backward()
    largest = max(x.grad.abs().max().item() for x in exact.parameters() if x.grad is not None)
    each = zip(*(eager.parameters() for eager in (theirs, *others)), strict=True)
    for (name, p), x, qs in zip(model.named_parameters(), exact.parameters(), each, strict=True):
        assert all((p.grad is None) == (q.grad is None) for q in qs), f"gradient of {name}"
        if p.grad is not None:
            grads = [q.grad for q in qs]
            noise = min(2 * max(distance(grad, x.grad) for grad in grads), 2**-8 * largest)
            assert_as_near(p.grad, grads, x.grad, f"gradient of {name}", 2**-8, noise)
    return call


ASPECTS: Mapping[str, Callable[[Architecture], Any]] = {
    "train": train,
    "infer": infer,
    "bfloat16": bfloat16,
    "dynamic": dynamic,
}
"""Name -> check; it returns the compiled callable."""


def _assert_steps(model: Any, theirs: Any, call: Any, batches: list[Batch]) -> None:
    """A step per batch with both, each from the same state.

    (A step of Adam divides a gradient by its own size, which makes a step of the noise that is left where it is 0.)
    """
    optimizers = [torch.optim.SGD(m.parameters(), lr=LR) for m in (model, theirs)]
    for number, batch in enumerate(batches):
        start = copy.deepcopy(theirs)
        output, expected = call(**batch), theirs(**batch)
        assert_same_outputs(output, expected, what=f"step {number}:")
        losses = objective(output), objective(expected)
        assert_close(*losses, LOSS, f"loss of step {number}", noise=1e-7)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        assert_same_state(model, theirs, what=f"step {number}:", witnesses=cache(partial(witnesses, start, batch)))
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
