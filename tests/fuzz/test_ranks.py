"""Random training scripts on two ranks do as with stock PyTorch, and the search finds one that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fuzz import keep as keeping
from tests.fuzz.__main__ import failure, search, smallest
from tests.fuzz.keep import KEPT, keep, kept_case
from tests.fuzz.ranks_checks import RanksCheck


@pytest.fixture(scope="module")
def check():
    made = RanksCheck()
    yield made
    made.ranks.stop()


@pytest.mark.parametrize("path", sorted(KEPT.glob("training_*.json")), ids=lambda path: path.stem)
def test_what_once_failed(check, path):
    name, case = kept_case(path)
    assert name == check.name and failure(check, case) is None


def test_scripts_do_as_with_stock_pytorch(check):
    seeds = (1, 11, 2)
    assert [check.case(seed).wrap.partition("(")[0] for seed in seeds] == ["fsdp2", "fsdp1", "ddp"]
    assert search(check, seeds) == []


class Planted(RanksCheck):
    """Of an input that has been doubled."""

    def case(self, seed, size=None):
        return replace(super().case(seed, size), way="lambda x: module(x * 2)")


def test_a_planted_fault_is_found_and_its_script_shrunk(check, tmp_path, monkeypatch):
    planted = Planted(check.ranks)
    (seed, text), *_ = search(planted, range(2))
    program = smallest(planted, seed, text)
    assert text.startswith("value") and len(program.steps) == 1 and len(program.forward) <= 2
    monkeypatch.setattr(keeping, "KEPT", tmp_path)
    assert kept_case(keep(planted.name, seed, program)) == (planted.name, program) and failure(planted, program)
