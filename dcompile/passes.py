"""Rows of `pipeline.py`: passes, their conditions, and the report of a pass over an FX graph.

`DCOMPILE_SKIP=name,name` skips passes, and `DCOMPILE_UNTIL=name` stops after one, in any list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

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
    del config
    return True


def with_own_kernels(config: Config) -> bool:
    """Condition of a pass that serves dcompile's own kernels."""
    return config.own_kernels


def recomputes(config: Config) -> bool:
    """Whether the settings trade time for memory: the backward recomputes more than what is free."""
    return config.recompute == "memory" or config.activation_memory_budget < 1


def nothing(request: Any) -> tuple[Any, ...]:
    """Arguments of a pass that takes only the graph: none."""
    del request
    return ()


@dataclass(frozen=True, slots=True)
class GraphPass:
    """A rewrite of an FX graph, in place: `run(gm, *given(request))`.

    `request` is a `capture.passes.run_passes.GraphRequest`. `stages`: the graphs that it rewrites. "dynamo" is the
    graph that TorchDynamo captured, "joint" forward and backward in one, "inference" a forward alone.
    """

    run: Callable[..., PassReport]
    given: Callable[[Any], tuple[Any, ...]] = nothing
    when: Callable[[Config], bool] = always
    stages: tuple[str, ...] = ("dynamo",)
    required: bool = False
    """Whether it cannot be skipped."""

    @property
    def name(self) -> str:
        """Name in logs, dumps, and the options `skip` and `until`."""
        return self.run.__name__


@dataclass(frozen=True, slots=True)
class OutputStep:
    """A change to the results of a program in each call: `run(results, plan)`, in place.

    `plan(gm, request)` is computed once, when the program is compiled. An empty plan means that there is nothing to do.
    `request` is a `capture.output_steps.OutputRequest`. `stages`: "forward" of a training graph, or "inference".
    """

    run: Callable[[list[Any], Any], None]
    plan: Callable[[Any, Any], Any]
    stages: tuple[str, ...]
    rewrites: bool = False
    """Whether planning changes the graph's results: it then comes after all others."""

    @property
    def name(self) -> str:
        """Name in the printed list."""
        return self.run.__name__


@dataclass(frozen=True, slots=True)
class GraphWrapper:
    """A function around one compiled graph: `wrap(compiled, around)` returns `compiled` itself if it is not needed.

    `around` is a `capture.dynamo_backend.WrapperRequest`.
    """

    wrap: Callable[[Callable[..., Any], Any], Callable[..., Any]]

    @property
    def name(self) -> str:
        """Name in the printed list and in dumps."""
        return self.wrap.__name__


@dataclass(frozen=True, slots=True)
class GraphPasses:
    """Rows that capture needs, as selected by the settings."""

    dynamo: Sequence[GraphPass]
    joint: Sequence[GraphPass]
    outputs: Sequence[OutputStep]
    wrappers: Sequence[GraphWrapper]


class Row(Protocol):
    """A pass of any list, as needed for selection."""

    @property
    def name(self) -> str:
        """Name, unique in all lists."""

    @property
    def required(self) -> bool:
        """Whether it cannot be skipped."""


R = TypeVar("R", bound=Row)


def check_names(config: Config, lists: Sequence[Sequence[Row]]) -> None:
    """Raise OptionError if `skip` or `until` names an unknown pass."""
    names = [row.name for rows in lists for row in rows]
    for wanted in filter(None, (*config.skip.split(","), config.until)):
        if wanted not in names:
            raise OptionError(
                f"dcompile: unknown pass {wanted!r} in skip or until{suggestion(wanted, names, 'passes')}"
            )


def select_rows(config: Config, rows: Sequence[R], earlier: Sequence[Sequence[Row]] = ()) -> tuple[R, ...]:
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
