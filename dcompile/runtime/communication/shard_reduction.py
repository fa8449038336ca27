"""Reduce gradients of sharded parameters to shards, and install these as gradients, now or in a later backward."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from dcompile import compat
from dcompile.collectives.contract import ShardGroup, ShardUnit
from dcompile.compat.autograd import backward_task
from dcompile.errors import DcompileError
from dcompile.runtime.communication.gather_scatter import PackedUnits, UnevenReduceScatter, start_scatter
from dcompile.runtime.communication.gradient_presence import UncertainUnits
from dcompile.runtime.communication.work import PendingCollective, label_of_model


@dataclass(eq=False)
class PendingReduction:
    """A reduction in flight."""

    name: str
    group: ShardGroup
    flat: torch.Tensor
    """All shards of this rank, end to end."""
    shards: dict[int, torch.Tensor]
    collective: PendingCollective
    absent: frozenset[int] = frozenset()
    """Units that this rank has no gradient of."""
    scattered: bool = False
    """Whether the reduce-scatter is done: this rank has its shards."""
    complete: bool = True
    """Whether the shards become gradients; otherwise they are kept until replicas are averaged over."""
    replicating: PendingCollective | None = None
    """The all-reduce among replicas."""


@contextlib.contextmanager
def named_error(what: str, numbers: Iterable[int], units: Mapping[int, ShardUnit], group: Any) -> Iterator[None]:
    """Add a note to a RuntimeError: the collective that failed, its parameters, and its ranks."""
    try:
        yield
    except RuntimeError as error:
        names = [units[number].name for number in numbers]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        error.add_note(
            f"dcompile: rank {dist.get_rank()} was in {what} of {', '.join(names[:3])}{more}, "
            f"over ranks {dist.get_process_group_ranks(group)}; "
            "another rank has failed, stalled, or does not run this step"
        )
        raise


@dataclass(eq=False)
class ShardReductions:
    """Reductions of one model's sharded parameters, and gradients that are not reduced yet."""

    units: Mapping[int, ShardUnit]
    groups: Mapping[str, ShardGroup]
    numbers: dict[Any, int] = field(init=False, default_factory=dict)
    """See `label_of_model`."""
    unreduced: DeferredGradients = field(init=False)
    unsure: UncertainUnits = field(init=False)
    _unsettled: dict[int, ShardUnit] = field(init=False, default_factory=dict)
    """Units whose gradients may still be copied to CPU memory."""

    def __post_init__(self) -> None:
        self.unreduced = DeferredGradients(self.units)
        self.unsure = UncertainUnits(self.units, self.groups)

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

    def give_back(self) -> None:
        """Pass unreduced gradients to FSDP."""
        self.unreduced.give_back()

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
        world = dist.get_world_size(process_group)
        parts = [self.units[number].parts for number in full]
        sizes = self.shard_sizes({number: tensor.numel() for number, tensor in full.items()}, process_group)
        flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        shards = dict(zip(full, torch.split(flat, sizes), strict=True))
        inputs, outputs = list(full.values()), list(shards.values())
        if packed:
            parcel = PackedUnits(inputs[-packed:], world)
            parcel.pack()
            inputs = [*inputs[:-packed], parcel.whole]
            outputs = [*outputs[:-packed], flat[-parcel.whole.numel() // world :]]

        def start(limit_s: float | None) -> Any:
            if any(parts):
                return UnevenReduceScatter(process_group, outputs, inputs, parts, rule.scatter, limit_s)
            return start_scatter(process_group, outputs, inputs, rule.scatter, limit_s)

        with named_error(f"the {name}", full, self.units, process_group):
            together = f", {packed} together" if packed else ""
            text = f"{name} ({sum(t.numel() for t in full.values())} elements{together})"
            label = label_of_model(text, process_group, self.numbers)
            collective = PendingCollective(process_group, first.device, label, start)
        return PendingReduction(name, group, flat, shards, collective, lacking)

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
        with named_error(f"the {pending.name}", shards, self.units, group.scatter_group()):
            pending.collective.wait()
        pending.scattered = True
        replicas, rule = group.replica_group(), group.reduction(flat.dtype)
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
            options = dist.AllreduceOptions()
            options.reduceOp = rule.reduce
            compat.groups.limit(options, limit_s)
            return replicas.allreduce([flat], options)

        with named_error(f"the {pending.name} among replicas", shards, self.units, replicas):
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
            with named_error(f"the {pending.name} among replicas", pending.shards, self.units, replicas):
                pending.replicating.wait()
        divisor = pending.group.reduction(pending.flat.dtype).divide_after
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
    _given_back: bool = field(init=False, default=False)

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
                kept = self.whole.get(number)
                self.whole[number] = own if kept is None else kept.add_(own)

    def add_to(self, number: int, tensor: torch.Tensor) -> None:
        """Add all kept sums of a unit to a gradient before its reduction, this backward's first, as autograd does."""
        self.real.discard(number)
        self._with_begun(number, tensor)
        if number in self.whole:
            tensor.add_(self.whole.pop(number))

    def _with_begun(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Add this backward's sum so far, and round the result as autograd would."""
        begun, dtype = self._begun.pop((backward_task(), number), None), self.units[number].dtype
        if begun is not None:
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
        if self._given_back:
            self.give_back()

    def holds(self, numbers: Iterable[int]) -> bool:
        """Whether gradients of any of these units are kept."""
        kept = {number for _, number in self._begun} | self.whole.keys() | self.partial.keys()
        return any(number in kept for number in numbers)

    def forget_failed(self) -> None:
        """Drop partial sums of backwards that ended with an error. Has an effect only outside of any backward."""
        if backward_task() < 0:
            self._begun.clear()
            self.real &= self.whole.keys()

    def give_back(self) -> None:
        """Pass all kept gradients to FSDP, and those that later backwards keep.

        Raises DcompileError for partly reduced ones.
        """
        self._given_back = True
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
