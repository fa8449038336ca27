"""Reduce DDP's gradients as autograd adds them to `.grad`: where no one program computes all that a bucket holds.

That is where a model is captured in several graphs, uses parameters outside of them, or runs eagerly. With
`find_unused_parameters=True`, ranks may then run different graphs, and use other parameters. Each still reduces the
same buckets in the same order: those of a program that has every gradient. So a rank with one graph pairs with a rank
that has several. A bucket is exchanged once the last of its gradients is there, while other graphs still compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from dcompile import compat
from dcompile.capture.adapters.ddp import DdpAdapter
from dcompile.capture.services import GradientBuckets
from dcompile.errors import DcompileError
from dcompile.ir.nodes import Bucket

SEVERAL = "the model was captured in several graphs"
"""Why a call's gradients are reduced as they arrive."""
Layout = tuple[Bucket, ...]


class ArrivingGradients:
    """One backward's buckets: which gradients each still waits for."""

    def __init__(
        self,
        layout: Layout,
        buckets: GradientBuckets,
        params: Mapping[int, Callable[[], Any]],
        unreduced: set[int],
        waits: bool,
    ) -> None:
        """`layout`: the buckets in the order of reduction. `unreduced`: parameters with gradients, also earlier ones.

        `waits`: whether all is to be reduced at the end, as hooks may change gradients.
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
        """Autograd has added a gradient to the parameter `number`, which the model calls `name`."""
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
            self._start(self._order[len(self._memory)])  # in the one order that all ranks have

    def _start(self, name: str) -> None:
        self._memory[name] = memory = self._buckets.acquire(name)
        self._buckets.mark_used(self._unreduced)
        self._buckets.start(name, memory)

    def finish(self) -> None:
        """The backward is through: reduce what is left, and wait for all of it."""
        for name in self._order[len(self._memory) :]:
            self._start(name)
        for name, memory in self._memory.items():
            self._buckets.wait(name, memory)


def _will_come(parameter: Any) -> bool:
    return parameter is not None and compat.tensors.will_accumulate(parameter)


class GradientArrivals:
    """Of one DDP model: which calls' gradients are reduced as they arrive, and those of the backward that runs."""

    def __init__(
        self,
        adapter: DdpAdapter,
        make: Callable[[], tuple[Layout, GradientBuckets]],
        finish: Callable[[list[GradientBuckets]], None],
    ) -> None:
        """`make`: the buckets of a program without a gradient, on which all ranks agree. `finish`: hands them on."""
        self._adapter, self._make, self._finish = adapter, make, finish
        self._made: tuple[Layout, GradientBuckets] | None = None
        self._scattered: set[int] = set()
        """Graphs of calls that no one program computes all gradients of: their programs put none into buckets."""
        self._running: dict[int, ArrivingGradients] = {}
        """Backward -> its gradients."""

    def forget(self) -> None:
        """The parameters with places in buckets are others now."""
        self._made = None

    def scatter(self, graphs: Collection[int], alone: bool) -> bool:
        """Note the graphs that a call has run; whether its gradients are to be reduced as they arrive.

        `alone`: nothing but these graphs has used parameters.
        """
        if len(graphs) > 1 or not alone:
            self._scattered.update(graphs)
        return not self._scattered.isdisjoint(graphs)

    def has(self, graph: int) -> bool:
        """Whether a graph's program is to leave its gradients to autograd alone."""
        return graph in self._scattered

    def layout(self, graphs: Iterable[int]) -> Layout:
        """The buckets that gradients of a call, which has run these graphs, are copied into."""
        return () if self._made is None or self._scattered.isdisjoint(graphs) else self._made[0]

    def is_running(self) -> bool:
        """Whether the gradients of the backward that runs now are reduced as they arrive."""
        return compat.tensors.backward_task() in self._running

    def begin(self) -> None:
        """Inside a backward, before the first gradient of such a call: reduce each bucket once it is complete."""
        adapter, task = self._adapter, compat.tensors.backward_task()
        if task in self._running:
            return
        if hooked := adapter.hooked():
            adapter.note_behind(hooked)
        self._made = self._made or self._make()
        adapter.watch()
        running = ArrivingGradients(*self._made, adapter.refs, adapter.unreduced, waits=bool(hooked))
        self._running, adapter.arrived = {task: running}, running.arrived  # a backward that has raised is forgotten
        compat.tensors.at_end_of_backward(lambda: self._end(task))

    def _end(self, task: int) -> None:
        running, self._adapter.arrived = self._running.pop(task, None), None
        if running is None or self._made is None or not self._adapter.eligible:
            return
        running.finish()
        self._adapter.has_synced()
        self._finish([self._made[1]])
