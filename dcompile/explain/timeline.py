"""Measured steps as data: computation, communication and waits. Times in seconds.

`steps_of` splits what instrumented programs recorded into steps, and `bars` shows one on two tracks, for every picture.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

from dcompile.ir.collective_kinds import HostCopyKind, PlannedKind, bucket_traits

Arrived: TypeAlias = "tuple[float, int] | None"
"""Time of the last rank's arrival at a collective, and that rank; None where it is not known."""
Lane = Literal["compute", "optimizer", "wait", "communication"]
MIN_BANDWIDTH_BOUND_BYTES = 1 << 20
"""A collective of fewer bytes takes its latency."""
MAX_HIDDEN_SHARE = 0.005
"""Part of the step below which an exposed collective needs no advice."""
COPIED = "the link to host memory is slower than what is computed meanwhile: offload fewer bytes"
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
class CollectiveReport:
    """One collective of each step: medians over measured steps, or the cost model's prediction."""

    program: str
    kind: str
    bucket: str
    group: str
    nbytes: int
    producer: str
    """Step that computes the last of its operands."""
    consumer: str
    """First step after its wait."""
    seconds: float
    """From the possible begin of the transfer to its end."""
    exposed: float
    """Seconds for which its wait delays later steps."""
    exposed_skew: float = 0.0
    queued: float = 0.0
    skew: float | None = None
    """None if the other ranks did not report their arrival."""
    latest_rank: int | None = None
    advice: str = ""
    """Setting that would change that."""
    predicted: float | None = None
    own: bool = False
    """Whether the model's own code requests it: tensor parallelism, SyncBatchNorm."""
    parameters: tuple[str, ...] = ()
    """Parameters that it is for, in a planned program."""


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
    collectives: tuple[CollectiveReport, ...] = field(init=False)

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


def _summaries(steps: Sequence[MeasuredStep], predicted: Mapping[tuple[str, str], float]) -> Iterator[CollectiveReport]:
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
        made = CollectiveReport(
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
            predicted=predicted.get((first.program, first.bucket)),
            own=first.own,
        )
        yield replace(made, advice=advise(made, length))


def _median(exchanges: Sequence[CollectiveInterval], of: Callable[[CollectiveInterval], float]) -> float:
    return statistics.median(map(of, exchanges))


def advise(found: CollectiveReport, step: float) -> str:
    """Advice on how to shorten the exposed time of a collective."""
    if found.exposed <= MAX_HIDDEN_SHARE * step:
        return "hidden" if found.exposed else "hidden: nothing waits for it"
    if found.exposed_skew > found.exposed / 2:
        return f"rank {found.latest_rank} comes later: its work or its data loading; no setting of the compiler"
    if found.kind in get_args(HostCopyKind):
        return COPIED
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


# --- steps from what was measured -------------------------------------------------------------------------------------


def steps_of(
    calls: Sequence[Any],
    updates: Sequence[tuple[str, float, float]],
    begin: float,
    end: float,
    latest: Sequence[Arrived] | None,
    groups: Mapping[tuple[str, str], str],
    serial: bool = True,
) -> tuple[MeasuredStep, ...]:
    """Split measured `ProgramCallTiming`s and the optimizer's (name, begin, end) into steps.

    A step ends with an optimizer's update; without any, where a forward follows a backward. `latest`: latest arrival at
    each collective, in the order of their starts. `groups`: (program, bucket) -> name of the group. `serial`:
    collectives of a group run one after another, as on NCCL's stream; Gloo uses threads.
    """
    exchanges = _exchanges(calls, latest, groups, serial)
    spans = [span for call in calls for span in _spans(call)]
    spans += [MeasuredSpan("optimizer", name, begun, ended) for name, begun, ended in updates]
    spans += [MeasuredSpan("compute", f"hands {e.bucket} over", e.arrived, e.started, e.program) for e in exchanges]
    spans += [MeasuredSpan("wait", f"waits for {e.bucket}", e.wait_begin, e.wait_end, e.program) for e in exchanges]
    spans.sort(key=lambda span: span.begin)
    cuts = [begin, *_cuts(calls, updates, end)]
    return tuple(
        MeasuredStep(
            one,
            two,
            tuple(span for span in spans if one <= span.begin < two),
            tuple(exchange for exchange in exchanges if one <= exchange.arrived < two),
        )
        for one, two in itertools.pairwise(cuts)
    )


def _cuts(calls: Sequence[Any], updates: Sequence[tuple[str, float, float]], end: float) -> list[float]:
    """End of each step."""
    if updates:
        ends = sorted(ended for _, _, ended in updates)
        starts = [call.begin for call in calls]
        # of several optimizers in one step, only the last one before the next program ends the step
        return [e for e, after in zip(ends, [*ends[1:], None], strict=True) if _runs_between(starts, e, after)]
    kinds = [call.program.startswith("backward") for call in calls]
    between = [call.begin for call, before, now in zip(calls[1:], kinds, kinds[1:], strict=False) if before and not now]
    return [*between, end]


def _runs_between(starts: Sequence[float], one: float, two: float | None) -> bool:
    return two is None or any(one <= start < two for start in starts)


def _spans(call: Any) -> Iterator[MeasuredSpan]:
    for number, begin, end in call.spans:
        statement = call.statements[number]
        yield MeasuredSpan("compute", label(statement.name, statement.origin), begin, end, call.program, statement.name)


def label(name: str, origin: Sequence[str]) -> str:
    """Short name of a step: the modules it came from, else what it calls."""
    modules = list(dict.fromkeys(text.partition(": ")[0] if ": " in text else "" for text in origin))
    shown = [module for module in modules if module]
    if not shown:
        shown = [text.partition(" (")[0] for text in origin[:1]] or [name]
    return ", ".join(shown[:2]) + (", ..." if len(shown) > 2 else "")


def _exchanges(
    calls: Sequence[Any],
    latest: Sequence[Arrived] | None,
    groups: Mapping[tuple[str, str], str],
    serial: bool,
) -> list[CollectiveInterval]:
    made: list[CollectiveInterval] = []
    free: dict[str, float] = {}
    every = [(call, found) for call in calls for found in call.exchanges]
    for number, (call, found) in enumerate(every):
        if found.wait_end is None:
            continue
        ended = found.wait_end if found.ended is None else found.ended
        group = groups.get((call.program, found.bucket), found.group)
        last = None if latest is None else latest[number]
        made.append(
            CollectiveInterval(
                call.program, found.kind, found.bucket, group, found.nbytes, found.arrived, found.started, ended,
                found.wait_begin, found.wait_end, _producer(call, found), _consumer(call, found),
                None if last is None else last[0], None if last is None else last[1], bool(found.group),
                free.get(group, float("-inf")),
            )
        )  # fmt: skip
        if serial:
            free[group] = max(free.get(group, ended), ended)
    return made


def _producer(call: Any, found: Any) -> str:
    """Last step before the start that touches the bucket."""
    bucket = found.bucket.replace(".", "_")
    if not found.group and bucket_traits(found.kind).gathers:
        return "nothing: shards are there from the start"
    order = [number for number, *_ in call.spans]
    upto = order[: order.index(found.after) + 1] if found.after >= 0 else []
    # if the text names no bucket, gradients are in plain memory, and the start comes right after the last of them
    named = [number for number in upto if bucket in call.statements[number].buckets] or upto
    if not named:
        return "the program's inputs"
    return label(call.statements[named[-1]].name, call.statements[named[-1]].origin)


def _consumer(call: Any, found: Any) -> str:
    """First step after the wait."""
    order = [number for number, *_ in call.spans]
    rest = order[order.index(found.before) + 1 :] if found.before >= 0 else order
    if not rest:
        return "the end of the program"
    return label(call.statements[rest[0]].name, call.statements[rest[0]].origin)


# --- bars -------------------------------------------------------------------------------------------------------------


COLOURS = {
    "forward": "#4477aa",
    "backward": "#66ccee",
    "optimizer": "#aa3377",
    "waiting": "#ee6677",
    "on the wire": "#228833",
    "behind another": "#ccbb44",
    "other rank late": "#bbbbbb",
}
"""Kind of bar -> colour of Paul Tol's bright scheme, which colour-blind people can distinguish, too."""
LANES = ("compute", "communication")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; times in seconds from the step's begin."""

    lane: str
    kind: str
    begin: float
    end: float
    title: str


def bars(step: MeasuredStep, finest: float = 0.0) -> list[Bar]:
    """Bars of a step. Neighbours of one kind that are shorter than `finest` seconds are merged."""
    compute = [_compute_bar(span, step.begin) for span in step.spans]
    return [*_merge_bars(compute, finest), *(bar for e in step.exchanges for bar in _exchange_bars(e, step.begin))]


def _compute_bar(span: MeasuredSpan, zero: float) -> Bar:
    kind = {"optimizer": "optimizer", "wait": "waiting"}.get(span.lane) or (
        "backward" if span.program.startswith("backward") else "forward"
    )
    title = f"{span.name}: {duration(span.seconds)}"
    return Bar("compute", kind, span.begin - zero, span.end - zero, title)


def _merge_bars(found: Iterable[Bar], finest: float) -> Iterator[Bar]:
    """Merge bars that are too short to be seen with their neighbours."""
    open_: Bar | None = None
    for bar in found:
        small = bar.kind != "waiting" and bar.end - bar.begin < finest
        if open_ and small and bar.kind == open_.kind and bar.begin - open_.end < finest:
            open_ = Bar(bar.lane, bar.kind, open_.begin, max(open_.end, bar.end), open_.title)
            continue
        if open_:
            yield open_
        open_ = bar
    if open_:
        yield open_


def _exchange_bars(found: CollectiveInterval, zero: float) -> Iterator[Bar]:
    what = f"{found.kind} {found.bucket}, {megabytes(found.nbytes)}"
    late = max(found.arrived, found.latest or found.arrived)
    pieces = (
        (
            "other rank late",
            found.arrived,
            min(late, found.ended),
            f"{what}: rank {found.latest_rank} is not there yet",
        ),
        ("behind another", late, found.begin, f"{what}: behind the collective before it"),
        ("on the wire", found.begin, found.ended, f"{what}: {duration(found.wire)}, {duration(found.exposed)} exposed"),
    )
    for kind, begin, end, title in pieces:
        if end > begin:
            yield Bar("communication", kind, begin - zero, end - zero, title)


def duration(seconds: float) -> str:
    """Text of a duration: `1.42 s`, `12.3 ms`, `85 us`."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def megabytes(nbytes: int) -> str:
    """Text of a size: `25.0 MiB`, `3.1 KiB`."""
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 1 << 20 else f"{nbytes / 2**10:.1f} KiB"


def caption(step: MeasuredStep) -> str:
    """Numbers of one step, for the caption of its picture."""
    return _totals([step], step.exposed)


def exchange_caption(step: MeasuredStep) -> str:
    """Numbers of one step's communication, for a picture of several steps."""
    if not step.exchanges:
        return "nothing is exchanged"
    share = step.overlapped / step.communication if step.communication else 0.0
    return (
        f"on the wire {duration(step.communication)}, of which {share:.0%} while something computes; exposed "
        f"{duration(step.exposed)} ({step.exposed / step.seconds:.1%} of the step)"
    )


def medians(timeline: Timeline) -> str:
    """Same numbers as medians over the steps. Exposed time is the sum of the medians of all collectives."""
    return _totals(timeline.steps, sum(found.exposed for found in timeline.collectives))


def _totals(steps: Sequence[MeasuredStep], exposed: float) -> str:
    def middle(of: Callable[[MeasuredStep], float]) -> float:
        return statistics.median(map(of, steps))

    seconds, moving = middle(lambda step: step.seconds), middle(lambda step: step.communication)
    idle = f"idle {middle(lambda step: step.idle) / seconds:.1%}"
    if not any(step.exchanges for step in steps):
        computing = duration(middle(lambda step: step.compute))
        return f"step of {duration(seconds)}: computing {computing}, {idle}; nothing is exchanged"
    share = middle(lambda step: step.overlapped) / moving if moving else 0.0
    return (
        f"step of {duration(seconds)}: computing {duration(middle(lambda step: step.compute))}, on the wire "
        f"{duration(moving)}, of which {share:.0%} while something computes; exposed "
        f"{duration(exposed)} ({exposed / seconds:.1%} of the step); {idle}"
    )
