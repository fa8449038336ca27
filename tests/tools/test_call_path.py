"""The page on the path of one call notices functions that have moved."""

from __future__ import annotations

import sys

import pytest

import dcompile
from dcompile.capture.adapters.ddp_sync import DdpSync
from dcompile.config import Config
from tools.call_path import LANDMARKS, CallPath, Landmark, summary


def test_a_function_is_summed_up_by_its_docstring_or_by_that_around_it():
    assert summary("api.py", "compile") == " ".join(str(dcompile.compile.__doc__).split("\n\n")[0].split())
    assert summary("capture/adapters/ddp_sync.py", "DdpSync.__init__") == str(DdpSync.__doc__).split("\n\n")[0]


@pytest.mark.parametrize("function", ["compiles", "Entry.enters", "Entry.__init__.inside"])
def test_a_function_that_is_not_in_its_file_is_an_error(function):
    with pytest.raises(LookupError, match="has no"):
        summary("capture/entry.py", function)


def test_landmarks_are_missed_until_they_are_entered(monkeypatch):
    assert CallPath().missed() == [*LANDMARKS]
    mark = Landmark("config.py", "Config.make", "Settings are read")
    monkeypatch.setattr("tools.call_path._LOOKUP", {(mark.file, mark.function): mark})
    monkeypatch.setattr("tools.call_path._FUNCTIONS", {mark.function})
    found, before = CallPath(), sys.getprofile()
    sys.setprofile(found.watch)
    try:
        Config.make()
        Config.make()
    finally:
        sys.setprofile(before)
    assert found.sections == [(mark, [("config.py", "Config.make")])]
