"""Sharded parameters of one model: gather them into a program's memory, and reduce their gradients to shards.

Reduced shards become gradients, now or in a later backward.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist

from dcompile import compat
from dcompile.collectives.contract import GradientReduction, Phase, ShardGroup, ShardUnit
from dcompile.compat.autograd import backward_task
from dcompile.errors import DcompileError
from dcompile.ir.buffers import Bucket
from dcompile.runtime.communication.gather_order import GatherOrder
from dcompile.runtime.communication.gather_scatter import (
    PackedUnits,
    UnevenReduceScatter,
    in_order,
    start_gather,
    start_scatter,
)
from dcompile.runtime.communication.gradient_presence import UncertainUnits
from dcompile.runtime.communication.peer_memory.shards import (
    ConvertedShards,
    CopyGathers,
    PeerShardGroup,
    PeerShards,
    PendingCopyGather,
)
from dcompile.runtime.communication.scaled_casts import update_scales
from dcompile.runtime.communication.work import PendingCollective, count_replayed, label_of_model
from dcompile.runtime.coordination.agreement import agree


@dataclass(eq=False, slots=True)
class PendingGather:
    """A gather in flight."""

    collective: PendingCollective | PendingCopyGather
    shards: list[torch.Tensor]
    """Tensors that the gather reads; they must live until it is done."""
    packed: PackedUnits | None
    """Units that arrive as one message and are unpacked afterwards."""
    group: Any
    full: list[torch.Tensor]
    """Tensors of the units that the gather fills."""


@dataclass(eq=False)
class PendingReduction:
    """A reduction in flight."""

    name: str
    group: ShardGroup
    flat: torch.Tensor
    """All shards of this rank, end to end."""
    shards: dict[int, torch.Tensor]
    collective: PendingCollective
    rule: GradientReduction
    absent: frozenset[int] = frozenset()
    """Units that this rank has no gradient of."""
    scattered: bool = False
    """Whether the reduce-scatter is done: this rank has its shards."""
    complete: bool = True
    """Whether the shards become gradients; otherwise they are kept until replicas are averaged over."""
    replicating: PendingCollective | None = None
    """The all-reduce among replicas."""


@dataclass(frozen=True, slots=True)
class NamedError:
    """Context that adds a note to a RuntimeError: the collective that failed, its parameters, and its ranks.

    A generator would take four times as long, and each bucket has four of these.
    """

    what: str
    numbers: Iterable[int]
    units: Mapping[int, ShardUnit]
    group: Any

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            names = [self.units[number].name for number in self.numbers]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            error.add_note(
                f"dcompile: rank {dist.get_rank()} was in {self.what} of {', '.join(names[:3])}{more}, "
                f"over ranks {dist.get_process_group_ranks(self.group)}; "
                "another rank has failed, stalled, or does not run this step"
            )


@dataclass(eq=False)
class Shards:
    """Sharded parameters of one model: their units and groups, their gathers and reductions."""

    units: Mapping[int, ShardUnit]
    groups: Mapping[str, ShardGroup]
    gathers: str = "auto"
    """The option `gathers`."""
    shard_copies: Literal["auto", "kept", "gather"] = "auto"
    saves_memory: str = ""
    """See `ConvertedShards`."""
    converted: ConvertedShards = field(init=False)
    peer_shards: PeerShards = field(init=False)
    numbers: dict[Any, int] = field(init=False, default_factory=dict)
    """See `label_of_model`."""
    unreduced: DeferredGradients = field(init=False)
    """Gradients that are not reduced yet."""
    unsure: UncertainUnits = field(init=False)
    _scale_exchanges: int = field(init=False, default=0)
    """All-reduces that the last call took for scales."""
    _unsettled: dict[int, ShardUnit] = field(init=False, default_factory=dict)
    """Units whose gradients may still be copied to CPU memory."""
    _order: Callable[[], GatherOrder[ForeseenGather] | None] = field(
        init=False, default_factory=lambda: compat.groups.weak(None)
    )
    """Weak reference to the order of gathers of the FSDP2 root that the module is a part of."""
    _parts: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    """Unit -> this rank's part of it within a smaller group, which the last forward left for the backward."""

    def __post_init__(self) -> None:
        self.converted = ConvertedShards(self.units, self.shard_copies, self.saves_memory)
        self.peer_shards = PeerShards(self.units, self.groups, self.gathers, self.converted)
        self.unreduced = DeferredGradients(self.units)
        self.unsure = UncertainUnits(self.units, self.groups)

    def copied(self, group: str) -> tuple[bool, str]:
        """Whether a group's gathers are copies from peer memory; if not, the reason why, or empty.

        The first call makes ranks meet over the store.
        """
        return self.peer_shards.of(group) is not None, self.peer_shards.reason(group)

    def save_memory(self, reason: str) -> None:
        """Keep no converted shards, unless an option asks for them or they exist already."""
        self.converted.save_memory(reason)

    def join(self, root: Any, current: Callable[[], Any]) -> None:
        """Take part in the order of gathers of an FSDP2 root, which `root` keeps; see `GatherOrder`."""
        known = vars(root).setdefault("_dcompile_order", GatherOrder(current, compare_order))
        known.forget()
        self._order = weakref.ref(known)

    @property
    def order(self) -> GatherOrder[ForeseenGather] | None:
        """The order of gathers that the module takes part in."""
        return self._order()

    def note(self) -> str:
        """A line for the receipt; empty if there is nothing to say."""
        return "; ".join(filter(None, ("" if self.order is None else self.order.note(), self._note_on_casts())))

    def _note_on_casts(self) -> str:
        cast = [unit.cast for unit in self.units.values() if unit.cast is not None]
        if not cast:
            return ""
        dtypes = ", ".join(sorted({str(found.dtype).removeprefix("torch.") for found in cast}))
        come = f"found by {self._scale_exchanges} all-reduce a call" if self._scale_exchanges else "the user's"
        return f"{len(cast)} parameters are gathered as {dtypes}; their scales are {come}"

    def update_scales(self) -> None:
        """Write this call's scales of shards that are cast to 8-bit floats, before anything is gathered."""
        self._scale_exchanges = update_scales(self.units.values(), self.groups, self.numbers)

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

    # --- reductions ---

    def commit(self, shards: Mapping[int, torch.Tensor], absent: Collection[int] = ()) -> None:
        """Install reduced shards as gradients.

        Units that are absent on this rank wait until other ranks report theirs.
        """
        for number, shard in shards.items():
            if not self.unsure.hold(number, shard, number not in absent):
                self._commit(number, shard)

    def may_lack(self, units: Iterable[int]) -> None:
        """Note that a program may have no gradient of these units.

        Ranks agree at the end of the backward on those that exist.
        """
        self.unsure.known.update(units)

    def take(self, full: Mapping[int, torch.Tensor]) -> None:
        """Take gradients of whole units from FSDP, which has not reduced them; they are reduced with the next ones."""
        self.unreduced.take(full)
        self.unreduced.real.update(full)

    def give_back(self, from_now_on: bool = True) -> None:
        """Pass unreduced gradients to FSDP. `from_now_on`: and those of all later backwards."""
        self.unreduced.give_back(from_now_on)

    def flush(self, outside: Mapping[int, torch.Tensor] = MappingProxyType({})) -> None:
        """End a backward: reduce kept gradients of units that it did not reach, and wait for copies to CPU memory.

        Every rank has kept gradients of the same units, as it ran the same backwards. `outside`: gradients that no
        program has computed; they are reduced, or kept, with these.
        """
        self.unreduced.end()
        self.unreduced.keep(outside)
        for number in sorted(self.unreduced.whole):
            group = self._group_of(number)
            if group.wants() != "nothing":
                whole, absent = self.unreduced.whole.pop(number), {number} - self.unreduced.real
                pending = self.scatter(group, {number: whole}, f"the rest of {self.units[number].name}", 0, absent)
                self.finish(pending)
        for number, shard in self.unsure.settle():
            self._commit(number, shard)
        while self._unsettled:
            self._unsettled.popitem()[1].settle()

    def reduce_behind(self, full: Mapping[int, torch.Tensor]) -> None:
        """Reduce flat gradients of whole units that no program has reduced.

        Every rank passes some of the same units.
        """
        for number, whole in sorted(full.items()):
            self.finish(self.scatter(self._group_of(number), {number: whole}, f"the rest of {self.units[number].name}"))

    def _group_of(self, number: int) -> ShardGroup:
        return self.groups[self.units[number].group]

    def scatter(
        self,
        group: ShardGroup,
        full: Mapping[int, torch.Tensor],
        name: str,
        packed: int = 0,
        absent: Collection[int] = (),
    ) -> PendingReduction:
        """Start reducing units of one group, the last `packed` of them as one message; `absent` ones are zeros."""
        lacking = frozenset(absent).difference(self.unreduced.real)
        process_group = group.scatter_group()
        first = next(iter(full.values()))
        rule = group.reduction(first.dtype)
        for number, tensor in full.items():
            self.unreduced.add_to(number, tensor)
            if rule.divide_before not in (None, 1):
                tensor.div_(rule.divide_before)
        world = process_group.size()
        parts = [self.units[number].parts for number in full]
        sizes = self.shard_sizes({number: tensor.numel() for number, tensor in full.items()}, process_group)
        flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        shards = dict(zip(full, torch.split(flat, sizes), strict=True))
        inputs, outputs = list(full.values()), list(shards.values())
        if packed:
            message = PackedUnits(inputs[-packed:], world)
            message.pack()
            inputs = [*inputs[:-packed], message.whole]
            outputs = [*outputs[:-packed], flat[-message.whole.numel() // world :]]

        def start(limit_s: float | None) -> Any:
            if any(parts):
                return UnevenReduceScatter(process_group, outputs, inputs, parts, rule.scatter, limit_s)
            return start_scatter(process_group, outputs, inputs, rule.scatter, limit_s)

        with NamedError(f"the {name}", full, self.units, process_group):
            together = f", {packed} together" if packed else ""
            text = f"{name} ({sum(t.numel() for t in full.values())} elements{together})"
            label = label_of_model(text, process_group, self.numbers)
            collective = PendingCollective(process_group, first.device, label, start)
        return PendingReduction(name, group, flat, shards, collective, rule, lacking)

    def shard_sizes(self, numels: Mapping[int, int], group: Any) -> list[int]:
        """Elements of this rank's shard of each unit."""
        rank, world = dist.get_rank(group) if any(self.units[n].parts for n in numels) else 0, group.size()
        return [
            self.units[number].parts[rank] if self.units[number].parts else numel // world
            for number, numel in numels.items()
        ]

    def finish(self, pending: PendingReduction) -> None:
        """Wait for a whole reduction, and install the shards as gradients."""
        if self.reduce(pending):
            self.commit(pending.shards, pending.absent)

    def _commit(self, number: int, shard: torch.Tensor) -> None:
        unit = self.units[number]
        unit.commit(shard)
        if unit.offloaded:
            self._unsettled[number] = unit

    def go_on(self, pending: PendingReduction) -> None:
        """Wait for the shards. Where replicas hold copies of them, start averaging among these."""
        group, shards, flat = pending.group, pending.shards, pending.flat
        with NamedError(f"the {pending.name}", shards, self.units, group.scatter_group()):
            pending.collective.wait()
        pending.scattered = True
        replicas = group.replica_group()
        if replicas is None:
            return
        pending.complete = group.wants() == "all"
        for number, shard in shards.items():
            kept = self.unreduced.partial.pop(number, None)
            if kept is not None:
                shard.add_(kept)
            if not pending.complete:
                self.unreduced.partial[number] = shard
        if not pending.complete:
            return

        def start(limit_s: float | None) -> Any:
            return compat.groups.start_all_reduce(replicas, [flat], pending.rule.reduce, limit_s)

        with NamedError(f"the {pending.name} among replicas", shards, self.units, replicas):
            text = f"{pending.name} among replicas ({flat.numel()} elements)"
            label = label_of_model(text, replicas, self.numbers)
            pending.replicating = PendingCollective(replicas, flat.device, label, start)

    def reduce(self, pending: PendingReduction) -> bool:
        """Wait for a whole reduction. Return whether the shards can become gradients now."""
        if not pending.scattered:
            self.go_on(pending)
        if not pending.complete:
            return False
        if pending.replicating is not None:
            replicas = pending.group.replica_group()
            with NamedError(f"the {pending.name} among replicas", pending.shards, self.units, replicas):
                pending.replicating.wait()
        divisor = pending.rule.divide_after
        if divisor not in (None, 1):
            pending.flat.div_(divisor)
        return True


@dataclass(eq=False)
class DeferredGradients:
    """Unreduced gradients by unit: padded sums on this rank, in the dtype of the reduction."""

    units: Mapping[int, ShardUnit]
    whole: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    """Whole units from backwards that did not reduce them."""
    partial: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    """Shards that are reduced among the ranks of a shard group, but not yet among replicas."""
    real: set[int] = field(init=False, default_factory=set)
    """Units of which a kept sum contains a gradient, and not only the zeros of an absent one."""
    _begun: dict[tuple[int, int], torch.Tensor] = field(init=False, default_factory=dict)
    """(backward, unit) -> the sum so far, to which another program of the same backward adds."""
    _passes_to_fsdp: bool = field(init=False, default=False)

    def keep(self, full: Mapping[int, torch.Tensor], later: Collection[int] = (), absent: Collection[int] = ()) -> None:
        """Accumulate gradients that are not reduced yet.

        `later`: units of which this backward computes more. `absent`: units whose gradients are only zeros.
        """
        self.real.update(number for number in full if number not in absent)
        for number, tensor in full.items():
            own = self._with_begun(number, tensor.clone())
            if number in later:
                self._begun[backward_task(), number] = own
            else:
                self.take({number: own})

    def take(self, full: Mapping[int, torch.Tensor]) -> None:
        """Add gradients to the kept sums, and keep their memory."""
        for number, tensor in full.items():
            kept = self.whole.get(number)
            self.whole[number] = tensor if kept is None else kept.add_(tensor)

    def add_to(self, number: int, tensor: torch.Tensor) -> None:
        """Add all kept sums of a unit to a gradient before its reduction, this backward's first, as autograd does."""
        self.real.discard(number)
        self._with_begun(number, tensor)
        if number in self.whole:
            tensor.add_(self.whole.pop(number))

    def _with_begun(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Add this backward's sum so far, and round the result as autograd would."""
        begun = self._begun.pop((backward_task(), number), None) if self._begun else None
        if begun is not None:
            dtype = self.units[number].dtype
            tensor.add_(begun)
            if dtype != tensor.dtype:
                tensor.copy_(tensor.to(dtype))
        return tensor

    def end(self) -> None:
        """End a backward: its sums so far are complete."""
        task = backward_task()
        numbers = [number for of, number in self._begun if of == task]
        absent = [number for number in numbers if number not in self.real]
        self.keep({number: self._begun.pop((task, number)) for number in numbers}, absent=absent)
        if self._passes_to_fsdp:
            self.give_back()

    def holds(self, numbers: Iterable[int]) -> bool:
        """Whether gradients of any of these units are kept."""
        kept = {number for _, number in self._begun} | self.whole.keys() | self.partial.keys()
        return any(number in kept for number in numbers)

    def shared(self) -> set[int]:
        """Units to whose gradients other programs of a backward, or ranks of a shard group, have already added."""
        return {number for _, number in self._begun} | self.partial.keys()

    def forget_failed(self) -> None:
        """Drop partial sums of backwards that ended with an error. Has an effect only outside of any backward."""
        if backward_task() < 0:
            self._begun.clear()
            self.real &= self.whole.keys()

    def give_back(self, from_now_on: bool = True) -> None:
        """Pass all kept gradients to FSDP, and with `from_now_on` those that later backwards keep.

        Raises DcompileError for partly reduced ones.
        """
        self._passes_to_fsdp = self._passes_to_fsdp or from_now_on
        if self.partial:
            names = ", ".join(self.units[number].name for number in sorted(self.partial))
            raise DcompileError(
                f"dcompile: FSDP is to reduce gradients itself from here on, and those of {names} are summed up among "
                "some ranks only (set_requires_all_reduce); give this model options={'distributed': 'stock'}"
            )
        while self.whole:
            number, whole = self.whole.popitem()
            if number in self.real:
                self.units[number].take_back(whole)


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
    _foreseen: dict[str, tuple[ForeseenInFlight, list[torch.Tensor]]] = field(init=False, default_factory=dict)
    """Bucket -> its gather that another program has started, and the memory to copy it to."""
    _to_start: int = field(init=False, default=-1)
    """Number of gathers that are not started yet; -1 once the next program's may be."""
    _reducing: dict[str, PendingReduction] = field(init=False, default_factory=dict)
    _copies: dict[PeerShardGroup, CopyGathers] = field(init=False, default_factory=dict)
    """Group of peers -> its gathers by copies."""
    _waited: int = field(init=False, default=0)
    """Number of collectives that were waited for."""
    _due: set[int] | None = field(init=False, default=None)
    """Units with a converted buffer that this call has not converted yet; None before the first conversion."""

    def __post_init__(self) -> None:
        self._to_start = sum(bucket.traits.gathers for bucket in self.buckets.values())

    def start_gather(self, bucket: str, full: list[torch.Tensor]) -> None:
        """Start filling `full` with the units whose shards the ranks hold, unless another program has done so."""
        order, self._to_start = self.shards.order, self._to_start - 1
        pending = None
        if order is not None:
            pending = order.started(ForeseenGather(self.shards, self.buckets[bucket], self.phase))
        if pending is None:
            self.begin_gather(bucket, full)
        else:
            self._foreseen[bucket] = pending, full

    def begin_gather(self, bucket: str, full: list[torch.Tensor]) -> None:
        """Start filling `full`."""
        found, units = self.buckets[bucket], full
        peers = self.shards.peer_shards.of(found.group)
        if peers is not None:
            with self._named("all-gather", found, peers.group):
                copying = self._copies_from(peers).start(bucket, found.units, full)
            self._gathering[bucket] = PendingGather(copying, [], None, peers.group, units)
            return
        group, shards = self._senders(found)
        full, shards = _as_bytes(full), _as_bytes(shards)
        packed = PackedUnits([full[place] for place in found.packed], group.size()) if found.packed else None
        if packed is not None:
            alone = [place for place in range(len(full)) if place not in found.packed]
            sent = torch.cat([shards[place] for place in found.packed])
            full, shards = [*(full[n] for n in alone), packed.whole], [*(shards[n] for n in alone), sent]

        def start(limit_s: float | None) -> Any:
            return start_gather(group, full, shards, limit_s)

        text = f"all-gather {bucket} ({sum(tensor.numel() for tensor in full)} elements{_coalescing(found)})"
        label = label_of_model(text, group, self.shards.numbers)
        with self._named("all-gather", found, group):
            collective = PendingCollective(group, full[0].device, label, start)
        self._gathering[bucket] = PendingGather(collective, shards, packed, group, units)

    def _copies_from(self, peers: PeerShardGroup) -> CopyGathers:
        found = self._copies.get(peers)
        if found is None:
            peer_shards, gathers = self.shards.peer_shards, [b for b in self.buckets.values() if b.traits.gathers]
            own = [bucket for bucket in gathers if bucket.name not in self._foreseen]
            copied = [bucket for bucket in own if peer_shards.of(bucket.group) is peers]
            numbers = list(dict.fromkeys(number for bucket in copied for number in bucket.units))
            overlaps = not self.shards.converted.kept.keys().isdisjoint(numbers)
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
        return group.gather_group(), list(map(self.shards.converted.sent, bucket.units))

    def _convert(self, numbers: Iterable[int]) -> None:
        """Convert the shards of these units, unless this call has already."""
        if self._due is None:
            gathers = (bucket.units for bucket in self.buckets.values() if bucket.traits.gathers)
            self._due = self.shards.converted.kept.keys() & set().union(*gathers)
        now = [number for number in numbers if number in self._due]
        self.shards.converted.convert(now)
        self._due.difference_update(now)

    def wait_gather(self, bucket: str) -> None:
        """Wait for the gather that `start_gather` began."""
        if bucket in self._foreseen:
            pending, full = self._foreseen.pop(bucket)
            pending.wait()
            for whole, arrived in zip(full, pending.full, strict=True):
                whole.copy_(arrived)
        else:
            self._end_gather(bucket)
        self._has_waited()
        if not self._to_start and self.shards.order is not None:
            self._to_start = -1
            self.shards.order.start_next()

    def end_foreseen(self, bucket: str) -> None:
        """Wait for the only gather of this communication."""
        self._end_gather(bucket)
        self._has_waited()

    def _end_gather(self, bucket: str) -> None:
        found = self.buckets[bucket]
        gathering = self._gathering.pop(bucket)
        with self._named("all-gather", found, gathering.group):
            gathering.collective.wait()
        if gathering.packed is not None:
            gathering.packed.unpack()
        fewer = self.shards.groups[found.group].part_group() if self.phase == "forward" else None
        if fewer is not None:
            self.shards.leave_parts(fewer, found.units, gathering.full)

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

    def reducing(self, bucket: str) -> Mapping[int, torch.Tensor]:
        """Unit -> memory of this rank's shard, for each unit of a bucket that is being averaged over all ranks."""
        pending = self._reducing.get(bucket)
        return {} if pending is None or pending.group.wants() != "all" else pending.shards

    def wait_scatter(self, bucket: str) -> None:
        """Wait for the reduction that `start_scatter` began, and install the shards as gradients."""
        if bucket in self._reducing:
            self.shards.finish(self._arrived(bucket))
        self._has_waited()

    def take_shards(self, bucket: str, sizes: Iterable[tuple[int, ...]]) -> list[torch.Tensor]:
        """Wait for a reduction, and return the shards of `Bucket.taken`, without padding; others become gradients."""
        pending = self._complete(bucket)
        rest, taken = dict(pending.shards), zip(self.buckets[bucket].taken, sizes, strict=True)
        found = [rest.pop(number)[: math.prod(size)].view(size) for number, size in taken]
        self._install(rest, pending.absent)
        self._has_waited()
        return found

    def _complete(self, bucket: str) -> PendingReduction:
        """Wait for a reduction whose shards something else waits for."""
        pending = self._arrived(bucket)
        complete = self.shards.reduce(pending)
        assert complete, "only complete reductions are recorded, or have updates behind them"
        return pending

    def _install(self, shards: Mapping[int, torch.Tensor], absent: Collection[int]) -> None:
        self.shards.commit(shards, absent)

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
            shards = {bucket.units[place]: part for place, part in zip(order, parts, strict=True)}
            self.shards.commit({number: part for number, part in shards.items() if number not in bucket.taken})

    def hand_on_count(self) -> int:
        """Number of reduced tensors that `hand_on` expects."""
        return len(self._scattered())

    def _scattered(self) -> list[Bucket]:
        """Buckets with shards that become gradients."""
        found = (bucket for bucket in self.buckets.values() if not bucket.traits.gathers)
        return [bucket for bucket in found if len(bucket.taken) < len(bucket.units)]

    def _named(self, kind: str, bucket: Bucket, group: Any) -> contextlib.AbstractContextManager[None]:
        return NamedError(f"the {kind} {bucket.name}", bucket.units, self.shards.units, group)


@dataclass(frozen=True, slots=True)
class ForeseenGather:
    """A gather that another program may start; see `GatherOrder`."""

    shards: Shards
    bucket: Bucket
    phase: Phase

    def start(self) -> ForeseenInFlight:
        """Start it, into memory of its own."""
        bucket = self.bucket
        dtype = getattr(torch, bucket.dtype)
        full = [torch.empty(size, dtype=dtype, device=bucket.device) for size in bucket.sizes]
        source = ShardCommunication(self.shards, {bucket.name: bucket}, False, self.phase)
        source.begin_gather(bucket.name, full)
        return ForeseenInFlight(source, bucket.name, full)

    def __str__(self) -> str:
        names = [self.shards.units[number].name for number in self.bucket.units]
        return f"{self.phase}: {self.bucket.name} of {', '.join(names)}"


@dataclass(frozen=True, slots=True)
class ForeseenInFlight:
    """A gather that was started for the next program."""

    source: ShardCommunication
    bucket: str
    full: list[torch.Tensor]

    def wait(self) -> None:
        """Wait until `full` has arrived."""
        self.source.end_foreseen(self.bucket)


def compare_order(order: list[ForeseenGather]) -> None:
    """Compare the order of a forward or backward between the ranks of each process group, before it is followed."""
    lines: dict[Any, list[str]] = {}
    for gather in order:
        lines.setdefault(gather.shards.groups[gather.bucket.group].gather_group(), []).append(str(gather))
    for group, texts in lines.items():
        agree(group, "order of gathers", texts)


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
        self._complete(bucket)
        self._has_waited()

    def _complete(self, bucket: str) -> PendingReduction:
        pending = super()._complete(bucket)
        if pending.replicating is not None:
            self._log(pending.replicating)
        self._done[bucket] = pending.flat
        return pending

    def _install(self, shards: Mapping[int, torch.Tensor], absent: Collection[int]) -> None:
        """Leave that to replays."""

    def reduced(self) -> list[torch.Tensor]:
        """This rank's shards of each reduced bucket as one flat tensor, in the program's order.

        Valid after the call.
        """
        return [self._done[bucket.name] for bucket in self._scattered()]


def _as_bytes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """View 8-bit floats as integers: backends move bytes, and few operations take such floats."""
    return [
        tensor.view(torch.uint8) if tensor.dtype.is_floating_point and tensor.itemsize == 1 else tensor
        for tensor in tensors
    ]


def _coalescing(bucket: Bucket) -> str:
    return f", {len(bucket.packed)} together" if bucket.packed else ""
