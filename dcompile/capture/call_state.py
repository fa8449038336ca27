"""What is known of single calls of a compiled model, and of the kinds of calls that there were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dcompile.capture.services import Line, ShardedParameters
from dcompile.capture.trace_cache.graph_trace import GraphTrace
from dcompile.collectives.contract import Executable


@dataclass(eq=False)
class Invocation:
    """One call of the compiled model."""

    inside_ddp: bool = False
    sync: bool = False
    token: torch.Tensor | None = None
    """What the graphs of this call leave for their backwards: 1 if these are to reduce gradients, 2 if gradients are to
    be reduced as they arrive; 0 and -2 if that is so only where it is asked for by hand. None: 0.
    """
    graphs: list[int] = field(default_factory=list)
    """Numbers of the graphs that ran in this call, in order."""
    units: set[int] = field(default_factory=set)
    """Of sharded parameters, those that graphs of this call have gradients of."""


@dataclass(frozen=True)
class Variant:
    """The graphs that one kind of call runs (another kind: other shapes, another branch, no_grad)."""

    graphs: tuple[int, ...]
    training: bool
    objections: tuple[str, ...] = ()
    """Parameters that this kind of call uses outside the compiled graphs, and the like."""


class CapturedGraph(Protocol):
    """A Dynamo graph with its programs (`graph_runner.GraphPrograms`), as the state of a model sees it."""

    number: int
    training: bool
    executables: dict[str, Executable]
    notes: list[str]
    fallbacks: Counter[str]
    captured: list[Line]
    later: set[int]
    grads: tuple[tuple[int, int], ...]
    """(position among the backward's outputs, parameter number)."""
    trace: GraphTrace | None
    """Where its trace came from."""
    unsure: tuple[int, ...]
    """Parameters that a backward may have no gradient of."""

    def accumulates(self) -> bool:
        """Inside its backward: whether that adds to the `.grad` of any parameter."""

    def units(self) -> set[int]:
        """Units of sharded parameters that a backward has gradients of."""

    @property
    def shards(self) -> ShardedParameters | None:
        """What its sharded parameters are exchanged through, also after they were given back."""

    @property
    def gathers(self) -> bool:
        """Whether programs gather sharded parameters."""

    def units_of(self, numbers: Iterable[int]) -> set[int]:
        """Units of these parameters."""

    def has_own_collectives(self, kind: str) -> bool:
        """Whether a program has collectives that the model itself calls."""

    def agree(self, kind: str) -> None:
        """Before a program's first collective: see that every rank is about to run the same ones."""
