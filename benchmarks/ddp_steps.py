"""A step of stock DDP, eager or under torch.compile, as data that `dcompile.explain` draws; times of the host's clock.

A communication hook starts the default all-reduce of each bucket. It records when the bucket is ready and, as
`dcompile.profile` does, when its future is done, on the thread of Gloo that completes it. DDP's waits for its buckets
begin when autograd has run its last node, and end with the futures, bucket after bucket. Forward, backward, clipping
and update are one block each, from the host's call to its return: gaps between their kernels are not seen.

With a hook, DDP does not divide gradients, and a hook that does would read and write them once more. So the loss has to
be divided by the number of ranks, which gives the same gradients if that is a power of two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dcompile.explain.timeline import CollectiveInterval, MeasuredSpan, MeasuredStep


@dataclass(frozen=True)
class Marks:
    """Times of one step's begin, and of the ends of its parts."""

    begin: float
    forward: float
    backward: float
    clip: float
    optimizer: float
    end: float


@dataclass
class HookedBucket:
    """An all-reduce of one bucket in one step."""

    nbytes: int
    arrived: float
    started: float = 0.0
    ended: float = 0.0


@dataclass
class HookRecorder:
    """Record a DDP module's all-reduces; `call` is the module, or what torch.compile has made of it."""

    call: Any
    found: list[HookedBucket] = field(default_factory=list)
    computed: float = 0.0
    """When the backward had computed all gradients, and DDP's waits began."""

    def __post_init__(self) -> None:
        getattr(self.call, "_orig_mod", self.call).register_comm_hook(None, self._reduce)

    def begin_step(self) -> None:
        self.found = []

    @property
    def arrivals(self) -> list[float]:
        return [bucket.arrived for bucket in self.found]

    def _reduce(self, _state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  DDP checks annotations
        import torch
        import torch.distributed as dist

        buffer = bucket.buffer()
        made = HookedBucket(buffer.nbytes, time.perf_counter())
        if not self.found:  # DDP queues its own callback, which waits, behind the last bucket
            torch.autograd.Variable._execution_engine.queue_callback(self._computed)
        self.found.append(made)
        future = dist.all_reduce(buffer, async_op=True).get_future()
        made.started = time.perf_counter()
        future.add_done_callback(lambda _: setattr(made, "ended", time.perf_counter()))
        return future.then(lambda done: done.value()[0])

    def _computed(self) -> None:
        self.computed = time.perf_counter()


def step_of(marks: Marks, buckets: HookRecorder, latest: Sequence[float]) -> MeasuredStep:
    """The step that `buckets` has recorded; `latest`: when the last rank had each bucket ready."""
    exchanges = tuple(_exchanges(buckets, latest))
    waited = exchanges[-1].wait_end if exchanges else marks.backward
    spans = [
        MeasuredSpan("compute", "forward", marks.begin, marks.forward, "forward"),
        MeasuredSpan("compute", "backward", marks.forward, min(buckets.computed, marks.backward), "backward"),
        *(MeasuredSpan("wait", f"waits for {e.bucket}", e.wait_begin, e.wait_end, "backward") for e in exchanges),
        MeasuredSpan("compute", "gradients from buckets", waited, marks.backward, "backward"),
        *_update(marks),
    ]
    return MeasuredStep(marks.begin, marks.end, tuple(span for span in spans if span.seconds > 0), exchanges)


def _exchanges(buckets: HookRecorder, latest: Sequence[float]) -> Iterator[CollectiveInterval]:
    reached = buckets.computed
    for number, (found, last) in enumerate(zip(buckets.found, latest, strict=True)):
        wait = reached
        reached = max(reached, found.ended)
        yield CollectiveInterval(
            "backward", "all_reduce", f"bucket{number}", "ddp", found.nbytes, found.arrived, found.started, found.ended,
            wait, reached, "", "", last,
        )  # fmt: skip


def with_marks(step: MeasuredStep, marks: Marks) -> MeasuredStep:
    """A step that `dcompile.profile` has measured, from the begin to the end of the script's step, with clipping."""
    clip = MeasuredSpan("optimizer", "clip_grad_norm_", marks.backward, marks.clip)
    spans = [*step.spans, *([clip] if marks.clip > marks.backward else [])]
    inside = sorted((s for s in spans if marks.begin <= s.begin < marks.end), key=lambda span: span.begin)
    return replace(step, begin=marks.begin, end=marks.end, spans=tuple(inside))


def _update(marks: Marks) -> Iterator[MeasuredSpan]:
    yield MeasuredSpan("optimizer", "clip_grad_norm_", marks.backward, marks.clip)
    yield MeasuredSpan("optimizer", "AdamW", marks.clip, marks.optimizer)
