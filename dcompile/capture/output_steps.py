"""Plan what is done to a program's results: views, detached tensors, tensors of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dcompile.passes import OutputStep


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """What AOTAutograd says of a graph's results, by their positions."""

    count: int
    """Results before what a forward saves."""
    views: Sequence[int] = ()
    """Those of a forward that are views of what it computed."""
    constant: Sequence[int] = ()
    """Those of a forward that have no gradient."""


def plan_outputs(
    rows: Sequence[OutputStep], gm: Any, request: OutputRequest, stage: str
) -> tuple[tuple[Callable[[list[Any], Any], None], Any], ...]:
    """(what to run, its plan) of all rows that have something to do with the results of this graph, in order."""
    wanted = [row for row in rows if stage in row.stages]
    plans = {id(row): row.plan(gm, request) for row in sorted(wanted, key=lambda row: row.rewrites)}
    return tuple((row.run, plans[id(row)]) for row in wanted if plans[id(row)])
