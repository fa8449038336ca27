"""The life of a compiled model, call by call: with services, an adapter and graphs that are made up."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from dcompile import compat
from dcompile.capture.call_state import Variant
from tests.capture.made_up import MadeUp, MadeUpAdapter, MadeUpGraph, MadeUpSync, made_up


def called(made: MadeUp, *graphs: int, result: object = None) -> None:
    """One call that runs these graphs."""
    call = made.model.begin(inside_ddp=False)
    for number in graphs:
        made.model.record_forward(made.model.graphs[number])
    made.model.after_call(call, result)
    made.model.end(call)


def with_graphs(*training: bool, made: MadeUp | None = None) -> MadeUp:
    """A model with so many graphs."""
    made = made or made_up()
    made.model.graphs += [MadeUpGraph(number, trains) for number, trains in enumerate(training)]
    return made


@pytest.fixture
def ends(monkeypatch):
    """What runs when the backward ends."""
    found = []
    monkeypatch.setattr(compat.autograd, "at_end_of_backward", found.append)
    monkeypatch.setattr(compat.autograd, "backward_task", lambda: 0)
    return found


# --- calls ---


def test_calls_are_known_by_their_thread_from_begin_to_end():
    made = made_up()
    assert not made.model.is_running()
    outer, inner = made.model.begin(inside_ddp=True), made.model.begin(inside_ddp=False)
    assert made.model.is_running() and (outer.inside_ddp, inner.inside_ddp) == (True, False)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(made.model.is_running()))
    thread.start()
    thread.join()
    made.model.end(inner)
    assert made.model.is_running() and seen == [False]
    made.model.end(outer)
    assert not made.model.is_running() and made.model.calls == {}
    assert made.peers[-1].entered == 2 and made.sync.asked == ["begin call"] * 2


def test_graphs_are_noted_in_the_innermost_call():
    made = with_graphs(True, True)
    made.sync.tokens.append(torch.tensor(1))
    outer, inner = made.model.begin(False), made.model.begin(False)
    assert made.model.record_forward(made.model.graphs[1]) is made.sync.tokens[0]
    assert (outer.graphs, inner.graphs) == ([], [1]) and made.sync.asked[-1] == "forward 1"
    assert made.model.graphs_of_call(made.model.graphs[1]) == [made.model.graphs[1]]


def test_a_graph_that_nobody_calls_through_the_model_is_a_call_of_its_own():
    made = with_graphs(True, False)
    for _ in range(2):
        made.model.record_forward(made.model.graphs[0])
    assert made.model.variants == {(0,): Variant((0,), True)} and made.model.newest is made.model.variants[(0,)]
    made.model.record_forward(made.model.graphs[1])
    assert made.model.newest == Variant((1,), False)
    assert not [asked for asked in made.sync.asked if asked.startswith("forward")], "no call, so nothing of one"


def test_each_kind_of_call_is_looked_through_once():
    made = with_graphs(True, True)
    made.sync.objections = ("a parameter is used outside",)
    called(made, 0, result="y")
    called(made, 0, result="y")
    called(made, 0, 1, result="z")
    wanted = ["check y", "objections to (0,)", "after call (0,)", "after call (0,)"]
    wanted += ["check z", "objections to (0, 1)", "after call (0, 1)"]
    assert [asked for asked in made.sync.asked if asked.split()[0] in ("check", "objections", "after")] == wanted
    assert made.model.objections() == ["a parameter is used outside"] * 2
    assert made.model.newest is made.model.variants[(0, 1)]


def test_without_gradients_nothing_is_objected_to():
    made = with_graphs(True, False)
    made.sync.objections = ("never asked",)
    with torch.no_grad():
        called(made, 0)
    called(made, 1)
    assert made.model.objections() == [] and not made.model.variants[(0,)].training


def test_a_call_that_runs_no_graph_is_counted_and_changes_no_newest():
    made = with_graphs(True)
    called(made, 0)
    newest = made.model.newest
    called(made)
    assert (made.model.eager_calls, made.model.newest) == (1, newest)
    assert made.sync.asked.count("no graph ran") == 1


def test_the_graphs_of_a_backward_are_those_of_its_call():
    made = with_graphs(True, True, True)
    called(made, 0, 1)
    called(made, 2)
    first, second, third = made.model.graphs
    assert made.model.graphs_of_call(second) == [first, second]
    assert made.model.graphs_of_call(third) == [third]
    call = made.model.begin(False)
    call.graphs += [1, 2]
    assert made.model.graphs_of_call(second) == [second, third], "a call in progress comes first"
    made.model.release()
    assert [graph.number for graph in made.model.graphs] == [0, 1, 2], "as long as others hold them"


# --- reports ---


def test_inference_and_training_are_reported_once_each(ends):
    made = with_graphs(False, True)
    called(made, 0)
    called(made, 0)
    assert made.reports == [made.model]
    called(made, 1)
    made.model.before_backward(made.model.graphs[1], sync=True)
    made.model.before_backward(made.model.graphs[1], sync=True)
    assert len(made.reports) == 1 and len(ends) == 1
    ends[0]()
    assert made.reports == [made.model] * 2
    assert "before backward 1, sync True" in made.sync.asked


def test_a_backward_inside_a_call_is_reported_when_the_call_ends(ends):
    made = with_graphs(True)
    call = made.model.begin(False)
    made.model.record_forward(made.model.graphs[0])
    made.model.before_backward(made.model.graphs[0], sync=True)
    ends[0]()
    assert made.reports == []
    made.model.after_call(call, None)
    assert made.reports == [made.model]


def test_nothing_is_reported_before_it_is_settled_who_reduces(ends):
    made = with_graphs(True)
    made.sync.settled = False
    called(made, 0)
    made.model.before_backward(made.model.graphs[0], sync=False)
    assert ends == []


def test_that_nothing_was_compiled_is_reported_once():
    made = made_up()
    made.model.compiled("code", "code", whole=False)
    called(made)
    called(made)
    assert made.reports == [made.model] and made.model.eager_calls == 2
    whole = made_up()
    whole.model.compiled("code", "code", whole=True)
    called(whole)
    assert whole.reports == [], "a frame of nothing but torch's own"


def test_with_modules_inside_the_last_of_them_reports():
    made, part = with_graphs(False), made_up()
    made.model.add_inside(part.model)
    made.model.add_inside(part.model)
    called(made, 0)
    assert made.reports == [] and made.model.inside == [part.model]


def test_calls_past_the_model_are_a_kind_of_their_own():
    made = made_up()
    made.model.ran_eagerly()
    made.model.ran_eagerly()
    assert made.model.eager_calls == 2 and made.model.newest == Variant((), True) and len(made.reports) == 1


# --- adapters ---


def test_another_adapter_starts_over():
    made = with_graphs(True)
    called(made, 0)
    made.model.shared_buckets.storages["memory"] = 1
    made.model.refuse("a reason")
    sync = MadeUpSync(MadeUpAdapter(groups={"ddp": "the group"}))
    made.model.adopt(sync)
    assert (made.model.graphs, made.model.variants, made.model.newest, made.model.shared_buckets.storages) == (
        [],
        {},
        None,
        {},
    )
    assert sync.model is made.model and made.met == [None, None, "the group"]
    assert made.model.peers is made.peers[-1]


def test_a_process_group_that_changes_leaves_the_adapter_and_new_parameters_forget_buckets():
    adapter = MadeUpAdapter()
    made = with_graphs(True, made=made_up(adapter))
    assert not made.model.has_moved() and not made.model.is_outdated()
    adapter.moved = adapter.changed = True
    assert made.model.has_moved() and adapter.left == ["it has another process group"]
    assert made.model.is_outdated() and made.sync.asked[-1] == "forget buckets"
    made.model.graphs.clear()
    assert not made.model.is_outdated()


def test_sharded_parameters_are_given_back_on_every_group_at_once():
    adapter = MadeUpAdapter(groups={"fsdp0": "one", "fsdp1": "two", "fsdp2": "one"})
    made = with_graphs(True, made=made_up(adapter))
    given_back = []
    made.model.sync.shards = SimpleNamespace(give_back=lambda: given_back.append(True))  # type: ignore[assignment]
    old = made.model.sync
    made.model.give_back(adapter, "a hook")  # type: ignore[arg-type]
    assert [(group, subject) for group, subject, _ in made.agreed] == [
        ("one", "use of FSDP's own hooks, group 0"), ("two", "use of FSDP's own hooks, group 1"),
    ]  # fmt: skip
    assert given_back == [True] and adapter.restored == ["a hook"]
    assert made.model.sync is not old and made.model.adapter is adapter and made.model.graphs == []


# --- agreement between ranks ---


def test_each_plan_is_compared_once_over_every_group():
    adapter = MadeUpAdapter(groups={"a": "one", "b": "two"})
    made = made_up(adapter)
    for plan in (["x"], ["y"], ["x"]):
        made.model.agree_on(plan)
    assert made.agreed == [
        ("one", "collectives plan 1", ["x"]), ("two", "collectives plan 1.1", ["x"]),
        ("one", "collectives plan 2", ["y"]), ("two", "collectives plan 2.1", ["y"]),
    ]  # fmt: skip


def test_collectives_of_the_model_are_compared_over_groups_of_their_own(monkeypatch):
    groups = {"0": "one", "5": "five"}
    monkeypatch.setattr(compat.groups, "group_by_name", groups.get)
    made = made_up(MadeUpAdapter(groups={"ddp": groups["0"]}))
    for _ in range(2):
        made.model.agree_on_own({"0": ["with the gradients"], "5": ["a sum"], "gone": ["of a group that is no more"]})
    made.model.agree_on_own({"5": ["a gather"]})
    assert made.agreed == [
        ("five", "model collectives plan 1", ["a sum"]),
        ("five", "model collectives plan 2", ["a gather"]),
    ]


def test_captures_are_compared_in_calls_of_training_on_several_ranks():
    def compares(adapter=None, in_call=True, **options):
        made = made_up(adapter or MadeUpAdapter(groups={"ddp": "group"}), **options)
        if in_call:
            made.model.begin(False)
        return made.model.compares_captures()

    assert compares()
    assert not compares(MadeUpAdapter()), "no other rank"
    assert not compares(in_call=False)
    assert not compares(distributed="stock")
    with torch.no_grad():
        assert not compares()


def test_compared_captures_are_forgotten():
    made = made_up(MadeUpAdapter(torch.zeros(2), groups={"ddp": "group"}))
    graphs = [MadeUpGraph(0, captured=[("mul", "model.py:1")]), MadeUpGraph(1, captured=[("add", "model.py:2")])]
    made.model.compare_captures(graphs)
    ((group, subject, lines),) = made.agreed
    assert (group, subject) == ("group", "captured graphs")
    texts = [text for text, _ in lines]
    assert [text for text in texts if text.startswith("parameter")] == ["parameter p0 [2] float32 replicated"]
    assert texts[-4:] == ["graph 0 of the call", "mul", "graph 1 of the call", "add"]
    assert [graph.captured for graph in graphs] == [[], []]


# --- capturing ---


def test_while_dynamo_captures_other_ranks_are_told_and_breaks_are_counted_once(monkeypatch):
    counts, breaks = iter((0, 2, 2, 3)), iter(([], ["inside"], ["inside"], ["outside"]))
    monkeypatch.setattr(compat.dynamo, "graph_break_count", lambda: next(counts))
    monkeypatch.setattr(compat.dynamo, "graph_breaks", lambda known=0: next(breaks))
    made = made_up()
    with made.model.compiling("inner", "entry", late_sizes=True):
        pass
    assert made.model.graph_breaks == 2
    with pytest.raises(ValueError), made.model.compiling("entry", "entry", late_sizes=True):
        raise ValueError
    assert made.model.graph_breaks == 2, "the outermost frame ends by a break that was counted"
    assert made.model.breaks == ["inside", "outside"] and made.model.compile_seconds > 0
    assert made.peers[-1].work == ["capturing"] * 2


def test_a_refusal_reaches_what_looks_after_eager_code():
    made, told = made_up(), []
    made.model.sync.eager_regions = SimpleNamespace(refuse=told.append, start=lambda: told.append("start"))  # type: ignore[assignment]
    made.model.refuse("the first reason")
    made.model.refuse("another")
    made.model.compiled("inner", "entry", whole=False)
    made.model.compiled("entry", "entry", whole=False)
    assert told == ["the first reason", "the first reason", "start"]
