"""A GPU that is stuck in a collective: ranks are threads, the GPU is an object that knows how far it has come."""

import re
import threading
import time

import pytest

from dcompile import compat
from dcompile.errors import PlanMismatchError
from dcompile.runtime.coordination import heartbeat, wait_policy
from dcompile.runtime.coordination import heartbeat as module
from tests.runtime.ranks import Ranks

ABORTING = ("dcompile abort", "dcompile communicators")


class Gpu:
    """Rank 0's: has come through so many events, and is stuck; an abort frees it."""

    def __init__(self):
        self.done, self.recorded, self.made = 0, 0, 0
        self.free = threading.Event()

    def synchronize(self):
        while not self.free.is_set():
            time.sleep(0.005)

    def event(gpu):
        class Event:
            def __init__(self):
                gpu.made += 1

            def record(self, stream):
                assert stream == "the stream of 7"
                gpu.recorded += 1
                self.number = gpu.recorded

            def query(self):
                return gpu.done >= self.number

        return Event


@pytest.fixture
def gpu(monkeypatch):
    found = Gpu()
    monkeypatch.setattr(heartbeat.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(heartbeat.torch.cuda, "Event", found.event())
    monkeypatch.setattr(heartbeat, "raw_stream", lambda device: 7)
    monkeypatch.setattr(heartbeat.torch.cuda, "current_stream", lambda device: "the stream of 7")
    return found


@pytest.fixture
def ranks(monkeypatch, gpu, exits):
    made = Ranks(monkeypatch)
    monkeypatch.setattr(compat.groups, "can_abort", lambda group: True)
    monkeypatch.setattr(compat.groups, "abort", lambda group: group.rank or gpu.free.set())
    for name, seconds in (("STUCK_S", 0.05), ("GRACE_S", 0.1), ("LAST_S", 2.0)):
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(wait_policy, "STALE_S", 0.2)
    monkeypatch.setattr(wait_policy, "BEAT_S", 0.05)
    monkeypatch.setattr(heartbeat, "GONE_S", 0.2)
    yield made
    for line in made.lines:
        line.reported.set()  # nobody is to be ended once this test is over
    made.stop()  # no line begins an abort from here on
    # by name, for those that are not started yet count too, and cannot be joined
    until(lambda: not any(thread.name in ABORTING for thread in threading.enumerate()))


@pytest.fixture
def exits(monkeypatch):
    found = []
    monkeypatch.setattr(module.os, "_exit", found.append)
    return found


def start(line, label):
    line.count(label)
    line.marks.put(line.started, label)


def train(line, gpu, used):
    """A step that starts a collective, reads something back from the GPU, and goes on with it."""
    line.enter()
    start(line, "all-reduce of gradient bucket0")
    gpu.synchronize()
    used.append("a wrong value")


def until(condition, seconds=3.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_marks_tell_where_the_gpu_is_and_use_events_again(gpu):
    found = heartbeat.ProgressEvents()
    for number in range(3):
        found.put(number, f"collective {number}")
    assert found.oldest().label == "collective 0"
    gpu.done = 2
    assert found.oldest().label == "collective 2"
    gpu.done = 3
    assert found.oldest() is None
    for number in range(10 * heartbeat.SWEEP_COUNT):
        found.put(number, "another")
        gpu.done = gpu.recorded - 2
    assert gpu.made <= heartbeat.SWEEP_COUNT + 2, "those that the GPU is through with serve again"


def test_a_rank_that_dies_in_a_collective_ends_the_host_of_the_other(ranks, gpu, exits):
    first, second = ranks.start(2)
    second.count("all-reduce of gradient bucket0")
    ranks.silence(second, start=1)  # as killed: another process has its number now
    used = []
    with pytest.raises(PlanMismatchError) as error:
        train(first, gpu, used)
    assert "rank 0 was waiting for the all-reduce of gradient bucket0, number 1 of this group" in str(error.value)
    assert re.search("rank 1 is gone: its process [0-9]+ has ended", str(error.value))
    assert used == [] and exits == []
    with pytest.raises(PlanMismatchError, match="bucket0"):
        first.enter()


@pytest.mark.parametrize("process", [{}, {"host": "elsewhere"}])
def test_a_rank_that_is_only_silent_is_waited_for_as_long_as_the_group_does(ranks, gpu, process):
    first, second = ranks.start(2)
    start(first, "a")
    ranks.silence(second, **process)
    time.sleep(0.5)
    assert not first.aborted, "though silent for longer than any limit but the group's"
    for group in ranks.groups:
        group.seconds = 0.6
    until(lambda: first.aborted)
    assert "rank 1 has been silent for" in first.aborted
    assert ("which cannot be seen from here" if process else "is there, perhaps in a long call") in first.aborted


def test_a_slow_rank_is_waited_for(ranks, gpu):
    first, _ = ranks.start(2)
    start(first, "a")
    time.sleep(1)
    assert not first.aborted
    gpu.done = 1
    assert first.stuck_in() is None


def test_a_rank_that_has_ended_early_is_named(ranks, gpu):
    first, second = ranks.start(2)
    second.count("a")
    start(first, "a")
    start(first, "b")
    gpu.done = 1
    ranks.each(lambda line: line.end(), [second])
    until(lambda: first.aborted)
    assert "rank 1 has ended after 1 collectives, but rank 0 has started the b, number 2" in first.aborted


def test_an_abort_by_another_rank_gets_the_host_out_of_its_wait(ranks, gpu, exits):
    first, second = ranks.start(2)
    used = []
    poster = threading.Timer(0.2, lambda: ranks.each(lambda line: line.call_off("the reason"), [second]))
    poster.start()
    with pytest.raises(PlanMismatchError, match="the reason"):
        train(first, gpu, used)
    poster.join()
    assert used == [] and exits == []


def test_where_nothing_is_under_way_the_host_hears_of_it_at_its_next_call(ranks, gpu, exits):
    first, second = ranks.start(2)
    first.enter()
    ranks.each(lambda line: line.call_off("the reason"), [second])
    until(gpu.free.is_set)
    time.sleep(0.3)
    with pytest.raises(PlanMismatchError, match="the reason"):
        first.enter()
    assert exits == []


def test_a_host_that_does_not_come_out_of_its_wait_is_ended(ranks, gpu, exits, monkeypatch, capsys):
    monkeypatch.setattr(module, "LAST_S", 0.1)
    first, second = ranks.start(2)
    start(first, "all-reduce of gradient bucket0")  # by a thread that nobody knows
    ranks.each(lambda line: line.call_off("dcompile: the reason"), [second])
    until(lambda: exits == [1])
    assert "dcompile: the reason\n" in capsys.readouterr().err


def test_without_a_store_a_stuck_collective_is_still_named(ranks, gpu, exits, monkeypatch):
    (first, *_) = ranks.start(2)

    def gone(store):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(first, "_publish_status", gone)
    used = []
    with pytest.raises(PlanMismatchError, match=r"number 1 of this group; the process that keeps the job's store"):
        train(first, gpu, used)
    assert used == [] and exits == []
