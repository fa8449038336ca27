"""What a compiled model is held to: eager PyTorch's outputs, gradients and parameters, in the same run.

Tolerances are for float32 sums in another order: 1e-5 of a loss, and for gradients and parameters 1e-4 of the largest
element of the tensor (an element that is nearly 0 by cancellation has no relative accuracy of its own). Where gradients
differ by more, because the model magnifies roundings, float64 says whose are off.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tests.device import device
from tests.subject import BACKEND

LOSS, TENSOR = 1e-5, 1e-4
LR = 1e-3


def compiled(model, eagers_bits=False, backend=BACKEND, **settings):
    """`model` behind torch.compile with the backend under test; the model itself stays as it is.

    `eagers_bits`: random numbers are eager's, so that the same seed drops the same elements.
    """
    options = {"options": {"receipt": False, "fallback_random": eagers_bits}} if backend == "dcompile" else {}
    return torch.compile(model, backend=backend, **options, **settings)


def twins(make, *arguments):
    """Two models with the same weights."""
    torch.manual_seed(0)
    model = make(*arguments).to(device())
    return model, copy.deepcopy(model)


def assert_close(actual, expected, tolerance, what="", noise=1e-12):
    """Equal up to `tolerance` of the largest element of `expected`, and up to `noise`."""
    kinds = [(t.dtype, tuple(t.shape)) for t in (actual, expected)]
    assert kinds[0] == kinds[1], f"{what}: {kinds[0]} where eager has {kinds[1]}"
    actual, expected = actual.detach().double(), expected.detach().double()
    scale = expected.abs().max().item() if expected.numel() else 0.0
    difference = (actual - expected).abs().max().item() if expected.numel() else 0.0
    assert difference <= tolerance * scale + noise, f"{what}: off by {difference:.2e}, largest element {scale:.2e}"


def assert_same_state(ours, theirs, tolerance=TENSOR, what="", witnesses=None):
    """Gradients, parameters and buffers, by name; a gradient that is None stays None.

    Some true gradients are 0 (a bias of attention's keys): what is computed for them is float32's rounding of the terms
    that cancel, so they are held to 2**-23 of the largest gradient in the model. Such parameters move by noise: all are
    held to a part of one optimizer step. Gradients and buffers that differ by more are brought before `witnesses()`
    (`tests.models.nearness`).
    """
    largest = max((q.grad.abs().max().item() for q in theirs.parameters() if q.grad is not None), default=0.0)
    for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{what} gradient of {name}"
        if p.grad is not None:
            _same_or_as_near(p.grad, q.grad, tolerance, what, f"gradient of {name}", witnesses, 2**-23 * largest)
        assert_close(p, q, tolerance, f"{what} parameter {name}", noise=tolerance * LR)
    for (name, p), (_, q) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        _same_or_as_near(p, q, tolerance, what, f"buffer {name}", witnesses)


def _same_or_as_near(actual, expected, tolerance, what, name, witnesses, noise=1e-12):
    try:
        assert_close(actual, expected, tolerance, f"{what} {name}", noise)
    except AssertionError:
        if witnesses is None or actual.dtype != expected.dtype or not actual.is_floating_point():
            raise
        witnesses().agree(name, actual)


def tensors_of(result: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in what a model returned, each with its place in it."""
    if isinstance(result, torch.Tensor):
        yield path, result
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from tensors_of(value, f"{path}.{key}")
    elif isinstance(result, list | tuple):
        for number, value in enumerate(result):
            yield from tensors_of(value, f"{path}[{number}]")


def objective(result: Any) -> torch.Tensor:
    """The model's own loss, or one of all it returns: a weighted sum, for a normalised output has a constant norm."""
    if isinstance(result, Mapping) and result.get("loss") is not None:
        return result["loss"]
    parts = [value for _, value in tensors_of(result) if value.requires_grad]
    assert parts, "nothing to differentiate"
    return sum((part.float() * _weights(part)).mean() for part in parts)


def _weights(part: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, part.numel() + 1, device=part.device).sin().view(part.shape)


def assert_same_outputs(actual, expected, tolerance=TENSOR, what=""):
    """Every tensor of two results, by its place: the loss to `LOSS`, all others to `tolerance`."""
    ours, theirs = dict(tensors_of(actual)), dict(tensors_of(expected))
    assert ours.keys() == theirs.keys() and theirs, what
    for place, tensor in theirs.items():
        assert ours[place].requires_grad == tensor.requires_grad, f"{what} {place}"
        assert_close(ours[place], tensor, LOSS if place == ".loss" else tolerance, f"{what} {place}", noise=1e-7)
