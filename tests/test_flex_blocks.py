"""Parts of FlexAttention's loop: equal rows and neighbouring blocks are joined, and nothing else is computed."""

import torch

from dcompile import flex_blocks
from dcompile.compat.flex import BlockTables
from dcompile.flex_blocks import KeyTile, Part, parts


def table(rows):
    """Counts and places of lists of blocks, by batch, head and row. Unused places name a block that does not exist."""
    width = max(len(row) for batch in rows for head in batch for row in head) + 1
    counts = torch.tensor([[[len(row) for row in head] for head in batch] for batch in rows], dtype=torch.int32)
    places = [[[[*row, *[99] * (width - len(row))] for row in head] for head in batch] for batch in rows]
    return counts, torch.tensor(places, dtype=torch.int32)


def described(found: list[Part]):
    """(batches, heads, queries, keys of each tile, which are whole) of each part, as lists of numbers."""

    def numbers(place):
        return [*range(place.start, place.stop)] if isinstance(place, slice) else place.tolist()

    def tile(given: KeyTile):
        whole = given.whole if isinstance(given.whole, bool) else given.whole.tolist()
        return numbers(given.keys), whole

    return [(*map(numbers, part.rows), [tile(item) for item in part.tiles]) for part in found]


def test_blocks_are_joined_in_order_and_cut_at_the_length():
    partial, whole = table([[[[2, 0], [], [3]]]]), table([[[[1], [], []]]])
    found = parts(BlockTables(*partial, *whole, 2, 4, None), (1, 1, 5, 8), 14)
    assert described(found) == [
        ([0], [0], [0, 1], [([*range(12)], [False] * 4 + [True] * 4 + [False] * 4)]),
        ([0], [0], [4], [([12, 13], False)]),
    ]
    assert isinstance(found[0].tiles[0].keys, slice)


def test_blocks_apart_are_positions():
    found = parts(BlockTables(*table([[[[3, 0]]]]), None, None, 4, 2, None), (1, 1, 4, 8), 8)
    assert described(found) == [([0], [0], [0, 1, 2, 3], [([0, 1, 6, 7], False)])]


def test_equal_rows_heads_and_batches_are_joined():
    same, other = [[0], [0]], [[1], [0]]
    found = parts(
        BlockTables(*table([[same, same, other], [same, same, other]]), None, None, 2, 2, None), (2, 3, 4, 8), 4
    )
    assert described(found) == [
        ([0, 1], [0, 1], [0, 1], [([0, 1], False)]),
        ([0, 1], [2], [0, 1], [([2, 3], False)]),
        ([0, 1], [0, 1, 2], [2, 3], [([0, 1], False)]),
    ]
    found = parts(BlockTables(*table([[same] * 3] * 2), None, None, 2, 2, None), (2, 3, 4, 8), 4)
    assert described(found) == [([0, 1], [0, 1, 2], [0, 1, 2, 3], [([0, 1], False)])]


def test_large_blocks_are_cut(monkeypatch):
    monkeypatch.setattr(flex_blocks, "QUERIES_AT_ONCE", 2)
    monkeypatch.setattr(flex_blocks, "KEYS_AT_ONCE", 3)
    monkeypatch.setattr(flex_blocks, "SCORES_AT_ONCE", 12)
    found = parts(BlockTables(*table([[[[0]]]]), None, None, 1 << 30, 1 << 30, None), (1, 3, 3, 8), 4)
    tiles = [([0, 1, 2], False), ([3], False)]
    assert described(found) == [
        ([0], [0, 1], [0, 1], tiles),
        ([0], [2], [0, 1], tiles),
        ([0], [0, 1, 2], [2], tiles),
    ]
