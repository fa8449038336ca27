"""Reads: elements of tensors whose values are unknown while a graph is captured, as variables of index expressions.

A padding mask, lengths and numbers of documents are inputs. Their values are unknown, but it is known where a mask
reads them: `documents[b, q] == documents[b, k]` has two reads of one tensor. A read is a variable of its own. If the
positions of a tensor's elements change, as in a view or an index, those of the reads in them change too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from dcompile.ir.index import Index, Ranges, as_index, is_symbol, substitute, var
from dcompile.ir.piecewise import Test, Tree, replace_variables, variables

DTYPES = (torch.bool, torch.int64, torch.int32)
"""Dtypes whose elements may be read: those of masks, lengths and numbers."""
_PREFIX = "z_read"
"""Start of a read's variable. By its first letter, an integer of unknown sign."""


@dataclass(frozen=True)
class Read:
    """An element of a node's tensor, at a position in each dimension."""

    node: Node
    positions: tuple[Index, ...]


class Reads:
    """All reads of one analysis, each with its variable. Equal reads share theirs."""

    def __init__(self) -> None:
        self._names: dict[Read, str] = {}
        self._reads: dict[str, Read] = {}

    def element(self, read: Read, dtype: torch.dtype) -> Tree:
        """Return a read as an element: an index, or a test of one for a boolean tensor."""
        index = var(self._name(read))
        return Test(index - as_index(1), True, False) if dtype == torch.bool else index

    def found(self, name: str) -> Read | None:
        """Return the read that a variable stands for; None for other variables."""
        return self._reads.get(name)

    def positions(self, tree: Tree) -> frozenset[str]:
        """Return the variables of positions that a tree depends on, directly or by reads; sizes are no positions."""
        names = set[str]()
        for name in variables(tree):
            read = self._reads.get(name)
            found = {name} if read is None else {n for index in read.positions for n in index.variables}
            names |= {n for n in found if not is_symbol(n)}
        return frozenset(names)

    def replace(self, tree: Tree, values: Mapping[str, Index], ranges: Ranges) -> Tree:
        """Replace variables of positions in a tree and in its reads; `ranges` are those of the new variables."""
        moved = dict(values)
        for name in sorted(variables(tree)):
            read = self._reads.get(name)
            if read is not None:
                positions = tuple(substitute(index, values, ranges) for index in read.positions)
                moved[name] = var(self._name(Read(read.node, positions)))
        return replace_variables(tree, moved, ranges)

    def _name(self, read: Read) -> str:
        name = self._names.setdefault(read, f"{_PREFIX}{len(self._names)}")
        self._reads[name] = read
        return name
