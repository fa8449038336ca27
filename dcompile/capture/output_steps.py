"""Plan the steps on a program's results: make views, detach tensors, make separate tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dcompile.passes import OutputStep


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """Facts from AOTAutograd about a graph's results, by position."""

    count: int
    """Number of results; a forward's saved values follow them."""
    views: Sequence[int] = ()
    """A forward's results that are views of computed values."""
    constant: Sequence[int] = ()
    """A forward's results without gradients."""


def plan_outputs(
    rows: Sequence[OutputStep], gm: Any, request: OutputRequest, stage: str
) -> tuple[tuple[Callable[[list[Any], Any], None], Any], ...]:
    """Return (function, its plan) of all rows that change results of this graph, in order of execution.

    Plans that rewrite the graph are made after all others.
    """
    wanted = [row for row in rows if stage in row.stages]
    plans = {id(row): row.plan(gm, request) for row in sorted(wanted, key=lambda row: row.rewrites)}
    return tuple((row.run, plans[id(row)]) for row in wanted if plans[id(row)])
