"""Record a call in pieces: several CUDA graphs, with steps between them that run as they are.

A call is recorded while it runs: each piece is captured and replayed at once, and what lies between two pieces works on
real values. A replay repeats this. Values that cross a cut have stable addresses:

- Results of pieces and the arena are in the recorder's pool, and stay where they are.
- Results of other steps are new tensors in each replay. Where a later piece reads them, they are copied to the tensor
  that the recording has seen, which it keeps. Others are passed on as they are.

If a piece cannot be captured, nothing of it has run. The rest of the call then runs as it is, and the recording is not
kept. A program without such steps is one piece.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcompile import compat
from dcompile.collectives.contract import AnySource
from dcompile.errors import NotInPartsError
from dcompile.ir.nodes import SCALE
from dcompile.runtime.communication.model_collectives import recording_collectives
from dcompile.runtime.cuda_graphs.recording import GraphRecorder, InParts, Replay
from dcompile.runtime.program.arena import copy_elements


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
