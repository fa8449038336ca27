"""One recorded run of a compiled program: the addresses of its inputs, its results, its replay, and its recorder.

A recording replays kernels on the addresses that it was made with. So each input tensor is either `fixed` or has a
slot. Fixed inputs are parameters and results of other recordings, whose address must stay the same. A slot is memory of
the recording's own, which is filled before each replay.

Results are stored in memory of the pool at addresses that never change. Each replay returns new tensors over this
memory. The reference count of the storage shows whether the caller still holds one. `ResultSorter` classifies the
results of a recorded run: inputs, their slots, gradient buckets, or memory of the recording's own.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import torch

from dcompile import compat
from dcompile.collectives.contract import AnySource, Executable
from dcompile.compat.tensors import forget_blas_workspaces
from dcompile.runtime.cuda_graphs.collectives import RecordedCall
from dcompile.runtime.program.arena import copy_elements, over
from dcompile.runtime.program.graph_partition import HostPart

COPY_BYTES = 1 << 16
"""Size in bytes up to which results are returned as copies: losses and metrics, which callers keep over many steps."""

Replay: TypeAlias = Callable[[Mapping[str, Any]], Sequence[Any]]
"""Repeats a recorded call with this memory of gradient buckets. Returns the results of the call's last part, if it is
not recorded.
"""


class GraphRecorder(Protocol):
    """Recorder of a device: it records the kernels that a function launches, with memory from a pool."""

    def record(self, function: Callable[[], list[Any]], pool: int) -> tuple[Callable[[], None], list[Any]]:
        """Record a function.

        Return (replay, the function's results), not computed yet; raise RuntimeError on failure.
        """

    def can_read(self, tensor: torch.Tensor) -> bool:
        """Whether recorded kernels may read the tensor."""


class InParts(Protocol):
    """A program in parts, which are recorded or run as they are; see `runtime.program.executable.HostParts`."""

    parts: tuple[HostPart, ...]

    def begin(self, args: list[Any]) -> tuple[int, tuple[int, ...]]:
        """Complete the arguments. Return the device, -1 for the CPU, and the sizes."""

    def prepare(self, device: int, sizes: tuple[int, ...]) -> tuple[list[Callable[..., list[Any]]], Any]:
        """Prepare a call. Return a function for each part, and the owner of the memory that they address."""


class Recordable(Executable, Protocol):
    """A program that can be recorded."""

    mutated: tuple[int, ...]
    """Positions of the inputs that it writes."""
    name: str
    on_gpu: bool

    def once(self, args: list[Any], buckets: AnySource | None = None, sync: bool = False) -> list[Any]:
        """Run with temporaries that are freed after the call."""

    @property
    def in_parts(self) -> InParts | None:
        """The program in parts; None if it is recorded as a whole."""

    def set_apart(self, error: BaseException) -> str:
        """Leave the call at which a recording failed out of later ones. Return its name; "" if it is unknown."""

    def release(self) -> None:
        """Free temporaries that earlier calls have left."""

    def measure(self, recorder: Any) -> None:
        """See `HostProgram.measure`."""


@dataclass(eq=False, slots=True)
class ResultRetention:
    """Whether the user of a program was found to keep its results. From then on, copies are returned."""

    found: bool = False


_uses = compat.storage_holders.use_counter()


class ResultMemory:
    """One storage of results, and a template of each result over it.

    `owned` while the allocator counts the memory as allocated. That ends when a later recording reuses the memory and
    frees it on the way. From then on, only the tree's rule protects the memory.
    """

    def __init__(self, storage: torch.UntypedStorage, pool: int, pinned: bool = False) -> None:
        self.owned = True
        self.pool = pool
        self.kept: ResultRetention | None = None
        """For memory whose results users see: whether they keep these results; None for other memory."""
        self.pinned = pinned
        """Whether it is a slot, which is filled from outside and cannot be reused."""
        self.address, self.nbytes, self.device = storage.data_ptr(), storage.nbytes(), storage.device
        self._storage = storage
        self._templates: list[torch.Tensor] = []
        self._base, self._rank = 0, (False, -1)
        """Index and rank of the template that the other results are views of: the largest one that was not a view, if
        any.

        AOTAutograd returns views of results that are not views, so that users may change them in place. It makes no
        views of views. If all results were views, the caller gets only views, so that `requires_grad_()` on one does
        not affect others.
        """
        self._whole = False
        """Whether a copy must include the whole storage: for several results in it, or a result with gaps.

        It also includes small storages as a whole, which the next graph may address with `as_strided`, as in eager
        mode.
        """
        self._own = (0, 0)
        self._alone = False
        """Whether one result, which was no view, has all of the memory: the caller gets one tensor of its own."""

    def add(self, like: torch.Tensor) -> int:
        """Add a template like this tensor, which is stored in this memory. Return the template's number."""
        template = self._over(like.dtype, like.shape, like.stride(), int(like.storage_offset()))
        gaps = torch.empty_like(template).stride() != template.stride()
        part = self.nbytes <= COPY_BYTES and compat.storage_offsets.is_part(template)
        self._whole = self._whole or bool(self._templates) or gaps or part
        self._templates.append(template)
        if (rank := (not like._is_view(), template.nbytes)) > self._rank:
            self._base, self._rank = len(self._templates) - 1, rank
        return len(self._templates) - 1

    def _over(self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=self.device).set_(self._storage, offset, shape, strides)

    def settle(self) -> None:
        """Note the current reference counts. Holders beyond these are the caller's from now on."""
        self._own = self._holders()
        self._alone = len(self._templates) == 1 and self._rank[0] and not self._templates[0].storage_offset()

    def _holders(self) -> tuple[int, int]:
        # Python code shares one storage object, which counts once; its own reference count tells of further holders
        return _uses(self._storage._cdata), sys.getrefcount(self._storage)

    @property
    def live(self) -> bool:
        """Whether the caller still holds a tensor over it."""
        uses, references = self._own
        return _uses(self._storage._cdata) != uses or sys.getrefcount(self._storage) != references

    @property
    def holders(self) -> int:
        """Number of the caller's tensors over it."""
        count, references = self._holders()
        return count - self._own[0] + references - self._own[1]

    def hand_out(self, template: int, given: Given, copies: bool, looks: bool) -> torch.Tensor:
        """Return a result to the caller: a tensor over this memory, or a copy.

        `given` holds the bases of this call's other results in this memory. `looks`: whether the user sees the result.
        As in a call without a recording, results in one memory share one version counter. The user gets a view of a
        shared base, so that `v.requires_grad_()` affects parts of `v`.
        """
        if self._alone and not copies:  # most saved tensors, of which a forward of twelve layers returns two hundred
            return self._templates[0].detach()
        base = given.get((self, copies))
        if base is None:
            base = given[self, copies] = self._copy() if copies else self._seen()
        like = self._templates[template]
        was_no_view, _ = self._rank
        if template == self._base and (was_no_view or not looks) and base.shape == like.shape:
            return base
        if like.dtype != base.dtype:
            return over(base, like.dtype, like.shape, like.stride(), int(like.storage_offset()) * like.itemsize)
        look = base.as_strided(like.shape, like.stride(), like.storage_offset())
        return look if looks else look.detach()  # a view would keep its base alive

    def _seen(self) -> torch.Tensor:
        """Largest result, or the whole memory if that result begins inside it, as in a call without a recording.

        With symbolic sizes, torch may fail to trace a view of a tensor that begins inside its storage, next to that
        tensor. It fails if it traced them differently before: "sources must not be empty for symbol".
        """
        tensor = self._templates[self._base]
        if not tensor.storage_offset():
            return tensor.detach()
        return self._over(tensor.dtype, (self.nbytes // tensor.itemsize,), (1,), 0)

    def _copy(self) -> torch.Tensor:
        """Copy of the largest result, with the whole memory around it if other results are stored there."""
        tensor = self._templates[self._base]
        if not self._whole:
            return tensor.clone()
        memory = self._over(torch.uint8, (self.nbytes,), (1,), 0).clone()
        if not tensor.storage_offset():
            return over(memory, tensor.dtype, tensor.shape, tensor.stride(), 0)
        return over(memory, tensor.dtype, (self.nbytes // tensor.itemsize,), (1,), 0)

    def give_up(self) -> None:
        """Let the allocator free the memory once nobody else holds it. The address stays known."""
        self.owned = False
        old = self._templates
        self._storage = compat.tensors.storage_at(self.address, self.nbytes, self.device)
        self._templates = [self._over(t.dtype, t.shape, t.stride(), int(t.storage_offset())) for t in old]
        del old
        self.settle()


Given = dict[tuple[ResultMemory, bool], torch.Tensor]
"""(memory, whether it is copied) -> the base tensor that this call has returned."""


@dataclass(frozen=True, slots=True)
class CopiedInput:
    """A copied input: its position, and the tensor that the recording reads instead."""

    position: int
    tensor: torch.Tensor
    mutated: bool

    def fill(self, args: Sequence[Any]) -> None:
        """Copy this call's input into the recording's tensor."""
        copy_elements(self.tensor, args[self.position])

    def copy_back(self, args: Sequence[Any]) -> None:
        """Copy the program's changes back to the caller's tensor."""
        if self.mutated:
            copy_elements(args[self.position], self.tensor)


@dataclass(frozen=True, slots=True)
class RecordedResult:
    """One result of a recording.

    Its kind is one of these. `value`: not a tensor. `input`, `bucket`: a view of it. `memory`, `copy`: in memory of the
    recording, returned itself or as a copy. `again`: the same tensor as an earlier result, because views and version
    counters depend on its identity. `new`: what the replay has returned at this position.
    """

    kind: Literal["value", "input", "bucket", "memory", "copy", "again", "new"]
    source: Any
    """The value; the input's position; the bucket's name; the `ResultMemory`; or the position of a result."""
    template: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0
    """For a view of an input or bucket: offset in elements from the beginning of that tensor."""
    kept: ResultRetention | None = None

    def of(
        self, args: Sequence[Any], buckets: Mapping[str, Any], given: Given, earlier: list[Any], new: Sequence[Any]
    ) -> Any:
        """Tensor or value for the caller, after `earlier` results; `given` as in `ResultMemory.hand_out`.

        `new`: what the replay has returned.
        """
        match self.kind:
            case "memory":  # first, since most are
                kept = self.kept
                return self.source.hand_out(self.template, given, kept is not None and kept.found, kept is not None)
            case "new":
                return new[self.source]
            case "again":
                return earlier[self.source]
            case "value":
                return self.source
            case "copy":
                return self.source.hand_out(self.template, given, True, True)
            case "input":
                tensor = args[self.source]
                if self.offset == 0 and tensor.shape == self.shape and tensor.stride() == self.strides:
                    return tensor
                return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)
            case "bucket":
                return buckets[self.source].flat.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True, eq=False, slots=True)
class Recording:
    """Recording of one call; see the module.

    `tolerates`: memory that was alive when it was made. It may overwrite any other memory of its pool.
    """

    replay: Replay
    fixed: list[int]
    addresses: list[int]
    """Addresses of all inputs; only those of the fixed ones are compared."""
    slots: tuple[CopiedInput, ...]
    results: tuple[RecordedResult, ...]
    memories: tuple[ResultMemory, ...]
    pool: int
    tolerates: frozenset[ResultMemory]
    layouts_fit: Callable[..., bool] | None = None
    """For a backward: whether the fixed inputs still have their layouts, since a new `.data` may have the
    same address.
    """
    collectives: Mapping[Any, list[str]] = field(default_factory=dict)
    """Process group -> labels of the model's own collectives in the recording, in order."""

    def fits(self, args: list[Any]) -> bool:
        """Whether the fixed inputs have the addresses, and for a backward the layouts, that this recording reads."""
        if not compat.tensors.addresses_are(args, self.addresses, self.fixed):
            return False
        return self.layouts_fit is None or self.layouts_fit(*[args[place] for place in self.fixed])

    def run(self, args: list[Any], buckets: Mapping[str, Any], new: Sequence[Any] | None = None) -> list[Any]:
        """Replay with these inputs and this memory of gradient buckets; `args` is emptied.

        `new`: new results of this call, if it ran while it was recorded.
        """
        if new is None:
            for slot in self.slots:
                slot.fill(args)
            new = self.replay(buckets)
        for slot in self.slots:
            slot.copy_back(args)
        given: Given = {}
        results: list[Any] = []
        for result in self.results:
            results.append(result.of(args, buckets, given, results, new))  # each may be a view of earlier ones
        args.clear()
        return results


class ResultSorter:
    """Classify the results of a recorded run, and collect their memory.

    `stay`: positions of the fixed inputs whose memory was not freed during the run. Freed memory may hold a result now.
    `pinned`: addresses of memory of the recording's own that is filled from outside, apart from slots.
    """

    def __init__(
        self,
        stay: Sequence[int],
        args: Sequence[Any],
        slots: Sequence[CopiedInput],
        pool: int,
        call: RecordedCall,
        pinned: frozenset[int] = frozenset(),
    ) -> None:
        self._pool, self._pinned = pool, pinned
        self._buckets = {memory.flat.untyped_storage().data_ptr(): name for name, memory in call.memories.items()}
        self._inputs = {args[i].untyped_storage().data_ptr(): i for i in reversed(stay)}
        self._args = args
        self._by_address: dict[int, ResultMemory] = {}
        self._slots = {slot.tensor.untyped_storage().data_ptr(): slot for slot in slots}
        self._virtual = {id(args[i]): i for i in stay if is_virtual(args[i])}
        self._seen: dict[ResultMemory, None] = {}

    @property
    def memories(self) -> tuple[ResultMemory, ...]:
        """Memory that the caller may come to hold."""
        return tuple(self._seen)

    def settle(self) -> None:
        """Note reference counts, once nothing else holds the results of the recorded run."""
        for memory in self._by_address.values():
            memory.settle()

    def result(self, value: Any, kept: ResultRetention | None, earlier: int | None) -> RecordedResult:
        """Describe a result. `kept`: what is known of its users, if it has any; `earlier`: position of the same one."""
        if not isinstance(value, torch.Tensor):
            return RecordedResult("value", value)
        if earlier is not None:
            return RecordedResult("again", earlier)
        storage = value.untyped_storage()
        position = self._inputs.get(storage.data_ptr()) if storage.nbytes() else self._virtual.get(id(value))
        if position is not None:
            return _view_of_input(position, self._args[position], value)
        slot = self._slots.get(storage.data_ptr()) if storage.nbytes() else None
        if slot is not None and kept is not None:  # a saved one is read from the slot
            return _view_of_input(slot.position, slot.tensor, value)
        bucket = self._buckets.get(storage.data_ptr())
        if bucket is not None:
            return RecordedResult("bucket", bucket, 0, tuple(value.shape), value.stride(), int(value.storage_offset()))
        # empty results have no address that they could share
        address = storage.data_ptr() if storage.nbytes() else -1 - len(self._by_address)
        memory = self._by_address.get(address)
        if memory is None:
            memory = self._by_address[address] = ResultMemory(
                storage, self._pool, pinned=slot is not None or address in self._pinned
            )
        if kept is not None and storage.nbytes() <= COPY_BYTES:
            return RecordedResult("copy", memory, memory.add(value))
        self._seen[memory] = None
        memory.kept = memory.kept or kept
        return RecordedResult("memory", memory, memory.add(value), kept=kept)


def position_in_results(results: Sequence[Any], number: int, users: int) -> int | None:
    """Position of an earlier user result that is the same tensor, or None."""
    earlier = range(number) if number < users else ()
    return next((place for place in earlier if results[place] is results[number]), None)


def _view_of_input(position: int, source: torch.Tensor, value: torch.Tensor) -> RecordedResult:
    """Result that is a view of `source`: the input at this position, or the slot that holds its copy."""
    offset = value.storage_offset() - source.storage_offset()
    return RecordedResult("input", position, 0, tuple(value.shape), value.stride(), int(offset))


def is_virtual(tensor: torch.Tensor) -> bool:
    """Whether it represents a sharded parameter: full shape, without memory."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


class CudaRecorder:
    """Record on a stream of its own, with memory from pools of the caching allocator.

    torch registers the default generator when a capture begins, so replays draw new random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pools: dict[int, Any] = {}
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]

    def record(self, function: Callable[[], list[Any]], pool: int) -> tuple[Callable[[], None], list[Any]]:
        """Record a function; see `GraphRecorder`. Other threads may use CUDA meanwhile (loaders, NCCL's watchdog).

        Each recording has its own cuBLAS workspaces, as in torch's trees. Otherwise torch would keep them for the
        stream, and with them the whole pool of a deleted graph (65 MiB a model on an H100). Newer versions free them
        with any graph recorded on that stream (pytorch issue 193402), while other graphs still write there.
        """
        graph = torch.cuda.CUDAGraph()
        handle = self._pools.setdefault(pool, torch.cuda.graph_pool_handle())
        current = torch.cuda.current_stream(self.device)
        forget_blas_workspaces()
        try:
            with (
                without_garbage_collection(),  # first: a collection that is due may run until the capture begins
                torch.cuda.graph(graph, pool=handle, stream=self._stream, capture_error_mode="thread_local"),
            ):
                results = function()
        except RuntimeError:
            torch.cuda.set_stream(current)  # after a capture that cannot end, torch leaves its stream current,
            del self._pools[pool]  # its pool in use, so that nothing more could be recorded into it,
            self._end_capture_of_random_numbers()
            raise
        finally:
            forget_blas_workspaces()
        return graph.replay, results

    def _end_capture_of_random_numbers(self) -> None:
        """Give the default generator a state that no capture uses: the old one refuses any draw outside of it."""
        generator: Any = torch.cuda.default_generators[self.device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())

    def can_read(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this device."""
        return tensor.device == self.device


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: an old model's objects may unmap memory of other ranks, which breaks a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
