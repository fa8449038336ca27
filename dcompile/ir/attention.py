"""FlexAttention as a step of a program: the arguments of its two calls by name.

Tables of a block mask say which key blocks a row of query blocks has (or the reverse, in the backward): counts of
(batch, heads, rows), and places of (batch, heads, rows, columns), for blocks that are computed in part and in whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dcompile.ir.nodes import Extern, View
from dcompile.ir.pair_function import PairFunction, parse_pair_function

FLEX, FLEX_BACKWARD = "dcompile_flex_attention.forward", "dcompile_flex_attention.backward"
MAX_WIDTH = 256
"""Elements of a head at most: a tile of queries and their sums are in registers."""
MIN_BLOCK = 16
"""Queries or keys of a mask's block at least, as tensor cores have them."""


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Which blocks are computed for each row of blocks, of one kind."""

    counts: View
    places: View


@dataclass(frozen=True, slots=True)
class CapturedTerm:
    """A part of the gradient of a tensor that the score function reads: values of pairs, added at their indices."""

    total: int
    """Which of the tensors with a gradient it is of."""
    value: PairFunction
    indices: tuple[PairFunction, ...]


@dataclass(frozen=True, slots=True)
class FlexArguments:
    """The arguments of a call. Those from `out` on are of the backward."""

    query: View
    key: View
    value: View
    partial: BlockTable
    whole: BlockTable | None
    score: PairFunction
    mask: PairFunction
    scale: float
    query_block: int
    key_block: int
    out: View | None = None
    logsumexp: View | None = None
    grad: View | None = None
    grad_logsumexp: View | None = None
    partial_of_keys: BlockTable | None = None
    whole_of_keys: BlockTable | None = None
    joint: PairFunction | None = None
    terms: tuple[CapturedTerm, ...] = ()

    @property
    def group(self) -> int:
        """Heads of queries that share a head of keys."""
        return int(self.query.shape[1]) // int(self.key.shape[1])  # type: ignore[arg-type]


def flex_arguments(step: Extern) -> FlexArguments:
    """Return the arguments of a call; functions read the program's buffers."""
    given: tuple[Any, ...] = step.args
    query, key, value, tables, score_buffers, mask_buffers, score, mask, scale, blocks = given[:10]
    score_function = _function(score, score_buffers)
    factors, functions = (query, key, value), (score_function, _function(mask, mask_buffers))
    forward = FlexArguments(*factors, *_tables(tables), *functions, float(scale), *blocks)
    if step.op == FLEX:
        return forward
    out, logsumexp, grad, grad_logsumexp, of_keys, joint, terms = given[10:]
    partial, whole = _tables(of_keys)
    captured = tuple(
        CapturedTerm(total, _function(value, score_buffers), tuple(_function(text, score_buffers) for text in indices))
        for total, value, indices in terms
    )
    return replace(
        forward, out=out, logsumexp=logsumexp, grad=grad, grad_logsumexp=grad_logsumexp,
        partial_of_keys=partial, whole_of_keys=whole, joint=_function(joint, score_buffers),
        terms=captured,
    )  # fmt: skip


def _tables(tables: tuple[Any, ...]) -> tuple[BlockTable, BlockTable | None]:
    partial_counts, partial, whole_counts, whole = tables
    return BlockTable(partial_counts, partial), None if whole is None else BlockTable(whole_counts, whole)


def _function(text: str, buffers: tuple[View, ...]) -> PairFunction:
    places = {f"c{number}": (view.buffer, view.offset) for number, view in enumerate(buffers)}
    return parse_pair_function(text).with_buffers(places)
