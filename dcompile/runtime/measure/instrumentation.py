"""Measure host programs from inside: the time of each step, and when each collective started, ended and was waited for.

A measured program runs a second text (`instrument`) in which each step records a timestamp. The program's usual text is
unchanged, so measuring costs nothing while it is off. A timestamp is the host's clock on CPU, and an event on the
current stream on a GPU. Events are read when measuring has ended.
"""

from __future__ import annotations

import ast
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, get_args, runtime_checkable

import torch

from dcompile.collectives.contract import ProgramReport
from dcompile.ir.buffers import Bucket
from dcompile.ir.collective_kinds import PlannedKind, bucket_traits
from dcompile.ir.functional_collectives import is_wait, kind_of

_WORK = re.compile(r"_(k|op|launch|fn|collective)\d+(?:\.wait|\.run_epilogue)?")
"""Names that a host program gives to callables that compute: kernels, library calls, launch tables."""
POLL_S = 2e-4
"""Seconds between two checks of collectives that do not notify when they end."""
_STARTS: Mapping[str, PlannedKind] = {bucket_traits(kind).start: kind for kind in get_args(PlannedKind)}
_WAITS = frozenset(bucket_traits(kind).wait for kind in _STARTS.values())
"""Methods of sources that host programs call -> kinds, and those that wait."""
METHODS = frozenset((*_STARTS, *_WAITS))
_MEMORY = re.compile(r"(?:_p)?_bucket_(\w+)")


@dataclass(frozen=True, slots=True)
class InstrumentedStatement:
    """One step of a host program, as parsed from its text: its callee, its origin, and the buckets that it touches."""

    name: str
    origin: tuple[str, ...]
    buckets: frozenset[str]
    """Bucket names in which each character that names cannot contain is an underscore, as in the text."""
    starts: str = ""
    """Name of the model's own collective that it starts, or of its result if it is a library call."""
    group: str = ""
    """Name of the process group that it runs in."""
    waits: str = ""
    """Name of the collective that it waits for, as in `starts`."""


@dataclass(eq=False, slots=True)
class CollectiveTiming:
    """One collective of one call.

    Times are timestamps until `CallRecorder.finish`, then seconds; None: not measured.
    """

    kind: str
    bucket: str
    nbytes: int
    after: int
    """Index of the last statement before the start; -1 if none."""
    arrived: Any
    started: Any = None
    """When the start returned, which includes scaling of gradients."""
    ended: Any = None
    wait_begin: Any = None
    wait_end: Any = None
    before: int = -1
    """Index of the last statement before the wait."""
    group: str = ""
    """Name of the process group, for a collective of the model's own."""


@dataclass(eq=False, slots=True)
class ProgramCallTiming:
    """One call of one program."""

    program: str
    statements: tuple[InstrumentedStatement, ...]
    begin: Any
    end: Any = None
    spans: list[tuple[int, Any, Any]] = field(default_factory=list)
    """(statement, begin, end), in the order in which the host reached them."""
    exchanges: list[CollectiveTiming] = field(default_factory=list)


def instrument(source: str) -> tuple[str, tuple[InstrumentedStatement, ...]]:
    """Add timestamps to a host program. Return its new text and its statements.

    The text uses the global name `_probe` (see `ProgramProbe`).
    """
    lines = source.split("\n")
    call = call_of(ast.parse(source))
    before: dict[int, list[str]] = {}
    after: dict[int, list[str]] = {}
    statements: list[InstrumentedStatement] = []
    started: set[str] = set()
    for node in call.body:
        last = node.end_lineno or node.lineno
        if _is_clear(node):
            after[last] = ["_call = _probe.call(buckets)", "_now, _ran = _probe.now, _call.spans.append"]
            after[last].append("buckets = _probe.buckets(buckets, _call)")
        elif works(node):
            found = own_collective(node, parse_statement(node, lines), started)
            started |= {found.starts} - {""}
            after[last] = [_stamp(len(statements), found, node)]
            before[node.lineno] = ["_begin = _now()"]
            statements.append(found)
        elif isinstance(node, ast.Return):
            before[node.lineno] = ["_probe.end(_call)"]
    text: list[str] = []
    for number, line in enumerate(lines, 1):
        text += [f"        {added}" for added in before.get(number, ())]
        text.append(line)
        text += [f"        {added}" for added in after.get(number, ())]
    return "\n".join(text), tuple(statements)


def call_of(module: ast.Module) -> ast.FunctionDef:
    """The inner function `call` of `make`."""
    found = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    assert len(found) == 1, f"a host program has {len(found)} functions named call"
    return found[0]


def _is_clear(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node) == "args.clear()"


def _value_of(node: ast.stmt) -> Any:
    """The expression that a statement evaluates; an `if` tests it."""
    value = node.test if isinstance(node, ast.If) else getattr(node, "value", None)
    return value.value if isinstance(value, ast.NamedExpr) else value


def works(node: ast.stmt) -> bool:
    """Whether a statement computes: it calls an object that `make` prepared, and keeps, drops or tests the result."""
    value = _value_of(node)
    if not isinstance(node, ast.Expr | ast.Assign | ast.If) or not isinstance(value, ast.Call):
        return False
    return _WORK.fullmatch(ast.unparse(value.func)) is not None


def parse_statement(node: ast.stmt, lines: list[str]) -> InstrumentedStatement:
    """Parse a statement. The comment before it gives its origin."""
    value: Any = _value_of(node)
    callee, _, method = ast.unparse(value.func).partition(".")
    if method == "run_epilogue":  # a launch, unless the collective's kernel was that of the loop, too
        callee = ast.unparse(value.args[0])
    prepared = re.compile(rf"^    {callee} = (.*)$")
    at, found = next((n, m[1]) for n, line in enumerate(lines) if (m := prepared.match(line)))
    comment = lines[node.lineno - 2].strip()
    origin = tuple(comment[2:].split(", ")) if comment.startswith("# ") else ()
    library = re.fullmatch(r"(?:entry\()?torch\.(ops\.)?([\w.]+)\)?", found)
    if own := re.match(r"run\.(?:collective|host_copy)\('([^']+)', '([^']+)'", found):
        texts = [leaf.value for leaf in value.args if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)]
        exchange = {"waits": own[2]} if method else {"starts": own[2], "group": texts[-1]}
        return InstrumentedStatement(own[1], origin, frozenset(), **exchange)
    name = found if library is None else library[2] if library[1] else f"aten.{library[2]}"
    if kernel := re.match(r"run\.(?:kernel|function|product)\('([^']+)'", found):
        name = kernel[1]
    if found.startswith(("run.launches(", "run.calls(")):
        name, origin = _launched_kernel(lines[at + 1 :])
    names = {leaf.id for leaf in ast.walk(value) if isinstance(leaf, ast.Name)}
    buckets = frozenset(m[1] for name_ in names if (m := _MEMORY.fullmatch(name_)))
    return InstrumentedStatement(name, origin, buckets)


def own_collective(node: Any, found: InstrumentedStatement, started: set[str]) -> InstrumentedStatement:
    """Add the collective of the model that a library call starts or waits for, if any."""
    if found.starts or found.waits:
        return found
    value: Any = getattr(node, "value", None)
    arguments = value.args if isinstance(value, ast.Call) else []
    if kind_of(found.name) is not None and isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        texts = [leaf.value for leaf in arguments if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)]
        return replace(found, starts=node.targets[0].id, group=texts[-1] if texts else "")
    if is_wait(found.name):
        names = {leaf.id for argument in arguments for leaf in ast.walk(argument) if isinstance(leaf, ast.Name)}
        return replace(found, waits=next(iter(names & started), ""))
    return found


def _stamp(number: int, found: InstrumentedStatement, node: Any) -> str:
    """Text that a measured program runs after a statement."""
    if found.starts and isinstance(node, ast.Expr):
        return f"_probe.begun(_call, {number}, _begin, {ast.unparse(_value_of(node).func)})"
    if found.starts:
        return f"_probe.started(_call, {number}, _begin, {found.starts}, {ast.unparse(node.value.args[0])})"
    if found.waits:
        return f"_probe.waited(_call, {number}, _begin)"
    return f"_ran(({number}, _begin, _now()))"


def _launched_kernel(lines: list[str]) -> tuple[str, tuple[str, ...]]:
    """Name and origins of a launch table, whose rows follow its first line."""
    origins: dict[str, None] = {}
    kernels = 0
    for line in lines:
        if line == "    ])":
            break
        text = line.strip()
        if text.startswith("# "):
            origins.update(dict.fromkeys(text[2:].split(", ")))
        else:
            kernels += 1
    return f"{kernels} kernels" if kernels != 1 else "1 kernel", tuple(origins)


@runtime_checkable
class Measurable(Protocol):
    """A compiled program that can be measured."""

    name: str
    buckets: tuple[Bucket, ...]
    report: ProgramReport
    on_gpu: bool

    def measure(self, recorder: CallRecorder | None) -> None:
        """Report each step to `recorder` from the next call on; with None, stop measuring."""


class CallRecorder:
    """Timings of all program calls of one rank while it is measured."""

    def __init__(self, gpu: torch.device | None) -> None:
        self.calls: list[ProgramCallTiming] = []
        self.gpu = gpu
        self._side = None if gpu is None else torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call, unused-ignore]
        """Stream that waits for collectives to see when they end, so that no other stream has to."""
        self.now: Callable[[], Any] = time.perf_counter if gpu is None else self._event
        self._polled: queue.SimpleQueue[tuple[Any, CollectiveTiming] | None] = queue.SimpleQueue()
        self._poller: threading.Thread | None = None
        self._anchor: tuple[Any, float] | None = None
        if gpu is not None:
            event = self._event()
            event.synchronize()
            self._anchor = event, time.perf_counter()

    def _event(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]
        event.record()
        return event

    def watch(self, work: Any, exchange: CollectiveTiming) -> None:
        """Record when a collective ends."""
        if self._side is not None:
            with torch.cuda.stream(self._side):
                work.wait()
                exchange.ended = self._event()
            return
        try:
            future = work.get_future()
        except RuntimeError:  # collectives on several tensors have no future
            self._polled.put((work, exchange))
            if self._poller is None:
                self._poller = threading.Thread(target=self._poll, name="dcompile measuring", daemon=True)
                self._poller.start()
        else:
            # Gloo's own thread reports it: the computing thread may be anywhere by then
            future.add_done_callback(lambda _: setattr(exchange, "ended", time.perf_counter()))

    def _poll(self) -> None:
        """Poll collectives that do not notify, until they are waited for: some end only then."""
        pending: list[tuple[Any, CollectiveTiming]] = []
        while True:
            while not pending or not self._polled.empty():
                found = self._polled.get()
                if found is None:
                    return
                pending.append(found)
            for work, exchange in pending:
                if exchange.wait_end is None and work.is_completed():
                    exchange.ended = time.perf_counter()
            pending = [p for p in pending if p[1].ended is None and p[1].wait_end is None]
            time.sleep(POLL_S)

    def finish(self) -> list[ProgramCallTiming]:
        """Calls that have ended, with their timestamps converted to seconds of the host's clock."""
        if self._poller is not None:
            self._polled.put(None)
            self._poller.join()
        calls = [call for call in self.calls if call.end is not None]
        if self._anchor is not None:
            torch.cuda.synchronize(self.gpu)
        for call in calls:
            call.begin, call.end = self.seconds(call.begin), self.seconds(call.end)
            call.spans = [(number, self.seconds(begin), self.seconds(end)) for number, begin, end in call.spans]
            for exchange in call.exchanges:
                for name in ("arrived", "started", "ended", "wait_begin", "wait_end"):
                    setattr(exchange, name, self.seconds(getattr(exchange, name)))
        return calls

    def seconds(self, stamp: Any) -> Any:
        """Convert a timestamp to seconds of the host's clock (time.perf_counter)."""
        if stamp is None or self._anchor is None:
            return stamp
        event, at = self._anchor
        return at + event.elapsed_time(stamp) / 1e3


class ProgramProbe:
    """Interface that the text of one measured program calls."""

    def __init__(self, program: str, statements: tuple[InstrumentedStatement, ...], recorder: CallRecorder) -> None:
        self._program, self._statements, self._recorder = program, statements, recorder
        self.now = recorder.now

    def call(self, _buckets: Any) -> ProgramCallTiming:
        """Record the begin of a call."""
        call = ProgramCallTiming(self._program, self._statements, self.now())
        self._recorder.calls.append(call)
        return call

    def end(self, call: ProgramCallTiming) -> None:
        """Record the end of a call."""
        call.end = self.now()

    def started(self, call: ProgramCallTiming, number: int, begin: Any, result: Any, sent: Any) -> None:
        """Record a collective that a library call has started.

        Its end is seen by its wait, which is the next statement.
        """
        found = self._statements[number]
        nbytes = max(tensor.numel() * tensor.element_size() for tensor in (result, sent))
        kind = kind_of(found.name) or found.name
        call.exchanges.append(
            CollectiveTiming(kind, found.starts, nbytes, _last_statement(call), begin, self.now(), group=found.group)
        )

    def begun(self, call: ProgramCallTiming, number: int, begin: Any, exchange: Any) -> None:
        """Record one of the model's own collectives, which is now in flight."""
        found = self._statements[number]
        timing = CollectiveTiming(
            exchange.kind, found.starts, exchange.nbytes, _last_statement(call), begin, self.now(), group=found.group
        )
        call.exchanges.append(timing)
        self._recorder.watch(exchange.work, timing)

    def waited(self, call: ProgramCallTiming, number: int, begin: Any) -> None:
        """Record the end of a wait."""
        name = self._statements[number].waits
        exchange = next(exchange for exchange in reversed(call.exchanges) if exchange.bucket == name)
        exchange.before, exchange.wait_begin, exchange.wait_end = _last_statement(call), begin, self.now()

    def buckets(self, buckets: Any, call: ProgramCallTiming) -> Any:
        """Bucket source whose collectives are measured."""
        return None if buckets is None else _Measured(buckets, call, self._recorder)


def _last_statement(call: ProgramCallTiming) -> int:
    """Index of the statement that ran last; -1 if none."""
    return call.spans[-1][0] if call.spans else -1


def _sent_gradients(memory: Any) -> Any:
    """What a bucket of gradients sends: its storage, or a copy in the dtype that a hook asks for."""
    wire = getattr(memory, "wire", None)
    return memory.flat if wire is None else wire


class _Measured:
    """Wrapper of a `BucketSource` or `ShardSource` that records its collectives."""

    def __init__(self, inner: Any, call: ProgramCallTiming, recorder: CallRecorder) -> None:
        self._inner, self._call, self._recorder = inner, call, recorder
        self._open: dict[str, CollectiveTiming] = {}

    def __getattr__(self, name: str) -> Any:
        if name in _STARTS:
            return partial(self._start, name, _STARTS[name])
        return partial(self._wait, name) if name in _WAITS else getattr(self._inner, name)

    def _start(self, method: str, kind: PlannedKind, bucket: str, given: Any) -> None:
        sent = given if bucket_traits(kind).carries == "units" else [_sent_gradients(given)]
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in sent)
        exchange = CollectiveTiming(kind, bucket, nbytes, _last_statement(self._call), self._recorder.now())
        self._open[bucket] = exchange
        self._call.exchanges.append(exchange)
        getattr(self._inner, method)(bucket, given)
        exchange.started = self._recorder.now()
        work = self._inner.pending(bucket)
        if work is not None:
            self._recorder.watch(work, exchange)

    def _wait(self, method: str, bucket: str, *given: Any) -> None:
        exchange = self._open.pop(bucket)
        exchange.before, exchange.wait_begin = _last_statement(self._call), self._recorder.now()
        getattr(self._inner, method)(bucket, *given)
        exchange.wait_end = self._recorder.now()
