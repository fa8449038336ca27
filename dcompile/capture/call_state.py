"""State of single calls of a compiled model, and of kinds of calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dcompile.capture.services import Line
from dcompile.capture.warm_start.trace_cache import GraphTrace
from dcompile.collectives.contract import Executable


@dataclass(eq=False)
class Invocation:
    """One call of the compiled model."""

    inside_ddp: bool = False
    sync: bool = False
    token: torch.Tensor | None = None
    """Token that the graphs of this call save for their backwards; None means 0.

    1: reduce gradients in programs. 2: reduce gradients as they arrive. 0 and -2: as 1 and 2, but only if the user has
    prepared DDP's reducer.
    """
    graphs: list[int] = field(default_factory=list)
    """Numbers of the graphs that ran in this call, in order."""
    units: set[int] = field(default_factory=set)
    """Units of sharded parameters for which graphs of this call compute gradients."""
    strategy: Any = None
    """The gradient synchronization of the module that is called: programs may belong to another, equal one."""


@dataclass(frozen=True)
class Variant:
    """The graphs that one kind of call runs; kinds differ in shapes, branches or grad mode."""

    graphs: tuple[int, ...]
    training: bool
    objections: tuple[str, ...] = ()
    """Reasons against reducing gradients in programs, such as parameters used outside the compiled graphs."""


class GraphView(Protocol):
    """Interface of a Dynamo graph with its programs (`captured_graph.CapturedGraph`), for layers below it."""

    number: int
    training: bool
    device: torch.device
    executables: dict[str, Executable]
    notes: list[str]
    fallbacks: Counter[str]
    captured: list[Line]
    later: set[int]
    params: dict[int, int]
    """Position among the graph's inputs -> the parameter's number."""
    grads: tuple[tuple[int, int], ...]
    """(position among the backward's outputs, parameter number)."""
    trace: GraphTrace | None
    """Where its trace came from."""
    visible: tuple[tuple[tuple[int, int], ...], int]
    """((position among the forward program's results, parameter number) of each parameter that the modules show after
    the call, number of the results that the graph itself has).
    """
    unsure: tuple[int, ...]
    """Parameters that a backward may have no gradient of."""

    def accumulates(self) -> bool:
        """Inside its backward: does that add to the `.grad` of any parameter?"""

    @property
    def gathers(self) -> bool:
        """Whether programs gather sharded parameters."""

    def has_own_collectives(self, kind: str) -> bool:
        """Does a program have collectives that the model itself calls?"""

    def strategy(self) -> Any:
        """The gradient synchronization of the module whose call runs the graph's forward now."""

    def agree(self, kind: str, strategy: Any = None) -> None:
        """Check before a program's first collective that every rank is about to run the same ones.

        `strategy`: that of an equal module which runs the program, too.
        """
