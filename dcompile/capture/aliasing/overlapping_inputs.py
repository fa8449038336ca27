"""Arguments that come to share memory after a graph was traced, where the graph changes one of them in place.

AOTAutograd traces which inputs share memory, and gives a graph one tensor in the place of those that do. Dynamo guards
on what inputs look like, and on nothing of where they are stored, so that a later call with windows of one tensor would
be computed as if they were apart. Such a call runs the captured graph operator by operator, as eager does. Checked are
pairs of an input that changes with another, if one of the two is no parameter or buffer: 50 ns an input and call.
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
"""What the receipt counts."""


@dataclass(frozen=True)
class TracedOverlaps:
    """The inputs of a graph that are compared, and how they were stored when it was traced."""

    positions: tuple[int, ...]
    """Where they are among the graph's."""
    changed: frozenset[int]
    """Places in `positions` of inputs that the graph writes to."""
    chosen: frozenset[int]
    """Places of those that a caller chooses."""
    traced: dict[tuple[int, int], int]
    """For places of inputs that share memory since then: bytes from the first to the second."""


def watched_inputs(gm: Any, inputs: Sequence[Any], changed: frozenset[int] | None) -> TracedOverlaps | None:
    """Which inputs of a graph to compare, given those it changes (None: not known); None if there is no pair."""
    nodes = gm.graph.find_nodes(op="placeholder")
    plain = [
        n for n, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and not compat.tensors.is_wrapper(value) and value.layout is torch.strided
    ]  # fmt: skip
    chosen = {n for n in plain if not compat.dynamo.is_static_input(nodes[n], inputs[n])}
    written = {n for n in plain if n in changed} if changed is not None else chosen
    # the others of those that stay are never compared with one another
    positions = tuple(sorted(written | chosen)) if not written & chosen else tuple(plain)
    if not written or not chosen or len(positions) < 2:
        return None
    of = {position: place for place, position in enumerate(positions)}
    places = frozenset(of[n] for n in written), frozenset(of[n] for n in chosen)
    return TracedOverlaps(positions, *places, _overlapping_pairs(positions, *places, inputs))


def _overlapping_pairs(
    positions: Sequence[int], changed: frozenset[int], chosen: frozenset[int], values: Sequence[Any]
) -> dict[tuple[int, int], int]:
    """Of pairs that matter, those whose addresses overlap: places of both, and bytes from the first to the second."""
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
    """Bytes from the first element of a tensor to behind its last."""
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
    """`compiled` for calls whose inputs share memory as when it was traced; the captured graph itself for all others.

    Raises DcompileError for those where gradients are exchanged by what is compiled.
    """
    if watched is None:
        return compiled
    positions, changed, chosen, traced = watched.positions, watched.changed, watched.chosen, watched.traced
    address = torch.Tensor.data_ptr
    known: list[int] = []
    """Addresses that were found to be right, of the last call."""

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
