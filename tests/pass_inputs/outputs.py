"""Graphs for the rows of `OUTPUT_STEPS`, and their results in text: which share memory, and which are one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcompile.capture.aliasing.output_views import OutputRequest
from tests.pass_inputs.graphs import traced


@dataclass(frozen=True)
class OutputInput:
    """A function of one tensor, and what AOTAutograd says of its results."""

    function: Callable[[torch.Tensor], Any]
    request: OutputRequest
    returned: Callable[[list[Any]], list[Any]] = list
    """What a program returns in place of what the function does."""

    def graph(self) -> Any:
        """Its graph."""
        return traced(self.function, self.argument())

    def argument(self) -> torch.Tensor:
        """What it is called with."""
        return torch.zeros(2, 3)

    def results(self, gm: Any) -> list[Any]:
        """What a program of this graph returns."""
        return self.returned(list(gm(self.argument().requires_grad_())))


def _looked_at(x: torch.Tensor) -> Any:
    y = x * 2
    return [y, y.view(6)]


def _looked_at_as_integers(x: torch.Tensor) -> Any:
    y = x * 2
    return [y, y.view(torch.int32)]


def _same_twice(x: torch.Tensor) -> Any:
    y = x * 2
    return [y, y]


def _saved_view(x: torch.Tensor) -> Any:
    return [x.sin(), x[1:]]


def _saved_itself(x: torch.Tensor) -> Any:
    y = x * 2
    return [y.view(6), y]


def _same_look(x: torch.Tensor) -> Any:
    y = x * 2
    return [y, y.view(2, 3)]


def _one_tensor(results: list[Any]) -> list[Any]:
    """A look at all of a result as it lies is the result itself in a program."""
    return [results[0], results[0]]


def _looks_anew(results: list[Any]) -> list[Any]:
    """A program looks anew at memory for each place."""
    return [result.view_as(result) for result in results]


OUTPUT_INPUTS: Mapping[str, OutputInput] = {
    "return_views": OutputInput(_saved_itself, OutputRequest(1, views=(0,))),
    "separate_results": OutputInput(_same_look, OutputRequest(2), _one_tensor),
    "view_as_dtypes": OutputInput(_looked_at_as_integers, OutputRequest(2)),
    "detach_saved_views": OutputInput(_saved_view, OutputRequest(1)),
    "separate_results of constants": OutputInput(_same_look, OutputRequest(2, constant=(0, 1)), _one_tensor),
    "detach_results": OutputInput(_looked_at, OutputRequest(2, constant=(1,))),
    "repeat_results": OutputInput(_same_twice, OutputRequest(2), _looks_anew),
}
"""One for each row, in their order."""


def results_text(results: list[Any]) -> str:
    """A line for each result: its layout, and the earlier one that it is, or whose memory it is in."""
    lines = []
    for place, result in enumerate(results):
        earlier = results[:place]
        same = [f"is result {n}" for n, other in enumerate(earlier) if other is result]
        shared = [
            f"in the memory of result {n}"
            for n, other in enumerate(earlier)
            if other.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
        ]
        facts = ["a view" if result._is_view() else "no view", *(["with a gradient"] if result.requires_grad else [])]
        words = ", ".join([*facts, *(same or shared[:1])])
        lines.append(f"{place}: {str(result.dtype).removeprefix('torch.')}{[*result.shape]}, {words}")
    return "\n".join(lines)
