"""Predicates of attention: which keys a query may attend to, as a function of positions and of values read there.

The variables are `b` (batch), `h` (head), `q` (query) and `k` (key). A causal window of 8 is `q - k >= 0` and
`k - q + 7 >= 0`. Values that only a run knows are reads, with variables `z0`, `z1`, ..., and sizes that it knows are
`s0`, `s1`, .... Documents are the reads `z0 = tensor[b, q]` and `z1 = tensor[b, k]`, where `z0 - z1` is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from dcompile.ir.cursor import TextCursor
from dcompile.ir.index import Index, Size, as_index, evaluate, is_nonnegative, var
from dcompile.ir.index_text import parse_index
from dcompile.ir.piecewise import Test, Tree, indices_of, leaves, replace_variables, variables

BATCH, HEAD, QUERY, KEY = "bhqk"
PREFIX, CAUSAL, WINDOW, PADDING, DOCUMENTS = "prefix", "causal", "window", "padding", "documents"

QUERIES_AT_ONCE = 256
"""Queries of a block on CPUs: fewer make the masked corners of a block smaller, and calls more numerous."""


@dataclass(frozen=True)
class Predicate:
    """A tree with leaves True and False over `b`, `h`, `q`, `k`, reads and sizes.

    Relies on: positions of reads are within their tensors, whatever the tests around them say.
    """

    tree: Tree
    reads: tuple[tuple[Index, ...], ...] = ()
    """Position of each read in its tensor, by dimension."""
    sizes: tuple[str, ...] = ()
    """Names of the sizes, each with the letter for its least value (`index.MIN_SYMBOL_VALUES`)."""

    def __str__(self) -> str:
        positions = "".join(f"[{', '.join(map(str, read))}]" for read in self.reads)
        return f"{' '.join((*self.sizes, ''))}{positions}{_text(self.tree)}"

    @cached_property
    def back(self) -> Size | None:
        """The distance from a query back to a key, from which on no key is allowed; None if none is known."""
        return self._reach(var(QUERY) - var(KEY))

    @cached_property
    def ahead(self) -> Size | None:
        """The distance from a query to a key after it, from which on no key is allowed; None if none is known."""
        return self._reach(var(KEY) - var(QUERY))

    def _reach(self, distance: Index) -> Size | None:
        """Return the least distance, of those in the tests, from which on the predicate is proved to be False."""
        found: list[Index] = []
        for condition in indices_of(self.tree):
            for factor in (1, -1):
                rest = condition - (var(QUERY) - var(KEY)) * factor
                if not rest.variables & {BATCH, HEAD, QUERY, KEY} and not any(map(_is_read, rest.variables)):
                    found += [rest + 1, rest * -1]  # where the test fails, and where its opposite does
        proved = [w for w in found if all(leaf is False for leaf in leaves(self.tree, (distance - w,), {}))]
        numbers = [w.constant for w in proved if w.constant is not None]
        return min(numbers) if numbers else next(iter(proved), None)

    def key_range(self, begin: int, end: int, keys: int, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return the range of keys that queries from `begin` to `end` may attend to, of `keys` keys."""
        first, last = 0, keys
        if self.back is not None:
            first = max(first, begin - _number(self.back, sizes) + 1)
        if self.ahead is not None:
            last = min(last, end - 1 + _number(self.ahead, sizes))
        return min(first, keys), max(last, min(first, keys))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """What the mask is made of, in the field's words."""
        found = dict.fromkeys(self._read_kinds())
        if self.ahead is not None:
            found[CAUSAL] = None
        if self.back is not None:
            found[WINDOW] = None
        return tuple(kind for kind in (PREFIX, CAUSAL, WINDOW, PADDING, DOCUMENTS) if kind in found)

    def _read_kinds(self) -> Iterator[str]:
        for condition in indices_of(self.tree):
            places = [self._places(name) for name in condition.variables if _is_read(name)]
            if len(places) > 1:
                yield DOCUMENTS
            elif places and (places[0] or not condition.variables & {QUERY, KEY}):
                yield PADDING
            elif places:
                yield CAUSAL if {QUERY, KEY} <= condition.variables else PREFIX

    def _places(self, read: str) -> frozenset[str]:
        names = [name for index in self.reads[int(read[1:])] for name in index.variables]
        return frozenset(names) & {QUERY, KEY}

    @property
    def names(self) -> frozenset[str]:
        """Variables of the tests and of the positions that are read."""
        return frozenset(variables(self.tree)).union(*(index.variables for read in self.reads for index in read))

    @property
    def by_batch(self) -> bool:
        """Whether elements of a batch may have different masks."""
        return BATCH in self.names

    def has_key_in_each_row(self, queries: Size, keys: Size) -> bool:
        """Whether each query is proved to have an allowed key: the one at its own position, or as far from the end."""
        further = as_index(keys) - queries
        if not is_nonnegative(further, {}):
            return False
        trees = (replace_variables(self.tree, {KEY: var(QUERY) + offset}, {}) for offset in (0, further))
        return any(all(leaf is True for leaf in leaves(tree, (), {QUERY: queries})) for tree in trees)


def allowed_pairs(predicate: Predicate, queries: int, keys: int, block: int, sizes: Mapping[str, int]) -> int:
    """Return how many pairs are computed if blocks of queries read only keys in their range, in whole blocks."""
    pairs = 0
    for begin in range(0, queries, block):
        first, last = predicate.key_range(begin, min(begin + block, queries), keys, sizes)
        whole = min(-(-last // block) * block, keys) - first // block * block if last > first else 0
        pairs += whole * (min(begin + block, queries) - begin)
    return pairs


def _is_read(name: str) -> bool:
    return name[0] == "z"


def _number(size: Size, sizes: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else evaluate(size, sizes)


# --- text -------------------------------------------------------------------------------------------------------------


def _text(tree: Tree) -> str:
    if isinstance(tree, Test):
        return f"{{{tree.condition} ? {_text(tree.then)} : {_text(tree.otherwise)}}}"
    assert isinstance(tree, bool), f"a predicate with the leaf {tree}"
    return "yes" if tree else "no"


@lru_cache(maxsize=256)
def parse_predicate(text: str) -> Predicate:
    """Parse the text of a predicate: its sizes, the positions of its reads, and its tree."""
    cursor = TextCursor(text)
    sizes, reads = list[str](), list[tuple[Index, ...]]()
    while (size := cursor.match(r"[su]\d+")) is not None:
        sizes.append(size)
    while cursor.has("["):
        reads.append(_parse_positions(cursor))
    return Predicate(_parse_tree(cursor), tuple(reads), tuple(sizes))


def _parse_positions(cursor: TextCursor) -> tuple[Index, ...]:
    found: list[Index] = []
    while not cursor.has("]"):
        if found:
            cursor.need(",")
        found.append(parse_index(cursor))
    return tuple(found)


def _parse_tree(cursor: TextCursor) -> Tree:
    if not cursor.has("{"):
        return cursor.expect("yes|no", "`yes` or `no`") == "yes"
    condition = parse_index(cursor)
    cursor.need("?")
    then = _parse_tree(cursor)
    cursor.need(":")
    otherwise = _parse_tree(cursor)
    cursor.need("}")
    return Test(condition, then, otherwise)
