"""In which parts a loop computes FlexAttention: the rows and the keys of each, as tables of blocks name them.

A part is a range of batches, heads and queries that have the same keys. Its keys come in tiles, each a range or,
where blocks are apart, a list of positions. Blocks of any size are joined and cut, so that a tile is large enough for
matmuls and no part's memory depends on the length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias

import torch

from dcompile.compat.flex import BlockTables
from dcompile.ir.predicate import QUERIES_AT_ONCE

KEYS_AT_ONCE = 512
SCORES_AT_ONCE = 1 << 21
"""Scores of a tile, over all batches and heads of its part, where there are several."""

Row: TypeAlias = "tuple[tuple[int, bool], ...]"
"""Blocks of keys of one row of blocks, in order: place, and whether it is computed without the mask's function."""
Span: TypeAlias = "tuple[int, int, bool]"


@dataclass(frozen=True, slots=True)
class KeyTile:
    """Keys that a part computes at once."""

    keys: slice | torch.Tensor
    whole: bool | torch.Tensor
    """Whether pairs are all allowed; by key, if that differs."""


@dataclass(frozen=True, slots=True)
class Part:
    """Queries that are computed at once."""

    rows: tuple[slice, slice, slice]
    """Batches, heads and queries."""
    tiles: tuple[KeyTile, ...]


def parts(tables: BlockTables, queries: Sequence[int], keys: int) -> list[Part]:
    """Return the parts of a call that have keys. `queries`: the shape of the queries. `keys`: the number of keys."""
    batch, heads, length = queries[:3]
    rows = _rows(tables)
    if len(rows) * tables.query_block < length:
        raise ValueError(f"the block mask has {len(rows)} rows of {tables.query_block} queries; there are {length}")
    known: dict[Row, tuple[KeyTile, ...]] = {(): ()}
    found: list[Part] = []
    first = 0
    for cells, same in groupby(rows):
        begin, first = first, first + sum(1 for _ in same)
        end = min(first * tables.query_block, length)
        for at in range(begin * tables.query_block, end, QUERIES_AT_ONCE):
            step = slice(at, min(at + QUERIES_AT_ONCE, end))
            for of_batch, of_heads, row in _rectangles(cells, batch, heads):
                if row not in known:
                    known[row] = tuple(_tiles(row, tables.key_block, keys, tables.partial.device))
                found += _bounded(of_batch, of_heads, step, known[row])
    return found


def _bounded(batch: slice, heads: slice, queries: slice, tiles: tuple[KeyTile, ...]) -> Iterator[Part]:
    """Yield a rectangle of rows in parts of a bounded number of scores."""
    if not tiles:
        return
    count = max(1, SCORES_AT_ONCE // (KEYS_AT_ONCE * (queries.stop - queries.start)))
    of_heads = min(count, heads.stop - heads.start)
    of_batch = max(1, count // of_heads) if of_heads == heads.stop - heads.start else 1
    for b in range(batch.start, batch.stop, of_batch):
        for h in range(heads.start, heads.stop, of_heads):
            rows = (slice(b, min(b + of_batch, batch.stop)), slice(h, min(h + of_heads, heads.stop)), queries)
            yield Part(rows, tiles)


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Table:
    """Places of key blocks by batch, head and row of query blocks, as many as there are counted."""

    counts: torch.Tensor
    places: torch.Tensor
    whole: bool

    def expanded(self, batch: int, heads: int) -> _Table:
        counts = self.counts.expand(batch, heads, -1)
        return replace(self, counts=counts, places=self.places.expand(batch, heads, -1, -1))

    def is_equal_along(self, dim: int) -> bool:
        return all(
            table.shape[dim] == 1 or table.stride(dim) == 0 or bool((table == table.narrow(dim, 0, 1)).all())
            for table in (self.counts, self.places)
        )

    def first_along(self, dim: int) -> _Table:
        return replace(self, counts=self.counts.narrow(dim, 0, 1), places=self.places.narrow(dim, 0, 1))


def _rows(tables: BlockTables) -> list[tuple[tuple[Row, ...], ...]]:
    """Return the key blocks of each row of query blocks, by batch and head; or one for all, if they are equal."""
    read = [_table(tables.partial_counts, tables.partial, False)]
    if tables.whole is not None:
        read.append(_table(tables.whole_counts, tables.whole, True))
    batch, heads = (max(table.places.shape[dim] for table in read) for dim in (0, 1))
    read = [table.expanded(batch, heads) for table in read]
    for dim in (0, 1):
        if all(table.is_equal_along(dim) for table in read):
            read = [table.first_along(dim) for table in read]
    lists = [(table.counts.tolist(), table.places.tolist(), table.whole) for table in read]
    batch, heads, rows = read[0].counts.shape
    return [tuple(tuple(_row(lists, b, h, r) for h in range(heads)) for b in range(batch)) for r in range(rows)]


def _table(counts: torch.Tensor, places: torch.Tensor, whole: bool) -> _Table:
    """Return a table with dimensions for batch and head, which a mask need not have."""
    counts = counts.reshape((1,) * (3 - counts.dim()) + counts.shape)
    return _Table(counts, places.reshape((1,) * (4 - places.dim()) + places.shape), whole)


def _row(lists: Sequence[tuple[Any, Any, bool]], b: int, h: int, r: int) -> Row:
    found: dict[int, bool] = {}
    for counts, places, whole in lists:
        found |= dict.fromkeys(places[b][h][r][: counts[b][h][r]], whole)
    return tuple(sorted(found.items()))


def _rectangles(cells: Sequence[Sequence[Row]], batch: int, heads: int) -> Iterator[tuple[slice, slice, Row]]:
    """Join neighbours with equal keys: heads of a batch, then batches with the same heads."""
    by_batch = [tuple(_runs(row, heads)) for row in cells]
    for first, last, runs in _runs(by_batch, batch):
        for begin, end, row in runs:
            yield slice(first, last), slice(begin, end), row


def _runs(values: Sequence[Any], length: int) -> Iterator[tuple[int, int, Any]]:
    """Yield (first, last, value) of equal neighbours. One value alone is that of all places."""
    if len(values) == 1:
        yield 0, length, values[0]
        return
    first = 0
    for value, same in groupby(values):
        begin, first = first, first + sum(1 for _ in same)
        yield begin, first, value


# --- keys -------------------------------------------------------------------------------------------------------------


def _tiles(row: Row, block: int, length: int, device: torch.device) -> Iterator[KeyTile]:
    """Yield the keys of a row in tiles of bounded size."""
    spans: list[Span] = []
    count = 0
    for place, whole in row:
        end = min((place + 1) * block, length)
        for begin in range(place * block, end, KEYS_AT_ONCE):
            stop = min(begin + KEYS_AT_ONCE, end)
            if spans and count + stop - begin > KEYS_AT_ONCE:
                yield _tile(spans, device)
                spans, count = [], 0
            spans.append((begin, stop, whole))
            count += stop - begin
    if spans:
        yield _tile(spans, device)


def _tile(spans: Sequence[Span], device: torch.device) -> KeyTile:
    begin, end = spans[0][0], spans[-1][1]
    keys: slice | torch.Tensor = slice(begin, end)
    if end - begin > sum(stop - start for start, stop, _ in spans):
        keys = torch.cat([torch.arange(start, stop, device=device) for start, stop, _ in spans])
    kinds = {whole for *_, whole in spans}
    if len(kinds) == 1:
        return KeyTile(keys, kinds.pop())
    whole = [torch.full((stop - start,), kind, device=device) for start, stop, kind in spans]
    return KeyTile(keys, torch.cat(whole))
