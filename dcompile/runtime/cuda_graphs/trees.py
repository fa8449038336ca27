"""Replay compiled programs as CUDA graphs that share memory.

The first call of a program runs without a graph, so that libraries initialize themselves; it is an ordinary step. The
second call is recorded, and replayed from then on. Freed memory of the pool is reused, also by later recordings. So a
recording may be replayed only where it overwrites no live result. The rule:

    a recording may be replayed when every result that is alive now was alive when it was recorded.

A recording could not reuse memory that was alive then, and it writes the same addresses each time. If the rule does not
hold, the call is recorded once more in its current state. Examples are two forwards before their backwards, and
gradients kept over a forward. So the recordings of a model form a tree of paths, each path a sequence of states.
Training settles in one loop through it. A program with `MAX_RECORDINGS` recordings runs without graphs from then on,
and the receipt says so. Where sizes vary, one size of each class has a graph.

A backward frees the tensors that its forward saved. Saved tensors that only the call holds are therefore released to
the allocator while it is recorded. Gradients then reuse memory of activations, as in eager execution. If such memory is
in use again in a later step, the allocator would reuse it wrongly; a recording made then gets another pool.

Other inputs are copied to the memory that a recording reads. Once their address has been stable for a few replays, one
more recording reads them there, and replaces the first. Parameters are known to be stable. Gradients that a compiled
optimizer reads are not. But an allocator that gets the same requests in the same order each step returns the same
addresses. Copying them took 1.3 ms of a 1B Llama's step on an H200.

Users may keep results for as long as they like. Small results are returned as copies. So are all results of a program
whose live results once prevented a replay.
"""

from __future__ import annotations

import bisect
import weakref
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcompile import compat
from dcompile.collectives.contract import AnySource
from dcompile.errors import NotInPartsError
from dcompile.runtime.communication.work import count_replayed
from dcompile.runtime.cuda_graphs.collectives import RecordedCall, call_of
from dcompile.runtime.cuda_graphs.partitioned import PiecewiseRecording, RecordedRun, borrowed, record_whole
from dcompile.runtime.cuda_graphs.recording import (
    CopiedInput,
    GraphRecorder,
    InParts,
    Recordable,
    RecordedResult,
    Recording,
    ResultMemory,
    ResultRetention,
    ResultSorter,
    is_virtual,
    position_in_results,
)
from dcompile.runtime.program.arena import like
from dcompile.runtime.program.graph_partition import MIN_LAUNCHES

MAX_RECORDINGS = 8
"""Most recordings of one program. Each shape has a program of its own. More recordings mean a caller who keeps every
result, for whom no number would suffice.
"""
AROUND = "they read memory around an input (as_strided), of which a recording has a copy"
OTHER_SIZES = "some calls run without a CUDA graph: another size of their class has it, or they are in no class"
MAX_POOLS = 3
"""Most pools of one model. The second and third serve recordings made while unowned memory of the first is in use."""
WATCHED_CALLS = 3
"""Replays after which an unmoved input is taken for stable. First steps allocate differently than later ones. A wrong
guess costs one more recording, at most twice.
"""
COPY_US, BYTES_A_US = 2.0, 2_000_000
"""Time of a copy on an H200: microseconds to start it, and bytes per microsecond."""
MIN_COPIES_US = 20.0
"""Time of copies per call, in microseconds, from which removing them justifies one more recording (some tenths of a
second).
"""
MAX_REASONS = 4
"""Reasons that the receipt lists for what is not recorded."""
CAPTURED = "some calls were captured by the caller's CUDA graph, and recorded none of dcompile's"
MAX_CLASSES = 8
"""Maximum number of classes with graphs in one program under `auto`, which has no largest class."""
MIN_CALLS_TO_REPLACE = 8
"""Calls of a size before it replaces the recorded size of its class, if that one is not called meanwhile."""


@dataclass(frozen=True, eq=False, slots=True)
class Recorded:
    """A recording to serve this call. `new`: the call's new results, if it ran while it was recorded.

    `fails`: whether it serves this call only.
    """

    recording: Recording
    new: Sequence[Any] | None = None
    fails: bool = False


class GraphTree:
    """Recordings of one model on one device, and their live results."""

    def __init__(self, recorder: GraphRecorder) -> None:
        self.recorder = recorder
        self._returned: dict[Recording, None] = {}
        """Recordings whose results may be alive."""
        self._dropped: set[Recording] = set()
        """Those among them that are not replayed any more."""
        self._programs: weakref.WeakSet[ReplayedExecutable] = weakref.WeakSet()
        self._ends_with_groups = False
        self._pairs: dict[tuple[Recording, Recording], tuple[ResultMemory, ...]] = {}

    def obstacle(self, recording: Recording) -> ResultMemory | None:
        """Live memory that was not alive when `recording` was made, which prevents its replay; None if none."""
        for other in list(self._returned):
            strange = self._strange(recording, other)
            for memory in strange:
                if memory.live:
                    return memory
            over = other in self._dropped and not any(memory.live for memory in other.memories)
            if over or len(strange) == len(other.memories):
                self._forget_handed(other)
        return None

    def _forget_handed(self, recording: Recording) -> None:
        del self._returned[recording]
        if recording in self._dropped:
            self._dropped.remove(recording)
            self._forget_pairs(recording)

    def _forget_pairs(self, recording: Recording) -> None:
        self._pairs = {pair: found for pair, found in self._pairs.items() if recording not in pair}

    def _strange(self, recording: Recording, other: Recording) -> tuple[ResultMemory, ...]:
        """Memory of another recording that `recording` might overwrite."""
        found = self._pairs.get((recording, other))
        if found is None:
            apart = recording.pool != other.pool
            found = () if apart else tuple(memory for memory in other.memories if memory not in recording.tolerates)
            self._pairs[recording, other] = found
        return found

    def pool(self) -> int | None:
        """Number of a pool to record from: one in which the allocator knows of all live memory.

        None if there is none.
        """
        busy = {memory.pool for memory in self.alive() if not memory.owned}
        return next((pool for pool in range(MAX_POOLS) if pool not in busy), None)

    def add(self, program: ReplayedExecutable) -> None:
        """Register a program whose recordings belong to this tree."""
        self._programs.add(program)

    def end_with_process_groups(self) -> None:
        """Make recordings end before the process groups of their collectives."""
        if not self._ends_with_groups:
            self._ends_with_groups = True
            compat.groups.before_groups_end(self.forget)

    def forget(self) -> None:
        """Drop all recordings."""
        self._returned.clear()
        self._dropped.clear()
        self._pairs.clear()
        for program in self._programs:
            program.forget()

    def drop(self, recording: Recording) -> None:
        """Stop replaying a recording. Its memory, slots included, is freed once none of its results is alive."""
        self._forget_pairs(recording)
        if recording in self._returned:
            self._dropped.add(recording)

    def note_replay(self, recording: Recording) -> None:
        """Note that a recording was replayed: the caller holds its results."""
        self._returned[recording] = None

    def alive(self) -> list[ResultMemory]:
        """Result memory that somebody holds."""
        return [memory for recording in self._returned for memory in recording.memories if memory.live]


class ReplayedExecutable:
    """Executable that is recorded and replayed. See `collectives.contract.Executable`.

    `results`: number of leading results that the user sees; the others are saved tensors or gradients. `saved`: whether
    the program is a backward, with saved tensors of a forward as inputs. `whole`: positions of inputs whose whole
    storage it addresses. A recording reads a copy of such an input, so calls with parts of larger storages run without
    a graph. `classes`: sizes that may be recorded, where sizes vary; None: each size that comes twice. `sizes`:
    positions of inputs that are such sizes.
    """

    def __init__(
        self,
        program: Recordable,
        tree: GraphTree,
        *,
        results: int = 0,
        saved: bool = False,
        whole: Sequence[int] = (),
        classes: SizeClasses | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self._classes, self._sizes = classes if sizes else None, sizes
        self._program, self._tree, self._results, self._saved, self._whole = program, tree, results, saved, whole
        self._mutated = frozenset(program.mutated)
        self._kept = ResultRetention()
        self._recordings: dict[tuple[Any, ...], list[Recording]] = {}
        self._detectors: dict[tuple[Any, ...], StableInputDetector] = {}
        self._objection: str | None = None
        self._measured = False
        self.report, self.buckets, self.source = program.report, program.buckets, program.source
        self.name, self.on_gpu = program.name, program.on_gpu
        tree.add(self)

    def __call__(self, args: list[Any], *, buckets: AnySource | None = None, sync: bool = False) -> list[Any]:
        """Run the program, as a replay where one fits; `args` is emptied."""
        if self._measured or self._objection is not None:
            return self._program(args, buckets=buckets, sync=sync)
        if self.on_gpu and torch.cuda.is_current_stream_capturing():
            self._note(CAPTURED)
            return self._program(args, buckets=buckets, sync=sync)
        apart = any(compat.storage_offsets.is_part(args[place]) for place in self._whole)
        call = AROUND if apart else call_of(self.buckets, buckets, sync)
        if isinstance(call, str):
            self._note(f"some calls run without a CUDA graph: {call}")
            return self._program(args, buckets=buckets, sync=sync)
        key = (*_key(args), *call.key, *filter(None, (compat.attention.chosen_flash_attention(),)))
        if self._classes is not None and not self._is_admitted(args, key):
            self._note(OTHER_SIZES)
            return self._program(args, buckets=buckets, sync=sync)
        recordings = self._recordings.get(key)
        if recordings is None:
            self._recordings[key] = []
            self._detectors[key] = StableInputDetector()
            return self._program(args, buckets=buckets, sync=sync)
        for recording in recordings:
            if not recording.fits(args):
                continue
            obstacle = self._tree.obstacle(recording)
            if obstacle is None:
                return self._replay(self._settled(recording, args, key, call), args, call)
            if obstacle.kept is not None and not obstacle.kept.found:
                obstacle.kept.found = True  # it may be freed soon, and later results will be copies
                return self._program(args, buckets=buckets, sync=sync)
        made = self._record(args, recordings, self._detectors[key], call)
        return self._program(args, buckets=buckets, sync=sync) if made is None else self._replay(made, args, call)

    def _is_admitted(self, args: Sequence[Any], key: tuple[Any, ...]) -> bool:
        """Whether calls of these sizes may be recorded; those of another size of the class are not replayed then."""
        assert self._classes is not None, "asked where sizes vary"
        admitted, replaced = self._classes.admit([args[place] for place in self._sizes], key)
        if isinstance(replaced, tuple):
            self._detectors.pop(replaced, None)
            for recording in self._recordings.pop(replaced, []):
                self._tree.drop(recording)
        return admitted

    def forget(self) -> None:
        """Drop all recordings; later calls record anew."""
        self._recordings.clear()
        self._detectors.clear()

    def measure(self, recorder: Any) -> None:
        """See `HostProgram.measure`. While it measures, nothing is recorded or replayed."""
        self._measured = recorder is not None
        self._program.measure(recorder)

    def _replay(self, made: Recorded, args: list[Any], call: RecordedCall) -> list[Any]:
        recording = made.recording
        results = recording.run(args, call.memories, made.new)
        for group, labels in recording.collectives.items():
            count_replayed(group, labels)
        call.happened(results)
        self._tree.note_replay(recording)
        if made.fails:
            self._tree.drop(recording)
        self.report.replays += 1
        return results

    def _decline(self, reason: str) -> None:
        self._objection = reason
        self._note(f"runs without a CUDA graph: {reason}")

    def _note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)

    # --- recording ---

    def _settled(self, recording: Recording, args: list[Any], key: tuple[Any, ...], call: RecordedCall) -> Recorded:
        """Return a recording to replay: one without copies of inputs, once these are known to be stable."""
        detector = self._detectors[key]
        # ranks would decide differently, but recordings with collectives must be made by all of them
        if call.communicates or recording.collectives:
            return Recorded(recording)
        if not detector.observe(args, recording.slots):
            return Recorded(recording)
        made = self._record(args, self._recordings[key], detector, call)
        if made is None or made.fails:
            return made or Recorded(recording)
        for old in self._recordings[key]:
            if old is not made.recording:
                self._tree.drop(old)
        self._recordings[key][:] = [made.recording]  # other states are recorded again, without copies
        return made

    def _record(
        self, args: list[Any], recordings: list[Recording], settling: StableInputDetector, call: RecordedCall
    ) -> Recorded | None:
        """Record this call. Return None if it must run without a graph."""
        pool = self._pool_for(args, len(recordings))
        if pool is None:
            return None
        alive = self._tree.alive()
        taken = {memory.address: memory for memory in alive}
        staying = settling.staying(args)
        fixed = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and (i in staying or _stays(a, taken))]
        slots = self._slots(args, frozenset(fixed))
        addresses = [a.data_ptr() if isinstance(a, torch.Tensor) else 0 for a in args]
        run = self._record_program([self._recorded_args(args, slots, taken, pool)], call, pool)
        if run is None:
            return None
        results = run.results
        gone = {memory.address for memory in alive if not memory.owned and memory.pool == pool}
        made = ResultSorter(
            [i for i in fixed if args[i].untyped_storage().data_ptr() not in gone], args, slots, pool, call, run.pinned
        )
        kept = tuple(
            RecordedResult("new", number)
            if number in run.new
            else made.result(
                value,
                self._kept if number < self._results else None,
                position_in_results(results, number, self._results),
            )
            for number, value in enumerate(results)
        )
        new = [value if number in run.new else None for number, value in enumerate(results)] if run.has_run else None
        run.results = results = []  # the recording must be the only holder
        made.settle()
        layouts_fit = compat.guards.like_these([args[place] for place in fixed]) if self._saved and fixed else None
        recording = Recording(
            run.replay,
            fixed,
            addresses,
            slots,
            kept,
            made.memories,
            pool,
            frozenset(alive),
            layouts_fit,
            run.collectives,
        )
        if not run.failed:
            recordings.append(recording)
            self._program.release()
            self.report.recordings += 1
            self._note_pieces(run)
        return Recorded(recording, new, run.failed)

    def _record_program(self, inside: list[list[Any]], call: RecordedCall, pool: int) -> RecordedRun | None:
        """Record the program with the arguments in `inside`, which are popped: only the recording may hold them.

        If that fails, return None, with the reason in the receipt.
        """
        program, recorder, parts = self._program, self._tree.recorder, self._program.in_parts
        try:
            if parts is None:
                run = record_whole(
                    recorder, pool, lambda: call.run(lambda source, sync: program.once(inside.pop(), source, sync))
                )
            else:
                pieces = PiecewiseRecording(parts, recorder, pool, call.memories, self._explain)
                run = pieces.finished(call.run(lambda source, sync: pieces.run(inside.pop(), source, sync)))
        except NotInPartsError as error:
            self._explain(error)
            return None
        except RuntimeError as error:
            if parts is not None:
                raise  # of a step between pieces: the user's
            self._explain(error)
            return None
        if call.communicates or run.collectives:
            self._tree.end_with_process_groups()
        return run

    def _note_pieces(self, run: RecordedRun) -> None:
        """Report the number of CUDA graphs, and what runs between them."""
        self.report.pieces, parts = run.pieces, self._program.in_parts
        if parts is not None:
            graphs = "1 CUDA graph" if run.pieces == 1 else f"{run.pieces} CUDA graphs"
            self._note(f"runs as {graphs}; between or around: {_reasons_of(parts)}")

    def _explain(self, error: RuntimeError) -> None:
        """Note why a recording failed. Where one call is to blame, later recordings leave it out."""
        reason, name = str(error).strip().splitlines()[0], self._program.set_apart(error)
        if name:
            self._note(f"{name} cannot be recorded: {reason}")
        else:
            self._decline(reason)

    def _pool_for(self, args: list[Any], recorded: int) -> int | None:
        """Return the pool to record a call in; None, with the reason in the receipt, if it must run without a graph."""
        parts = self._program.in_parts
        if parts is not None and not any(part.recorded for part in parts.parts):
            self._decline(f"no {MIN_LAUNCHES} launches follow each other without {_reasons_of(parts)}")
            return None
        strangers = [a for a in args if isinstance(a, torch.Tensor) and not self._tree.recorder.can_read(a)]
        if strangers and (parts is None or strangers[0].device.type != "cpu"):  # no piece works on the CPU
            self._decline(f"it takes a tensor on {strangers[0].device}")
            return None
        if recorded >= MAX_RECORDINGS:
            self._decline(f"it was recorded {MAX_RECORDINGS} times, and its results or inputs are elsewhere each time")
            return None
        pool = self._tree.pool()
        if pool is None:
            self._note("some calls run without a CUDA graph: results of earlier ones are held in every pool")
        return pool

    def _slots(self, args: Sequence[Any], fixed: frozenset[int]) -> tuple[CopiedInput, ...]:
        positions = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i not in fixed]
        slots = tuple(CopiedInput(i, like(args[i]), i in self._mutated) for i in positions)
        for slot in slots:
            slot.fill(args)
        return slots

    def _recorded_args(
        self, args: list[Any], slots: Sequence[CopiedInput], taken: dict[int, ResultMemory], pool: int
    ) -> list[Any]:
        """Inputs to record with.

        Saved tensors that only `args` holds are given up, so that the recording can free them.
        """
        inside = list(args)
        for slot in slots:
            inside[slot.position] = slot.tensor
        held: dict[int, int] = {}
        for arg in args:
            if isinstance(arg, torch.Tensor):
                address = arg.untyped_storage().data_ptr()
                # a retained graph holds the same tensor: one holder of the storage, which must not be given up
                held[address] = held.get(address, 0) + (
                    1 if compat.storage_holders.only_python_holds(arg) else -len(args)
                )
        for address, count in held.items():
            memory = taken.get(address)
            if memory is not None and memory.pool == pool and memory.holders == count and not memory.pinned:
                memory.give_up()
        for position in range(len(args)):
            if (
                isinstance(args[position], torch.Tensor)
                and args[position].untyped_storage().data_ptr() in taken
                and not is_virtual(args[position])
            ):
                args[position] = borrowed(args[position])
        return inside


def _reasons_of(parts: InParts) -> str:
    """What is not recorded, and why."""
    reasons = [*dict.fromkeys(reason for part in parts.parts for reason in part.reasons)]
    more = len(reasons) - MAX_REASONS
    return ", ".join(reasons[:MAX_REASONS]) + (f" and {more} more" if more > 0 else "")


def _key(args: Sequence[Any]) -> tuple[Any, ...]:
    """Key of a recording apart from addresses: numbers among the inputs, and with them all shapes."""
    if all(issubclass(kind, torch.Tensor) for kind in set(map(type, args))):
        return ()
    return tuple(tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args)


def _stays(tensor: torch.Tensor, taken: dict[int, ResultMemory]) -> bool:
    """Whether an input is expected at the same address in each call."""
    return (
        isinstance(tensor, torch.nn.Parameter)
        or is_virtual(tensor)
        or compat.tensors.is_static_input(tensor)
        or tensor.untyped_storage().data_ptr() in taken
    )


class StableInputDetector:
    """Watch the copied inputs of calls that share their recordings, until each is known to be stable or not."""

    def __init__(self) -> None:
        self.still: dict[int, int] = {}
        """Addresses of inputs that are expected to stay, by position."""
        self._left = WATCHED_CALLS
        self._seen: dict[int, int] | None = None
        self._wrong = False

    def observe(self, args: Sequence[Any], slots: Sequence[CopiedInput]) -> bool:
        """Compare input addresses of one more replay.

        Return whether some inputs with slots are now known to be stable.
        """
        if self._left == 0:
            return False
        self._left -= 1
        here = {slot.position: args[slot.position].data_ptr() for slot in slots}
        seen = here if self._seen is None else self._seen
        self._seen = {position: address for position, address in seen.items() if here.get(position) == address}
        spared = sum(COPY_US + slot.tensor.nbytes / BYTES_A_US for slot in slots if slot.position in self._seen)
        if self._left == 0 and spared >= MIN_COPIES_US:
            self.still = self._seen
        return bool(self.still)

    def staying(self, args: Sequence[Any]) -> Collection[int]:
        """Positions of inputs that a recording may treat as stable."""
        moved = {known for known, address in self.still.items() if args[known].data_ptr() != address}
        if moved:  # wrong guess: copy it from now on, and at the second time all inputs
            self.still = {} if self._wrong else {k: a for k, a in self.still.items() if k not in moved}
            self._wrong = True
        return self.still.keys()


class SizeClasses:
    """Size classes of one program. `bounds`: largest size of each class, ascending; empty: powers of two."""

    def __init__(self, bounds: Sequence[int] = ()) -> None:
        self._bounds = sorted(bounds)
        self._limit = len(bounds) or MAX_CLASSES
        self._recorded: dict[tuple[int, ...], Hashable] = {}
        """Class -> key of the calls with graphs."""
        self._others: dict[tuple[int, ...], Counter[Hashable]] = {}
        """Class -> keys of other calls, and their number since the last call with graphs."""

    def bound(self, size: int) -> int | None:
        """Return the largest size of a size's class; None if the size is larger than all."""
        if not self._bounds:
            return 1 << max(size - 1, 0).bit_length()
        place = bisect.bisect_left(self._bounds, size)
        return self._bounds[place] if place < len(self._bounds) else None

    def admit(self, sizes: Sequence[int], key: Hashable) -> tuple[bool, Hashable | None]:
        """Return whether a call of these sizes may have a graph, and the key of the calls that it replaces."""
        bounds = tuple(bound for size in sizes if (bound := self.bound(size)) is not None)
        if len(bounds) < len(sizes):
            return False, None
        holder = self._recorded.get(bounds)
        if holder == key:
            self._others.pop(bounds, None)
            return True, None
        if holder is None:
            free = len(self._recorded) < self._limit
            if free:
                self._recorded[bounds] = key
            return free, None
        others = self._others.setdefault(bounds, Counter())
        others[key] += 1
        if others[key] < MIN_CALLS_TO_REPLACE:
            return False, None
        del self._others[bounds]
        self._recorded[bounds] = key
        return True, holder
