"""The table of adapters: the first row that detects a wrapper has the model, and models without one are plain."""

from __future__ import annotations

import pytest
from torch import nn

from dcompile.capture.adapters import table
from dcompile.capture.adapters.gradient_sync import GradientSync
from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.capture.adapters.table import ADAPTERS, AdapterRow, WrappedModule, sync_for
from dcompile.config import Config


def test_names_are_those_of_the_ways_to_distribute() -> None:
    assert [row.name for row in ADAPTERS] == ["zero", "ddp", "fsdp2", "fsdp1"]


def test_a_plain_module_has_no_row() -> None:
    wrapped = WrappedModule(nn.Linear(2, 2), Config.make())
    assert sync_for(wrapped) is None and not wrapped.stock
    assert WrappedModule(nn.Linear(2, 2), Config.make(options={"distributed": "stock"})).stock


def test_the_first_row_that_detects_something_makes_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(name: str, found: object) -> AdapterRow:
        def make(detected: object, wrapped: WrappedModule) -> GradientSync:
            adapter = PlainAdapter()
            adapter.name = f"{name} of {detected} on {type(wrapped.module).__name__}"
            return GradientSync(adapter)

        return AdapterRow(name, lambda at: found, make)

    monkeypatch.setattr(table, "ADAPTERS", (row("none", None), row("first", 1), row("second", 2)))
    sync = sync_for(WrappedModule(nn.Linear(2, 2), Config.make()))
    assert sync is not None and sync.adapter.name == "first of 1 on Linear"
