"""Gradient synchronization of a compiled model: one strategy class for each kind of adapter.

`CompiledModel` owns the life cycle, and calls its strategy at fixed points. These are the start of a call, a graph's
forward, the end of a call, and the start and run of a backward. The base class serves models that synchronize nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dcompile.capture.adapters.eager_regions import EagerRegionMonitor
from dcompile.capture.adapters.fsdp_common import ShardedAdapter
from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.capture.call_state import GraphView, Invocation, Variant
from dcompile.capture.services import GradientBuckets, Replicas, Services, ShardedParameters
from dcompile.collectives.contract import Executable, SharedBuckets
from dcompile.ir.buffers import Bucket

Boxed = Callable[[list[Any]], list[Any]]


def make_token(number: int) -> torch.Tensor:
    """Make a CPU tensor that tells a backward whether to reduce, or for which module; forwards save it.

    It is no inference tensor, although the call may run in inference mode.
    """
    with torch.inference_mode(False):
        return torch.tensor(int(number), device="cpu")


@dataclass(slots=True)
class BackwardCall:
    """Arguments of one run of a backward program."""

    graph: GraphView
    run: Executable
    buckets: GradientBuckets | None
    args: list[Any]
    """The program's inputs; it empties the list."""
    sync: int
    """Whether and how gradients are reduced: see `Invocation.token`."""
    gone: Collection[int]
    """Positions of results that are None in this call."""

    def absent(self) -> frozenset[int]:
        """Return the parameters without a gradient in this call."""
        return frozenset(number for place, number in self.graph.grads if place in self.gone)


class SynchronizedModel(Protocol):
    """Interface of a compiled model (`compiled_model.CompiledModel`) for strategies."""

    settings: Any
    services: Services
    adapter: Any
    variants: dict[tuple[int, ...], Variant]
    shared_buckets: SharedBuckets

    @property
    def graphs(self) -> Iterable[GraphView]:
        """All graphs captured so far."""

    def objections(self) -> list[str]:
        """Return reasons, found in calls so far, against reducing gradients in the compiled graphs."""

    def compare_captures(self, graphs: Iterable[GraphView]) -> None:
        """Check that every rank has captured the same for these graphs: all ranks call this, and raise together."""

    def graphs_of_call(self, graph: GraphView) -> list[GraphView]:
        """Return the graphs of the call that a graph's backward belongs to."""

    def agree_on(self, plan: list[str]) -> None:
        """Check before a program's first collective that every rank is about to run the same ones."""

    def agree_on_own(self, plans: Mapping[str, list[str]]) -> None:
        """Compare the collectives that the model itself calls, in each of their process groups."""


class GradientSync:
    """Interface and base class of the strategies: it synchronizes nothing."""

    model: SynchronizedModel
    """The model that uses this strategy, set when the model adopts it."""

    def __init__(self, adapter: PlainAdapter) -> None:
        self.adapter = adapter
        self.shards: ShardedParameters | None = None
        """Sharded parameters that programs gather, also after a fallback to the wrapper's own hooks."""
        self.eager_regions: EagerRegionMonitor | None = None
        """Monitor of the eager regions between these programs."""
        self.replicas: list[Replicas] = []
        """Watches of what ranks hold alike, once there was a training call."""
        self.compared = False
        """Whether ranks know of each other that they run an equal module's programs."""

    def renewed(self) -> GradientSync:
        """Return a new strategy of this class, in its initial state, for the same adapter."""
        return type(self)(self.adapter)

    @property
    def sharded(self) -> ShardedAdapter | None:
        """The adapter if parameters are sharded, else None."""
        return None

    def take_over(self) -> tuple[ShardedParameters | None, EagerRegionMonitor | None]:
        """Take over synchronization; return the shards that programs gather, and the monitor of eager regions."""
        return None, None

    @property
    def scatters(self) -> bool:
        """Whether backwards reduce gradients to shards although no program gathers parameters."""
        return False

    # --- forward ---

    def begin_call(self, call: Invocation) -> None:
        """Record, as a call starts, whether its backward reduces gradients."""

    def on_forward(self, call: Invocation, graph: GraphView) -> None:
        """Record that a graph's forward runs in a call."""

    def lend_to(self, other: GradientSync) -> None:
        """Let an equal module, which has the strategy `other`, run these programs."""

    def by_token(self, token: int) -> GradientSync:
        """Return the strategy of the call that has saved a token: this one, or one to which programs are lent."""
        return self

    def save_memory(self, reason: str) -> None:
        """Keep no converted shards; see `ShardedParameters.save_memory`."""
        if self.shards is not None:
            self.shards.save_memory(reason)

    def token(self, call: Invocation | None) -> torch.Tensor | None:
        """Return the tensor that a forward saves to tell its backward whether to reduce, or None without tokens."""
        return None

    def compares_captures(self) -> bool:
        """May ranks have to compare a graph that is captured now?"""
        return torch.is_grad_enabled() and not any(v.training for v in self.model.variants.values())

    def wrap_forward(self, graph: GraphView, run: Executable, kind: str) -> Boxed:
        """Return a forward or inference program that has its shard source. `kind`: "forward" or "inference".

        If the program has collectives that the model itself calls, ranks compare plans before each run.
        """
        if not graph.has_own_collectives(kind):
            return run

        def agreeing(args: list[Any]) -> list[Any]:
            graph.agree(kind, graph.strategy())
            return run(args)

        return agreeing

    def health(self) -> list[str]:
        """Return lines for the receipt about replicas that have drifted apart."""
        return [said for replicas in self.replicas if (said := replicas.status())]

    # --- after a call ---

    def check_result(self, result: Any) -> None:
        """Raise FallBackToStock if the model returns a virtual parameter."""

    def objections_to(self, key: tuple[int, ...], result: Any) -> tuple[str, ...]:
        """Return what a new kind of call uses outside its graphs; `key` has the graphs' numbers."""
        return ()

    def after_call(self, variant: Variant, call: Invocation, result: Any) -> None:
        """Handle the end of a call that ran graphs."""

    def no_graph_ran(self, call: Invocation, result: Any) -> None:
        """Handle the end of a call that ran no graph."""

    # --- backward ---

    def before_backward(self, graph: GraphView, sync: bool) -> bool:
        """Prepare for a graph's backward program; return whether it is decided who reduces gradients."""
        return True

    def run_backward(self, call: BackwardCall) -> list[Any]:
        """Run a backward program."""
        if call.graph.has_own_collectives("backward"):
            call.graph.agree("backward")
        return call.run(call.args)

    def why_updates_apart(self, graph: GraphView) -> str:
        """Return why the optimizer's update cannot run in a graph's backward program; empty if it can."""
        return ""

    def ranks_of_norm(self) -> str:
        """Return the name of the process group over which the norm of gradients is summed up; empty for none."""
        return ""

    def reduces_all(self, token: int) -> bool:
        """Does a backward with this token reduce gradients over all ranks, if parameters are sharded?"""
        return False

    def begin_waiting(self) -> None:
        """Begin a backward that waits for the optimizer's step."""

    def reducing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backwards reduce gradients, whatever the wrapper's settings are now."""
        return contextlib.nullcontext()

    def accumulates(self, numbers: Iterable[int]) -> bool:
        """Inside a backward: does it add to the `.grad` of any of these parameters?"""
        raise AssertionError("of a model that is not kept in step, nobody asks")

    def awaited(self, grads: Iterable[tuple[int, int]], unsure: Collection[int]) -> frozenset[int]:
        """Return the positions of gradients that must be tensors, zeros if need be, where autograd has none."""
        return frozenset(place for place, number in grads if number not in unsure)

    def reduces_in_program(self, graph: GraphView) -> bool:
        """Does a backward program that is compiled now reduce gradients itself?"""
        return True

    def arriving(self, graphs: Iterable[int]) -> tuple[Bucket, ...]:
        """Return the buckets into which gradients of a call of these graphs are copied as autograd adds them."""
        return ()

    def make_buckets(self, buckets: tuple[Bucket, ...]) -> GradientBuckets:
        """Allocate a backward program's buckets."""
        raise AssertionError("only DDP has buckets")

    # --- parameters ---

    def forget_buckets(self) -> None:
        """Drop bucket layouts, since other parameters have places in buckets now."""

    def watch_parameters(self, compiled: Callable[..., Any], params: Mapping[int, int]) -> Callable[..., Any]:
        """Return `compiled` with a check for replaced parameter objects (load_state_dict(assign=True)).

        `params`: position among the inputs -> the parameter's number.
        """
        return compiled
