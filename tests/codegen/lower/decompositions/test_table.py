"""The table that AOTAutograd traces with: whose rules are ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dcompile.codegen.lower.decompositions import table
from tests.traits import change_cpu

LOSSES = ("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_means_over_nothing_are_nothing(name: str) -> None:
    """torch's own rules divide by a count of 0."""
    rule = table.table()[getattr(torch.ops.aten, name).default]
    last = () if name == "mse_loss_backward" else (1.0,)
    for shape in ((0, 3), (2, 3)):
        x, y, grad = torch.randn(shape), torch.randn(shape), torch.tensor(2.0)
        expected = getattr(torch.ops.aten, name)(grad, x, y, 1, *last)
        torch.testing.assert_close(rule(grad, x, y, 1, *last), expected)


def test_each_caller_has_a_table_of_its_own() -> None:
    table.table().clear()
    assert len(table.table()) > 100
    assert table.table(fallback_random=True).keys() <= table.table().keys()


@pytest.mark.parametrize("on_gpus", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_gradients_of_biases_are_sums(transposed: bool, on_gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over batch and space, of depthwise and transposed convolutions too, and where nothing else is wanted."""
    change_cpu(monkeypatch, sums_bias_gradient_apart=True, converts_filters=not on_gpus)
    back, calls = torch.ops.aten.convolution_backward.default, []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.extend([args[-1]] if op is back else [])
            return op(*args, **kwargs or {})

    x, weight = torch.randn(2, 4, 6, 7, dtype=torch.bfloat16), torch.randn(4, 1, 5, 5, dtype=torch.bfloat16)
    how = ([4], [1, 1], [2, 2], [1, 1], transposed, [0, 0], 4)
    grad = torch.randn_like(x)
    for mask in ([True, True, True], [False, True, True], [False, False, True]):
        with Calls():
            found = table.table()[back](grad, x, weight, *how, mask)
        expected = back(grad, x, weight, *how, mask)
        assert [value is not None for value in found] == mask
        for ours, theirs in zip(found, expected, strict=True):
            if theirs is not None:
                assert ours.dtype == theirs.dtype
                torch.testing.assert_close(ours, theirs)
    assert all(not mask[2] for mask in calls)
    assert len(calls) == (2 if on_gpus else 3)  # filters of 25 elements are converted in a call of their own
