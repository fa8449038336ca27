"""dcompile.bisect names the planted place, and finds nothing in a correct model."""

from __future__ import annotations

import pytest

import dcompile
from dcompile.bisect.repro import MAX_LINES
from tests.faults.planted import FAULTS, MODELS, Fault, make


@pytest.mark.parametrize("model", MODELS)
def test_a_correct_model_has_no_difference(model: str) -> None:
    module, x = make(model)
    found = dcompile.bisect(module, x)
    assert not found and "no difference found" in str(found)
    assert found.compared["forward0"] > 1 and found.compared["backward0"] > 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_the_planted_place_is_named(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = make(fault.model)
    monkeypatch.setenv("DCOMPILE_VERIFY", "0")  # which would find some of them at once
    with fault.plant():
        found = dcompile.bisect(module, x)
    assert found.finding is not None, "the fault was not found"
    place = found.finding.place
    assert place.kind == fault.kind, str(found)
    assert fault.place in " ".join((place.name, *place.notes)), str(found)
    if place.kind in ("kernel", "lowering rule"):
        assert found.finding.repro is not None, "no script shows it"
        assert found.finding.repro.script.count("\n") <= MAX_LINES
