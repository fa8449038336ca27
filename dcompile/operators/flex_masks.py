"""Attention under a predicate by FlexAttention: its tables of blocks, and its function of positions.

A block of 128 queries and 128 keys is left out, computed in part or computed whole. That is decided by bounds: each
index of the predicate has a least and a largest value in a block. So no pair of positions is looked at, and the tables
of 64k tokens take 2 MiB. A block that is only thought to be partial costs time, and is correct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dcompile.compat import attention
from dcompile.ir.index import Atom, Div, Extreme, Index, Mod, Var, as_index, evaluate_on
from dcompile.ir.piecewise import Test, Tree
from dcompile.ir.predicate import BATCH, HEAD, KEY, QUERY, Predicate, parse_predicate
from dcompile.operators.attention_ops import allowed, autocast, chosen, element

BLOCK = attention.BLOCK
_DIMS = (BATCH, HEAD, QUERY, KEY)


def attend_in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    reads: Sequence[torch.Tensor],
    sizes: Sequence[int],
    tables: Sequence[torch.Tensor],
    predicate: str,
    scale: float,
) -> torch.Tensor:
    """Attention of (batch, heads, queries, width) to keys and values, for allowed pairs; 0 where a row has none.

    `tables` are `block_tables` of the same predicate, which may be shared by the layers of a model.
    """
    parsed = parse_predicate(predicate)
    count = len(parsed.reads)

    def mask_mod(b: Any, h: Any, q: Any, k: Any, *buffers: torch.Tensor) -> Any:
        return allowed(parsed, {BATCH: b, HEAD: h, QUERY: q, KEY: k}, buffers[:count], buffers[count:])

    buffers = (*reads, *_as_tensors(sizes, query.device))
    query, key, value = autocast(query, key, value)
    named = dict(zip(attention.TABLES, tables, strict=True))
    found: torch.Tensor = attention.attend_by_flex(query, key, value, mask_mod, named, buffers, scale)
    return found


def block_tables(
    query: torch.Tensor,
    key: torch.Tensor,
    reads: Sequence[torch.Tensor],
    sizes: Sequence[int],
    predicate: str,
) -> tuple[torch.Tensor, ...]:
    """Tables of FlexAttention's block mask, in the order of `compat.attention.TABLES`, as int32 tensors."""
    parsed = parse_predicate(predicate)
    bounds = _BlockBounds(parsed, query, key, reads, sizes)
    some, others = bounds.outcomes(parsed.tree)
    some, others = bounds.as_blocks(some), bounds.as_blocks(others)
    full = some & ~others & bounds.whole
    partial = some & ~full
    found: list[torch.Tensor] = []
    for blocks in (partial, full, partial.transpose(-2, -1), full.transpose(-2, -1)):
        found += _ordered(blocks)
    return tuple(found)


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of true elements in each row, and their columns in order. The rest of a row is the last column."""
    columns = blocks.shape[-1]
    so_far = blocks.to(torch.int32).cumsum(-1, dtype=torch.int32)
    rank = torch.arange(columns, device=blocks.device, dtype=torch.int32)
    # the column of the element of a rank comes after as many columns as have not more than that rank so far
    places = (so_far[..., None, :] <= rank[:, None]).sum(-1, dtype=torch.int32).clamp(max=columns - 1)
    return blocks.sum(-1, dtype=torch.int32), places


def _as_tensors(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    return [torch.full((), size, dtype=torch.int64, device=device) for size in sizes]


class _BlockBounds:
    """Bounds of a predicate's indices in each block, as tensors that broadcast to (batch, heads, rows, columns)."""

    def __init__(
        self,
        predicate: Predicate,
        query: torch.Tensor,
        key: torch.Tensor,
        reads: Sequence[torch.Tensor],
        sizes: Sequence[int],
    ) -> None:
        self.device = query.device
        lengths = {BATCH: query.shape[0], HEAD: query.shape[1], QUERY: query.shape[2], KEY: key.shape[2]}
        self._lengths, self._blocks = lengths, {name: -(-lengths[name] // BLOCK) for name in (QUERY, KEY)}
        self.whole = self._first(QUERY) + BLOCK <= lengths[QUERY]
        self.whole = self.whole & (self._first(KEY) + BLOCK <= lengths[KEY])
        places = {name: self._range(name) for name in (BATCH, HEAD)}
        named = dict(zip(predicate.sizes, _as_tensors(sizes, self.device), strict=True))
        self.shape = tuple(lengths[name] if name in predicate.names else 1 for name in (BATCH, HEAD))
        self.values: dict[str, tuple[Any, Any]] = {name: (place, place) for name, place in (places | named).items()}
        for name in (QUERY, KEY):
            first = self._first(name)
            self.values[name] = (first, (first + (BLOCK - 1)).clamp(max=lengths[name] - 1))
        for number, (tensor, positions) in enumerate(zip(reads, predicate.reads, strict=True)):
            self.values[f"z{number}"] = self._read(tensor, positions, places | named)

    def _range(self, name: str) -> torch.Tensor:
        dim = _DIMS.index(name)
        return torch.arange(self._lengths[name], device=self.device).view([-1 if n == dim else 1 for n in range(4)])

    def _first(self, name: str) -> torch.Tensor:
        """Position of the first element of each block of queries or keys."""
        dim = _DIMS.index(name)
        found = torch.arange(self._blocks[name], device=self.device) * BLOCK
        return found.view([-1 if n == dim else 1 for n in range(4)])

    def _read(
        self, tensor: torch.Tensor, positions: Sequence[Index], values: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Least and largest of the values that a block reads."""
        names = {name for index in positions for name in index.variables} & {QUERY, KEY}
        assert len(names) <= 1, "a read depends on queries or on keys"
        if not names:
            found = element(tensor, [evaluate_on(index, values) for index in positions])
            return found, found
        (name,) = names
        inside = torch.arange(BLOCK, device=self.device)
        places = (self._first(name)[..., None] + inside).clamp(max=self._lengths[name] - 1)
        spread = {other: place[..., None] if place.dim() else place for other, place in values.items()}
        found = element(tensor, [evaluate_on(index, spread | {name: places}) for index in positions])
        return found.amin(-1), found.amax(-1)

    def as_blocks(self, value: torch.Tensor | bool) -> torch.Tensor:
        """Return a value for each block: (batch or 1, heads or 1, rows, columns)."""
        shape = (*self.shape, self._blocks[QUERY], self._blocks[KEY])
        if isinstance(value, bool):
            return torch.full(shape, value, device=self.device)
        return value.expand(shape)

    def outcomes(self, tree: Tree) -> tuple[Any, Any]:
        """Return whether some pair of a block may be allowed, and whether some may be forbidden."""
        if not isinstance(tree, Test):
            return bool(tree), not tree
        low, high = self._bounds(tree.condition)
        test, opposite = high >= 0, low < 0
        then, otherwise = self.outcomes(tree.then), self.outcomes(tree.otherwise)
        some, others = (chosen(test, opposite, *parts) for parts in zip(then, otherwise, strict=True))
        return some, others

    def _bounds(self, index: Index) -> tuple[Any, Any]:
        low: Any = 0
        high: Any = 0
        for monomial, coefficient in index.terms:
            least: Any = 1
            largest: Any = 1
            for number, atom in enumerate(monomial):
                ends = self._of_atom(atom)
                least, largest = ends if number == 0 else _product((least, largest), ends)
            if coefficient < 0:
                least, largest = largest, least
            low, high = low + least * coefficient, high + largest * coefficient
        return low, high

    def _of_atom(self, atom: Atom) -> tuple[Any, Any]:
        match atom:
            case Var(name):
                return self.values[name]
            case Div(base, divisor):
                by = self._bounds(as_index(divisor))[0]  # of sizes, which have one value
                low, high = self._bounds(base)
                return low // by, high // by
            case Mod(_, divisor):
                by = self._bounds(as_index(divisor))[0]
                return by * 0, by - 1
            case Extreme(kind, left, right):
                pick = torch.maximum if kind == "max" else torch.minimum
                found = pick(self._bounds(left)[0], self._bounds(right)[0])
                return found, found


def _product(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    corners = [x * y for x in one for y in other]
    low, high = corners[0], corners[0]
    for corner in corners[1:]:
        low, high = torch.minimum(low, corner), torch.maximum(high, corner)
    return low, high
