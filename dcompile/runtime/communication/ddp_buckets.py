"""Memory of gradient buckets: acquire it for a backward, all-reduce it, and install its views as p.grad.

`ReducedRun` keeps the gradients that one run of a backward program has reduced until the whole backward ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dcompile.collectives.contract import SharedBuckets
from dcompile.compat.autograd import will_accumulate
from dcompile.compat.storage_holders import storage_use_count
from dcompile.compat.tensors import copy_all, in_layout_of, multiply_all, zero_all
from dcompile.ir.buffers import Bucket
from dcompile.runtime.communication.gradient_presence import RanksWithGradients
from dcompile.runtime.communication.work import PendingCollective, count_replayed, label_of_model, start_sum

MAX_KEPT_STORAGES = 2
"""Storages kept per bucket: one that p.grad may still show, and one to write into. A caller's older gradients are a
third one, which the caller owns."""


@dataclass(eq=False)
class BucketMemory:
    """One storage of one bucket.

    `tensors` are views that a host program builds on this memory once, as targets of library calls. Each counts as a
    reference to the storage.
    """

    flat: torch.Tensor
    wire: torch.Tensor | None = None
    """Tensor that is all-reduced in place of `flat`, if its dtype differs."""
    tensors: dict[Any, torch.Tensor] = field(default_factory=dict)

    def is_free(self) -> bool:
        """Whether nothing else refers to the storage: no p.grad, no tensor of the user, no pending reduction."""
        return storage_use_count(self.flat) == 1 + len(self.tensors)


@dataclass(eq=False)
class BucketSet:
    """All buckets of one backward program; implements BucketSource.

    Parameters are held by weak references and read at each use, because their .grad changes between calls.
    """

    buckets: tuple[Bucket, ...]
    params: Mapping[int, Callable[[], Any]]
    group: Any
    shared: SharedBuckets = field(default_factory=SharedBuckets)
    _table: dict[str, Bucket] = field(init=False)
    _places: dict[int, tuple[str, int]] = field(init=False)
    """Parameter number -> the name of its bucket and its offset there, in elements."""
    _used_places: dict[int, tuple[str, int]] = field(init=False)
    """Those of parameters that the program uses, without idle ones."""
    _kept: dict[str, list[BucketMemory]] = field(init=False)
    _works: dict[str, PendingCollective] = field(init=False, default_factory=dict)
    _reduced: dict[str, BucketMemory] = field(init=False, default_factory=dict)
    _used: frozenset[int] = field(init=False, default=frozenset())
    """Parameters that hold gradients of earlier backwards, which this one reduces."""
    _aside: dict[int, Any] = field(init=False, default_factory=dict)
    """Idle parameter -> its .grad before this backward."""
    _idle_gradients: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    """Idle parameter -> its reduced gradient, if any rank had one."""
    _task: object = field(init=False, default=None)
    _first: bool = field(init=False, default=True)
    _absent: frozenset[int] = field(init=False, default=frozenset())
    """Parameters whose gradient the program does not compute in this call: they are idle in this call."""
    _unsettled: dict[tuple[int, str], tuple[BucketMemory, torch.Tensor, tuple[int, ...]]] = field(
        init=False, default_factory=dict
    )
    """(run, bucket) -> memory, presence flags and idle parameters, until `settle_idle` reads them. The flags are views
    of the memory, so it is not free meanwhile.
    """
    _runs: int = field(init=False, default=0)
    _marks: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    """Bucket -> its presence flags: 1 for each parameter that the program has a gradient of, 0 for idle ones."""
    ranks: RanksWithGradients = field(init=False, default_factory=RanksWithGradients)
    order: tuple[tuple[int, ...], ...] = field(init=False)
    """Numbers of the parameters in each bucket, in the order of reduction."""
    times_ns: list[int] = field(init=False, default_factory=lambda: [0, 0, 0])
    """Of the last backward: start of the first all-reduce, start and end of the last one; since the epoch."""
    _scale: float = field(init=False)
    _exact: bool = field(init=False)
    """Whether scaling changes exponents alone (a power of two), so that it may come before rounding."""

    def __post_init__(self) -> None:
        self._table = {bucket.name: bucket for bucket in self.buckets}
        self._places = {n: (b.name, offset) for b in self.buckets for n, offset in b.places}
        self._used_places = {n: self._places[n] for b in self.buckets for n in b.params}
        self.order = tuple(tuple(number for number, _ in bucket.places) for bucket in self.buckets)
        layouts = {b.name: (b.name, b.places, b.numel, b.dtype, b.wire) for b in self.buckets}
        self._kept = {name: self.shared.storages.setdefault(layout, []) for name, layout in layouts.items()}
        ranks = dist.get_world_size(self.group)
        self._scale, self._exact = 1 / ranks, ranks & (ranks - 1) == 0

    def acquire(self, bucket: str) -> BucketMemory:
        """Return a storage of a bucket that nothing else refers to. Allocate one if there is none."""
        kept = self._kept[bucket]
        for memory in kept:
            if memory.is_free():
                return memory
        memory = self._allocate(self._table[bucket])
        kept.append(memory)
        if len(kept) > MAX_KEPT_STORAGES:
            del kept[0]  # references that are left keep the oldest alive
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
        """Start a backward that synchronizes gradients, and drop the state of the last one.

        `used`: parameters whose .grad holds gradients of earlier backwards. `task`: the autograd task that this call
        belongs to. `first`: whether this is the task's first program that reduces gradients. For later ones, .grad of
        parameters that they do not compute is reduced already. `absent`: parameters without a gradient in this call,
        since no loss has used the results that they lead to. The program writes zeros for them.
        """
        self._reduced.clear()
        self._runs += 1
        self.times_ns = [0, 0, 0]
        if task is None or task != self._task:
            self._task = task
            self._aside.clear()
            self._idle_gradients.clear()
            self._unsettled.clear()
        self._used = frozenset(used)
        self._first = first
        self._absent = frozenset(absent)

    def mark_used(self, numbers: Iterable[int]) -> None:
        """Note parameters whose .grad holds a gradient on this rank. The next `start` sends this to other ranks."""
        self._used |= frozenset(numbers)

    def forget(self) -> None:
        """End a backward whose gradients are all installed: release its memory."""
        self._idle_gradients.clear()
        self._reduced.clear()

    def scale(self, sync: bool) -> float:
        """Factor that a program applies as it writes gradients of `Bucket.scaled`."""
        return self._scale if sync and self._exact else 1.0

    def serve(self, buckets: tuple[Bucket, ...]) -> None:
        """Serve another program from now on, with the same places: it may scale other gradients as it writes them."""
        if buckets is not self.buckets:
            assert [b.exchanged for b in buckets] == [b.exchanged for b in self.buckets], "ranks know these places"
            self.buckets, self._table = buckets, {bucket.name: bucket for bucket in buckets}

    def start(self, bucket: str, memory: BucketMemory) -> None:
        """Add what p.grad holds already, scale the rest by one over the world size, and start the all-reduce.

        DDP reduces accumulated gradients, too. With p.grad set to None, autograd installs the bucket's view as the new
        p.grad. Otherwise it would add the view to gradients that are reduced already.
        """
        now = time.time_ns()
        self.times_ns[:2] = self.times_ns[0] or now, now
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
        """Parameters with a place in the bucket whose gradient this rank does not compute in this call."""
        return (*bucket.idle, *(number for number in bucket.params if number in self._absent))

    def _fill_idle(self, bucket: Bucket, memory: BucketMemory) -> None:
        """Fill places of idle parameters with their .grad, or with zeros, and set the presence flags of the bucket."""
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
        """Write presence flags: which of the `known` parameters have a gradient on this rank and in this call."""
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
        """End a backward: give idle parameters the gradients that other ranks have reduced for them.

        Parameters without a gradient on any rank stay as they were, as under DDP. `elsewhere`: parameters whose
        gradients other programs have reduced in the same backward.
        """
        unsettled, self._unsettled = self._unsettled, {}
        found: dict[int, torch.Tensor] = {}
        marked: set[int] = set()
        for (_, name), (memory, marks, idle) in unsettled.items():
            bucket = self._table[name]
            unknown = any(number not in self._used for number in idle)  # else no wait for a GPU's flags
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
                self._idle_gradients[number] = gradient = in_layout_of(gradient, param)
                param.grad = gradient if beside is None else beside + gradient
            elif beside is None:
                param.grad = before

    def _unscaled(self, bucket: Bucket, memory: BucketMemory) -> list[torch.Tensor]:
        """Views of what was not scaled as it was written: some gradients, and flags, which all ranks' programs add."""
        rest = (number for number, _ in bucket.places if number not in bucket.scaled)
        views = [self._view(number, memory) for number in rest if self._param(number) is not None]
        return [*views, memory.flat[-bucket.marks :]] if bucket.marks else views

    def reduce_behind(self, numbers: Collection[int], before: Collection[int]) -> None:
        """Reduce every bucket after a backward whose program did not.

        Its content is .grad of `numbers`, and zeros for all others. `before`: parameters whose whole .grad other
        buckets of the same backward have reduced already. Gradients that other ranks have of them in these buckets are
        added.
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
            self.ranks.note(bucket, memory, self._scale)
            marked = self._marked_idle(bucket, memory)
            for number, view, param in self._views(bucket, memory):
                if (number in before or number in marked) and param.grad is not None:
                    param.grad += view
                elif number in numbers or number in marked:
                    param.grad = in_layout_of(view, param)

    def _marked_idle(self, bucket: Bucket, memory: BucketMemory) -> set[int]:
        """Idle parameters of which another rank has a gradient; valid after the all-reduce."""
        idle = self._idle(bucket)
        marks = zip(bucket.places, memory.flat[-bucket.marks :].tolist(), strict=True) if idle else ()
        return {number for (number, _), mark in marks if mark and number in idle}

    def _views(self, bucket: Bucket, memory: BucketMemory) -> Iterator[tuple[int, torch.Tensor, Any]]:
        """Number, view of the bucket, and parameter, for each parameter that is still alive."""
        for number, _ in bucket.places:
            if (param := self._param(number)) is not None:
                yield number, self._view(number, memory), param

    def pending(self, bucket: str) -> Any:
        """The torch.distributed.Work of a bucket's pending all-reduce, or None."""
        collective = self._works.get(bucket)
        return None if collective is None else collective.work

    def wait(self, bucket: str, memory: BucketMemory) -> None:
        """Wait for the all-reduce that `start` began."""
        self._works.pop(bucket).wait()
        self.times_ns[2] = time.time_ns()
        if memory.wire is not None:
            memory.flat.copy_(memory.wire)
        self._landed(bucket, memory)

    def _landed(self, bucket: str, memory: BucketMemory) -> None:
        self._reduced[bucket], described = memory, self._table[bucket]
        self.ranks.note(described, memory, self._scale)
        if idle := self._idle(described):
            self._unsettled[self._runs, bucket] = memory, memory.flat[-described.marks :], idle

    def _label(self, bucket: str) -> str:
        text = f"all-reduce of gradient {bucket} ({self._table[bucket].numel} elements)"
        return label_of_model(text, self.group, self.shared.numbers)

    def accumulated(self) -> bool:
        """Whether a parameter holds a gradient already, is noted for one that it held, or gets none in this call."""
        if self._absent:
            return True
        params = (self._param(number) for bucket in self.buckets for number, _ in bucket.places)
        return bool(self._used) or any(param is not None and param.grad is not None for param in params)

    def replayed(self, bucket: str, memory: BucketMemory) -> None:
        """Note that a replayed CUDA graph contained the all-reduce of this memory."""
        count_replayed(self.group, [self._label(bucket)])
        self._landed(bucket, memory)

    def _view(self, number: int, memory: BucketMemory) -> torch.Tensor:
        """View of a parameter's place in its bucket, in the parameter's shape."""
        offset, param = self._places[number][1], self._param(number)
        view: torch.Tensor = memory.flat[offset : offset + param.numel()].view(param.shape)
        return view

    def reduced(self) -> dict[int, int]:
        """Parameter number -> address of its reduced gradient, in the last backward that synchronized."""
        known = {
            number: memory.flat.data_ptr() + offset * memory.flat.element_size()
            for name, memory in self._reduced.items()
            for number, offset in zip(self._table[name].params, self._table[name].offsets, strict=True)
            if number not in self._absent
        }
        return known | {number: gradient.data_ptr() for number, gradient in self._idle_gradients.items()}

    def last_run(self) -> ReducedRun:
        """Return what the program has reduced in its last run."""
        # each another tensor of the memory, which is not free meanwhile
        flats = {name: memory.flat.detach() for name, memory in self._reduced.items()}
        return ReducedRun(flats, self._used_places, self._param, self._absent)

    def ranks_with_gradients(self) -> dict[int, int]:
        """Parameter number -> number of ranks with a gradient of it, of buckets with presence flags."""
        return self.ranks.counts()

    def handed_on(self) -> Collection[int]:
        """Return idle parameters that got a gradient which other ranks have reduced."""
        return self._idle_gradients.keys()

    def reduced_gradient(self, number: int) -> torch.Tensor:
        """Reduced gradient of one parameter in the last backward that synchronized: a view of the bucket."""
        if number in self._idle_gradients:
            return self._idle_gradients[number]
        return self._view(number, self._reduced[self._places[number][0]])


def scale_for_all_reduce(
    flat: torch.Tensor, group: Any, scale: float, wire: str = "", memory: torch.Tensor | None = None
) -> torch.Tensor:
    """Scale a bucket as DDP does before it sums. Return the tensor to all-reduce: `memory` if given, else `flat`."""
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
    for (collective, payload), tensor in zip(pairs, tensors, strict=True):
        collective.wait()
        if payload is not tensor:
            tensor.copy_(payload)


class ReducedRun:
    """Reduced gradients of one run, by parameter number.

    A gradient is intact while autograd holds it as the run returned it. A sum with another gradient is a new tensor,
    and drops its reference to the memory here. `flats`: the memory of each bucket that the run reduced. `places`:
    parameter number -> its bucket, of all buckets, and its offset there in elements. `parameter`: the parameter of a
    number. `absent`: parameters whose gradient no rank has.
    """

    def __init__(
        self,
        flats: Mapping[str, torch.Tensor],
        places: Mapping[int, tuple[str, int]],
        parameter: Callable[[int], Any],
        absent: Collection[int] = frozenset(),
    ) -> None:
        self._flats, self._places, self._parameter = flats, places, parameter
        self._absent = frozenset(absent)
        self._copies: dict[int, torch.Tensor] = {}
        """Gradients in the layout of a parameter that is not contiguous, as autograd would copy them."""
        self._uses: dict[str, int] = {}
        self._stream: Any = None

    def __contains__(self, number: int) -> bool:
        return number in self._places and self._places[number][0] in self._flats and number not in self._absent

    def gradient(self, number: int) -> torch.Tensor:
        """Return a parameter's gradient, as its memory is now."""
        if number in self._copies:
            return self._copies[number]
        (bucket, offset), parameter = self._places[number], self._parameter(number)
        view: torch.Tensor = self._flats[bucket][offset : offset + parameter.numel()].view(parameter.shape)
        return view

    def address(self, number: int) -> int:
        """Return the address of a parameter's gradient."""
        if number in self._copies:
            return self._copies[number].data_ptr()
        bucket, offset = self._places[number]
        flat = self._flats[bucket]
        return flat.data_ptr() + offset * flat.element_size()

    def lay_out(self, results: list[Any], grads: Iterable[tuple[int, int]]) -> None:
        """Give results of the program the layout of their parameters. `grads`: (position of a result, number)."""
        for place, number in grads:
            parameter = self._parameter(number) if number in self else None
            if parameter is not None and results[place] is not None and not parameter.is_contiguous():
                copy = torch.empty_like(parameter, requires_grad=False).copy_(results[place])
                results[place], self._copies[number] = copy, copy.detach()

    def hand_on(self) -> None:
        """Count the references to each memory, just before autograd gets the results."""
        self._uses = {bucket: storage_use_count(flat) for bucket, flat in self._flats.items()}
        self._stream = _current_stream(self._flats)

    def intact(self, numbers: Iterable[int]) -> frozenset[int]:
        """Return those of these parameters whose gradients autograd holds as they were returned, to be added to."""
        if self._stream != _current_stream(self._flats):
            return frozenset()
        whole = {bucket for bucket, flat in self._flats.items() if storage_use_count(flat) == self._uses[bucket]}
        return frozenset(number for number in numbers if self._is_held(number, whole))

    def _is_held(self, number: int, whole: Collection[str]) -> bool:
        if number in self._copies:
            return storage_use_count(self._copies[number]) == 2  # autograd's tensor, and the one here
        return self._places[number][0] in whole


def _current_stream(flats: Mapping[str, torch.Tensor]) -> Any:
    device = next((flat.device for flat in flats.values()), None)
    return torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None
