"""Which sources lead through a layer's."""

from __future__ import annotations

from typing import Any

import pytest
from torch._dynamo.source import AttrSource, GetItemSource, LocalSource, UnspecializedNNModuleSource

from dcompile.compat.layer_calls import guard_match
from dcompile.compat.layer_calls.guard_match import Within

LAYERS = AttrSource(LocalSource("self"), "layers")
LAYER = GetItemSource(LAYERS, 1)


def test_ways_through_a_layer_are_within_it_and_no_others() -> None:
    within = Within(LAYER)
    assert within(LAYER) and within(GetItemSource(LAYERS, 1))
    assert within(AttrSource(UnspecializedNNModuleSource(LAYER), "weight"))
    assert not within(LAYERS) and not within(AttrSource(GetItemSource(LAYERS, 0), "weight"))


def test_each_source_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards of PEFT's adapters share ways of 20 steps: to walk each anew took a third of the time of recording."""
    seen: list[Any] = []
    parts = guard_match._parts
    monkeypatch.setattr(guard_match, "_parts", lambda source: (seen.append(source), parts(source))[1])
    way = LAYER
    for step in range(20):
        way = AttrSource(way, f"part{step}")
    leaves = [AttrSource(way, f"leaf{number}") for number in range(10)]
    within = Within(LAYER)
    assert all(map(within, [*leaves, *leaves]))
    assert len(seen) == 30
