"""A sample of the sweep on a GPU: what eager does there, compiled; and nothing falls back to ATen that did not before.

`python -m tests.ops.sweep --device cuda` runs every case.
"""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

from tests.ops import record
from tests.ops.cases import all_cases
from tests.ops.pool import run_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CASES, SECONDS = int(os.environ.get("SAMPLE_CASES", "120")), 300
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def answers():
    """Cases of both dtypes in turn, in an order drawn from a seed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_DEVICE", "cuda")
        known = record.load()["failures"]
        piles = [[c for c in all_cases() if c.dtype == dtype and str(c) not in known] for dtype in DTYPES]
        for pile in piles:
            random.Random(SECONDS).shuffle(pile)
        cases = [case for row in zip(*piles, strict=False) for case in row][:CASES]
        yield list(run_all(cases, jobs=min(os.cpu_count() or 1, 12), until=time.monotonic() + SECONDS))


def test_what_eager_does_is_done_compiled(answers):
    failed = [f"{a['case']}: {a['detail']}" for a in answers if a["status"] == "fail"]
    assert not failed, "\n".join(failed)
    assert sum(a["status"] == "pass" for a in answers) >= 10, "hardly anything was tried"


def test_fallbacks_only_shrink(answers):
    news = [line for line in record.grown(answers) if line.startswith("new fallback")]
    assert not news, "\n".join(news)
