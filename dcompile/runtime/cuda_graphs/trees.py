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

A program with steps that no CUDA graph can record is recorded in pieces: several graphs, between which these steps run
as they are. A call is recorded while it runs: each piece is captured and replayed at once, and what lies between two
pieces works on real values. A replay repeats this. Values that cross a cut have stable addresses:

- Results of pieces and the arena are in the recorder's pool, and stay where they are.
- Results of other steps are new tensors in each replay. Where a later piece reads them, they are copied to the tensor
  that the recording has seen, which it keeps. Others are passed on as they are.

If a piece cannot be captured, nothing of it has run. The rest of the call then runs as it is, and the recording is not
kept. A program without such steps is one piece.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcompile import compat
from dcompile.collectives.contract import AnySource
from dcompile.errors import NotInPartsError
from dcompile.ir.nodes import SCALE
from dcompile.runtime.communication.model_collectives import recording_collectives
from dcompile.runtime.communication.work import count_replayed
from dcompile.runtime.cuda_graphs.collectives import RecordedCall, call_of
from dcompile.runtime.cuda_graphs.recording import (
    CopiedInput,
    GraphRecorder,
    InParts,
    Recordable,
    RecordedResult,
    Recording,
    Replay,
    ResultMemory,
    ResultRetention,
    ResultSorter,
    is_virtual,
    position_in_results,
)
from dcompile.runtime.program.arena import copy_elements, like
from dcompile.runtime.program.graph_partition import MIN_LAUNCHES


@dataclass(eq=False, slots=True)
class RecordedRun:
    """A recorded call: how to replay it, its results, and labels of its collectives by process group."""

    replay: Replay
    results: list[Any]
    collectives: dict[Any, list[str]]
    has_run: bool = False
    """Whether the call ran while it was recorded."""
    new: frozenset[int] = frozenset()
    """Positions of results that are new tensors or numbers in each replay."""
    pinned: frozenset[int] = frozenset()
    """Addresses of tensors of the recording's own that replays fill from outside."""
    failed: bool = False
    """Whether a piece could not be captured: the recording serves this call only."""
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Varying:
    """A value of a step between pieces that differs between replays, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class BucketOf:
    """Memory of a gradient bucket, which each call brings."""

    bucket: str


@dataclass(eq=False, slots=True)
class UnrecordedPart:
    """What runs between two pieces: its function, how it gets its arguments, and where its results belong."""

    function: Callable[..., list[Any]]
    takes: tuple[Any, ...]
    gives: tuple[tuple[str, torch.Tensor | None], ...]
    """Name of each result, and the tensor that later pieces read instead."""
    sync: bool
    scale: float
    _varying: list[tuple[int, Varying | BucketOf]] = field(init=False)
    """Places among its arguments of those that differ between replays; a part may return all saved tensors."""

    def __post_init__(self) -> None:
        self._varying = [(at, value) for at, value in enumerate(self.takes) if isinstance(value, Varying | BucketOf)]

    def run(self, values: dict[str, Any], memories: Mapping[str, Any]) -> list[Any]:
        """Run it in a replay, in which steps between pieces have computed `values`."""
        given = [*self.takes]
        for place, value in self._varying:
            given[place] = values[value.name] if isinstance(value, Varying) else memories[value.bucket]
        made = self.function(given, ReplayedSource(memories, self.scale) if memories else None, self.sync)
        for (name, kept), value in zip(self.gives, made, strict=False):
            if kept is None:
                values[name] = value
            else:
                refill(kept, value)
        return made


@dataclass(frozen=True, slots=True)
class ReplayedSource:
    """Memory of a call's buckets, for steps between pieces. Collectives of buckets are recorded."""

    memories: Mapping[str, Any]
    factor: float

    def acquire(self, bucket: str) -> Any:
        return self.memories[bucket]

    def scale(self, sync: bool) -> float:
        del sync
        return self.factor


def refill(kept: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a step's new result to where pieces read it; where it is there already, do nothing."""
    if kept.shape != value.shape or kept.dtype != value.dtype:
        raise RuntimeError(
            f"dcompile: a step between two CUDA graphs returned {value.dtype} {tuple(value.shape)}, where it returned "
            f"{kept.dtype} {tuple(kept.shape)} as they were recorded"
        )
    if kept.stride() != value.stride():
        kept.copy_(value)
    elif kept.data_ptr() != value.data_ptr():
        copy_elements(kept, value)


def borrowed(value: Any) -> Any:
    """The same memory without owning it: it is in the recorder's pool, or an input's."""
    if not isinstance(value, torch.Tensor) or not value.untyped_storage().nbytes():
        return value
    storage = value.untyped_storage()
    outside = compat.tensors.storage_at(storage.data_ptr(), storage.nbytes(), value.device)
    lent = torch.empty(0, dtype=value.dtype, device=value.device)
    return lent.set_(outside, value.storage_offset(), value.shape, value.stride())


def storage_of(value: Any) -> int:
    """Address of a tensor's storage; 0 without memory."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0


def record_whole(recorder: GraphRecorder, pool: int, run: Callable[[], list[Any]]) -> RecordedRun:
    """Record a call as one piece, which has not run yet."""
    with recording_collectives() as started:
        replay, results = recorder.record(run, pool)
    return RecordedRun(lambda memories: replay() or (), results, _by_group(started))


def _by_group(started: Sequence[tuple[Any, str]]) -> dict[Any, list[str]]:
    return {group: [label for other, label in started if other is group] for group, _ in started}


@dataclass(eq=False)
class PiecewiseRecording:
    """Recording of one call in pieces."""

    program: InParts
    recorder: GraphRecorder
    pool: int
    memories: Mapping[str, Any]
    """Memory of gradient buckets, by name."""
    explain: Callable[[RuntimeError], None]
    """Takes note of a piece that could not be captured."""
    failed: bool = False
    steps: list[Callable[[], None] | UnrecordedPart] = field(default_factory=list)
    new: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self._functions: list[Callable[..., list[Any]]] | None = None
        self._owner: Any = None
        self._bound: dict[str, Any] = {}
        """What a replay passes for each name: a borrowed tensor, or a value that differs."""
        self._kept: list[torch.Tensor] = []
        self._started: list[tuple[Any, str]] = []
        self._buckets = {memory.flat.untyped_storage().data_ptr() for memory in self.memories.values()}

    def run(self, args: list[Any], source: AnySource | None, sync: bool) -> list[Any]:
        """Run the call, recording its pieces; `args` is emptied.

        Raise NotInPartsError if it has to run as a whole. Nothing of it has run then.
        """
        self._device, self._sizes = self.program.begin(args)
        self._source, self._sync = source, sync
        parts = self.program.parts
        last_taken = {name: number for number, part in enumerate(parts) for name in part.takes}
        values: dict[str, Any] = {}
        given = args
        with torch.no_grad(), self._on_device():
            for number, part in enumerate(parts):
                if number:
                    given = [values[n] if last_taken[n] > number else values.pop(n) for n in part.takes]
                made = self._part(number, given)
                if number < len(parts) - 1:
                    values.update(zip(part.gives, made, strict=True))
                    self._bind(number, made)
        return made

    def finished(self, results: list[Any]) -> RecordedRun:
        """Return the recording of the call that has run."""
        if not isinstance(self.steps[0], UnrecordedPart):
            self._owner = None  # the arena is in the pool, where later recordings may reuse it
        self._source = None
        pinned = frozenset(map(storage_of, self._kept))
        pieces = sum(not isinstance(step, UnrecordedPart) for step in self.steps)
        collectives = _by_group(self._started)
        return RecordedRun(self.replay, results, collectives, True, self.new, pinned, self.failed, pieces)

    def replay(self, memories: Mapping[str, Any]) -> Sequence[Any]:
        """Repeat the call."""
        values: dict[str, Any] = {}
        made: Sequence[Any] = ()
        with torch.no_grad(), self._on_device():
            for step in self.steps:
                if isinstance(step, UnrecordedPart):
                    made = step.run(values, memories)
                else:
                    step()
        return made

    def _lent(self, value: Any) -> Any:
        """What a replay passes for a value that has the same address in each. No pool holds memory of the CPU."""
        on_host = isinstance(value, torch.Tensor) and value.device.type == "cpu" and self._device >= 0
        return value if on_host else borrowed(value)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        here = self._device < 0 or self._device == torch.cuda.current_device()
        return contextlib.nullcontext() if here else torch.cuda.device(self._device)

    # --- parts ---

    def _part(self, number: int, given: list[Any]) -> list[Any]:
        part = self.program.parts[number]
        varies = any(isinstance(self._bound.get(name), Varying) for name in part.takes)
        if not part.recorded or varies or self.failed:
            return self._run_unrecorded(number, given)
        again = [*map(borrowed, given)]
        inside = [given]
        del given
        source, sync = self._source, self._sync
        try:
            with recording_collectives() as started:
                replay, made = self.recorder.record(
                    lambda: self._function(number)(inside.pop(), source, sync), self.pool
                )
        except RuntimeError as error:
            if number == 0:
                raise NotInPartsError(str(error)) from error
            self.explain(error)
            self.failed = True
            return self._run_unrecorded(number, again)
        self._started += started
        self.steps.append(replay)
        replay()
        return made

    def _function(self, number: int) -> Callable[..., list[Any]]:
        if self._functions is None:  # in the first capture if the call begins with a piece: the arena is in its pool
            self._functions, self._owner = self.program.prepare(self._device, self._sizes)
        return self._functions[number]

    def _run_unrecorded(self, number: int, given: list[Any]) -> list[Any]:
        """Run what is not recorded, and note how to do so in a replay."""
        parts = self.program.parts
        part, last = parts[number], number == len(parts) - 1
        takes = tuple(self._bound[name] for name in part.takes) if number else tuple(map(self._lent, given))
        stays = {*map(storage_of, takes)} - {0}
        same = {id(value) for value in takes if not storage_of(value)}
        function = self._function(number)
        made = function(given, self._source, self._sync)
        if last:
            fixed = (storage_of(value) in stays or id(value) in same for value in made)
            self.new = frozenset(place for place, is_fixed in enumerate(fixed) if not is_fixed)
            gives: tuple[tuple[str, torch.Tensor | None], ...] = ()
        else:
            read = {name for later in parts[number + 1 :] if later.recorded for name in later.takes}
            gives = tuple(
                (name, self._stable(value) if name in read and isinstance(value, torch.Tensor) else None)
                for name, value in zip(part.gives, made, strict=True)
            )
        scale = getattr(self._source, "scale", None)
        factor = scale(self._sync) if scale is not None and self.memories else 1.0
        self.steps.append(UnrecordedPart(function, takes, gives, self._sync, factor))
        return made

    def _stable(self, value: torch.Tensor) -> torch.Tensor:
        """Tensor at a step's result, which replays fill. It is held, unless a bucket of the caller holds it."""
        kept: torch.Tensor = borrowed(value) if storage_of(value) in self._buckets else value.detach()
        self._kept.append(kept)
        return kept

    def _bind(self, number: int, made: list[Any]) -> None:
        """Note what a replay passes for the results of a part."""
        step, part = self.steps[-1], self.program.parts[number]
        kept = dict(step.gives) if isinstance(step, UnrecordedPart) else {}
        for name, value in zip(part.gives, made, strict=True):
            bucket = next((bucket for bucket, memory in self.memories.items() if memory is value), None)
            if bucket is not None:
                self._bound[name] = BucketOf(bucket)
            elif kept.get(name) is not None:
                self._bound[name] = kept[name]
            elif isinstance(step, UnrecordedPart) and name != SCALE.text:
                self._bound[name] = Varying(name)
            else:
                self._bound[name] = self._lent(value)


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
