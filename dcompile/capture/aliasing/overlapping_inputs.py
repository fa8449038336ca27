"""Detect arguments that share memory in another way than when a graph was traced, if the graph changes one in place.

AOTAutograd traces which inputs share memory, and passes a graph one tensor in place of those that do. Dynamo guards on
inputs' shapes and strides, but not on their addresses. So a later call with overlapping windows of one tensor would be
computed as if they did not overlap. Such a call runs the captured graph operator by operator, as eager does. The check
covers pairs of a changed input and another one, unless both are parameters or buffers: 50 ns an input and call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcompile import compat
from dcompile.errors import DcompileError

COUNTED = "call with arguments that share memory otherwise than when it was traced, run eagerly"
"""Name of the receipt's count of such calls."""


@dataclass(frozen=True)
class TracedOverlaps:
    """The inputs of a graph that are checked, and how they overlapped when it was traced."""

    positions: tuple[int, ...]
    """Positions among the graph's inputs."""
    changed: frozenset[int]
    """Indices into `positions` of inputs that the graph writes to."""
    chosen: frozenset[int]
    """Indices of inputs that the caller chooses: neither parameters nor buffers."""
    traced: dict[tuple[int, int], int]
    """Indices of two inputs that shared memory at tracing -> bytes from the first to the second."""


def watched_inputs(gm: Any, inputs: Sequence[Any], changed: frozenset[int] | None) -> TracedOverlaps | None:
    """Return the inputs of a graph to check, given those that it changes (None: unknown); None if there is no pair."""
    nodes = gm.graph.find_nodes(op="placeholder")
    plain = [
        n for n, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and not compat.tensors.is_wrapper(value) and value.layout is torch.strided
    ]  # fmt: skip
    chosen = {n for n in plain if not compat.dynamo.is_static_input(nodes[n], inputs[n])}
    written = {n for n in plain if n in changed} if changed is not None else chosen
    # parameters and buffers that do not change are needed only where a caller's input changes
    positions = tuple(sorted(written | chosen)) if not written & chosen else tuple(plain)
    if not written or not chosen or len(positions) < 2:
        return None
    of = {position: place for place, position in enumerate(positions)}
    places = frozenset(of[n] for n in written), frozenset(of[n] for n in chosen)
    return TracedOverlaps(positions, *places, _overlapping_pairs(positions, *places, inputs))


def _overlapping_pairs(
    positions: Sequence[int], changed: frozenset[int], chosen: frozenset[int], values: Sequence[Any]
) -> dict[tuple[int, int], int]:
    """Return relevant pairs whose addresses overlap: indices of both -> bytes from the first to the second."""
    found: dict[tuple[int, int], int] = {}
    spans = []
    for place, position in enumerate(positions):
        value = values[position]
        begin = value.data_ptr()
        if begin and (length := _length(value)):
            spans.append((begin, begin + length, place))
    spans.sort()
    for number, (begin, end, place) in enumerate(spans):
        for other_begin, _, other in spans[number + 1 :]:
            if other_begin >= end:
                break
            if (place in changed or other in changed) and (place in chosen or other in chosen):
                first, second = sorted((place, other))
                found[first, second] = other_begin - begin if first == place else begin - other_begin
    return found


def _length(value: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if value.is_contiguous():
        return value.numel() * value.element_size()
    if not value.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size()


def as_traced(
    compiled: Callable[..., Any],
    gm: Callable[..., Any],
    watched: TracedOverlaps | None,
    counted: Counter[str],
    has_collectives: bool,
) -> Callable[..., Any]:
    """Return a callable: `compiled` if inputs overlap as at tracing, else the captured graph `gm` itself, counted.

    It raises DcompileError instead of running `gm` if compiled programs reduce gradients (`has_collectives`).
    """
    if watched is None:
        return compiled
    positions, changed, chosen, traced = watched.positions, watched.changed, watched.chosen, watched.traced
    address = torch.Tensor.data_ptr
    known: list[int] = []
    """Addresses of the last call that passed the check."""

    def call(*args: Any) -> Any:
        nonlocal known
        addresses = [address(args[position]) for position in positions]
        if addresses != known:
            if _overlapping_pairs(positions, changed, chosen, args) != traced:
                if has_collectives:
                    raise DcompileError(
                        "dcompile: an argument that the model changes in place shares memory with another one, "
                        "otherwise than in the first call; pass a copy (.clone()) of one of the two"
                    )
                counted[COUNTED] += 1
                return gm(*args)
            known = addresses
        return compiled(*args)

    return compat.dynamo.no_dynamo(call, "a compiled graph")
