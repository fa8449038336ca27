"""Elements of an indexed tensor; the index may have slices, integers, None and tensors of positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dcompile.capture.passes.dynamo.symbolic_elements.elements import (
    Elements,
    Operation,
    UnknownElements,
    axis,
    name_of,
    size_of,
    value_of,
)
from dcompile.capture.passes.dynamo.symbolic_elements.values import (
    position_in,
    same_dtype,
    whole,
)
from dcompile.ir.index import Index, Ranges, Size, as_index, is_nonnegative, var
from dcompile.ir.piecewise import Leaf, Tree, combine, negate_condition


def index_elements(operation: Operation) -> Elements:
    source, index = same_dtype(operation), operation.node.args[1]
    parts: list[Any] = list(index) if isinstance(index, tuple | list) else [index]
    if name_of(operation.node) == "index":  # ATen's operator has None for a dimension that is taken whole
        parts = [slice(None) if part is None else part for part in parts]
    tensors = [part for part in parts if isinstance(value_of(part), torch.Tensor)]
    if any(part not in operation.known for part in tensors):
        raise UnknownElements
    parts = _written_out(parts, len(source.shape))
    places = _IndexedDimensions(operation, parts, [operation.known[part] for part in tensors])
    positions = dict[int, Index]()
    by_tensor = dict[int, Tree]()
    for dim, part, place in places.dims():
        if part in tensors:
            by_tensor[dim] = places.broadcast(operation.known[part])
        elif isinstance(part, slice):
            positions[dim] = _slice_elements(part, source.shape[dim], place, operation.shape)
        else:
            positions[dim] = _from_the_start(size_of(part), source.shape[dim])

    def element(*leaves: Leaf) -> Tree:
        found = dict(positions)
        for dim, leaf in zip(by_tensor, leaves, strict=True):
            if axis(dim) in operation.reads.positions(source.tree):  # negative positions are relative to the end
                found[dim] = _from_the_start(whole(leaf), source.shape[dim], operation.ranges)
            else:
                found[dim] = as_index(0)
        return operation.at(source, found)

    return operation.made(combine(element, [*by_tensor.values()], operation.ranges))


def _written_out(parts: list[Any], dims: int) -> list[Any]:
    """Return an index with a full slice for each dimension that it leaves out."""
    used = sum(part is not None and part is not Ellipsis for part in parts)
    if any(isinstance(part, bool) for part in parts) or used > dims:
        raise UnknownElements
    place = next((n for n, part in enumerate(parts) if part is Ellipsis), None)
    if place is None:
        return [*parts, *[slice(None)] * (dims - used)]
    return [*parts[:place], *[slice(None)] * (dims - used), *parts[place + 1 :]]


class _IndexedDimensions:
    """Map from dimensions of an indexed tensor, and of its index tensors, to dimensions of the result."""

    def __init__(self, operation: Operation, parts: list[Any], tensors: list[Elements]) -> None:
        """`parts`: an index with an entry for each dimension. `tensors`: elements of the tensors in it.

        Raises UnknownElements for index tensors of other dtypes than int32 and int64.
        """
        self.operation, self.parts = operation, parts
        self.count = max((len(tensor.shape) for tensor in tensors), default=0)
        if any(tensor.dtype not in _POSITIONS or (self.count and not tensor.shape) for tensor in tensors):
            raise UnknownElements  # booleans are a mask; a tensor without dimensions acts as an integer
        others = [part for part in parts if part is None or isinstance(part, slice) or _is_tensor(part)]
        places = [n for n, part in enumerate(others) if _is_tensor(part)]
        adjacent = places and places[-1] - places[0] == len(places) - 1
        self.begin = sum(not _is_tensor(part) for part in others[: places[0]]) if adjacent else 0
        """The first dimension of the result that comes from index tensors."""

    def dims(self) -> Iterator[tuple[int, Any, int]]:
        """Yield (dimension of the source, its index, dimension of the result); the last is valid for slices."""
        dim = sliced = 0
        for part in self.parts:
            if part is not None:
                yield dim, part, sliced + (self.count if sliced >= self.begin else 0)
                dim += 1
            sliced += part is None or isinstance(part, slice)

    def broadcast(self, tensor: Elements) -> Tree:
        """Return an index tensor's element at a position of the result."""
        before = self.begin + self.count - len(tensor.shape)
        return self.operation.at(tensor, {n: var(axis(before + n)) for n in range(len(tensor.shape))})


_POSITIONS = (torch.int64, torch.int32)


def _is_tensor(part: Any) -> bool:
    return isinstance(value_of(part), torch.Tensor)


def _slice_elements(part: slice, size: Size, place: int, shape: Sequence[Size]) -> Index:
    step = 1 if part.step is None else part.step
    if not isinstance(step, int) or step < 1:
        raise UnknownElements
    start = as_index(0) if part.start is None else _from_the_start(size_of(part.start), size)
    return start + position_in(place, shape) * step


def _from_the_start(position: Size, size: Size, ranges: Ranges | None = None) -> Index:
    """Return a position relative to the start; a negative one is relative to the end.

    Raises UnknownElements if the sign is unknown.
    """
    index = as_index(position)
    for found, sign in ((index, 1), (index + size, -1)):
        if is_nonnegative(found, ranges or {}) and (sign == 1 or is_nonnegative(negate_condition(index), ranges or {})):
            return found
    raise UnknownElements
