"""Shards of the other ranks of one machine, where this rank's GPU can copy them, and all-gathers by such copies.

An all-gather by NCCL is a kernel, which takes multiprocessors from the computation: GEMMs beside it took a sixth longer
(two H200). A GPU that can map the others' memory needs no kernel. Each rank then copies the others' shards with copy
engines to where the program needs them. No shard is moved or copied twice for that: shards stay where FSDP stores them,
or in the buffer of converted ones (`ConvertedShards`).

Two rules make that correct. Each takes one meeting of the ranks (an all-reduce of one element) per program:

- No rank copies before all ranks have come to the program, so that optimizers are done with the shards.
- No rank leaves the program before all have copied, so that no optimizer starts.

Where shards are converted first, ranks meet once more. The shards of the first gather are converted before the first
meeting. All others are converted while the first gather copies, and before a second meeting.

Meetings are collectives like others: counted, compared between ranks, supervised, recorded in CUDA graphs. A copy
itself waits for no other rank.

Keep shards in the compute dtype where parameters are stored in another one (mixed precision).

Converting a shard for each gather costs a kernel per parameter. It also uses new memory each time, which other ranks
cannot map. So a model has one buffer for converted shards, and each program writes the ones that it gathers with one or
two kernels.

A backward converts again, as FSDP2 does, because nothing proves that parameters are unchanged since the forward. Fused
optimizers and `p.data.mul_()` do not bump a version counter.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from dcompile import compat
from dcompile.collectives.contract import ShardGroup, ShardUnit
from dcompile.logs import report
from dcompile.machine_model import MIN_COPIED_BYTES
from dcompile.runtime.communication.peer_memory.mapped_regions import MappedRegions, PeerMemoryAccess, reach_of
from dcompile.runtime.communication.scaled_casts import cast_shard, sent_dtype
from dcompile.runtime.communication.work import PendingCollective, start_sum

MAX_MEMORY_SHARE = 1 / 16
"""Part of a GPU's memory that the buffer may take unless `shard_copies` asks for it: 5 GB of 80."""
ALIGN_BYTES = 256
"""Alignment of each shard in bytes. NCCL and copy engines are slower at addresses that are no multiples of 16."""


class ConvertedShards:
    """Converted shards of one model.

    `way` is the option `shard_copies`. `saves_memory`: the reason why "auto" keeps none, or empty.
    """

    def __init__(
        self, units: Mapping[int, ShardUnit], way: Literal["auto", "kept", "gather"], saves_memory: str
    ) -> None:
        self._units, self._way, self._saves_memory = units, way, saves_memory
        self._memory: dict[int, torch.Tensor] | None = None
        self.reason = ""
        """Why there is no buffer although shards need a conversion; empty otherwise."""

    def save_memory(self, reason: str) -> None:
        """Make "auto" keep no converted shards, unless the buffer exists already. `reason` is shown to the user."""
        self._saves_memory = self._saves_memory or reason

    @property
    def kept(self) -> Mapping[int, torch.Tensor]:
        """Unit -> buffer of its converted shard, but for shards that are sent as stored, or converted for each gather.

        The first look allocates the buffers, so it must not come while a CUDA graph is recorded.
        """
        if self._memory is None:
            self._memory = self._allocate()
        return self._memory

    def sent(self, number: int) -> torch.Tensor:
        """This rank's shard as a gather sends it: the converted copy if there is one, as `convert` wrote it last."""
        kept, unit = self.kept.get(number), self._units[number]
        if kept is None:
            return unit.data() if unit.cast is None else cast_shard(unit)
        return kept

    def convert(self, numbers: Collection[int]) -> None:
        """Write the converted shards of these units, with one kernel for each pair of dtypes.

        A shard that is scaled takes a kernel of its own. Pairs of dtypes are copied separately: on GPUs, some versions
        of torch copy a list as if all had the first one's dtype.
        """
        kinds: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        buffers = self.kept
        for number in numbers:
            kept, unit = buffers.get(number), self._units[number]
            if kept is not None and unit.cast is not None:
                cast_shard(unit, kept)
            elif kept is not None and kept.numel():
                stored = unit.stored()
                targets, sources = kinds.setdefault((kept.device, kept.dtype, stored.dtype), ([], []))
                targets.append(kept)
                sources.append(stored)
        with torch.no_grad():
            for targets, sources in kinds.values():
                compat.tensors.copy_all(targets, sources)

    def _allocate(self) -> dict[int, torch.Tensor]:
        """Allocate one storage for each device and dtype, with a slice for each converted unit."""
        with torch.inference_mode(False), compat.tensors.real_tensors(), torch.no_grad():
            stored = {number: unit.stored() for number, unit in self._units.items() if not unit.offloaded}
            dtypes = {n: sent_dtype(self._units[n]) for n in stored}
            converted = {n: shard for n, shard in stored.items() if shard.dtype != dtypes[n]}
            self.reason = self._objection(converted)
            found: dict[int, torch.Tensor] = {}
            if self.reason:
                return found
            kinds = dict.fromkeys((shard.device, dtypes[number]) for number, shard in converted.items())
            for device, dtype in kinds:
                here = {n: s for n, s in converted.items() if (s.device, dtypes[n]) == (device, dtype)}
                found |= _laid_out(here, device, dtype)
            for number, kept in found.items():
                if self._units[number].cast is not None:  # its kernel is compiled now, and not while a graph records
                    cast_shard(self._units[number], kept)
            return found

    def _objection(self, converted: Mapping[int, torch.Tensor]) -> str:
        if not converted or self._way == "kept":
            return ""
        if self._way == "gather":
            return "option shard_copies='gather'"
        nbytes = sum(shard.numel() * sent_dtype(self._units[number]).itemsize for number, shard in converted.items())
        device = next(iter(converted.values())).device
        if self._saves_memory:
            return f"to save {nbytes >> 20} MiB, since {self._saves_memory} (option shard_copies)"
        if device.type == "cuda" and nbytes > torch.cuda.get_device_properties(device).total_memory * MAX_MEMORY_SHARE:
            return f"{nbytes >> 20} MiB would be more than a sixteenth of the GPU's memory (option shard_copies)"
        return ""


def _laid_out(shards: Mapping[int, torch.Tensor], device: torch.device, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    unit = ALIGN_BYTES // dtype.itemsize
    places, total = {}, 0
    for number, shard in shards.items():
        places[number] = total
        total += -(-shard.numel() // unit) * unit
    whole = torch.empty(total, dtype=dtype, device=device)
    return {number: whole[places[number] : places[number] + shard.numel()] for number, shard in shards.items()}


MAX_ASKED_RANKS = 16
"""Ranks above which a group is not asked: it spans several machines."""


class PeerShardGroup:
    """Units of one process group whose shards its ranks can copy.

    All ranks of the group construct theirs at the same point, and get the same `reasons`.
    """

    def __init__(
        self,
        group: Any,
        units: Mapping[int, ShardUnit],
        converted: ConvertedShards,
        device: torch.device,
        reach: PeerMemoryAccess,
    ) -> None:
        self.group, self.device, self.reach, self._converted = group, device, reach, converted
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.sources: dict[int, list[int]] = {}
        """Unit -> address of each rank's shard of it, in this process."""
        self._units = units
        self._moved = False
        self.reasons: dict[int, str] = {}
        """Unit -> why it cannot be copied. All other units can."""
        if self.ranks > MAX_ASKED_RANKS:
            self.reasons = dict.fromkeys(units, f"they are {self.ranks} ranks")
            return
        regions = {str(number): self._region(number, unit) for number, unit in units.items()}
        self._mapped = MappedRegions(group, reach, "shards", regions)
        self.reasons = {int(name): reason for name, reason in self._mapped.reasons.items()}
        self.sources = {int(name): addresses for name, addresses in self._mapped.addresses.items()}
        self._held = {int(name): tensor for name, tensor in self._mapped.held.items()}
        if not self.sources:
            return
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        """Operand of the all-reduce by which ranks meet; its value has no meaning."""
        self.streams = CopyStreams(device)

    def _region(self, number: int, unit: ShardUnit) -> torch.Tensor | str:
        """Return this rank's shard of a unit, or why others cannot read it."""
        if unit.offloaded:
            return "they are kept in CPU memory"
        data = self._converted.sent(number)
        if data.data_ptr() != unit.address() and number not in self._converted.kept:
            return f"they are converted for each gather: {self._converted.reason}"
        return data

    # --- what can be copied ---

    def covers(self, numbers: Iterable[int]) -> bool:
        """Whether every rank can copy all of these units from all others."""
        return all(number in self.sources for number in numbers)

    def refresh(self, numbers: Iterable[int]) -> None:
        """Make this rank's shards readable for the others: copy a shard that has moved to its exported address.

        Converted shards have a fixed address; their owner converts them before the meeting.
        """
        for number in numbers:
            unit, held = self._units[number], self._held[number]
            if number in self._converted.kept:
                continue
            if unit.address() != held.data_ptr():
                held.copy_(self._converted.sent(number))
                if not self._moved:
                    self._moved = True
                    report(
                        logging.WARNING,
                        f"rank {self.rank}: {unit.name} has another address than when the model was compiled; "
                        "from now on it is copied to the old one for each program that gathers it (compile the model "
                        "again to avoid that)",
                    )


class PeerShards:
    """Groups of a model's sharded parameters whose ranks can copy each other's shards.

    Ranks meet at the first question, which comes before compilation: the answers are part of plans.
    """

    def __init__(
        self, units: Mapping[int, ShardUnit], groups: Mapping[str, ShardGroup], gathers: str, converted: ConvertedShards
    ) -> None:
        self._units, self._groups, self._gathers, self._converted = units, groups, gathers, converted
        self._peer_groups: dict[int, PeerShardGroup] | None = None
        """Identity of a process group -> the units that its ranks can copy."""
        self._of: dict[str, PeerShardGroup | None] = {}
        self._partly_resharded = set[str]()
        """Groups on GPUs whose forward reshards over fewer ranks (`reshard_after_forward=N`): the backward gathers
        those parts.
        """

    def of(self, name: str) -> PeerShardGroup | None:
        """Peers that copy a group's units; None where a collective gathers them."""
        if name not in self._of:
            peers = self._groups_with_peers().get(id(self._groups[name].gather_group()))
            self._of[name] = peers if peers is not None and peers.covers(self._numbers(name)) else None
        return self._of[name]

    def reason(self, name: str) -> str:
        """Why a group's units are gathered by collectives, where copies could be expected; else empty."""
        peers = self._groups_with_peers().get(id(self._groups[name].gather_group()))
        if name in self._partly_resharded:
            return "reshard_after_forward=N: the backward gathers them from fewer ranks"
        if peers is None:
            return ""
        return next((peers.reasons[number] for number in self._numbers(name) if number in peers.reasons), "")

    def _numbers(self, name: str) -> list[int]:
        return list(self._units_of({name}))

    def _units_of(self, names: Collection[str]) -> dict[int, ShardUnit]:
        return {number: unit for number, unit in self._units.items() if unit.group in names}

    def _groups_with_peers(self) -> dict[int, PeerShardGroup]:
        if self._peer_groups is None:
            self._peer_groups = {}
            if self._gathers == "auto":
                with compat.tensors.real_tensors(), torch.no_grad():  # a graph is being compiled
                    self._exchange_handles(self._peer_groups)
        return self._peer_groups

    def _exchange_handles(self, found: dict[int, PeerShardGroup]) -> None:
        for group in self._groups.values():
            process_group = group.gather_group()
            if id(process_group) in found or not isinstance(process_group, dist.ProcessGroup):
                continue
            names = {name for name, other in self._groups.items() if other.gather_group() is process_group}
            device = next((unit.stored().device for unit in self._units_of(names).values() if not unit.offloaded), None)
            reach = None if device is None else reach_of(device)
            if reach is None or device is None or process_group.size() == 1:
                continue
            partly = {name for name in names if self._groups[name].part_group() is not None}
            self._partly_resharded |= partly
            names -= partly
            units = self._units_of(names)
            on_gpu = (unit for unit in units.values() if not unit.offloaded)
            gathered = sum(unit.stored().numel() * sent_dtype(unit).itemsize for unit in on_gpu) * process_group.size()
            if names and gathered >= MIN_COPIED_BYTES * len(names):
                with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                    found[id(process_group)] = PeerShardGroup(process_group, units, self._converted, device, reach)


class CopyStreams:
    """Two streams for the copies of one process group's gathers: from other ranks, and of this rank's own part.

    Copies inside a GPU's memory are kernels of the driver, which have to wait for free multiprocessors beside GEMMs.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: tuple[Any, ...] = ()
        if device.type == "cuda":
            self._streams = tuple(torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]

    @property
    def peer_copies(self) -> int:
        """Driver handle of the stream for copies from other ranks."""
        return self._streams[0].cuda_stream if self._streams else 0

    @property
    def own_copies(self) -> int:
        """Driver handle of the stream for copies of this rank's own part."""
        return self._streams[1].cuda_stream if self._streams else 0

    def on_peer_copies(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the stream for copies from other ranks is current."""
        return torch.cuda.stream(self._streams[0]) if self._streams else contextlib.nullcontext()

    def on_own_copies(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the stream for copies of this rank's own part is current."""
        return torch.cuda.stream(self._streams[1]) if self._streams else contextlib.nullcontext()

    def order_peer_behind_own(self) -> None:
        """Order later copies from other ranks after the current work of the stream for this rank's own part."""
        if self._streams:
            self._streams[0].wait_event(_event(self._streams[1]))

    def fork(self) -> None:
        """Order later copies after the current work of the current stream."""
        if self._streams:
            here = _event()
            for stream in self._streams:
                stream.wait_event(here)

    def events(self) -> list[Any]:
        """Events that complete after all copies so far."""
        return [_event(stream) for stream in self._streams]


def _event(stream: Any = None) -> Any:
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
    event.record(stream)
    return event


class PendingCopyGather:
    """One copy gather in flight, with the interface of a `PendingCollective`."""

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    @property
    def work(self) -> PendingCopyGather:
        """This object, as measuring waits for it like for a Work."""
        return self

    def wait(self) -> None:
        """Make the current stream wait for the copies."""
        for event in self._events:
            torch.cuda.current_stream().wait_event(event)

    def is_completed(self) -> bool:
        """Whether all copies are done."""
        return all(event.query() for event in self._events)

    def get_future(self) -> Any:
        """Raise RuntimeError, like a collective that does not notify when it ends."""
        raise RuntimeError("copies have no future")


class CopyGathers:
    """Copy gathers of one call of a program within one process group: `buckets` gathers over these units."""

    def __init__(
        self,
        peers: PeerShardGroup,
        buckets: int,
        units: Sequence[int],
        begun: Callable[[PendingCollective], None],
        convert: Callable[[Sequence[int]], None],
        overlaps: bool,
    ) -> None:
        """Prepare the gathers of a call.

        `convert` writes the converted shards of units. `begun` is called with each meeting. `overlaps`: all ranks
        convert most shards while the first gather copies.
        """
        self._peers, self._streams, self._left = peers, peers.streams, buckets
        self._units = units
        self._begun = begun
        """Called with each meeting that begins."""
        self._convert, self._overlaps = convert, overlaps and buckets > 1
        self._opened = False
        self._closing: PendingCollective | None = None

    def start(self, bucket: str, units: Sequence[int], full: Sequence[torch.Tensor]) -> PendingCopyGather:
        """Start filling `full`, flat tensors, with all ranks' shards of `units`, in the order of ranks."""
        peers, streams = self._peers, self._streams
        if not self._opened:
            self._opened = True
            self._convert(units if self._overlaps else self._units)
            peers.refresh(self._units)
            opening = self._start_barrier(f"meeting before {bucket} is copied")
            streams.fork()
            with streams.on_peer_copies():
                opening.wait()
        else:
            streams.fork()
            if self._overlaps:
                self._overlaps = False
                with streams.on_peer_copies():
                    streams.order_peer_behind_own()
                    self._start_barrier(f"meeting behind the conversion of {bucket} and others").wait()
        own, others = [], []
        for number, whole in zip(units, full, strict=True):
            nbytes = whole.numel() // peers.ranks * whole.element_size()
            sources, target = peers.sources[number], whole.data_ptr()
            own.append((target + peers.rank * nbytes, sources[peers.rank], nbytes))
            for step in range(1, peers.ranks):  # each rank begins with another peer, to spread the load
                rank = (peers.rank + step) % peers.ranks
                others.append((target + rank * nbytes, sources[rank], nbytes))
        peers.reach.copy(others, streams.peer_copies)
        peers.reach.copy(own, streams.own_copies)
        copying = PendingCopyGather(streams.events())
        if self._overlaps:
            with streams.on_own_copies():
                self._convert(self._units)
        self._left -= 1
        if not self._left:
            with streams.on_peer_copies():
                self._closing = self._start_barrier(f"meeting behind the copies of {bucket}")
        return copying

    def _start_barrier(self, label: str) -> PendingCollective:
        collective = start_sum(self._peers.group, self._peers.flag, label)
        self._begun(collective)
        return collective

    def finish(self) -> None:
        """Wait until all ranks have their copies. Called once the program has waited for all of its gathers."""
        if self._closing is not None:
            closing, self._closing = self._closing, None
            closing.wait()
