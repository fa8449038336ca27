"""How the gradients of a compiled model are kept in step with other ranks: one strategy for each kind of adapter.

`CompiledModel` keeps the life cycle, and asks its strategy at fixed points: when a call begins, when a graph's forward
runs, after a call, before and in a backward. The base is the strategy of a model without other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dcompile.capture.adapters.eager_regions import EagerRegionMonitor
from dcompile.capture.adapters.fsdp_common import ShardedAdapter
from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.capture.call_state import CapturedGraph, Invocation, Variant
from dcompile.capture.services import GradientBuckets, Services, ShardedParameters
from dcompile.collectives.contract import Executable
from dcompile.ir.nodes import Bucket

Boxed = Callable[[list[Any]], list[Any]]


@dataclass(slots=True)
class BackwardCall:
    """One run of a backward program."""

    graph: CapturedGraph
    run: Executable
    buckets: GradientBuckets | None
    args: list[Any]
    """The program's inputs, which it takes out of the list."""
    sync: int
    """Whether, and how, gradients are to be reduced: see `Invocation.token`."""
    gone: Collection[int]
    """Positions of results that there are none of in this call."""

    def absent(self) -> frozenset[int]:
        """Parameters that there is no gradient of in this call."""
        return frozenset(number for place, number in self.graph.grads if place in self.gone)


class SynchronizedModel(Protocol):
    """A compiled model (`compiled_model.CompiledModel`), as a strategy sees it."""

    settings: Any
    services: Services
    adapter: Any
    variants: dict[tuple[int, ...], Variant]
    shards: ShardedParameters | None
    pool: dict[Any, Any]

    @property
    def graphs(self) -> Iterable[CapturedGraph]:
        """All graphs captured so far."""

    def objections(self) -> list[str]:
        """What calls so far use outside the compiled graphs."""

    def compare_captures(self, graphs: Iterable[CapturedGraph]) -> None:
        """See that every rank has captured the same for these graphs: all come, and all raise if they have not."""

    def graphs_of_call(self, graph: CapturedGraph) -> list[CapturedGraph]:
        """Those that ran in the call that a graph's backward is of."""

    def agree_on(self, plan: list[str]) -> None:
        """Before the first collective of a program: see that every rank is about to run the same ones."""


class GradientSync:
    """Nothing is kept in step. The base of the other strategies, and their interface."""

    model: SynchronizedModel
    """The model that it serves, once that has adopted it."""

    def __init__(self, adapter: PlainAdapter) -> None:
        self.adapter = adapter

    def renewed(self) -> GradientSync:
        """The same for the same adapter, as at first."""
        return type(self)(self.adapter)

    @property
    def sharded(self) -> ShardedAdapter | None:
        """The adapter, if parameters are sharded."""
        return None

    def take_over(self) -> tuple[ShardedParameters | None, EagerRegionMonitor | None]:
        """What programs gather sharded parameters through, and what looks after eager code between them."""
        return None, None

    @property
    def scatters(self) -> bool:
        """Whether backwards reduce gradients to shards, though no program gathers parameters."""
        return False

    # --- forward ---

    def begin_call(self, call: Invocation) -> None:
        """A call starts: note whether its backward is to reduce gradients."""

    def on_forward(self, call: Invocation, graph: CapturedGraph) -> None:
        """A graph's forward runs in a call."""

    def token(self, call: Invocation | None) -> torch.Tensor | None:
        """What a forward saves to tell its backward whether to reduce; None where that is not carried."""
        del call
        return None

    def compares_captures(self) -> bool:
        """Whether a graph that is captured now may be among those that ranks are to compare."""
        return torch.is_grad_enabled() and not any(v.training for v in self.model.variants.values())

    def wrap_forward(self, graph: CapturedGraph, run: Executable, kind: str) -> Boxed:
        """A forward or inference program, with what it gathers through. `kind`: "forward" or "inference".

        One that has collectives of the model's own: ranks agree before the first.
        """
        if not graph.has_own_collectives(kind):
            return run

        def agreeing(args: list[Any]) -> list[Any]:
            graph.agree(kind)
            return run(args)

        return agreeing

    # --- after a call ---

    def check_result(self, result: Any) -> None:
        """Raises FallBackToStock if the model returns what has to stay inside."""

    def objections_to(self, key: tuple[int, ...], result: Any) -> tuple[str, ...]:
        """What a new kind of call, which runs these graphs, uses outside of them."""
        del key, result
        return ()

    def after_call(self, variant: Variant, call: Invocation, result: Any) -> None:
        """A call is through that has run graphs."""

    def no_graph_ran(self, call: Invocation, result: Any) -> None:
        """A call is through that has run none."""

    # --- backward ---

    def before_backward(self, graph: CapturedGraph, sync: bool) -> bool:
        """Before a graph's backward program runs; whether it is settled who reduces gradients."""
        del graph, sync
        return True

    def run_backward(self, call: BackwardCall) -> list[Any]:
        """Run a backward program."""
        if call.graph.has_own_collectives("backward"):
            call.graph.agree("backward")
        return call.run(call.args)

    def accumulates(self, numbers: Iterable[int]) -> bool:
        """Inside a backward: whether it adds to the `.grad` of any of these parameters."""
        raise AssertionError("of a model that is not kept in step, nobody asks")

    def awaited(self, grads: Iterable[tuple[int, int]], unsure: Collection[int]) -> frozenset[int]:
        """Positions of a backward's results that somebody waits for, whatever it lacks."""
        return frozenset(place for place, number in grads if number not in unsure)

    def reduces_in_program(self, graph: CapturedGraph) -> bool:
        """Whether a backward program that is compiled now is to reduce gradients itself."""
        del graph
        return True

    def arriving(self, graphs: Iterable[int]) -> tuple[Bucket, ...]:
        """Buckets that gradients of a call, which runs these graphs, are copied into as they arrive."""
        del graphs
        return ()

    def make_buckets(self, buckets: tuple[Bucket, ...]) -> GradientBuckets:
        """The memory of a backward program's buckets."""
        raise AssertionError("only DDP has buckets")

    # --- parameters ---

    def forget_buckets(self) -> None:
        """The parameters that have places in buckets are others now."""

    def watch_parameters(self, compiled: Callable[..., Any], params: Mapping[int, int]) -> Callable[..., Any]:
        """`compiled`, noticing when a parameter object was replaced (load_state_dict(assign=True)).

        `params`: position among the inputs -> the parameter's number.
        """
        del params
        return compiled
