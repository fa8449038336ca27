"""Predicates of attention masks: from a mask's elements to the pairs of positions that it allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dcompile.capture.passes.dynamo.symbolic_elements.elements import (
    Elements,
    Read,
    Reads,
    UnknownElements,
    axis,
    sizes_of,
    value_of,
)
from dcompile.ir.bounds import MIN_SYMBOL_VALUES
from dcompile.ir.index import Index, Size, as_index, is_below, is_nonnegative, is_symbol, substitute, var
from dcompile.ir.piecewise import Leaf, Test, TooManyCases, Tree, combine, variables
from dcompile.ir.predicate import BATCH, HEAD, KEY, QUERY, Predicate, replace_variables

MAX_READS = 8
"""Maximum number of reads of a predicate: a kernel loads each for every pair in a partial block."""


class UnknownMask(Exception):
    """A mask is no predicate that kernels know. The message says why."""


@dataclass(frozen=True)
class MaskPredicate:
    """A predicate, with the tensors that it reads and the sizes in it."""

    predicate: Predicate
    reads: tuple[Node, ...]
    sizes: tuple[str, ...]
    """Variables of the sizes, as in shapes of the graph's tensors."""


def is_allowed(leaf: Any, dtype: torch.dtype) -> bool:
    """Does an element of a mask allow attention? Raises UnknownElements if it adds a bias to the score.

    Minus infinity forbids it, and so does the least finite number of the dtype, which some libraries use. In a row with
    an allowed element, the exponential of either is 0 with any finite score.
    """
    if isinstance(leaf, bool):
        return leaf
    if not isinstance(leaf, float) or leaf not in (0.0, -math.inf, torch.finfo(dtype).min):
        raise UnknownElements
    return leaf == 0.0


def scores_shape(query: Any, key: Any) -> tuple[Size, ...]:
    """Return (batch, heads, queries, keys) of an attention call; () if its sizes are unknown or others."""
    by_query, by_key = sizes_of(query), sizes_of(key)
    return (*by_query[:3], by_key[2]) if len(by_query) == len(by_key) == 4 else ()


def broadcasts(shape: Sequence[Size], scores: Sequence[Size]) -> bool:
    """Does a mask of this shape leave the shape of scores as it is?"""
    pairs = zip(reversed(shape), reversed(scores), strict=False)
    return len(shape) <= len(scores) and all(size in (1, whole) for size, whole in pairs)


def predicate_of(mask: Elements | None, reads: Reads, scores: Sequence[Size]) -> MaskPredicate:
    """Return the predicate of a mask over scores (batch, heads, queries, keys). Raises UnknownMask."""
    if mask is None or mask.batches:
        raise UnknownMask("its elements are not known from how it is made")
    if not broadcasts(mask.shape, scores):
        raise UnknownMask("its shape is not that of the scores")
    try:
        tree = combine(lambda leaf: is_allowed(leaf, mask.dtype), (mask.tree,), mask.ranges)
    except UnknownElements:
        raise UnknownMask("it adds other numbers than 0 and minus infinity to scores") from None
    except TooManyCases:
        raise UnknownMask("it has too many pieces") from None
    found = _in_pairs(tree, mask, reads, scores)
    if _has_least_number(mask) and not found.predicate.has_key_in_each_row(scores[2], scores[3]):
        raise UnknownMask("it adds the least finite number, and a row may have no allowed key")
    return found


def _has_least_number(mask: Elements) -> bool:
    """Does a mask forbid by the least finite number? Rows without an allowed element then average all values."""
    if not mask.dtype.is_floating_point:
        return False
    least = torch.finfo(mask.dtype).min
    return any(leaf == least for leaf in _leaves(mask.tree))


def _leaves(tree: Tree) -> list[Leaf]:
    return [*_leaves(tree.then), *_leaves(tree.otherwise)] if isinstance(tree, Test) else [tree]


def _in_pairs(tree: Tree, mask: Elements, reads: Reads, scores: Sequence[Size]) -> MaskPredicate:
    """Write a tree over a mask's positions as a predicate of pairs, with reads and sizes numbered in order."""
    dims = len(mask.shape)
    named = {axis(n): var((BATCH, HEAD, QUERY, KEY)[4 - dims + n]) for n in range(dims)}
    ranges = dict(zip((BATCH, HEAD, QUERY, KEY), scores, strict=True))
    names = _ordered_variables(tree)
    used = [(name, read) for name in names if (read := reads.found(name)) is not None]
    if len(used) > MAX_READS:
        raise UnknownMask(f"it depends on {len(used)} elements of tensors")
    positions = [tuple(substitute(index, named, {}) for index in read.positions) for _, read in used]
    for (_, read), at in zip(used, positions, strict=True):
        _check_read(read, at, ranges)
    values = named | {name: var(f"z{number}") for number, (name, _) in enumerate(used)}
    read_names = {name for name, _ in used}
    symbols = [name for name in names if is_symbol(name) and name not in read_names]
    symbols += [n for at in positions for index in at for n in sorted(index.variables) if is_symbol(n)]
    sizes = {name: f"{_letter(name)}{number}" for number, name in enumerate(dict.fromkeys(symbols))}
    values |= {name: var(short) for name, short in sizes.items()}
    rewritten = tuple(tuple(substitute(index, values, {}) for index in at) for at in positions)
    predicate = Predicate(replace_variables(tree, values), rewritten, tuple(sizes.values()))
    return MaskPredicate(predicate, tuple(read.node for _, read in used), tuple(sizes))


def _check_read(read: Read, positions: Sequence[Index], ranges: Mapping[str, Size]) -> None:
    """Raise UnknownMask unless a read is of queries or of keys, and within its tensor for all pairs."""
    names = {name for index in positions for name in index.variables}
    if {QUERY, KEY} <= names or HEAD in names:
        raise UnknownMask("it is a tensor that the model is given, or that an operation without a rule makes")
    for index, size in zip(positions, sizes_of(read.node), strict=True):
        if not is_nonnegative(index, ranges) or not is_below(index, size, ranges):
            raise UnknownMask("it reads a tensor at positions that may be outside of it")


def _ordered_variables(tree: Tree) -> list[str]:
    """Variables of a tree, in the order of its tests."""
    if isinstance(tree, Test):
        parts = (sorted(tree.condition.variables), _ordered_variables(tree.then), _ordered_variables(tree.otherwise))
        return [*dict.fromkeys(name for part in parts for name in part)]
    return sorted(variables(tree))


def _letter(name: str) -> str:
    """Letter of a size's least value; sizes are never negative, though it may be unknown that a symbol is none."""
    return name[0] if MIN_SYMBOL_VALUES[name[0]] is not None else "u"


def size_dims(node: Node, sizes: Sequence[str]) -> dict[str, tuple[Node, int]]:
    """Return for each size a dimension of an attention call's operands that has it. Raises UnknownMask."""
    operands = [operand for operand in node.all_input_nodes if isinstance(value_of(operand), torch.Tensor)]
    found: dict[str, tuple[Node, int]] = {}
    for name in sizes:
        dims = [(each, n) for each in operands for n, size in enumerate(sizes_of(each)) if as_index(size) == var(name)]
        if not dims:
            raise UnknownMask("it depends on a size that queries and keys do not have")
        found[name] = dims[0]
    return found
