"""Rows of `pipeline.py`: passes, their conditions, and the report of a pass over an FX graph.

`DCOMPILE_SKIP=name,name` skips passes, and `DCOMPILE_UNTIL=name` stops after one, in any list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dcompile.config import Config
from dcompile.errors import OptionError, suggestion

GAIN = "for speed: "
"""How a note begins that only says what a pass has gained: it is in the receipt's data, and is not printed."""


@dataclass(frozen=True, slots=True)
class PassReport:
    """Result of a pass over an FX graph: the number of changes, and lines for people.

    `fallbacks` counts, by reason, patterns that it found and could not rewrite; the receipt shows them.
    """

    changes: int = 0
    notes: tuple[str, ...] = ()
    fallbacks: Mapping[str, int] = field(default_factory=dict)


def always(config: Config) -> bool:
    """Condition of a pass that every graph needs."""
    return True


def with_own_kernels(config: Config) -> bool:
    """Condition of a pass that serves dcompile's own kernels."""
    return config.own_kernels


def recomputes(config: Config) -> bool:
    """Whether the settings trade time for memory: the backward recomputes more than what is free."""
    return config.recompute == "memory" or config.activation_memory_budget < 1


def nothing(request: Any) -> tuple[Any, ...]:
    """Arguments of a pass that takes only the graph: none."""
    return ()


@dataclass(frozen=True, slots=True)
class Row:
    """A row of any list: what it runs."""

    run: Callable[..., Any]

    @property
    def name(self) -> str:
        """Name in logs, dumps, and the options `skip` and `until`; unique among the passes of all lists."""
        return self.run.__name__


@dataclass(frozen=True, slots=True)
class Pass(Row):
    """A rewrite, `run(what, *given(request))`, for settings under which `when` holds."""

    given: Callable[[Any], tuple[Any, ...]] = nothing
    when: Callable[[Config], bool] = always
    required: bool = False
    """Whether it cannot be skipped."""


@dataclass(frozen=True, slots=True)
class GraphPass(Pass):
    """A rewrite of an FX graph, in place: `run(gm, *given(request))` returns a `PassReport`.

    `request` is a `capture.passes.run_passes.GraphRequest`. `stages`: the graphs that it rewrites. "dynamo" is the
    graph that TorchDynamo captured, "joint" forward and backward in one, "inference" a forward alone.
    """

    stages: tuple[str, ...] = ("dynamo",)


@dataclass(frozen=True, slots=True)
class LoopPass(Pass):
    """A rewrite of the program: `run(program, *given(request))`, a new program.

    Without `reorders_sums`, outputs are bitwise equal to those before; with it, up to the order of reductions.
    `request` is a `collectives.contract.Request`.
    """

    reorders_sums: bool = False
    needs_loops: bool = True


@dataclass(frozen=True, slots=True)
class OutputStep(Row):
    """A change to the results of a program in each call: `run(results, plan)`, in place.

    `plan(gm, request)` is computed once, when the program is compiled. An empty plan means that there is nothing to do.
    `request` is a `capture.output_steps.OutputRequest`. `stages`: "forward" of a training graph, or "inference".
    """

    plan: Callable[[Any, Any], Any]
    stages: tuple[str, ...]
    rewrites: bool = False
    """Whether planning changes the graph's results: it then comes after all others."""


@dataclass(frozen=True, slots=True)
class GraphPasses:
    """Rows that capture needs, as selected by the settings."""

    dynamo: Sequence[GraphPass]
    joint: Sequence[GraphPass]
    outputs: Sequence[OutputStep]
    wrappers: Sequence[Row]


R = TypeVar("R", bound=Pass)


def check_names(config: Config, lists: Sequence[Sequence[Pass]]) -> None:
    """Raise OptionError if `skip` or `until` names an unknown pass."""
    names = [row.name for rows in lists for row in rows]
    for wanted in filter(None, (*config.skip.split(","), config.until)):
        if wanted not in names:
            raise OptionError(
                f"dcompile: unknown pass {wanted!r} in skip or until{suggestion(wanted, names, 'passes')}"
            )


def select_rows(config: Config, rows: Sequence[R], earlier: Sequence[Sequence[Pass]] = ()) -> tuple[R, ...]:
    """Rows that `skip` and `until` leave: all required ones, and others up to the pass to stop after.

    `earlier` are the lists that run before this one.
    """
    skipped = set(config.skip.split(","))
    stopped = any(row.name == config.until for others in earlier for row in others)
    left: list[R] = []
    for row in rows:
        if row.required or not (stopped or row.name in skipped):
            left.append(row)
        stopped = stopped or row.name == config.until
    return tuple(left)
