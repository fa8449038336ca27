"""Times of regions: measured once, the same on all ranks, kept from one start to the next."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from dcompile.runtime.coordination.heartbeat import PeerCoordinator, SingleProcess
from dcompile.runtime.measure.region_times import NOT_MEASURED, RegionTimes, measure_us

LAYOUT = ((4, 6), (1, 4), torch.float32)


class Kept:
    """What a disk keeps."""

    def __init__(self, **texts: str) -> None:
        self.texts = texts

    def find_trace(self, key: str) -> str | None:
        return self.texts.get(key)

    def put_trace(self, key: str, text: str) -> None:
        self.texts[key] = text


def rank_of(store: Any) -> PeerCoordinator:
    found = object.__new__(PeerCoordinator)
    found.store = store
    return found


def never() -> float:
    raise AssertionError("it was measured again")


def test_first_rank_decides_and_disks_follow() -> None:
    """Also where the disks of two machines say different things."""
    store, disks = dist.HashStore(), (Kept(old="7.50"), Kept(old="9.00"))
    ranks = [RegionTimes(disk, rank_of(store)) for disk in disks]
    assert [ranks[0].time_us("new", lambda: 3.0), ranks[1].time_us("new", never)] == [3.0, 3.0]
    assert [rank.time_us("old", never) for rank in ranks] == [7.5, 7.5]
    assert disks[0].texts == disks[1].texts == {"new": "3.00", "old": "7.50"}
    assert RegionTimes(disks[1], SingleProcess()).time_us("new", never) == 3.0


def test_ranks_that_measure_at_the_same_time_agree() -> None:
    store = dist.HashStore()

    def measure() -> float:
        assert RegionTimes(None, rank_of(store)).time_us("key", lambda: 5.0) == 5.0  # another rank is faster
        return 4.0

    assert RegionTimes(None, rank_of(store)).time_us("key", measure) == 5.0


def test_failures_are_estimated_on_all_ranks_and_later() -> None:
    store, disk = dist.HashStore(), Kept()
    assert RegionTimes(disk, rank_of(store)).time_us("key", lambda: None) is None
    assert RegionTimes(None, rank_of(store)).time_us("key", lambda: 4.0) is None
    assert disk.texts == {"key": NOT_MEASURED}
    assert RegionTimes(disk, SingleProcess(), measures=False).time_us("other", never) is None


def test_a_call_is_timed_with_inputs_of_its_layout() -> None:
    """Inside a graph that is traced with fake tensors, under autocast; the user's random numbers stay as they are."""
    given = []

    def run(values: list[Any]) -> torch.Tensor:
        given.append(values)
        time.sleep(0.002)
        return values[0] @ values[1].float()

    other, state = ((6, 2), (2, 1), torch.int32), torch.get_rng_state()
    with torch._subclasses.FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        us = measure_us(run, [LAYOUT, other], 32, torch.device("cpu"))
    assert us is not None and 2e3 <= us < 1e6 and len(given) > 1
    x, y = given[-1]
    assert type(x) is torch.Tensor and (x.shape, x.stride(), y.dtype) == ((4, 6), (1, 4), torch.int32)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_fails_or_has_no_room_is_not_timed() -> None:
    called = []

    def fails(values: list[Any]) -> None:
        called.append(values)
        raise RuntimeError("no kernel for it")

    assert measure_us(fails, [LAYOUT], 0, torch.device("cpu")) is None and len(called) == 1
    assert measure_us(fails, [((1 << 45,), (1,), torch.float32)], 0, torch.device("cpu")) is None and len(called) == 1
