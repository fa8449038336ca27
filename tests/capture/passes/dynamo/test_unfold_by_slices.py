"""Changes through windows with gaps leave the gaps as they were, of inputs and of what a graph makes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dcompile
from dcompile.capture.passes.dynamo.unfold_by_slices import view_unfold_by_slices, windows


def of_an_input(x: Any) -> Any:
    x.unfold(1, 1, 3).add_(10)
    return x


def of_a_turned_input(x: Any) -> Any:
    x.t().unfold(0, 2, 8).add_(3)
    return x + 1


def behind_the_last(x: Any) -> Any:
    y = x * 1
    y.unfold(1, 4, 4).mul_(2)
    return y


def one_window(x: Any) -> Any:
    y = x * 1
    y.unfold(1, 3, 9).mul_(2)
    return y


def little_behind_the_last(x: Any) -> Any:
    y = x * 1
    y.unfold(1, 2, 8).add_(3)
    return y


def of_a_diagonal(x: Any) -> Any:
    y = x * 1
    y.diagonal(1).unfold(0, 2, 4).neg_()
    return y


def of_windows(x: Any) -> Any:
    y = x * 1
    y.unfold(1, 2, 5).unfold(0, 1, 2).fill_(3)
    return y


def assigned(x: Any) -> Any:
    y = x * 1
    seen = y.unfold(dimension=-1, size=2, step=3)
    seen[..., 1] = 7
    seen += 1
    return y


def by_strides(x: Any) -> Any:
    y = x * 1
    y.as_strided((2, 2), (20, 3), 1).add_(5)
    return y


def _body(x: Any) -> Any:
    y = x * 1
    y.unfold(1, 2, 3).mul_(2)
    return y.sin()


def checkpointed(x: Any) -> Any:
    return checkpoint(_body, x, use_reentrant=False)


FUNCTIONS: list[Callable[[Any], Any]] = [
    of_an_input, of_a_turned_input, behind_the_last, one_window, little_behind_the_last, of_a_diagonal, of_windows,
    assigned, by_strides, checkpointed,
]  # fmt: skip


def run(call: Callable[..., Any], count: int, learns: bool) -> list[list[torch.Tensor]]:
    """For each of `count` inputs, the result, and what it is now, or its gradient."""
    inputs = [torch.arange(60.0).reshape(6, 10).requires_grad_(learns) for _ in range(count)]
    results = call(*inputs)
    if learns:
        torch.stack([y.square().sum() for y in results]).sum().backward()
    found = []
    for x, y in zip(inputs, results, strict=True):
        seen = x.grad if learns else x
        assert seen is not None
        found.append([y.detach(), seen])
    return found


@pytest.mark.parametrize(
    ("functions", "learns", "dynamic"),
    [
        pytest.param(FUNCTIONS, False, None, id="values"),
        pytest.param(FUNCTIONS, True, None, id="gradients"),
        pytest.param([of_an_input, of_a_turned_input], False, True, id="values-dynamic"),  # others change no input
        pytest.param(FUNCTIONS, True, True, id="gradients-dynamic"),  # with the values
    ],
)
def test_gaps_stay_as_they_were(functions: list[Callable[[Any], Any]], learns: bool, dynamic: bool | None) -> None:
    """One graph has all functions, each with memory of its own: tracing it is what takes time."""

    def step(*inputs: Any) -> list[Any]:
        return [function(x + 0 if learns else x) for function, x in zip(functions, inputs, strict=True)]

    compiled = dcompile.compile(step, dynamic=dynamic, fullgraph=True)
    both = [run(call, len(functions), learns) for call in (compiled, step)]
    wrong = [
        function.__name__
        for function, got, want in zip(functions, *both, strict=True)
        if not all(map(torch.allclose, got, want))
    ]
    assert wrong == []


@pytest.mark.parametrize(("size", "step"), [(1, 3), (2, 4), (4, 4), (3, 9), (2, 8), (4, 2), (10, 1), (1, 10)])
@pytest.mark.parametrize("dimension", [0, 1, -1])
def test_windows_are_the_views_that_unfold_gives(dimension: int, size: int, step: int) -> None:
    base = torch.arange(240.0).reshape(12, 20)
    for x in (base, base.t()[1:], base[1:, 2:14]):
        got, want = windows(x, dimension, size, step), x.unfold(dimension, size, step)
        assert torch.equal(got, want) and got.stride() == want.stride()
        assert got.storage_offset() == want.storage_offset() and got.data_ptr() == want.data_ptr()


def test_windows_that_are_only_read_stay() -> None:
    """Patches of images, say: slices would add nodes and, of symbolic sizes, guards."""

    def graph(function: Callable[[Any], Any]) -> set[Any]:
        found: set[Any] = set()

        def backend(gm: Any, _: Any) -> Any:
            view_unfold_by_slices(gm)
            found.update(node.target for node in gm.graph.nodes)
            return gm

        torch._dynamo.reset()
        torch.compile(function, backend=backend)(torch.ones(6, 10))
        return found

    assert windows not in graph(lambda x: (x.unfold(1, 2, 3) * 2).relu_())
    assert windows in graph(of_an_input) and windows in graph(assigned)
    assert operator.iadd in graph(assigned)
