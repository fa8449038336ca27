"""When a bucket of gradients is exchanged that autograd adds one by one: in order, once each has come that will."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from dcompile.capture.adapters.arriving_gradients import ArrivingGradients
from dcompile.errors import DcompileError

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
