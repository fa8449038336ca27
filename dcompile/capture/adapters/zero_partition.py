"""Adapter of ZeRO 1 and 2: every rank has whole parameters, and its own part of the gradients of each flat group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.adapters.fsdp_common import present
from dcompile.capture.adapters.plain import known_number
from dcompile.capture.adapters.zero import CAP_BYTES, FIRST_BYTES, ZeroAdapter, ZeroGroup, dtype_name, names_of
from dcompile.collectives.contract import ParamInfo, Shard


class FlatRange:
    """Adjacent parameters of a flat group as a unit; see `collectives.contract.ShardUnit`."""

    offloaded = False

    def __init__(
        self, adapter: ZeroPartitionAdapter, group: str, index: int, bounds: tuple[int, int], part: int
    ) -> None:
        self._adapter = weakref.ref(adapter)
        self.group = group
        self.index, self._start = index, bounds[0]
        start, stop = bounds
        ranks = adapter.group.size()
        self.parts = tuple(max(0, min(stop, (r + 1) * part) - max(start, r * part)) for r in range(ranks))
        """Number of elements of the unit in each rank's part."""
        rank = torch.distributed.get_rank(adapter.group)
        self._offset = max(start - rank * part, 0)
        """Position of this rank's elements in its part of the flat group."""
        self.name = ""
        """Names of its parameters."""
        self.members: list[tuple[Any, int]] = []
        """(weak reference, offset within the unit) of each parameter."""

    def add(self, name: str, parameter: Any, offset: int) -> None:
        """Add the next parameter."""
        self.name = f"{self.name} {name}".lstrip()
        self.members.append((weakref.ref(parameter), offset))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of gradients: that of the parameters."""
        found: torch.dtype = present(self.members[0][0]).dtype
        return found

    def data(self) -> torch.Tensor:
        raise AssertionError("parameters of stages 1 and 2 are not gathered")

    stored = data

    def address(self) -> int:
        return 0

    def commit(self, gradient: torch.Tensor) -> None:
        """Add this rank's elements to its part of the gradients."""
        if gradient.numel():
            flat = present(self._adapter).partition(self.index)
            flat[self._offset : self._offset + gradient.numel()].add_(gradient)

    def take_back(self, gradient: torch.Tensor) -> None:
        """Add this rank's whole gradient to `.grad` of the parameters, for DeepSpeed to reduce."""
        for reference, offset in self.members:
            parameter: Any = present(reference)
            piece = gradient[offset : offset + parameter.numel()].view(parameter.shape).to(parameter.dtype)
            parameter.grad = piece.clone() if parameter.grad is None else parameter.grad + piece

    def settle(self) -> None:
        """Return at once: `commit` finishes its work."""


class ZeroPartitionAdapter(ZeroAdapter):
    """State of the takeover of an engine of stage 1 or 2: gradients are reduced to each rank's part."""

    compares_in_forward = True

    def __init__(self, engine: Any, stage: int) -> None:
        super().__init__(engine, stage)
        self._group = compat.deepspeed.process_group(engine)
        self._refs: dict[int, Callable[[], Any]] = {}
        self._partitions: dict[int, Any] = {}
        """Index of a flat group -> its gradients in the form that the optimizer takes."""
        self._handed: set[int] = set()
        self._rank = torch.distributed.get_rank(self._group)
        found = self._make_units(engine, dtype_name(engine.communication_data_type))
        # numbers follow the module's order, not that of the flat groups
        order = {name: number for number, name in enumerate(names_of(engine).values())}
        entries = sorted(found, key=lambda entry: order[entry[0].fqn])
        self._infos = tuple(
            ParamInfo(number, i.fqn, i.shape, i.dtype, i.device, i.kind, i.group, i.shard)
            for number, (i, _) in enumerate(entries)
        )
        self._refs = {number: weakref.ref(parameter) for number, (_, parameter) in enumerate(entries)}
        self._numbers = {id(parameter): number for number, (_, parameter) in enumerate(entries)}

    def _make_units(self, engine: Any, reduce_dtype: str) -> list[tuple[ParamInfo, Any]]:
        """Make units, from the last parameter of the last group to the first; return (info for plans, parameter)."""
        names, found = names_of(engine), list[tuple[ParamInfo, Any]]()
        itemsize = getattr(torch, reduce_dtype).itemsize
        cap = min(CAP_BYTES, compat.zero.bucket_elements(engine) * itemsize)
        for flat in reversed(compat.zero.flat_groups(engine)):
            for members in in_buckets(flat.places, itemsize, min(FIRST_BYTES, cap), cap):
                bounds = members[0][1], members[-1][1] + members[-1][0].numel()
                number, group = len(self.units), f"zero{len(self.groups)}"
                unit = FlatRange(self, group, flat.index, bounds, flat.part)
                self.units[number] = unit
                self.groups[group] = ZeroGroup(engine, group, self._group)
                for parameter, place in members:
                    offset, name = place - bounds[0], names[id(parameter)]
                    unit.add(name, parameter, offset)
                    shard = Shard(number, number, offset, bounds[1] - bounds[0], reduce_dtype, reshard=False, flat=True)
                    shape, dtype = tuple(parameter.shape), dtype_name(parameter.dtype)
                    info = ParamInfo(0, name, shape, dtype, parameter.device.type, "sharded", group, shard)
                    found.append((info, parameter))
        return found

    @property
    def group(self) -> Any:
        return self._group

    def number_of(self, parameter: Any) -> int | None:
        return known_number(self._numbers, self._refs, parameter)

    def made_of(self, number: int) -> Callable[[Any], Any] | None:
        del number
        return None

    def virtual(self, number: int) -> torch.nn.Parameter:
        """Return the parameter itself, which is whole."""
        found: torch.nn.Parameter = present(self._refs[number])
        return found

    def trainable(self) -> Iterable[tuple[int, Any]]:
        return ((number, present(reference)) for number, reference in self._refs.items())

    def partition(self, index: int) -> torch.Tensor:
        """Return this rank's part of a flat group's gradients, a flat tensor that `commit` adds to.

        If the optimizer's step has taken the last part, a new one is made. It has not taken it if a step has another
        backward after the one that handed gradients over.
        """
        engine, known = self.engine, self._partitions.get(index)
        if known is not None and index in self._handed and not compat.zero.holds(engine, index, known):
            known = None
        if known is None:
            self._handed.discard(index)
            group = compat.zero.flat_groups(engine)[index]
            known = self._partitions[index] = compat.zero.new_partition(engine, group, self._rank)
        flat: torch.Tensor = known.flat_partition
        return flat

    def hand_over(self) -> None:
        """Pass a step's complete gradients to the optimizer."""
        for group in compat.zero.flat_groups(self.engine):
            self.partition(group.index)
            compat.zero.hand_over(self.engine, group.index, self._partitions[group.index])
            self._handed.add(group.index)


def in_buckets(
    places: Sequence[tuple[Any, int]], itemsize: int, first_bytes: int, cap_bytes: int
) -> list[list[tuple[Any, int]]]:
    """Group adjacent parameters into buckets, the last ones first; as in DDP, a bucket closes at its size in bytes.

    `places`: (parameter, offset) in order.
    """
    buckets: list[list[tuple[Any, int]]] = []
    size, limit = 0, first_bytes
    for parameter, place in reversed(places):
        if not buckets or size >= limit:
            limit = first_bytes if not buckets else cap_bytes
            buckets.append([])
            size = 0
        buckets[-1].insert(0, (parameter, place))
        size += parameter.numel() * itemsize
    return buckets
