"""The table that AOTAutograd traces with: whose rules are ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import dcompile
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


@pytest.mark.parametrize("name", [*LOSSES, "native_layer_norm_backward"])
def test_results_without_rows_follow_from_the_same_arguments_as_those_with_rows(name: str) -> None:
    """Ranks with an empty batch exchange the same tensors as others."""
    rule = table.table()[getattr(torch.ops.aten, name).default]

    def sources(rows: int) -> list[set[str]]:
        """Arguments that each result follows from."""
        x, scale = torch.randn(rows, 3), torch.ones(3)
        args: list[Any] = [torch.randn(rows, 3), x, x + 1]
        how: tuple[Any, ...] = (1,) if name == "mse_loss_backward" else (1, 1.0)
        if "norm" in name:
            args, how = [args[0], x, x[:, :1] * 0, x[:, :1] * 0 + 1, scale], (scale, [True] * 3)

        def call(*tensors: torch.Tensor) -> Any:
            return rule(*tensors[:2], [3], *tensors[2:], *how) if "norm" in name else rule(*tensors, *how)

        expected = getattr(torch.ops.aten, name)(*args[:2], *([[3]] if "norm" in name else []), *args[2:], *how)
        torch.testing.assert_close(call(*args), expected, rtol=1e-4, atol=1e-4)
        graph = make_fx(call)(*args).graph
        found: dict[Any, set[str]] = {}
        for node in graph.nodes:
            found[node] = (
                {node.name} if node.op == "placeholder" else set().union(*map(found.get, node.all_input_nodes))
            )
        results = graph.output_node().args[0]
        return [found[node] for node in (results if isinstance(results, (tuple, list)) else [results])]

    assert sources(0) == sources(2)


def test_each_caller_has_a_table_of_its_own() -> None:
    table.table().clear()
    assert len(table.table()) > 100
    assert table.table(fallback_random=True).keys() <= table.table().keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_gpus", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_gradients_of_biases_are_sums(
    transposed: bool, on_gpus: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over batch and space, of depthwise and transposed convolutions too, and where nothing else is wanted.

    oneDNN returns the gradient of filters with that of a bias, whether it is wanted or not.
    """
    change_cpu(monkeypatch, sums_bias_gradient_apart=True, converts_filters=not on_gpus)
    back, calls = torch.ops.aten.convolution_backward.default, []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.extend([args[-1]] if op is back else [])
            return op(*args, **kwargs or {})

    x, weight = torch.randn(2, 4, 6, 7, dtype=dtype), torch.randn(4, 1, 5, 5, dtype=dtype)
    how = ([4], [1, 1], [2, 2], [1, 1], transposed, [0, 0], 4)
    grad = torch.randn_like(x)
    for mask in ([True, True, True], [False, True, True], [False, False, True]):
        with Calls():
            found = table.table()[back](grad, x, weight, *how, mask)
        expected = back(grad, x, weight, *how, mask)
        assert [value is not None for value in found] == mask
        for ours, theirs, wanted in zip(found, expected, mask, strict=True):
            if wanted:
                assert ours.dtype == theirs.dtype
                torch.testing.assert_close(ours, theirs)
    assert all(not mask[2] for mask in calls)
    assert len(calls) == (2 if on_gpus else 3)  # filters of 25 elements are converted in a call of their own


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("kernels", ["auto", "aten"])
def test_gradients_that_are_returned_unasked_are_dropped(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN returns the gradient of frozen filters, where it sums that of their bias."""
    change_cpu(monkeypatch, sums_bias_gradient_apart=False)
    asked: list[Any] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.extend([args[-1]] if op is torch.ops.aten.convolution_backward.default else [])
            return op(*args, **kwargs or {})

    model = nn.Conv2d(4, 4, 3)
    model.weight.requires_grad_(False)
    x = torch.randn(2, 4, 6, 7, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), (x, model.bias))
    loss = dcompile.compile(model, options={"kernels": kernels})(x).square().sum()
    with Calls():
        loss.backward()
    assert asked == [[True, False, True]] and model.weight.grad is None
    torch.testing.assert_close((x.grad, model.bias.grad), expected)
