"""Which backwards reduce, and where: decided by DdpSync, with a model and a DDP that are made up."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from dcompile import compat
from dcompile.capture.adapters.ddp_sync import ArrivingGradients, DdpSync
from dcompile.capture.adapters.gradient_sync import BackwardCall
from dcompile.capture.call_state import Invocation, Variant
from dcompile.capture.services import NoReplicas
from dcompile.errors import DcompileError
from dcompile.runtime.communication.ddp_buckets import ReducedRun

GRADS = ((0, 7), (1, 8))


class MadeUpDdp:
    """A DDP module's adapter: what no_sync says, whether ranks may differ, and which parameters have hooks."""

    def __init__(self, *, sync: bool = True, uneven: bool = False, hooks: tuple[str, ...] = ()) -> None:
        self.sync, self.uneven, self.hooks = sync, uneven, list(hooks)
        self.state, self.reasons, self.group = "undecided", (), "group"
        self.covers_all_params = self.prepared = self.may_be_alone = self.is_static = False
        self.varies = uneven
        self.refs: dict[int, Any] = {}
        self.ddp = SimpleNamespace(static_graph=False, find_unused_parameters=uneven)
        self.unreduced: set[int] = set()
        self.decided: list[list[str]] = []
        self.restored: list[str] = []
        self.behind: list[list[str]] = []
        self.arriving: list[tuple[str, ...]] = []
        self.marked: list[Any] = []

    @property
    def eligible(self) -> bool:
        return self.state == "taken"

    def before_forward(self) -> None: ...

    def replicated(self) -> list[Any]:
        return []

    def wants_sync(self) -> bool:
        return self.sync

    def hooked(self) -> list[str]:
        return self.hooks

    def standing_objections(self) -> list[str]:
        return []

    def decide(self, objections: list[str], several: bool = False) -> None:
        self.decided.append(objections)
        self.state = "stock" if objections else "taken"

    def unwatch(self, numbers: Any) -> None:
        self.unwatched = set(numbers)

    def note_behind(self, reasons: list[str]) -> None:
        self.behind.append(reasons)

    def note_arriving(self, reasons: tuple[str, ...]) -> None:
        self.arriving.append(reasons)

    def has_synced(self, numbers: Any) -> None:
        self.marked.append(numbers)

    def accumulating(self, numbers: Any) -> frozenset[int]:
        return frozenset(numbers)

    def restore(self, reason: str, inside_forward: bool) -> None:
        self.restored.append(reason)
        self.state = "stock"


class MadeUpModel:
    """A compiled model with one graph; what ranks compared is kept."""

    def __init__(self, objections: tuple[str, ...] = ()) -> None:
        self.settings = SimpleNamespace(config=SimpleNamespace(distributed="auto", key=lambda: ""))
        self.compared: list[str] = []
        self.services = SimpleNamespace(
            agree=lambda group, subject, lines, *_, **__: self.compared.append(subject),
            watch_replicas=lambda *_: NoReplicas(),
        )
        self.variants: dict[tuple[int, ...], Variant] = {}
        self.graphs: list[Any] = []
        self._objections = objections

    def objections(self) -> list[str]:
        return list(self._objections)

    def compare_captures(self, graphs: Any) -> None:
        self.compared.append("captures")

    def graphs_of_call(self, graph: Any) -> list[Any]:
        return [graph]


class MadeUpGraph:
    """A captured graph whose backward adds to two parameters."""

    grads = GRADS
    params: ClassVar = {0: 7, 1: 8}
    number = 0

    def __init__(self, adds: bool = True) -> None:
        self.adds, self.agreed = adds, list[str]()

    def accumulates(self) -> bool:
        return self.adds

    def agree(self, kind: str) -> None:
        self.agreed.append(kind)


class MadeUpBuckets:
    """Bucket memory that notes when a backward begins."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def begin(self, *args: Any) -> None:
        self.begun.append(args)

    def last_run(self) -> ReducedRun:
        return ReducedRun({}, {}, lambda number: None)


def strategy(adapter: MadeUpDdp, model: MadeUpModel | None = None) -> DdpSync:
    sync = DdpSync(adapter)  # type: ignore[arg-type]
    sync.model = model or MadeUpModel()  # type: ignore[assignment]
    return sync


@pytest.fixture
def backward(monkeypatch):
    """Inside a backward, whose end never comes."""
    monkeypatch.setattr(compat.autograd, "backward_task", lambda: 1)
    monkeypatch.setattr(compat.autograd, "at_end_of_backward", lambda run: None)


def run(args: list[Any], **more: Any) -> list[Any]:
    return [more.get("sync")]


@pytest.mark.parametrize("sync", [True, False])
def test_a_forward_tells_its_backward_what_no_sync_says(sync):
    strategy_ = strategy(MadeUpDdp(sync=sync))
    call = Invocation(inside_ddp=True)
    strategy_.begin_call(call)
    assert call.sync is sync and int(strategy_.token(call)) == sync


def test_outside_of_ddp_nothing_is_to_be_reduced():
    sync = strategy(MadeUpDdp())
    call = Invocation()
    sync.begin_call(call)
    assert int(sync.token(call)) == int(sync.token(None)) == 0


def test_calls_have_tokens_of_their_own_where_ranks_may_differ():
    sync = strategy(MadeUpDdp(uneven=True))
    calls = Invocation(inside_ddp=True), Invocation(inside_ddp=True)
    for call in calls:
        sync.begin_call(call)
    assert sync.token(calls[0]) is not sync.token(calls[1])


def test_the_first_backward_that_reduces_decides_and_compares_once():
    adapter, model, graph = MadeUpDdp(), MadeUpModel(), MadeUpGraph()
    sync = strategy(adapter, model)
    assert sync.compares_captures()
    assert sync.before_backward(graph, True) and sync.before_backward(graph, True)
    assert adapter.decided == [[]] and model.compared == ["captures", "gradients of a model"]
    assert not sync.compares_captures()


def test_what_speaks_against_it_leaves_gradients_to_ddp():
    adapter = MadeUpDdp()
    sync = strategy(adapter, MadeUpModel(("a parameter is returned",)))
    assert sync.before_backward(MadeUpGraph(), True)
    assert adapter.decided == [["a parameter is returned"]] and not adapter.eligible


def test_a_backward_that_adds_to_nothing_compares_nothing():
    model = MadeUpModel()
    sync = strategy(MadeUpDdp(), model)
    sync.before_backward(MadeUpGraph(adds=False), True)
    assert model.compared == []


@pytest.mark.usefixtures("backward")
def test_a_program_reduces_unless_no_sync_or_a_hook_says_otherwise():
    graph, buckets = MadeUpGraph(), MadeUpBuckets()
    adapter = MadeUpDdp()
    adapter.state = "taken"
    sync = strategy(adapter)
    assert sync.run_backward(BackwardCall(graph, run, buckets, [], False, ())) == [False]
    assert adapter.unreduced == {7, 8} and graph.agreed == [], "kept for a backward to come"
    assert sync.run_backward(BackwardCall(graph, run, buckets, [], True, (1,))) == [True]
    assert graph.agreed == ["backward"] and len(buckets.begun) == 1
    hooked = MadeUpDdp(hooks=("parameter 7 has a hook",))
    hooked.state = "taken"
    assert strategy(hooked).run_backward(BackwardCall(graph, run, buckets, [], True, ())) == [False], (
        "behind the backward"
    )
    assert hooked.behind == [["parameter 7 has a hook"]]


def test_without_buckets_the_program_runs_alone():
    assert strategy(MadeUpDdp()).run_backward(BackwardCall(MadeUpGraph(), run, None, [], True, ())) == [None]


def test_a_forward_that_ran_no_graph_gives_reduction_back():
    adapter = MadeUpDdp()
    adapter.state = "taken"
    with torch.enable_grad():
        strategy(adapter).no_graph_ran(Invocation(inside_ddp=True), torch.ones(1))
    assert adapter.restored == ["a forward ran without any compiled graph"]


@pytest.mark.parametrize(("graphs", "uneven", "token"), [([0, 1], True, 2), ([0], True, 1), ([0, 1], False, 1)])
def test_several_graphs_reduce_gradients_as_they_arrive_where_ranks_may_differ(graphs, uneven, token):
    adapter = MadeUpDdp(uneven=uneven)
    sync, call = strategy(adapter), Invocation(inside_ddp=True)
    sync.begin_call(call)
    call.graphs += graphs
    result = torch.ones(1, requires_grad=True) * 2
    with torch.enable_grad():
        sync.after_call(Variant(tuple(graphs), training=True), call, result)
    assert int(sync.token(call)) == token and len(adapter.arriving) == (token == 2)
    assert [sync.reduces_in_program(SimpleNamespace(number=n)) for n in graphs] == [token != 2] * len(graphs)


def test_a_step_under_no_sync_reduces_as_gradients_arrive_only_where_asked_for_by_hand():
    sync, call = strategy(MadeUpDdp(uneven=True, sync=False)), Invocation(inside_ddp=True)
    sync.begin_call(call)
    call.graphs += [0, 1]
    with torch.enable_grad():
        sync.after_call(Variant((0, 1), training=True), call, torch.ones(1, requires_grad=True) * 2)
    assert int(sync.token(call)) == -2


def test_ddps_own_reducer_waits_for_every_gradient():
    adapter = MadeUpDdp()
    sync = strategy(adapter)
    adapter.state = "stock"
    assert sync.awaited(GRADS, {7}) == {0, 1}
    adapter.state = "taken"
    assert sync.awaited(GRADS, {7}) == {1}, "ranks say together that there is none of parameter 7"
    adapter.covers_all_params = True
    assert sync.awaited(GRADS, ()) == frozenset()


LAYOUT = tuple(
    SimpleNamespace(name=name, places=tuple((number, 0) for number in numbers))
    for name, numbers in (("bucket0", (4, 3)), ("bucket1", (2, 1)), ("bucket2", (0,)))
)


class NotingBuckets:
    """Bucket memory that notes what is started and waited for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.used: frozenset[int] = frozenset()

    def begin(self, used: Iterable[int]) -> None:
        self.used = frozenset(used)

    def mark_used(self, numbers: Iterable[int]) -> None:
        self.used |= frozenset(numbers)

    def acquire(self, name: str) -> str:
        return name

    def start(self, name: str, memory: str) -> None:
        self.calls.append(("start", name))

    def wait(self, name: str, memory: str) -> None:
        self.calls.append(("wait", name))


@pytest.fixture
def begun(monkeypatch):
    """Make one backward's gradients, of which those of `coming` will be added."""

    def make(coming: set[int], waits: bool = False) -> tuple[ArrivingGradients, NotingBuckets]:
        monkeypatch.setattr("dcompile.compat.autograd.will_accumulate", lambda number: number in coming)
        buckets, params = NotingBuckets(), {number: (lambda number=number: number) for number in range(5)}
        layout: Any = LAYOUT
        return ArrivingGradients(layout, buckets, params, coming, waits), buckets  # type: ignore[arg-type]

    return make


def started(buckets: NotingBuckets) -> list[str]:
    return [name for what, name in buckets.calls if what == "start"]


def test_a_bucket_waits_for_its_gradients_and_for_earlier_buckets(begun):
    arriving, buckets = begun({0, 1, 2, 3, 4})
    arriving.arrived(2, "c")
    arriving.arrived(1, "b")
    arriving.arrived(4, "e")
    assert started(buckets) == [], "the second is complete, the first is not"
    arriving.arrived(3, "d")
    assert started(buckets) == ["bucket0", "bucket1"]
    arriving.finish()
    assert started(buckets) == ["bucket0", "bucket1", "bucket2"]
    assert [name for what, name in buckets.calls if what == "wait"] == ["bucket0", "bucket1", "bucket2"]


def test_nobody_waits_for_gradients_that_do_not_come(begun):
    arriving, buckets = begun({3})
    arriving.arrived(3, "d")
    assert started(buckets) == ["bucket0", "bucket1", "bucket2"] and buckets.used == {3}


def test_where_hooks_change_gradients_all_is_reduced_at_the_end(begun):
    arriving, buckets = begun({3}, waits=True)
    arriving.arrived(3, "d")
    assert started(buckets) == []
    arriving.finish()
    assert started(buckets) == ["bucket0", "bucket1", "bucket2"]


def test_a_gradient_that_comes_too_late_is_an_error(begun):
    arriving, _ = begun({3})
    arriving.arrived(3, "d")
    with pytest.raises(DcompileError, match=r"parameter head got a gradient .* use_reentrant=False"):
        arriving.arrived(4, "head")
