"""The ways in which every architecture is used: training, inference, bfloat16, changing sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.models.architecture import Architecture, Batch
from tests.models.checks import (
    LOSS,
    LR,
    assert_close,
    assert_same_outputs,
    assert_same_state,
    compiled,
    objective,
    tensors_of,
    twins,
)

ROWS = 2
# A step moves by at most LR / EPS of what a gradient is off by. Where gradients are held to 2**-23 of the largest one,
# of about 10, that is to stay below 1e-4 of a step: EPS >= 2**-23 * 10 / 1e-4.
EPS = 1e-2


def train(architecture: Architecture) -> Any:
    """Two AdamW steps."""
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
    """Forward and backward, held to eager's own distance from float32: at most half as much again."""
    exact, theirs = twins(architecture.make)
    theirs = theirs.bfloat16()
    model = copy.deepcopy(theirs)
    batch = architecture.batch(ROWS, architecture.lengths[0])
    rounded = {key: _in_bfloat16(value) for key, value in batch.items()}
    call = compiled(model, fullgraph=architecture.fullgraph)
    results = call(**rounded), theirs(**rounded), exact(**batch)
    ours, eagers, reference = (dict(tensors_of(result)) for result in results)
    assert ours.keys() == eagers.keys() == reference.keys()
    for place, value in ours.items():
        _assert_as_near(value, eagers[place], reference[place], place)
    for result in results:
        objective(result).backward()
    largest = max(x.grad.abs().max().item() for x in exact.parameters() if x.grad is not None)
    for (name, p), q, x in zip(model.named_parameters(), theirs.parameters(), exact.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"gradient of {name}"
        if p.grad is not None:
            _assert_as_near(p.grad, q.grad, x.grad, f"gradient of {name}", noise=2**-8 * largest)
    return call


def _assert_as_near(ours: Any, eagers: Any, exact: Any, what: str, noise: float = 0.0) -> None:
    """`noise` is what terms of the size of the largest gradient leave behind where they cancel."""
    assert ours.dtype == eagers.dtype and ours.shape == eagers.shape, what
    off, allowed = ((value.float() - exact.float()).norm() for value in (ours, eagers))
    limit = 1.5 * allowed + 1e-3 * exact.float().norm() + noise
    assert off <= limit, f"{what}: off by {off:.2e}, eager by {allowed:.2e}"


ASPECTS: Mapping[str, Callable[[Architecture], Any]] = {
    "train": train,
    "infer": infer,
    "bfloat16": bfloat16,
    "dynamic": dynamic,
}
"""Name -> check; it returns the compiled callable."""


def _assert_steps(model: Any, theirs: Any, call: Any, batches: list[Batch]) -> None:
    """An AdamW step per batch with both."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=LR, eps=EPS) for m in (model, theirs)]
    for number, batch in enumerate(batches):
        output, expected = call(**batch), theirs(**batch)
        assert_same_outputs(output, expected, what=f"step {number}:")
        losses = objective(output), objective(expected)
        assert_close(*losses, LOSS, f"loss of step {number}", noise=1e-7)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        assert_same_state(model, theirs, what=f"step {number}:")
        for optimizer in optimizers:
            optimizer.step()
    assert_same_state(model, theirs, what="after the last step:")


def _in_bfloat16(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
