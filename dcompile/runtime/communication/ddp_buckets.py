"""Memory of gradient buckets: given out, filled by a backward, reduced over the ranks, and handed on as p.grad."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from dcompile.compat.tensors import copy_all, multiply_all, storage_use_count, will_accumulate, zero_all
from dcompile.ir.nodes import Bucket
from dcompile.runtime.communication.work import PendingCollective, count_replayed, start_sum

MAX_KEPT_STORAGES = 2
"""Storages kept per bucket: one that p.grad may still show, one to write into. A third is needed only by a caller who
holds on to older gradients, and is his to free."""


@dataclass(eq=False)
class BucketMemory:
    """One storage of one bucket.

    `tensors` are views that a host program builds on this memory once, as targets of library calls; each counts as a
    reference to the storage.
    """

    flat: torch.Tensor
    wire: torch.Tensor | None = None
    """What is exchanged in place of `flat`, if it is of another dtype."""
    tensors: dict[Any, torch.Tensor] = field(default_factory=dict)

    def is_free(self) -> bool:
        """Whether nobody outside refers to the storage: no p.grad, no tensor that the user kept, no reduction."""
        return storage_use_count(self.flat) == 1 + len(self.tensors)


Pool: TypeAlias = "dict[tuple[Any, ...], list[BucketMemory]]"
"""Layout of a bucket -> its storages."""


@dataclass(eq=False)
class BucketSet:
    """All buckets of one backward program: its BucketSource.

    Parameters are held weakly and read anew each time: their .grad changes between calls.
    """

    buckets: tuple[Bucket, ...]
    params: Mapping[int, Callable[[], Any]]
    group: Any
    pool: Pool = field(default_factory=dict)
    """Memory that the programs of one model share, where they lay out the same parameters: one for each shape, say."""
    _table: dict[str, Bucket] = field(init=False)
    _places: dict[int, tuple[str, int]] = field(init=False)
    """Parameter number -> its bucket and its offset there."""
    _kept: dict[str, list[BucketMemory]] = field(init=False)
    _works: dict[str, PendingCollective] = field(init=False, default_factory=dict)
    _reduced: dict[str, BucketMemory] = field(init=False, default_factory=dict)
    _used: frozenset[int] = field(init=False, default=frozenset())
    """Parameters that hold gradients of earlier backwards, which this one is to reduce."""
    _aside: dict[int, Any] = field(init=False, default_factory=dict)
    """What .grad of idle parameters held before this backward."""
    _handed_on: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    """Idle parameter -> its reduced gradient, if any rank had one."""
    _task: object = field(init=False, default=None)
    _first: bool = field(init=False, default=True)
    _absent: frozenset[int] = field(init=False, default=frozenset())
    """Parameters that the program has no gradient of in this call: idle ones, for now."""
    _unsettled: dict[tuple[int, str], tuple[BucketMemory, torch.Tensor, tuple[int, ...]]] = field(
        init=False, default_factory=dict
    )
    """(run, bucket) -> memory, marks and idle parameters, until `settle_idle` looks at them. As views, marks keep
    memory from others."""
    _runs: int = field(init=False, default=0)
    _marks: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    """Bucket -> 1 for each parameter that the program has a gradient of, 0 for idle ones."""
    _scale: float = field(init=False)
    _exact: bool = field(init=False)
    """Whether scaling changes exponents alone, so that it may come before rounding."""

    def __post_init__(self) -> None:
        self._table = {bucket.name: bucket for bucket in self.buckets}
        self._places = {n: (b.name, offset) for b in self.buckets for n, offset in b.places}
        layouts = {b.name: (b.name, b.places, b.numel, b.dtype, b.wire) for b in self.buckets}
        self._kept = {name: self.pool.setdefault(layout, []) for name, layout in layouts.items()}
        ranks = dist.get_world_size(self.group)
        self._scale, self._exact = 1 / ranks, ranks & (ranks - 1) == 0

    def acquire(self, bucket: str) -> BucketMemory:
        """Memory that nobody outside refers to."""
        kept = self._kept[bucket]
        for memory in kept:
            if memory.is_free():
                return memory
        memory = self._allocate(self._table[bucket])
        kept.append(memory)
        if len(kept) > MAX_KEPT_STORAGES:
            del kept[0]  # whoever still refers to the oldest keeps it alive
        return memory

    def _allocate(self, bucket: Bucket) -> BucketMemory:
        params = (self._param(number) for number, _ in bucket.places)
        device = next((param.device for param in params if param is not None), bucket.device)
        # zeroed once: the gaps between aligned gradients are reduced too, and should be finite
        flat = torch.zeros(bucket.numel, dtype=getattr(torch, bucket.dtype), device=device)
        cast = bucket.wire not in ("", bucket.dtype)
        return BucketMemory(flat, torch.empty_like(flat, dtype=getattr(torch, bucket.wire)) if cast else None)

    def _param(self, number: int) -> Any:
        return self.params[number]()

    def begin(
        self, used: Iterable[int] = (), task: object = None, first: bool = True, absent: Iterable[int] = ()
    ) -> None:
        """A synced backward starts: forget the last one. `used`: parameters that earlier ones left gradients for.

        `task`: the backward that this is a part of, and whether it is the `first` part of it that reduces gradients:
        for all later ones, .grad of what they do not compute themselves is reduced already. `absent`: parameters that
        the program has no gradient of in this call, as no loss has used what they lead to; it writes zeros.
        """
        self._reduced.clear()
        self._runs += 1
        if task is None or task != self._task:
            self._task = task
            self._aside.clear()
            self._handed_on.clear()
            self._unsettled.clear()
        self._used = frozenset(used)
        self._first = first
        self._absent = frozenset(absent)

    def mark_used(self, numbers: Iterable[int]) -> None:
        """Parameters that this rank has gradients of in `.grad`: other ranks learn of it with the next `start`."""
        self._used |= frozenset(numbers)

    def forget(self) -> None:
        """A backward is through, and all has been handed on: let others have the memory."""
        self._handed_on.clear()
        self._reduced.clear()

    def scale(self, sync: bool) -> float:
        """What a program multiplies by as it writes gradients of `Bucket.scaled`."""
        return self._scale if sync and self._exact else 1.0

    def start(self, bucket: str, memory: BucketMemory) -> None:
        """Add what p.grad holds already, scale the rest by one over the world size, and start the all-reduce.

        The accumulated gradient is what DDP reduces. Taking it out of p.grad makes autograd hand over the bucket's view
        as the new p.grad, where it would otherwise add to gradients that are already reduced.
        """
        described = self._table[bucket]
        early = described.scaled if self._exact else ()
        for number in described.params:
            param = self._param(number)
            if number in self._absent:
                continue
            if param is not None and param.grad is not None and will_accumulate(param):
                self._view(number, memory).add_(param.grad.detach(), alpha=self._scale if number in early else 1)
                param.grad = None
        self._fill_idle(described, memory)
        if early:
            payload = memory.flat
            if rest := self._unscaled(described, memory):
                multiply_all(rest, self._scale)
        else:
            payload = scale_for_all_reduce(memory.flat, self.group, self._scale, described.wire, memory.wire)
        self._works[bucket] = start_sum(self.group, payload, self._label(bucket))

    def _idle(self, bucket: Bucket) -> tuple[int, ...]:
        """Parameters with a place there that this rank has no gradient of, now."""
        return (*bucket.idle, *(number for number in bucket.params if number in self._absent))

    def _fill_idle(self, bucket: Bucket, memory: BucketMemory) -> None:
        """Of parameters that this program has no gradient of: what .grad holds already, or zeros. Mark all others."""
        early = bucket.scaled if self._exact else ()
        views, gradients, empty = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for number in self._idle(bucket):
            param = self._param(number)
            view = None if param is None else self._view(number, memory)
            if view is not None and param.grad is not None and self._first:
                scaled = param.grad.detach() * self._scale if number in early else param.grad.detach()
                views.append(view)
                gradients.append(scaled)
                self._aside[number], param.grad = param.grad, None
            elif view is not None:
                empty.append(view)
        if views:
            copy_all(views, gradients)
        if empty:
            zero_all(empty)
        if bucket.marks:
            self._mark(bucket, memory, bucket.params)

    def _mark(self, bucket: Bucket, memory: BucketMemory, known: Collection[int]) -> None:
        """Say which parameters this rank has gradients of: those `known`, unless they are absent now."""
        marks = memory.flat[-bucket.marks :]
        if bucket.name not in self._marks:  # made once, as a recording cannot copy from the host
            ones = [number in bucket.params for number, _ in bucket.places]
            self._marks[bucket.name] = torch.tensor(ones, dtype=marks.dtype, device=marks.device)
        marks.copy_(self._marks[bucket.name])
        for place, (number, _) in enumerate(bucket.places):
            if number in self._used:
                marks[place].fill_(1)
            elif number in bucket.params and (number in self._absent or number not in known):
                marks[place].zero_()

    def settle_idle(self, elsewhere: Collection[int]) -> None:
        """A backward is through: parameters that it had no gradient of get what the other ranks' came to.

        Those that no rank has a gradient of stay as they were, as under DDP. `elsewhere`: parameters whose gradients
        other programs have reduced in the same backward.
        """
        unsettled, self._unsettled = self._unsettled, {}
        found: dict[int, torch.Tensor] = {}
        marked: set[int] = set()
        for (_, name), (memory, marks, idle) in unsettled.items():
            bucket = self._table[name]
            unknown = any(number not in self._used for number in idle)  # else nobody has to wait for a GPU's marks
            known = marks.tolist() if unknown else [1.0] * len(bucket.places)
            for (number, _), mark in zip(bucket.places, known, strict=True):
                if number in idle and self._param(number) is not None:
                    view = self._view(number, memory)
                    found[number] = found[number] + view if number in found else view
                    if mark:
                        marked.add(number)
        for number, gradient in found.items():
            param = self._param(number)
            before, beside = self._aside.pop(number, None), param.grad
            came = beside is not None and (before is not None or number not in elsewhere)
            if number in marked or came:
                self._handed_on[number] = gradient = like(gradient, param)
                param.grad = gradient if beside is None else beside + gradient
            elif beside is None:
                param.grad = before

    def _unscaled(self, bucket: Bucket, memory: BucketMemory) -> list[torch.Tensor]:
        """Gradients that no product has scaled."""
        rest = (number for number, _ in bucket.places if number not in bucket.scaled)
        return [self._view(number, memory) for number in rest if self._param(number) is not None]

    def reduce_all(self) -> None:
        """Reduce every bucket, as a program does on its way: what .grad holds of each parameter."""
        memories = {bucket.name: self.acquire(bucket.name) for bucket in self.buckets}
        for name, memory in memories.items():
            self.start(name, memory)
        for name, memory in memories.items():
            self.wait(name, memory)

    def reduce_behind(self, numbers: Collection[int], before: Collection[int]) -> None:
        """Reduce every bucket behind a backward whose program has not: what .grad holds of `numbers`, else zeros.

        `before`: parameters whose .grad other buckets of the same backward have reduced as a whole already. What other
        ranks have of them in these buckets is added.
        """
        memories = {bucket.name: self.acquire(bucket.name) for bucket in self.buckets}
        for name, memory in memories.items():
            bucket = self._table[name]
            for number, view, param in self._views(bucket, memory):
                mine = number in numbers and number not in before and param.grad is not None
                view.copy_(param.grad.detach()) if mine else view.zero_()
            if bucket.marks:
                self._mark(bucket, memory, numbers)
            payload = scale_for_all_reduce(memory.flat, self.group, self._scale, bucket.wire, memory.wire)
            self._works[name] = start_sum(self.group, payload, self._label(name))
        for name, memory in memories.items():
            self.wait(name, memory)
            bucket = self._table[name]
            marked = self._marked_idle(bucket, memory)
            for number, view, param in self._views(bucket, memory):
                if (number in before or number in marked) and param.grad is not None:
                    param.grad += view
                elif number in numbers or number in marked:
                    param.grad = like(view, param)

    def _marked_idle(self, bucket: Bucket, memory: BucketMemory) -> set[int]:
        """Parameters that another rank has a gradient of, and this one does not; behind the exchange."""
        idle = self._idle(bucket)
        marks = zip(bucket.places, memory.flat[-bucket.marks :].tolist(), strict=True) if idle else ()
        return {number for (number, _), mark in marks if mark and number in idle}

    def _views(self, bucket: Bucket, memory: BucketMemory) -> Iterator[tuple[int, torch.Tensor, Any]]:
        """Number, place in the bucket, and parameter, of those that are still there."""
        for number, _ in bucket.places:
            if (param := self._param(number)) is not None:
                yield number, self._view(number, memory), param

    def pending(self, bucket: str) -> Any:
        """The torch.distributed.Work that `wait` is going to wait for; None if there is none."""
        flight = self._works.get(bucket)
        return None if flight is None else flight.work

    def wait(self, bucket: str, memory: BucketMemory) -> None:
        """Wait for the all-reduce that `start` began."""
        self._works.pop(bucket).wait()
        if memory.wire is not None:
            memory.flat.copy_(memory.wire)
        self._landed(bucket, memory)

    def _landed(self, bucket: str, memory: BucketMemory) -> None:
        self._reduced[bucket] = memory
        if idle := self._idle(self._table[bucket]):
            self._unsettled[self._runs, bucket] = memory, memory.flat[-self._table[bucket].marks :], idle

    def _label(self, bucket: str) -> str:
        return f"all-reduce of gradient {bucket} ({self._table[bucket].numel} elements)"

    def accumulated(self) -> bool:
        """Whether a parameter holds a gradient already, is marked for one that it held, or gets none in this call."""
        if self._absent:
            return True
        params = (self._param(number) for bucket in self.buckets for number, _ in bucket.places)
        return bool(self._used) or any(param is not None and param.grad is not None for param in params)

    def replayed(self, bucket: str, memory: BucketMemory) -> None:
        """The all-reduce of this memory was part of a replay."""
        count_replayed(self.group, [self._label(bucket)])
        self._landed(bucket, memory)

    def _view(self, number: int, memory: BucketMemory) -> torch.Tensor:
        """A parameter's place in its bucket, in the parameter's shape."""
        offset, param = self._places[number][1], self._param(number)
        view: torch.Tensor = memory.flat[offset : offset + param.numel()].view(param.shape)
        return view

    def reduced(self) -> dict[int, int]:
        """Parameter number -> address of its reduced gradient, of the last synced backward."""
        known = {
            number: memory.flat.data_ptr() + offset * memory.flat.element_size()
            for name, memory in self._reduced.items()
            for number, offset in zip(self._table[name].params, self._table[name].offsets, strict=True)
            if number not in self._absent
        }
        return known | {number: gradient.data_ptr() for number, gradient in self._handed_on.items()}

    def reduced_gradient(self, number: int) -> torch.Tensor:
        """One parameter's reduced gradient, as a view of the bucket, of the last synced backward."""
        if number in self._handed_on:
            return self._handed_on[number]
        return self._view(number, self._reduced[self._places[number][0]])


def like(gradient: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A gradient as autograd lays it out: as its parameter."""
    return gradient if param.is_contiguous() else torch.empty_like(param, requires_grad=False).copy_(gradient)


def scale_for_all_reduce(
    flat: torch.Tensor, group: Any, scale: float, wire: str = "", memory: torch.Tensor | None = None
) -> torch.Tensor:
    """What goes to the all-reduce for `flat`: DDP scales before it sums. `flat` itself, unless there is `memory`."""
    if not wire:
        return flat.mul_(scale)
    # DDP's own hooks cast first, and divide in the dtype that they send
    payload = flat if memory is None else memory.copy_(flat)
    return payload.div_(dist.get_world_size(group))


def average(group: Any, tensors: list[torch.Tensor], wire: str = "") -> None:
    """Average each tensor over the ranks, in place, with DDP's arithmetic: scale, then sum. `wire` as in BucketRule."""
    scale = 1 / dist.get_world_size(group)
    pairs = []
    for tensor in tensors:
        cast = wire not in ("", "own") and getattr(torch, wire) != tensor.dtype
        memory = torch.empty_like(tensor, dtype=getattr(torch, wire)) if cast else None
        payload = scale_for_all_reduce(tensor, group, scale, wire, memory)
        label = f"all-reduce of a gradient from outside the compiled graphs ({tensor.numel()} elements)"
        pairs.append((start_sum(group, payload, label), payload))
    for (flight, payload), tensor in zip(pairs, tensors, strict=True):
        flight.wait()
        if payload is not tensor:
            tensor.copy_(payload)
