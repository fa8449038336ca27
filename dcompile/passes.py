"""What the rows of `pipeline.py` are: passes, when each is on, and what a pass over an FX graph reports.

`DCOMPILE_SKIP=name,name` leaves passes out, and `DCOMPILE_UNTIL=name` stops after one, in whichever list it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dcompile.config import Config
from dcompile.errors import OptionError


@dataclass(frozen=True, slots=True)
class PassReport:
    """What a pass over an FX graph did: how much it changed, and lines for people.

    `fallbacks` counts, by reason, what it found and could not rewrite; the receipt shows them.
    """

    changes: int = 0
    notes: tuple[str, ...] = ()
    fallbacks: Mapping[str, int] = field(default_factory=dict)


def always(config: Config) -> bool:
    """The condition of a pass that every graph needs."""
    del config
    return True


def with_own_kernels(config: Config) -> bool:
    """The condition of a pass that serves kernels of ours."""
    return config.own_kernels


def nothing(request: Any) -> tuple[Any, ...]:
    """What a pass is given that takes the graph alone."""
    del request
    return ()


@dataclass(frozen=True, slots=True)
class GraphPass:
    """A rewrite of an FX graph, in place: `run(gm, *given(request))`.

    `request` is a `capture.graph_pass.GraphRequest`. `stages`: the graphs that it rewrites, "dynamo" for what
    TorchDynamo captured, "joint" for forward and backward in one, "inference" for a forward alone.
    """

    run: Callable[..., PassReport]
    given: Callable[[Any], tuple[Any, ...]] = nothing
    when: Callable[[Config], bool] = always
    stages: tuple[str, ...] = ("dynamo",)
    required: bool = False
    """Whether it may not be left out."""

    @property
    def name(self) -> str:
        """The name in logs, dumps, and the options `skip` and `until`."""
        return self.run.__name__


@dataclass(frozen=True, slots=True)
class OutputStep:
    """What is done to the results of a program, call after call: `run(results, plan)`, in place.

    `plan(gm, request)` is made once, when the program is compiled. Where it is empty, there is nothing to do. `request`
    is a `capture.output_steps.OutputRequest`. `stages`: "forward" of a training graph, or "inference".
    """

    run: Callable[[list[Any], Any], None]
    plan: Callable[[Any, Any], Any]
    stages: tuple[str, ...]
    rewrites: bool = False
    """Whether planning changes what the graph returns: it comes behind all others then."""

    @property
    def name(self) -> str:
        """The name in the printed list."""
        return self.run.__name__


@dataclass(frozen=True, slots=True)
class GraphPasses:
    """The rows that capturing needs, as the settings leave them."""

    dynamo: Sequence[GraphPass]
    joint: Sequence[GraphPass]
    outputs: Sequence[OutputStep]


class Row(Protocol):
    """A pass of any list, as selecting sees it."""

    @property
    def name(self) -> str:
        """Its name, unique in all lists."""

    @property
    def required(self) -> bool:
        """Whether it may not be left out."""


R = TypeVar("R", bound=Row)


def check_names(config: Config, lists: Sequence[Sequence[Row]]) -> None:
    """Raise OptionError if `skip` or `until` names a pass that there is not."""
    names = [row.name for rows in lists for row in rows]
    for wanted in filter(None, (*config.skip.split(","), config.until)):
        if wanted not in names:
            raise OptionError(f"dcompile: unknown pass {wanted!r} in skip or until; passes: {', '.join(names)}")


def select_rows(config: Config, rows: Sequence[R], earlier: Sequence[Sequence[Row]] = ()) -> tuple[R, ...]:
    """The rows that `skip` and `until` leave: all required ones, and others up to where a list says to stop.

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
