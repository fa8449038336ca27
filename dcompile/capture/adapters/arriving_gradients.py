"""Reduce DDP's gradients as autograd adds them to `.grad`, where no program computes all gradients of a bucket.

That happens if a model is captured in several graphs, uses parameters outside of them, or runs eagerly. With
`find_unused_parameters=True`, ranks may then run different graphs, and use different parameters. All still reduce the
same buckets in the same order: those of a program that has every gradient. So a rank with one graph matches a rank
with several. A bucket's all-reduce starts once its last gradient is there, while other graphs still compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from dcompile import compat
from dcompile.capture.adapters.ddp import DdpAdapter
from dcompile.capture.services import GradientBuckets
from dcompile.errors import DcompileError
from dcompile.ir.buffers import Bucket

SEVERAL = "the model was captured in several graphs"
"""Reason in the receipt for reducing a call's gradients as they arrive."""
Layout = tuple[Bucket, ...]


class ArrivingGradients:
    """The buckets of one backward, and the gradients that each still lacks."""

    def __init__(
        self,
        layout: Layout,
        buckets: GradientBuckets,
        params: Mapping[int, Callable[[], Any]],
        unreduced: set[int],
        waits: bool,
    ) -> None:
        """Start a backward. `layout`: the buckets in the order of reduction.

        `unreduced`: parameters with gradients that are not reduced yet, earlier backwards' included. `waits`: whether
        all buckets are reduced at the end of the backward, since hooks may change gradients.
        """
        self._buckets, self._unreduced = buckets, unreduced
        self._order = [bucket.name for bucket in layout]
        self._place = {number: at for at, bucket in enumerate(layout) for number, _ in bucket.places}
        self._missing = [
            {-1} if waits else {number for number, _ in bucket.places if _will_come(params[number]())}
            for bucket in layout
        ]
        self._memory: dict[str, Any] = {}
        buckets.begin(unreduced)

    def arrived(self, number: int, name: str) -> None:
        """Record that autograd has added a gradient to parameter `number`; start the buckets that are now complete.

        `name` is the parameter's name in errors. Raises DcompileError if its bucket has started already.
        """
        place = self._place.get(number)
        if place is None:
            return
        if self._order[place] in self._memory:
            raise DcompileError(
                f"dcompile: parameter {name} got a gradient when its bucket was on its way to other ranks. Stock DDP "
                "refuses this, too: a reentrant checkpoint (use_reentrant=True) under find_unused_parameters=True. Use "
                "use_reentrant=False, or find_unused_parameters=False"
            )
        self._missing[place].discard(number)
        while len(self._memory) < len(self._order) and not self._missing[len(self._memory)]:
            self._start(self._order[len(self._memory)])  # in the same order on all ranks

    def _start(self, name: str) -> None:
        self._memory[name] = memory = self._buckets.acquire(name)
        self._buckets.mark_used(self._unreduced)
        self._buckets.start(name, memory)

    def finish(self) -> None:
        """At the end of the backward: start the remaining buckets, and wait for all."""
        for name in self._order[len(self._memory) :]:
            self._start(name)
        for name, memory in self._memory.items():
            self._buckets.wait(name, memory)


def _will_come(parameter: Any) -> bool:
    return parameter is not None and compat.autograd.will_accumulate(parameter)


class GradientArrivals:
    """Bookkeeping of one DDP model: whose gradients are reduced as they arrive, and the backward in progress."""

    def __init__(
        self,
        adapter: DdpAdapter,
        make: Callable[[], tuple[Layout, GradientBuckets]],
        finish: Callable[[list[GradientBuckets]], None],
    ) -> None:
        """`make` returns the buckets of a program without a gradient, on which all ranks agree.

        `finish` passes reduced buckets on as `.grad`.
        """
        self._adapter, self._make, self._finish = adapter, make, finish
        self._made: tuple[Layout, GradientBuckets] | None = None
        self._scattered: set[int] = set()
        """Graphs of calls whose gradients no single program computes: their programs write none into buckets."""
        self._running: dict[int, ArrivingGradients] = {}
        """Autograd's number of a backward -> its gradients."""

    def forget(self) -> None:
        """Drop the buckets, since other parameters have places in them now."""
        self._made = None

    def scatter(self, graphs: Collection[int], alone: bool) -> bool:
        """Record the graphs of a call; return whether its gradients are reduced as they arrive.

        `alone`: no parameter was used outside these graphs.
        """
        if len(graphs) > 1 or not alone:
            self._scattered.update(graphs)
        return not self._scattered.isdisjoint(graphs)

    def has(self, graph: int) -> bool:
        """Does a graph's program leave its gradients to autograd?"""
        return graph in self._scattered

    def layout(self, graphs: Iterable[int]) -> Layout:
        """Return the buckets into which gradients of a call of these graphs are copied as they arrive, if they are."""
        return () if self._made is None or self._scattered.isdisjoint(graphs) else self._made[0]

    def is_running(self) -> bool:
        """Are the gradients of the backward that runs now reduced as they arrive?"""
        return compat.autograd.backward_task() in self._running

    def begin(self) -> None:
        """Inside a backward, before its first gradient: reduce each bucket from now on once it is complete."""
        adapter, task = self._adapter, compat.autograd.backward_task()
        if task in self._running:
            return
        if hooked := adapter.hooked():
            adapter.note_behind(hooked)
        self._made = self._made or self._make()
        adapter.watch()
        running = ArrivingGradients(*self._made, adapter.refs, adapter.unreduced, waits=bool(hooked))
        self._running, adapter.arrived = {task: running}, running.arrived  # a backward that has raised is forgotten
        compat.autograd.at_end_of_backward(lambda: self._end(task))

    def _end(self, task: int) -> None:
        running, self._adapter.arrived = self._running.pop(task, None), None
        if running is None or self._made is None or not self._adapter.eligible:
            return
        running.finish()
        self._adapter.has_synced()
        self._finish([self._made[1]])
