"""Heartbeats, calling a job off, and the order of collectives: ranks are threads here."""

import os
import re
import signal
import subprocess
import threading
import time
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dcompile.errors import BuildError, PlanMismatchError
from dcompile.runtime.coordination import heartbeat as module
from dcompile.runtime.coordination.wait_policy import RankProcess, _process_stat
from tests.runtime.ranks import Group, Ranks


@pytest.fixture
def ranks(monkeypatch):
    made = Ranks(monkeypatch)
    yield made
    made.stop()


def until(condition, seconds=3.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_a_rank_says_what_it_is_doing_and_how_far_it_is(ranks):
    first, second = ranks.start(2)
    with first.busy("compiling"):
        until(lambda: (said := second.status_of(0)) is not None and said.doing == "compiling")
    until(lambda: second.status_of(0).doing == "")
    first.count("a")
    until(lambda: second.status_of(0).started == 1)
    assert second.status_of(0).label == "a" and not second.status_of(0).ended


def test_heartbeats_go_on_while_nothing_changes(ranks):
    _, second = ranks.start(2)
    until(lambda: second.status_of(0) is not None)
    beats = second.status_of(0).beats
    until(lambda: second.status_of(0).beats > beats + 2)


def test_the_state_of_a_process_is_seen_on_its_host_alone():
    process = subprocess.Popen(["sleep", "60"])
    mine = RankProcess(RankProcess.current().host, process.pid, _process_stat(process.pid)[1])
    try:
        assert RankProcess.current().state() == "there" == mine.state()
        process.send_signal(signal.SIGSTOP)
        until(lambda: mine.state() == "suspended")
        assert replace(mine, start=mine.start + 1).state() == "gone", "a number that is used again"
        assert replace(mine, host="elsewhere").state() == replace(mine, host="").state() == ""
    finally:
        process.kill()
    until(lambda: mine.state() == "gone")  # a zombie, whose parent has not waited for it
    process.wait()
    assert mine.state() == "gone"


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b"[1]", b"[1,2,3,4,5,6,7,8]", b'[1,"",0,0,0,"",false,[]]', b"[" * 100_000]
)
def test_a_status_that_cannot_be_read_is_none_and_ends_no_heartbeat(ranks, text):
    first, second = ranks.start(2)
    first._ended = True
    first._thread.join()
    second.store.set("beat/0", text)
    beats = second._beats
    until(lambda: second._beats > beats + 2)
    assert second.status_of(0) is None
    second.store.set("abort", b"the \xff reason")
    until(lambda: second.aborted)


def test_what_calls_a_job_off_reaches_every_rank_in_the_same_words(ranks):
    lines = ranks.start(3)
    with pytest.raises(PlanMismatchError, match="the reason"):
        lines[1].call_off("the reason")
    until(lambda: all(line.aborted == "the reason" for line in lines))
    with pytest.raises(PlanMismatchError, match="the reason"):
        lines[2].call_off("another one")
    with pytest.raises(PlanMismatchError, match="the reason"):
        lines[0].count("a")


def test_another_order_of_collectives_is_noticed(ranks):
    first, second = ranks.start(2)
    for label in ("a", "b", "c"):
        first.count(label)
    for label in ("a", "c"):
        second.count(label)
    assert not first.aborted
    second.count("b")
    until(lambda: first.aborted and second.aborted)
    assert first.aborted == second.aborted
    assert "rank 0: c" in first.aborted and "rank 1: b" in first.aborted


def test_the_same_order_at_another_pace_is_none(ranks):
    first, second = ranks.start(2)
    for number in range(3 * module.MAX_REMEMBERED_COLLECTIVES):
        first.count(str(number))
    time.sleep(0.2)
    for number in range(3 * module.MAX_REMEMBERED_COLLECTIVES):
        second.count(str(number))
    time.sleep(0.3)
    assert not first.aborted and not second.aborted


def test_ranks_that_have_done_the_same_end_at_once(ranks):
    lines = ranks.start(3)
    for line in lines:
        line.count("a")
    began = time.monotonic()
    assert ranks.each(lambda line: line.end(), lines) == [None] * 3
    assert time.monotonic() - began < 1


def test_a_rank_that_ends_alone_does_not_wait_long(ranks, monkeypatch):
    monkeypatch.setattr(module, "GOODBYE_S", 0.3)
    first, _ = ranks.start(2)
    first.count("a")
    began = time.monotonic()
    first.end()
    assert 0.2 < time.monotonic() - began < 2
    assert first.status_of(0).ended


def test_a_rank_that_called_the_job_off_stays_until_the_others_have_been_told(ranks):
    """As rank 0, whose process keeps the store, where rank 1 leaves early."""
    first, second = ranks.start(2)
    second._ended = True
    second._thread.join()
    second._ended = False
    with pytest.raises(PlanMismatchError):
        first.call_off("the reason")
    late = threading.Timer(0.3, lambda: second._read_abort(second.store))
    late.start()
    first.end()
    assert second.aborted == "the reason"
    with pytest.raises(PlanMismatchError, match="the reason"):
        second.end()  # nothing has raised it there before
    late.join()


def test_a_child_of_a_fork_does_not_end_its_parent(ranks):
    group = Group(dist.HashStore(), 0, 2)
    line = module.peers_of(group)
    ranks.lines.append(line)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: there are threads
        child = os.fork()
    if not child:
        try:
            module.end_at_exit()
        finally:
            os._exit(line._ended)
    assert os.waitpid(child, 0)[1] == 0


def fails_to_build(gm, inputs):
    try:
        raise OSError("\nno space left\non the device")
    except OSError as error:
        raise BuildError("g++ has failed") from error


def loses_a_key(x):
    return {}["weight"]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (torch.compile(torch.sin, backend=fails_to_build), "BackendCompilerFailed, from OSError: no space left"),
        (loses_a_key, "KeyError: 'weight'"),
        (lambda x: torch.mm(x, x), "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_others_are_told_the_innermost_cause_of_a_ranks_end_and_its_place(ranks, run, said):
    first, second = ranks.start(2)
    try:
        run(torch.ones(2, 3))
    except Exception:
        first.end()
    assert second.failure().startswith(f"rank 0 has ended with {said}"), second.failure()
    assert re.search(r" \(\S*test_heartbeat\.py:\d+\)$", second.failure()), second.failure()


def test_counting_costs_little(ranks):
    (line, _) = ranks.start(2)
    best = 1.0
    for _ in range(5):
        began = time.process_time()
        for _ in range(1000):
            line.count("all-reduce of gradient bucket0 (6553600 elements)")
        best = min(best, time.process_time() - began)
    assert best < 0.02  # 20 us each would still be nothing beside an exchange; it is about one
