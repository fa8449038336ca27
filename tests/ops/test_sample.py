"""A seeded sample of the sweep: what eager does, compiled; and nothing falls back to ATen that did not before.

`make ops-sweep` runs every case. SAMPLE_CASES=600 SAMPLE_SECONDS=600 pytest tests/ops draws on for longer.
"""

import os
import random
import time

import pytest

from tests.ops import record
from tests.ops.cases import DTYPES, all_cases
from tests.ops.pool import run_all

SECONDS = float(os.environ.get("SAMPLE_SECONDS", "120"))
SEED = 20
CASES = int(os.environ.get("SAMPLE_CASES", "30"))


@pytest.fixture(scope="module")
def answers():
    """As many cases as the time allows, in an order that visits all dtypes."""
    rng = random.Random(SEED)
    known = record.load()["failures"]
    piles = [[c for c in all_cases() if c.dtype == dtype and str(c) not in known] for dtype in DTYPES]
    for pile in piles:
        rng.shuffle(pile)
    cases = [case for row in zip(*piles, strict=False) for case in row]
    until = time.monotonic() + SECONDS
    return list(run_all(cases[:CASES], jobs=os.cpu_count() or 1, until=until))


def test_what_eager_does_is_done_compiled(answers):
    failed = [f"{a['case']}: {a['detail']}" for a in answers if a["status"] == "fail"]
    assert not failed, "\n".join(failed)
    assert sum(a["status"] == "pass" for a in answers) >= 10, "hardly anything was tried"


def test_fallbacks_only_shrink(answers):
    news = [line for line in record.grown(answers) if line.startswith("new fallback")]
    assert not news, "\n".join(news)


def test_the_list_counts_itself():
    known = record.load()
    assert known["count"] == sum(map(len, known["fallbacks"].values()))


def test_a_module_that_is_missing_ends_the_sweep():
    """It must not pass for an operator that eager refuses."""
    cases = [c for c in all_cases() if c.entry == "add"][:1]
    with pytest.raises(RuntimeError, match=r"add\|.*No module named 'planted'"):
        list(run_all(cases, jobs=1, limit=1, environment={"OPS_MISSING_AT": str(cases[0])}))


def test_a_worker_that_crashes_costs_one_case():
    """At first both cases, which are one graph; then the one that crashes, before the other."""
    cases = [c for c in all_cases() if c.entry == "add"][:2]
    answers = list(run_all(cases, jobs=1, limit=1, environment={"OPS_CRASH_AT": str(cases[0])}))
    assert [a["status"] for a in answers] == ["fail", "pass"], answers
