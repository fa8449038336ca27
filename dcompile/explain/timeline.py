"""Measured steps as data: computation, communication and waits. Times in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

from dcompile.ir.collective_kinds import PlannedKind

Arrived: TypeAlias = "tuple[float, int] | None"
"""Time of the last rank's arrival at a collective, and that rank; None where it is not known."""
Lane = Literal["compute", "optimizer", "wait", "communication"]
MIN_BANDWIDTH_BOUND_BYTES = 1 << 20
"""A collective of fewer bytes takes its latency."""
MAX_HIDDEN_SHARE = 0.005
"""Part of the step below which an exposed collective needs no advice."""
OWN = "the model's own plan leaves no compute to hide it: fewer parallel ranks, or layouts that change less often"


@dataclass(frozen=True, slots=True)
class MeasuredSpan:
    """A named interval on one track."""

    lane: Lane
    name: str
    begin: float
    end: float
    program: str = ""
    kernel: str = ""
    """Name of the kernel or call in the program."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class CollectiveInterval:
    """One collective of one step, on this rank's clock."""

    program: str
    kind: str
    bucket: str
    group: str
    nbytes: int
    arrived: float
    """Time at which this rank's part was ready."""
    started: float
    """Time at which it was started, after gradients were scaled."""
    ended: float
    wait_begin: float
    wait_end: float
    """End of the interval in which the compute stream (on CPU, the host) only waited."""
    producer: str
    """Step that wrote the last gradient of the bucket."""
    consumer: str
    """First step after the wait."""
    latest: float | None = None
    """Time of the last rank's arrival; None if the other ranks did not report it."""
    latest_rank: int | None = None
    own: bool = False
    """Whether it is the model's own."""
    free: float = float("-inf")
    """End of the previous collective on the same group."""

    @property
    def exposed(self) -> float:
        return max(0.0, self.wait_end - self.wait_begin)

    @property
    def begin(self) -> float:
        """Time at which transfer could begin: all ranks had arrived, and the previous collective had ended."""
        return min(self.ended, max(self.arrived, self.latest or self.arrived, self.free))

    @property
    def queued(self) -> float:
        """Seconds behind the previous collective while all ranks had arrived."""
        return max(0.0, self.begin - max(self.arrived, self.latest or self.arrived))

    @property
    def skew(self) -> float | None:
        """Seconds by which the last rank arrived later than this one."""
        return None if self.latest is None else max(0.0, self.latest - self.arrived)

    @property
    def exposed_skew(self) -> float:
        """Part of `exposed` in which another rank had not arrived."""
        return max(0.0, min(self.wait_end, self.latest or self.wait_begin) - self.wait_begin)

    @property
    def wire(self) -> float:
        """Seconds from the possible begin of the transfer to its end."""
        return max(0.0, self.ended - self.begin)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One training step."""

    begin: float
    end: float
    spans: tuple[MeasuredSpan, ...]
    exchanges: tuple[CollectiveInterval, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def exposed(self) -> float:
        return sum(exchange.exposed for exchange in self.exchanges)

    @property
    def communication(self) -> float:
        """Seconds in which at least one collective transferred data."""
        return covered_seconds((e.begin, e.ended) for e in self.exchanges)

    @property
    def compute(self) -> float:
        return covered_seconds((s.begin, s.end) for s in self.spans if s.lane in ("compute", "optimizer"))

    @property
    def idle(self) -> float:
        """Seconds in which nothing computes and no collective is waited for: the host is late, or the script works."""
        return self.seconds - covered_seconds((s.begin, s.end) for s in self.spans)

    @property
    def overlapped(self) -> float:
        """Seconds in which data was transferred while something computed."""
        computing = [(s.begin, s.end) for s in self.spans if s.lane in ("compute", "optimizer")]
        moving = [(e.begin, e.ended) for e in self.exchanges]
        return self.compute + self.communication - covered_seconds([*computing, *moving])


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """Collective of one bucket, with medians over the measured steps."""

    program: str
    kind: str
    bucket: str
    group: str
    nbytes: int
    producer: str
    consumer: str
    seconds: float
    """From the possible begin of the transfer to its end."""
    exposed: float
    exposed_skew: float
    queued: float
    skew: float | None
    """None if the other ranks did not report their arrival."""
    latest_rank: int | None
    advice: str
    predicted: float | None = None
    own: bool = False
    """Whether the model's own code requests it: tensor parallelism, SyncBatchNorm."""


@dataclass(frozen=True)
class Timeline:
    """Measurement by `dcompile.profile` on one rank."""

    model: str
    rank: int
    world: int
    device: str
    steps: tuple[MeasuredStep, ...]
    notes: tuple[str, ...] = ()
    left_out: int = 0
    """Steps at the beginning that are not in `steps`, since they prepare calls."""
    predicted: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(program, bucket) -> predicted seconds of the collective."""
    typical: MeasuredStep = field(init=False)
    """Step of median length, which pictures show."""
    collectives: tuple[MeasuredCollective, ...] = field(init=False)

    def __post_init__(self) -> None:
        assert self.steps, "a timeline of no step"
        ranked = sorted(self.steps, key=lambda step: step.seconds)
        object.__setattr__(self, "typical", ranked[(len(ranked) - 1) // 2])
        object.__setattr__(self, "collectives", tuple(_summaries(self.steps, self.predicted)))


def covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one span."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def kernel_seconds(timeline: Timeline) -> dict[tuple[str, str], float]:
    """(program, kernel) -> mean seconds per step, over all calls of the kernel."""
    found: dict[tuple[str, str], float] = {}
    for step in timeline.steps:
        for span in step.spans:
            if span.kernel:
                key = span.program, span.kernel
                found[key] = found.get(key, 0.0) + span.seconds / len(timeline.steps)
    return found


def _summaries(
    steps: Sequence[MeasuredStep], predicted: Mapping[tuple[str, str], float]
) -> Iterator[MeasuredCollective]:
    found: dict[tuple[str, str, int], list[CollectiveInterval]] = {}
    for step in steps:
        times: dict[tuple[str, str], int] = {}
        for exchange in step.exchanges:
            key = exchange.program, exchange.bucket
            times[key] = times.get(key, 0) + 1  # the same program may run for several micro-batches of one step
            found.setdefault((*key, times[key]), []).append(exchange)
    length = statistics.median(step.seconds for step in steps)
    for exchanges in found.values():
        first = exchanges[0]
        skews = [e.skew for e in exchanges if e.skew is not None]
        ranks = [e.latest_rank for e in exchanges if e.latest_rank is not None]
        made = MeasuredCollective(
            program=first.program,
            kind=first.kind,
            bucket=first.bucket,
            group=first.group,
            nbytes=first.nbytes,
            producer=first.producer,
            consumer=first.consumer,
            seconds=_median(exchanges, lambda e: e.wire),
            exposed=_median(exchanges, lambda e: e.exposed),
            exposed_skew=_median(exchanges, lambda e: e.exposed_skew),
            queued=_median(exchanges, lambda e: e.queued),
            skew=statistics.median(skews) if skews else None,
            latest_rank=statistics.mode(ranks) if ranks else None,
            advice="",
            predicted=predicted.get((first.program, first.bucket)),
            own=first.own,
        )
        yield replace(made, advice=advise(made, length))


def _median(exchanges: Sequence[CollectiveInterval], of: Callable[[CollectiveInterval], float]) -> float:
    return statistics.median(map(of, exchanges))


def advise(found: MeasuredCollective, step: float) -> str:
    """Advice on how to shorten the exposed time of a collective."""
    if found.exposed <= MAX_HIDDEN_SHARE * step:
        return "hidden" if found.exposed else "hidden: nothing waits for it"
    if found.exposed_skew > found.exposed / 2:
        return f"rank {found.latest_rank} comes later: its work or its data loading; no setting of the compiler"
    if found.own:
        return OWN
    if found.queued > found.seconds:
        return "waits for others: send fewer bytes (bf16 compression hook or MixedPrecisionPolicy), or fewer times"
    kind = next(kind for kind in get_args(PlannedKind) if kind == found.kind)
    if found.nbytes < MIN_BANDWIDTH_BOUND_BYTES:
        return f"mostly a fixed cost per collective: {_how_to_make_fewer(kind)} makes them fewer"
    return _how_to_hide(kind, found.program.startswith("backward"))


def _how_to_make_fewer(kind: PlannedKind) -> str:
    match kind:
        case "all_reduce":
            return "a larger bucket_cap_mb"
        case "all_gather" | "reduce_scatter":
            return "one fully_shard over several of these modules"


def _how_to_hide(kind: PlannedKind, in_backward: bool) -> str:
    """What shortens the part of a collective that nothing hides."""
    match kind:
        case "all_reduce":
            return (
                "no compute is left to hide it: a smaller bucket_cap_mb leaves less for the end, no_sync makes it rarer"
            )
        case "reduce_scatter":
            return (
                "no compute is left to hide it: fully_shard on parts of these modules leaves less for the end, "
                "set_requires_gradient_sync(False) over micro-batches makes it rarer"
            )
        case "all_gather" if in_backward:
            return "gathered too late to be hidden: reshard_after_forward=False keeps what the forward has gathered"
        case "all_gather":
            return (
                "too little runs before it to hide it: fully_shard on parts of these modules, "
                "so that the first gather is small"
            )
