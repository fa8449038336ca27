"""Gather sharded parameters into a program's memory, and reduce their gradients to shards."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dcompile import compat
from dcompile.collectives.contract import Phase, ShardGroup
from dcompile.ir.buffers import Bucket
from dcompile.runtime.communication.converted_shards import ConvertedShards
from dcompile.runtime.communication.gather_scatter import PackedUnits, in_order, start_gather
from dcompile.runtime.communication.peer_memory.shards import CopyGathers, PeerShardGroup, PeerShards, PendingCopyGather
from dcompile.runtime.communication.shard_reduction import (
    PendingReduction,
    ShardReductions,
    named_error,
)
from dcompile.runtime.communication.work import PendingCollective, count_replayed, label_of_model


@dataclass(eq=False, slots=True)
class PendingGather:
    """A gather in flight."""

    collective: PendingCollective | PendingCopyGather
    shards: list[torch.Tensor]
    """Tensors that the gather reads; they must live until it is done."""
    parcel: PackedUnits | None
    """Units that arrive as one message and are unpacked afterwards."""
    group: Any
    full: list[torch.Tensor]
    """Tensors of the units that the gather fills."""


@dataclass(eq=False)
class Shards(ShardReductions):
    """Sharded parameters of one model: their units and groups, their gathers and reductions."""

    gathers: str = "auto"
    """The option `gathers`."""
    shard_copies: Literal["auto", "kept", "gather"] = "auto"
    saves_memory: str = ""
    """See `ConvertedShards`."""
    converted: ConvertedShards = field(init=False)
    peer_shards: PeerShards = field(init=False)
    _parts: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    """Unit -> this rank's part of it within a smaller group, which the last forward left for the backward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.converted = ConvertedShards(self.units, self.shard_copies, self.saves_memory)
        self.peer_shards = PeerShards(self.units, self.groups, self.gathers, self.converted)

    def copied(self, group: str) -> tuple[bool, str]:
        """Whether a group's gathers are copies from peer memory; if not, the reason why, or empty.

        The first call makes ranks meet over the store.
        """
        return self.peer_shards.of(group) is not None, self.peer_shards.reason(group)

    def save_memory(self, reason: str) -> None:
        """Keep no converted shards, unless an option asks for them or they exist already."""
        self.converted.save_memory(reason)

    def source(
        self,
        buckets: tuple[Bucket, ...],
        phase: Phase,
        accumulates: bool = False,
        later: Collection[int] = (),
        absent: Collection[int] = (),
        wanted: Collection[int] = (),
    ) -> ShardCommunication:
        """Make the communication of one call of a program with these buckets.

        `accumulates`: the call is part of a backward that adds to gradients; torch.autograd.grad does not. `later`:
        units whose gradients another program of the backward computes as well, and reduces. `absent`: units for which
        this call computes no gradient, only zeros. `wanted`: units whose gradients are left in `wanted`, unreduced.
        """
        named_buckets = {bucket.name: bucket for bucket in buckets}
        empty = dict.fromkeys(wanted)
        return ShardCommunication(self, named_buckets, accumulates, phase, frozenset(later), frozenset(absent), empty)

    def forget_parts(self) -> None:
        """Start a call: drop what a forward without a backward left, as parameters may have changed since."""
        self._parts.clear()
        self.unreduced.forget_failed()
        if compat.autograd.backward_task() < 0:
            self.unsure.forget()

    def leave_parts(self, group: Any, units: Iterable[int], full: Iterable[torch.Tensor]) -> None:
        """Keep this rank's parts of gathered units, which ranks of `group` gather in the backward."""
        rank, ranks = group.rank(), group.size()
        self._parts |= {unit: whole.view(ranks, -1)[rank].clone() for unit, whole in zip(units, full, strict=True)}

    def take_parts(self, units: tuple[int, ...]) -> list[torch.Tensor] | None:
        """Return and drop the parts that `leave_parts` kept, or None if a unit's part is missing."""
        if not self._parts.keys() >= set(units):
            return None
        return [self._parts.pop(unit) for unit in units]


@dataclass(eq=False)
class ShardCommunication:
    """Collectives of one call of a program; implements `collectives.contract.ShardSource`."""

    shards: Shards
    buckets: Mapping[str, Bucket]
    accumulates: bool
    phase: Phase
    later: frozenset[int] = frozenset()
    absent: frozenset[int] = frozenset()
    """Units that the program has no gradient of in this call."""
    wanted: dict[int, Any] = field(default_factory=dict)
    """Unit -> its unreduced gradient, once it is computed, in a call that adds to no gradient."""
    _gathering: dict[str, PendingGather] = field(init=False, default_factory=dict)
    """Bucket -> its pending gather."""
    _reducing: dict[str, PendingReduction] = field(init=False, default_factory=dict)
    _copies: dict[PeerShardGroup, CopyGathers] = field(init=False, default_factory=dict)
    """Group of peers -> its gathers by copies."""
    _waited: int = field(init=False, default=0)
    """Number of collectives that were waited for."""
    _due: dict[int, None] | None = field(init=False, default=None)
    """Units with a converted buffer that this call has not converted yet; None before the first conversion."""

    def start_gather(self, bucket: str, full: list[torch.Tensor]) -> None:
        """Start filling `full` with the units whose shards the ranks hold."""
        found, units = self.buckets[bucket], full
        peers = self.shards.peer_shards.of(found.group)
        if peers is not None:
            with self._named("all-gather", found, peers.group):
                copying = self._copies_from(peers).start(bucket, found.units, full)
            self._gathering[bucket] = PendingGather(copying, [], None, peers.group, units)
            return
        group, shards = self._senders(found)
        parcel = PackedUnits([full[place] for place in found.packed], group.size()) if found.packed else None
        if parcel is not None:
            alone = [place for place in range(len(full)) if place not in found.packed]
            sent = torch.cat([shards[place] for place in found.packed])
            full, shards = [*(full[n] for n in alone), parcel.whole], [*(shards[n] for n in alone), sent]

        def start(limit_s: float | None) -> Any:
            return start_gather(group, full, shards, limit_s)

        text = f"all-gather {bucket} ({sum(tensor.numel() for tensor in full)} elements{_coalescing(found)})"
        label = label_of_model(text, group, self.shards.numbers)
        with self._named("all-gather", found, group):
            collective = PendingCollective(group, full[0].device, label, start)
        self._gathering[bucket] = PendingGather(collective, shards, parcel, group, units)

    def _copies_from(self, peers: PeerShardGroup) -> CopyGathers:
        found = self._copies.get(peers)
        if found is None:
            peer_shards, gathers = self.shards.peer_shards, [b for b in self.buckets.values() if b.traits.gathers]
            copied = [bucket for bucket in gathers if peer_shards.of(bucket.group) is peers]
            numbers = list(dict.fromkeys(number for bucket in copied for number in bucket.units))
            overlaps = any(self.shards.converted.memory(number) is not None for number in numbers)
            found = CopyGathers(peers, len(copied), numbers, self._meeting, self._convert, overlaps)
            self._copies[peers] = found
        return found

    def _meeting(self, collective: PendingCollective) -> None:
        """Called for each meeting of the ranks around copy-engine gathers."""

    def _has_waited(self) -> None:
        self._waited += 1
        if self._waited == len(self.buckets):
            for gather in self._copies.values():
                gather.finish()
            # they refer to this object and it to them: a recording would count their memory as the caller's
            self._copies.clear()

    def _senders(self, bucket: Bucket) -> tuple[Any, list[torch.Tensor]]:
        """Group of ranks that a bucket is gathered from, and the tensors that this rank sends."""
        group = self.shards.groups[bucket.group]
        fewer = group.part_group() if self.phase == "backward" else None
        parts = self.shards.take_parts(bucket.units) if fewer is not None else None
        if parts is not None:
            return fewer, parts
        self._convert(bucket.units)
        return group.gather_group(), [self.shards.converted.sent(number) for number in bucket.units]

    def _convert(self, numbers: Iterable[int]) -> None:
        """Convert the shards of these units, unless this call has already."""
        if self._due is None:
            gathers = (bucket for bucket in self.buckets.values() if bucket.traits.gathers)
            units = (number for bucket in gathers for number in bucket.units)
            self._due = {number: None for number in units if self.shards.converted.memory(number) is not None}
        now = [number for number in numbers if number in self._due]
        self.shards.converted.convert(now)
        for number in now:
            del self._due[number]

    def wait_gather(self, bucket: str) -> None:
        """Wait for the gather that `start_gather` began."""
        found = self.buckets[bucket]
        gathering = self._gathering.pop(bucket)
        with self._named("all-gather", found, gathering.group):
            gathering.collective.wait()
        if gathering.parcel is not None:
            gathering.parcel.unpack()
        fewer = self.shards.groups[found.group].part_group() if self.phase == "forward" else None
        if fewer is not None:
            self.shards.leave_parts(fewer, found.units, gathering.full)
        self._has_waited()

    def start_scatter(self, bucket: str, full: list[torch.Tensor]) -> None:
        """Start summing `full` over the ranks; or keep it, in a backward that does not reduce."""
        found = self.buckets[bucket]
        if not self.accumulates:  # the memory of `full` is used again
            of_units = zip(found.units, full, strict=True)
            self.wanted.update((number, whole.clone()) for number, whole in of_units if number in self.wanted)
            return
        group = self.shards.groups[found.group]
        for place, start, stop in zip(found.gaps[::3], found.gaps[1::3], found.gaps[2::3], strict=True):
            full[place][start:stop].zero_()
        units = {found.units[place]: full[place] for place in in_order(found)}
        for number in self.absent & units.keys():
            units[number].zero_()  # an expression of zeros need not be zero
        kept = {number: units.pop(number) for number in list(units) if self._keeps(group, number)}
        self.shards.unreduced.keep(kept, self.later, self.absent)
        if units:
            packed = sum(found.units[place] in units for place in found.packed)
            name = f"reduce-scatter {bucket}"
            self._reducing[bucket] = self.shards.scatter(group, units, name, packed, self.absent)

    def _keeps(self, group: ShardGroup, number: int) -> bool:
        """Whether gradients of a unit are kept here instead of reduced."""
        return number in self.later or group.wants() == "nothing"

    def wait_scatter(self, bucket: str) -> None:
        """Wait for the reduction that `start_scatter` began, and install the shards as gradients."""
        if bucket in self._reducing:
            self.shards.finish(self._arrived(bucket))
        self._has_waited()

    def _arrived(self, bucket: str) -> PendingReduction:
        """Return a bucket's reduction after all that started before it have got their shards.

        Replicas must start the same all-reduces in the same order, whatever each of them waits for first.
        """
        for name, reducing in self._reducing.items():
            if not reducing.scattered:
                self.shards.go_on(reducing)
            if name == bucket:
                break
        return self._reducing.pop(bucket)

    def pending(self, bucket: str) -> Any:
        """The pending work of a bucket, or None."""
        if bucket in self._gathering:
            return self._gathering[bucket].collective.work
        reducing = self._reducing.get(bucket)
        return None if reducing is None else reducing.collective.work

    # --- recordings ---

    def same_each_time(self) -> tuple[int, ...] | str:
        """Addresses of the shards that this call reads; or why a replay at these may compute something else."""
        read: list[int] = []
        if self.absent:
            return "no loss has used what some parameters lead to"
        for bucket in self.buckets.values():
            if any(self.shards.units[number].offloaded for number in bucket.units):
                return "parameters are kept in CPU memory"
            if bucket.traits.gathers:
                read += [self.shards.units[number].address() for number in bucket.units]
            elif not self.accumulates:
                return "torch.autograd.grad was called, which adds to no gradient"
            elif (
                self.shards.groups[bucket.group].wants() != "all"
                or self.shards.unreduced.holds(bucket.units)
                or not self.later.isdisjoint(bucket.units)
            ):
                return "gradients are kept for a later reduction, or were"
        return tuple(read)

    def recorded(self) -> RecordedShardCommunication:
        """Make a communication of the same collectives that installs no gradients, for a recording."""
        return RecordedShardCommunication(self.shards, self.buckets, self.accumulates, self.phase, self.later)

    def hand_on(self, reduced: list[torch.Tensor], collectives: Iterable[tuple[Any, str]]) -> None:
        """Install the reduced shards of a replay as gradients, and count its collectives.

        `reduced` has the order of `RecordedShardCommunication.reduced`.
        """
        labels: dict[Any, list[str]] = {}
        for group, label in collectives:
            labels.setdefault(group, []).append(label)
        for group, of_group in labels.items():
            count_replayed(group, of_group)
        for bucket, flat in zip(self._scattered(), reduced, strict=True):
            group = self.shards.groups[bucket.group].scatter_group()
            order = in_order(bucket)
            sizes = self.shards.shard_sizes({bucket.units[place]: bucket.sizes[place] for place in order}, group)
            parts = torch.split(flat, sizes)
            self.shards.commit({bucket.units[place]: part for place, part in zip(order, parts, strict=True)})

    def hand_on_count(self) -> int:
        """Number of reduced tensors that `hand_on` expects."""
        return len(self._scattered())

    def _scattered(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets.values() if not bucket.traits.gathers]

    def _named(self, kind: str, bucket: Bucket, group: Any) -> contextlib.AbstractContextManager[None]:
        return named_error(f"the {kind} {bucket.name}", bucket.units, self.shards.units, group)


@dataclass(eq=False)
class RecordedShardCommunication(ShardCommunication):
    """Communication that a CUDA graph records: it keeps its reduced shards, which replays install."""

    collectives: list[tuple[Any, str]] = field(init=False, default_factory=list)
    """(process group, label) of each, in the order of their starts within a group."""
    _done: dict[str, torch.Tensor] = field(init=False, default_factory=dict)

    def start_gather(self, bucket: str, full: list[torch.Tensor]) -> None:
        """Start filling `full` with the units whose shards the ranks hold."""
        super().start_gather(bucket, full)
        if isinstance(collective := self._gathering[bucket].collective, PendingCollective):
            self._log(collective)

    def start_scatter(self, bucket: str, full: list[torch.Tensor]) -> None:
        """Start summing `full` over the ranks."""
        super().start_scatter(bucket, full)
        self._log(self._reducing[bucket].collective)

    def _meeting(self, collective: PendingCollective) -> None:
        self._log(collective)

    def _log(self, collective: PendingCollective) -> None:
        self.collectives.append((collective.group, collective.label))

    def wait_scatter(self, bucket: str) -> None:
        """Wait for the reduction that `start_scatter` began, and keep its shards."""
        pending = self._arrived(bucket)
        complete = self.shards.reduce(pending)
        assert complete, "only complete reductions are recorded"
        if pending.replicating is not None:
            self._log(pending.replicating)
        self._done[bucket] = pending.flat
        self._has_waited()

    def reduced(self) -> list[torch.Tensor]:
        """This rank's shards of each reduced bucket as one flat tensor, in the program's order.

        Valid after the call.
        """
        return [self._done[bucket.name] for bucket in self._scattered()]


def _coalescing(bucket: Bucket) -> str:
    return f", {len(bucket.packed)} together" if bucket.packed else ""
