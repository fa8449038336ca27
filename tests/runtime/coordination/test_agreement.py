"""Agreement over the store: ranks are threads here."""

import re
import time

import pytest

from dcompile.errors import PlanMismatchError
from dcompile.runtime.coordination import agreement, wait_policy
from dcompile.runtime.coordination.agreement import _compare_lines, any_rank_objection
from tests.runtime.ranks import Ranks


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(wait_policy, "BEAT_S", 0.05)
    monkeypatch.setattr(wait_policy, "STALE_S", 0.4)
    made = Ranks(monkeypatch)
    yield made
    made.stop()


def lines_of(plan):
    return [("plan", ""), *((line, "") for line in plan)]


def meet(ranks, plans, timeout_s=5.0, world=None, lines=None):
    lines = lines or ranks.start(world or len(plans), len(plans))
    return ranks.each(lambda line: _compare_lines(line, lines_of(plans[line.rank]), timeout_s), lines)


def test_equal_plans(ranks):
    assert meet(ranks, [["a", "b"]] * 4) == [None] * 4


@pytest.mark.parametrize(
    ("plans", "entry", "said"),
    [
        ([["a", "b"], ["a", "c"]], 2, ("rank 0: b", "rank 1: c")),
        ([["a"], ["a", "b"]], 2, ("rank 0: (nothing)", "rank 1: b")),
        ([["a"], ["a"], ["x"]], 1, ("rank 0: a", "rank 2: x")),
        ([["a=1\nb=1\nc=1\nd=1"], ["a=1\nb=2\nc=1\nd=2"]], 1, ("rank 0: b=1, d=1\n", "rank 1: b=2, d=2\n")),
    ],
)
def test_every_rank_is_told_the_same_first_difference(ranks, plans, entry, said):
    messages = meet(ranks, plans)
    assert len(set(messages)) == 1
    assert f"first at entry {entry}" in messages[0] and all(text in messages[0] for text in said)


def test_each_meeting_is_about_its_own_lines(ranks):
    lines = ranks.start(2)
    assert meet(ranks, [["a"]] * 2, lines=lines) == [None] * 2
    assert meet(ranks, [["b"]] * 2, lines=lines) == [None] * 2


def test_look_ups_of_a_rank_do_not_grow_with_their_number(ranks, monkeypatch):
    monkeypatch.setattr(wait_policy, "BEAT_S", 5.0)  # on a busy machine somebody may be late
    lines = ranks.start(16)
    asked = []
    for line in lines:
        store = line.store

        class Counting:
            def __getattr__(self, name, store=store, rank=line.rank):
                asked.append((rank, name))
                return getattr(store, name)

        line.store = Counting()
    assert meet(ranks, [["a"]] * 16, lines=lines) == [None] * 16
    # polling apart: what is set and fetched
    for rank in range(1, 16):
        assert sum(1 for who, name in asked if who == rank and name != "check") <= 4


def test_a_rank_that_never_comes_is_an_error_in_time_on_all_others(ranks):
    messages = meet(ranks, [["a"]] * 2, timeout_s=0.3, world=3)
    assert len(set(messages)) == 1
    assert "at most 0.3 s" in messages[0] and "rank 2 has not reported" in messages[0]
    assert "has not compiled it, as every rank has to" in messages[0]


def test_the_clock_stands_still_while_a_peer_compiles(ranks):
    lines = ranks.start(2)

    def come(line):
        if line.rank:
            with line.busy("compiling"):
                time.sleep(1.0)
        return _compare_lines(line, lines_of(["a"]), 0.4)

    assert ranks.each(come, lines) == [None, None]


@pytest.mark.parametrize(
    ("process", "limit_s", "said"),
    [
        ({"start": 1}, 60.0, r"rank 1 is gone: its process \d+ has ended"),
        ({}, 0.6, r"rank 1 has been silent for \d\.\d s: its process \d+ is there, perhaps in a long call"),
        ({"host": "elsewhere"}, 0.6, r"rank 1 has been silent for \d\.\d s: its process is suspended, .* or gone"),
    ],
)
def test_and_goes_on_when_its_heartbeat_stops_unless_its_process_has_ended(ranks, process, limit_s, said):
    lines = ranks.start(2)

    def come(line):
        if line.rank:
            with line.busy("compiling"):
                ranks.silence(line, **process)
                return None
        began = time.monotonic()
        with pytest.raises(PlanMismatchError, match=said) as error:
            _compare_lines(line, lines_of(["a"]), limit_s)
        return str(error.value), time.monotonic() - began

    (message, took), _ = ranks.each(come, lines)
    assert abs(float(re.search(r"rank 0 waited (\d+\.\d) s for", message)[1]) - took) < 0.3 and took < 3


def test_a_rank_that_is_gone_is_named_rather_than_others_that_miss_it(ranks):
    lines = ranks.start(4)
    ranks.silence(lines[3], start=1)
    first, *_ = ranks.each(lambda line: _compare_lines(line, lines_of(["a"]), 60.0), lines[:1])
    assert "rank 3 is gone" in first and first.endswith("; 2 more are missing")


def test_a_rank_that_goes_on_without_coming_is_noticed(ranks):
    """It runs its next collective by the old plan: nobody will come, whoever waits."""
    lines = ranks.start(2)

    def run(line):
        line.count("all-reduce of gradient bucket0")
        if line.rank:
            return _compare_lines(line, lines_of(["all_reduce other"]), 30, causes="Look there.")
        line.count("all-reduce of gradient bucket0")
        for _ in range(100):
            line.check()
            time.sleep(0.05)
        return None

    began = time.monotonic()
    first, second = ranks.each(run, lines)
    assert first == second and time.monotonic() - began < 3
    assert "first at collective 2" in first and "rank 0: all-reduce of gradient bucket0 (as before)" in first
    assert "rank 1: all_reduce other" in first and first.endswith("Look there.")


@pytest.mark.parametrize(("places", "told"), [(("m.py:3", "m.py:3"), True), (("", ""), False)])
def test_captures_that_differ_in_the_models_code_say_what_to_do_if_they_are_meant_to(ranks, places, told):
    lines = ranks.start(2)

    def come(line):
        graphs = [("graphs", ""), ("settings", ""), (f"call {line.rank}", places[line.rank])]
        return _compare_lines(line, graphs, 5.0, "Meant? Do this.", "Look there.")

    first, second = ranks.each(come, lines)
    assert first == second and ("with the same settings. Meant? Do this." in first) == told
    assert "ranks disagree on their graphs, first at entry 2" in first and first.endswith("Look there.")


def test_a_rank_that_has_ended_is_not_waited_for(ranks):
    lines = ranks.start(2)
    began = time.monotonic()

    def come(line):
        if line.rank:
            line.end()
            return None
        return _compare_lines(line, lines_of(["a"]), 60)

    first, _ = ranks.each(come, lines)
    assert "rank 1 has ended without" in first and time.monotonic() - began < 20


def test_a_meeting_lasts_as_long_as_the_groups_time_limit_at_least(ranks):
    """Eager ranks wait so long for one that does something alone, an evaluation for one."""
    (line,) = ranks.start(1)
    (group,) = ranks.groups
    for group.seconds, expected in ((2.0, agreement.TIMEOUT_S), (1800.0, 1800.0)):
        assert agreement._limit_s(line) == expected


@pytest.mark.parametrize(
    ("said", "heard"), [(["", "", ""], ""), (["", "no", ""], "rank 1: no"), (["no", "", "no"], "rank [02]: no")]
)
def test_all_ranks_hear_what_one_says(ranks, monkeypatch, said, heard):
    lines = ranks.start(3)
    groups = {line.rank: group for line, group in zip(lines, ranks.groups, strict=True)}
    monkeypatch.setattr(agreement, "peers_of", lambda group: lines[group.rank])
    answers = ranks.each(lambda line: any_rank_objection(groups[line.rank], "gradients", said[line.rank]), lines)
    assert len(set(answers)) == 1 and re.fullmatch(heard, answers[0])


def test_what_was_said_before_a_restart_is_not_believed(ranks, monkeypatch):
    lines = ranks.start(2)
    store = ranks.groups[0].store
    assert meet(ranks, [["old"], ["old"]], lines=lines) == [None, None]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = ranks.start(2, store=store)
    assert meet(ranks, [["new"], ["new"]], lines=again) == [None, None]
