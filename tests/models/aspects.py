"""The ways in which every architecture is used: training, inference, bfloat16, changing sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
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

ROWS = 2
LR = 1e-2


def train(architecture: Architecture) -> Any:
    """Two steps of gradient descent."""
    model, theirs = twins(architecture.make)
    call = compiled(model.train(), fullgraph=architecture.fullgraph)
    batches = [architecture.batch(ROWS, architecture.lengths[0]) for _ in range(2)]
    _assert_steps(model, theirs.train(), call, batches)
    return call


def dynamic(architecture: Architecture) -> Any:
    """A step each at two lengths, with sizes symbolic from the start."""
    model, theirs = twins(architecture.make)
    call = compiled(model.train(), fullgraph=architecture.fullgraph, dynamic=True)
    batches = [architecture.batch(ROWS + n, length) for n, length in enumerate(architecture.lengths)]
    _assert_steps(model, theirs.train(), call, batches)
    return call


def infer(architecture: Architecture) -> Any:
    """Evaluation without gradients, then in inference mode."""
    model, theirs = twins(architecture.make)
    batch = architecture.batch(ROWS, architecture.lengths[0])
    call = compiled(model.eval(), fullgraph=architecture.fullgraph)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same_outputs(call(**batch), theirs.eval()(**batch), what=mode.__name__)
    assert_same_state(model, theirs)
    return call


def bfloat16(architecture: Architecture) -> Any:
    """Forward and backward, held to eager's own distance from float32: at most half as much again.

    Where terms cancel, eager's distance is chance, and so is ours. How large it may be is seen from eager itself, with
    parameters moved by about a rounding; and it is never more than a rounding of the model's largest gradient.
    """
    exact, theirs = twins(architecture.make)
    theirs = theirs.bfloat16()
    model, nudged = copy.deepcopy(theirs), [_nudged(copy.deepcopy(theirs), seed) for seed in (1, 2)]
    batch = architecture.batch(ROWS, architecture.lengths[0])
    rounded = {key: _in_bfloat16(value) for key, value in batch.items()}
    call = compiled(model, fullgraph=architecture.fullgraph)
    results = call(**rounded), theirs(**rounded), exact(**batch)
    ours, eagers, reference = (dict(tensors_of(result)) for result in results)
    assert ours.keys() == eagers.keys() == reference.keys()
    for place, value in ours.items():
        _assert_as_near(value, eagers[place], reference[place], place)
    for result in (*results, *(other(**rounded) for other in nudged)):
        objective(result).backward()
    largest = max(x.grad.abs().max().item() for x in exact.parameters() if x.grad is not None)
    others = zip(*(other.parameters() for other in nudged), strict=True)
    four = zip(model.named_parameters(), theirs.parameters(), exact.parameters(), others, strict=True)
    for (name, p), q, x, moved in four:
        assert (p.grad is None) == (q.grad is None), f"gradient of {name}"
        if p.grad is not None:
            chance = max(_distance(other.grad, x.grad) for other in moved)
            _assert_as_near(p.grad, q.grad, x.grad, f"gradient of {name}", noise=min(2 * chance, 2**-8 * largest))
    return call


def _nudged(model: Any, seed: int) -> Any:
    """The model with every parameter moved by at most about a rounding of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 2**-8 * (2 * torch.rand(p.shape, generator=generator).to(p.device) - 1))
    return model


def _distance(value: Any, exact: Any) -> float:
    return float((value.float() - exact.float()).norm())


def _assert_as_near(ours: Any, eagers: Any, exact: Any, what: str, noise: float = 0.0) -> None:
    """`noise` is what cancelling terms leave behind."""
    assert ours.dtype == eagers.dtype and ours.shape == eagers.shape, what
    off, allowed = _distance(ours, exact), _distance(eagers, exact)
    limit = 1.5 * allowed + 1e-3 * float(exact.float().norm()) + noise
    assert off <= limit, f"{what}: off by {off:.2e}, eager by {allowed:.2e}"


ASPECTS: Mapping[str, Callable[[Architecture], Any]] = {
    "train": train,
    "infer": infer,
    "bfloat16": bfloat16,
    "dynamic": dynamic,
}
"""Name -> check; it returns the compiled callable."""


def _assert_steps(model: Any, theirs: Any, call: Any, batches: list[Batch]) -> None:
    """A step per batch with both. Gradient descent, for it is linear: parameters may move apart by what gradients may.

    (Adam divides a gradient by its own size, which makes a step of the noise that is left where a gradient is 0.)
    """
    optimizers = [torch.optim.SGD(m.parameters(), lr=LR) for m in (model, theirs)]
    for number, batch in enumerate(batches):
        output, expected = call(**batch), theirs(**batch)
        assert_same_outputs(output, expected, what=f"step {number}:")
        losses = objective(output), objective(expected)
        assert_close(*losses, LOSS, f"loss of step {number}", noise=1e-7)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        assert_same_state(model, theirs, what=f"step {number}:")
        moves = [_stepped(m, optimizer) for m, optimizer in zip((model, theirs), optimizers, strict=True)]
        noise = LR * 2**-23 * max(float(p.grad.abs().max()) for p in theirs.parameters() if p.grad is not None)
        for (name, p), ours, eagers in zip(theirs.named_parameters(), *moves, strict=True):
            rounding = 2**-22 * float(p.detach().abs().max()) if p.numel() else 0.0
            assert_close(ours, eagers, TENSOR, f"step {number}: how {name} moved", noise=noise + rounding)


def _stepped(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """How each parameter moves in a step."""
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    return [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]


def _in_bfloat16(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
