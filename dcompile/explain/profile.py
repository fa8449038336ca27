"""profile(): measure the steps that run inside a `with` block. Measuring costs nothing outside of it.

Ranks exchange, through the store, when the last of them came to each collective: skew is no transfer time.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dcompile import compat
from dcompile.capture.compiled_model import CompiledModel
from dcompile.capture.entry import find_model
from dcompile.compat.groups import group_store
from dcompile.errors import NotCompiledError
from dcompile.explain.timeline import Arrived, Timeline, steps_of
from dcompile.ir.functional_collectives import kind_of
from dcompile.runtime.measure.instrumentation import CallRecorder, InstrumentedStatement, Measurable, ProgramCallTiming
from dcompile.toolchain import boot as machine

_NEWEST: weakref.WeakKeyDictionary[CompiledModel, Timeline] = weakref.WeakKeyDictionary()
_SERIAL = itertools.count()
"""Numbers of the measurements that ranks compare. All ranks measure together, so they count alike."""


class Profile:
    """Measurement of a compiled model in a `with` block. All ranks of a job enter and leave the block together.

    `timeline` is available after the block. The first of several steps is left out, as it prepares calls.
    """

    def __init__(self, model: Any) -> None:
        found = find_model(model)
        if found is None or not any(graph.executables for graph in found.graphs):
            raise NotCompiledError(
                "dcompile: profile needs a model that dcompile has compiled and that has run a step: compile it, run a "
                "step or two, then measure"
            )
        self._name = _name_of(model)
        self._model: CompiledModel = found
        self._programs: list[Measurable] = []
        self._hooks: list[Any] = []
        self._updates: list[tuple[str, Any, Any]] = []
        self._open: dict[int, Any] = {}
        self._compiled_updates = False
        self._timeline: Timeline | None = None
        self._left = False

    @property
    def timeline(self) -> Timeline:
        """Measured timeline. Raises NotCompiledError inside the block, or if no compiled step ran in it."""
        if self._timeline is None and self._left:
            raise NotCompiledError(
                "dcompile: nothing was measured: the block was left by an exception, or no step ran in it that had run "
                "compiled before; do once before the block what is to be measured (training and evaluation apart)"
            )
        if self._timeline is None:
            raise NotCompiledError("dcompile: nothing is measured yet; run steps inside the `with` block and leave it")
        return self._timeline

    def __repr__(self) -> str:
        if self._timeline is None:
            return f"<dcompile.profile of {self._name}: nothing measured{'' if self._left else ' yet'}>"
        return f"<dcompile.profile of {self._name}: {len(self._timeline.steps)} steps>"

    def __str__(self) -> str:
        from dcompile.explain.export import timeline_lines

        try:
            return "\n".join(timeline_lines(self.timeline))
        except NotCompiledError as nothing:
            return str(nothing)

    def _repr_html_(self) -> str:
        from dcompile.explain.export import page
        from dcompile.explain.html_document import framed

        return escape(str(self)) if self._timeline is None else framed(page(self._timeline))

    def save(self, path: str | Path) -> Path:
        """Write the timeline: a trace for Perfetto (.json), a picture (.svg, .png), a page (.html), or text (.txt).

        Raises ValueError for other endings.
        """
        from dcompile.explain.export import save_timeline

        return save_timeline(self.timeline, Path(path))

    # --- measuring ---

    def __enter__(self) -> Profile:
        self._programs = _programs_of(self._model)
        self._recorder = CallRecorder(_gpu_of(self._model))
        for program in self._programs:
            program.measure(self._recorder)
        self._hooks = [
            register_optimizer_step_pre_hook(compat.hooks.mark_own(functools.partial(self._update_begins))),
            register_optimizer_step_post_hook(compat.hooks.mark_own(functools.partial(self._update_ends))),
        ]
        self._begin = self._recorder.now()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        end = self._recorder.now()
        for hook in self._hooks:
            hook.remove()
        for program in self._programs:
            program.measure(None)
        self._left = True
        if kind is None:
            self._timeline = self._finish(end)
            if self._timeline is not None:
                _NEWEST[self._model] = self._timeline

    def _update_begins(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # a compiled step: timestamps would be traced, not recorded
            self._compiled_updates = True
            return
        self._open[id(optimizer)] = self._recorder.now()

    def _update_ends(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and id(optimizer) in self._open:
            self._updates.append((type(optimizer).__name__, self._open.pop(id(optimizer)), self._recorder.now()))

    def _finish(self, end: Any) -> Timeline | None:
        recorder = self._recorder
        calls = recorder.finish()
        updates = [(name, recorder.seconds(begin), recorder.seconds(done)) for name, begin, done in self._updates]
        groups = {(program.name, bucket.name): bucket.group for program in self._programs for bucket in program.buckets}
        groups |= {(name, found.starts): compat.groups.describe_group(found.group) for name, found in _own(calls)}
        latest, note = self._others(calls, groups)
        begin, end = recorder.seconds(self._begin), recorder.seconds(end)
        steps = [
            step
            for step in steps_of(calls, updates, begin, end, latest, groups, serial=recorder.gpu is not None)
            if step.spans or step.exchanges
        ]
        if not steps:
            return None
        return Timeline(
            model=self._name,
            rank=dist.get_rank() if dist.is_initialized() else 0,
            world=dist.get_world_size() if dist.is_initialized() else 1,
            device="cpu" if recorder.gpu is None else torch.cuda.get_device_name(recorder.gpu),
            steps=tuple(steps[1:] if len(steps) > 1 else steps),
            left_out=int(len(steps) > 1),
            notes=tuple(filter(None, (note, *self._notes()))),
            predicted={
                (program.name, name): seconds_us / 1e6
                for program in self._programs
                for name, resource, _, seconds_us, _ in program.report.schedule
                if resource != "compute"
            }
            | dict(_foreseen(self._programs, calls)),
        )

    def _others(
        self, calls: list[ProgramCallTiming], groups: Mapping[tuple[str, str], str]
    ) -> tuple[list[Arrived], str]:
        """Latest arrival at each collective, in the order of their starts; None where it is not known."""
        every = [(groups.get((call.program, found.bucket), ""), found) for call in calls for found in call.exchanges]
        latest: list[Arrived] = [None] * len(every)
        said: dict[str, None] = {}
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps one store over restarts
        serial = next(_SERIAL)
        named = {found.group for _, found in _own(calls)}
        for number, (group, names) in enumerate([*_process_groups(self._model), *_own_groups(named)]):
            places = [place for place, (name, _) in enumerate(every) if name in names]
            arrivals = [(every[place][1].bucket, every[place][1].nbytes, every[place][1].arrived) for place in places]
            found, note = latest_arrivals(group, f"dcompile/{attempt}/profile/{serial}.{number}", arrivals)
            said |= dict.fromkeys(filter(None, [note]))
            for place, last in zip(places, found or (), strict=False):
                latest[place] = last
        return latest, "; ".join(said)

    def _notes(self) -> Iterator[str]:
        """Notes on what the timeline does not show."""
        more = len(_programs_of(self._model)) - len(self._programs)
        if more:
            yield f"{more} programs were compiled meanwhile: they are not in the timeline"
        if self._compiled_updates:
            yield "an optimizer's step is compiled: it is not in the timeline"
        if any(program.report.recordings for program in self._programs):
            yield "CUDA graphs were off while this was measured: the host's gaps between kernels are in these times"


@contextmanager
def profile(model: Any) -> Iterator[Profile]:
    """Measure the training steps inside the block: `with dcompile.profile(model) as measured: ...`.

    `model` as for `dcompile.receipt`; it must have run a compiled step. Inside, its programs record a timestamp for
    each step: CUDA events on a GPU, the host's clock on CPU. All ranks of a job run the same steps in their blocks. At
    the end they exchange, through the store, when each rank came to each collective.

    `measured.timeline` is data, `print(measured)` a table. `measured.save("trace.json")` writes a trace for
    ui.perfetto.dev; `.svg`, `.png` and `.html` give a picture with two tracks. `dcompile.explain(model, *inputs)` shows
    the newest measurement in its report.
    """
    measured = Profile(model)
    with measured:
        yield measured


def newest_timeline(model: Any) -> Timeline | None:
    """Newest timeline of a compiled model, or None."""
    found = find_model(model)
    return None if found is None else _NEWEST.get(found)


def _gpu_of(model: CompiledModel) -> torch.device | None:
    """GPU of the model's programs; None if they run on the CPU."""
    if not any(program.on_gpu for program in _programs_of(model)):
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _process_groups(model: CompiledModel) -> list[tuple[Any, frozenset[str]]]:
    """Process groups that a model's programs use, each with its names in plans."""
    adapters = [part.adapter for part in (model, *model.inside) if part.adapter.eligible]
    found: dict[int, tuple[Any, set[str]]] = {}
    for adapter in adapters:
        for name, group in adapter.communicators().items():  # gathered and reduced over the same ranks
            found.setdefault(id(group), (group, set()))[1].add(name)
    return [(group, frozenset(names)) for group, names in found.values()]


def _own(calls: Iterable[ProgramCallTiming]) -> Iterator[tuple[str, InstrumentedStatement]]:
    """(program, starting statement) of the model's own collectives, program by program, in order."""
    for name, statements in {call.program: call.statements for call in calls}.items():
        yield from ((name, found) for found in statements if found.starts)


def _own_groups(names: set[str]) -> Iterator[tuple[Any, frozenset[str]]]:
    """Process groups of the model's own collectives, in the same order on all of their ranks."""
    for name in sorted(names):
        if (group := compat.groups.group_by_name(name)) is not None:
            yield group, frozenset({compat.groups.describe_group(name)})


def _foreseen(
    programs: Iterable[Measurable], calls: Iterable[ProgramCallTiming]
) -> Iterator[tuple[tuple[str, str], float]]:
    """Predicted seconds of collectives that are library calls. The plan lists them in the order of the program text."""
    started: dict[str, list[str]] = {}
    for name, found in _own(calls):
        started.setdefault(name, []).append(found.starts)
    for program in programs:
        steps = {name for name, resource, *_ in program.report.schedule if resource != "compute"}
        if program.name in started:
            started[program.name] = [name for name in started[program.name] if name not in steps]
        lengths = [length for op, _, _, length, _ in program.report.schedule if kind_of(op) is not None]
        for name, length in zip(started.get(program.name, ()), lengths, strict=False):
            yield (program.name, name), length / 1e6


def _programs_of(model: CompiledModel) -> list[Measurable]:
    programs = [program for graph in model.graphs for program in graph.executables.values()]
    inside = [program for part in model.inside for program in _programs_of(part)]
    return [*(program for program in programs if isinstance(program, Measurable)), *inside]


def _name_of(model: Any) -> str:
    root = model
    while isinstance(root, torch.nn.Module) and type(root).__name__ in ("DistributedDataParallel", "OptimizedModule"):
        root = getattr(root, "_orig_mod", None) or root.module
    return type(root).__name__ if isinstance(root, torch.nn.Module) else getattr(model, "__qualname__", str(model))


# --- arrivals ---------------------------------------------------------------------------------------------------------


TIMEOUT_S = 30.0
PING_COUNT = 8

Arrival = tuple[str, int, float]
"""(bucket, bytes, seconds of time.perf_counter)."""


def latest_arrivals(
    group: Any, subject: str, arrivals: Sequence[Arrival], timeout_s: float = TIMEOUT_S
) -> tuple[list[tuple[float, int]] | None, str]:
    """Latest arrival at each collective of `group`: its time on this rank's clock, and the rank.

    All ranks call this with the same `subject`. Rank 0 compares, so that each of the others needs a few look-ups only.
    Returns None and the reason, if a rank does not come in time, or has run other collectives. Otherwise the text is
    empty, or gives the error of clocks of different machines.
    """
    store, rank, world = group_store(group), dist.get_rank(group), dist.get_world_size(group)
    channel = _StoreChannel(store, subject, rank, timeout_s)
    try:
        channel.send(f"arrivals/{rank}", [machine(), list(arrivals)])
        if rank == 0:
            said = {other: channel.receive(f"arrivals/{other}") for other in range(world)}
            apart = [other for other, (name, _) in said.items() if other and (not name or name != said[0][0])]
            channel.send("apart", apart)
            clocks = {other: channel.answer_pings(other) for other in apart}
            ranks = {other: dist.get_global_rank(group, other) for other in said}
            channel.send("latest", _latest(said, clocks, ranks))
        elif rank in channel.receive("apart"):
            channel.measure_offset()
        times, note = channel.receive("latest")
    except RuntimeError:  # the store's timeout is a DistStoreError
        return None, f"when the others arrived is not known: not all ranks had measured within {timeout_s:g} s"
    return (None if times is None else [(at - channel.offset, last) for at, last in times]), note


def _latest(
    said: dict[int, Any], clocks: dict[int, tuple[float, float]], ranks: dict[int, int]
) -> tuple[list[tuple[float, int]] | None, str]:
    """Latest arrivals by rank 0's clock, computed on rank 0."""
    if len({tuple((bucket, nbytes) for bucket, nbytes, _ in arrivals) for _, arrivals in said.values()}) > 1:
        return None, "when the others arrived is not known: ranks have measured different collectives"
    latest = [
        max((found[1][number][2] + clocks.get(other, (0.0, 0.0))[0], ranks[other]) for other, found in said.items())
        for number in range(len(said[0][1]))
    ]
    error = max((uncertain for _, uncertain in clocks.values()), default=0.0)
    return latest, f"clocks of different machines are compared to within {error * 1e6:.0f} us" if clocks else ""


class _StoreChannel:
    """Messages between ranks under one subject of the store."""

    def __init__(self, store: Any, subject: str, rank: int, timeout_s: float) -> None:
        self._store, self._subject, self._rank = store, subject, rank
        self._timeout = timedelta(seconds=timeout_s)
        self.offset = 0.0
        """Rank 0's clock minus this one's, in seconds."""

    def send(self, key: str, value: Any) -> None:
        self._store.set(f"{self._subject}/{key}", json.dumps(value))

    def receive(self, key: str) -> Any:
        name = f"{self._subject}/{key}"
        self._store.wait([name], self._timeout)
        return json.loads(self._store.get(name))

    def measure_offset(self) -> None:
        """Measure this rank's clock offset: the fastest of a few round trips has the smallest error."""
        found = []
        for number in range(PING_COUNT):
            asked = time.perf_counter()
            self.send(f"ask/{self._rank}/{number}", 0)
            said = self.receive(f"answer/{self._rank}/{number}")
            answered = time.perf_counter()
            found.append(((answered - asked) / 2, said - (asked + answered) / 2))
        uncertain, self.offset = min(found)
        self.send(f"clock/{self._rank}", [self.offset, uncertain])

    def answer_pings(self, rank: int) -> tuple[float, float]:
        """Answer another rank's round trips, on rank 0. Return its offset and the error of that, in seconds."""
        for number in range(PING_COUNT):
            self.receive(f"ask/{rank}/{number}")
            self.send(f"answer/{rank}/{number}", time.perf_counter())
        offset, uncertain = self.receive(f"clock/{rank}")
        return offset, uncertain
