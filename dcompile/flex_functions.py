"""Functions of one pair of positions, as FlexAttention has them: applied to many pairs, and their gradients summed.

A gradient graph adds what a pair gives for a captured tensor to zeros of that tensor's size. In a loop that is a tensor
of that size for each tile. `JointGraph` returns values and indices instead, and adds them to one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dcompile.compat import flex

_PAIRS = 4
"""Dimensions of a pair's place: batch, head, query, key."""
_BEFORE_BUFFERS = 1 + _PAIRS


def over_pairs(
    function: Callable[..., Any], before: Sequence[int], after: Sequence[int | None], out: Any = 0
) -> Callable[..., Any]:
    """Apply a function of scalars to positions along four dimensions, as eager does.

    `before` and `after`: dimensions of arguments before and after the positions that are mapped over, or None.
    """
    for dim in reversed(range(_PAIRS)):
        places = [0 if dim == n else None for n in range(_PAIRS)]
        function = torch.vmap(function, in_dims=(*before, *places, *after), out_dims=out)
    return function


def is_identity(function: Any) -> bool:
    """Whether a graph returns its first argument."""
    if not isinstance(function, GraphModule):
        return False
    first = next(iter(function.graph.nodes))
    return bool(function.graph.output_node().args[0] is first)


def unexpanded(tensor: torch.Tensor, dims: Sequence[int] = range(_PAIRS)) -> torch.Tensor:
    """Return a tensor without its repetitions along dimensions."""
    for dim in dims:
        if tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


# --- gradients --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Term:
    """A part of a captured tensor's gradient: how many results of the graph it has, and what they are."""

    buffer: int
    is_whole: bool
    """Whether the result is the gradient of a tile. Else it is one for each pair, with indices after it."""
    indices: int = 0


class JointGraph:
    """Gradients of a score function, by the graph that autograd has made of it."""

    def __init__(self, graph: GraphModule) -> None:
        joint, copies = Graph(), dict[Node, Node]()
        joint.graph_copy(graph.graph, copies)
        by_score: Node | None = graph.graph.output_node().args[0][0]  # type: ignore[index, assignment]
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        captured = flex.gradients_of_captured(graph)
        self._is_missing = [node is None for node in captured]
        self._terms: list[_Term] = []
        results: list[Node] = [] if by_score is None else [copies[by_score]]
        for buffer, node in enumerate(captured):
            for item in () if node is None else summands(node):
                term, nodes = _term(buffer, item)
                self._terms.append(term)
                results += [copies[node] for node in nodes]
        joint.output(tuple(results))
        joint.eliminate_dead_code()
        self._by_score = by_score is not None
        self._is_identity = self._by_score and by_score is inputs[_BEFORE_BUFFERS] and not self._terms
        self._function = GraphModule(graph, joint)
        outs: list[int | None] = [0] * self._by_score
        for term in self._terms:
            outs += [None] if term.is_whole else [0] * (1 + term.indices)
        self._outs = tuple(outs)

    def __call__(
        self,
        scores: torch.Tensor,
        places: Sequence[torch.Tensor],
        grad: torch.Tensor,
        buffers: Sequence[Any],
        sums: Sequence[torch.Tensor | None],
    ) -> torch.Tensor | None:
        """Return the gradient of a tile's scores, if they have one. Add those of captured tensors to `sums`."""
        if self._is_identity:
            return grad
        if not self._outs:
            return None
        mapped = over_pairs(self._function, (0,), (0, *[None] * len(buffers)), self._outs)
        results = iter(mapped(scores, *places, grad, *buffers))
        by_score: torch.Tensor | None = next(results) if self._by_score else None
        for term in self._terms:
            total, values = sums[term.buffer], next(results)
            assert total is not None, "captured tensors with a gradient have a sum"
            if term.is_whole:
                total += values
            else:
                _add_at(total, [next(results) for _ in range(term.indices)], values)
        return by_score

    def sums(self, buffers: Sequence[Any]) -> list[torch.Tensor | None]:
        """Return zeros for the gradients of captured tensors, in float32 at least."""
        return [
            None if missing else torch.zeros_like(buffer, dtype=torch.promote_types(buffer.dtype, torch.float32))
            for buffer, missing in zip(buffers, self._is_missing, strict=True)
        ]

    def gradients(self, buffers: Sequence[Any], sums: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        """Return the gradients of captured tensors: those that have none are 0 if they are of floats, else None."""
        return tuple(map(_gradient, buffers, sums))


def summands(node: Node) -> Iterator[Node]:
    """Yield what a gradient is the sum of: a tensor that is read several times has as many."""
    if node.target is torch.ops.aten.add.Tensor and not node.kwargs and has_scatter(node):
        for item in node.args:
            assert isinstance(item, Node), "a sum of gradients is one of tensors"
            yield from summands(item)
    else:
        yield node


def _term(buffer: int, node: Node) -> tuple[_Term, list[Node]]:
    found = flex.scattered(node)
    if found is not None:
        indices, values = found
        return _Term(buffer, False, len(indices)), [values, *indices]
    return _Term(buffer, has_scatter(node)), [node]


def has_scatter(node: Node) -> bool:
    """Return whether a gradient is made by adding values to zeros, among others."""
    seen, waiting = {node}, [node]
    while waiting:
        item = waiting.pop()
        if flex.is_scatter(item):
            return True
        waiting += [source for source in item.all_input_nodes if source not in seen]
        seen.update(item.all_input_nodes)
    return False


def _add_at(total: torch.Tensor, indices: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    """Add values of pairs to the elements that indices name. Those of pairs with the same index are summed first."""
    same = [dim for dim in range(_PAIRS) if all(index.stride(dim) == 0 for index in indices)]
    if same:
        values = values.sum(same, keepdim=True)
    values = values.to(total.dtype)
    if indices:
        total.index_put_([unexpanded(index, same) for index in indices], values, accumulate=True)
    else:
        total += values.reshape(values.shape[_PAIRS:])


def _gradient(buffer: Any, total: torch.Tensor | None) -> torch.Tensor | None:
    if total is not None:
        return torch.empty_like(buffer, memory_format=torch.contiguous_format).copy_(total)
    if isinstance(buffer, torch.Tensor) and buffer.is_floating_point():
        return torch.zeros_like(buffer, memory_format=torch.contiguous_format)
    return None
