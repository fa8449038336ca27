"""Small all-reduces as one kernel between two GPUs."""

import pytest

pytestmark = pytest.mark.gpu
CASES = "tests.distributed.one_shot_cases:"
GRAPHS = {"triton.cudagraphs": True}


@pytest.mark.parametrize("options", [{}, GRAPHS], ids=["plain", "recorded"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sums_are_nccls(ranks, dtype, options):
    for found in ranks.run(CASES + "summed", 120, dtype=dtype, **options):
        print(found)
        assert found["worst"] == 0  # two summands are rounded once, either way
        assert found["notes"] == ()
        assert found["replays"] >= 3 if options else found["starts"] >= 6 * 3


@pytest.mark.parametrize("reached", [True, False], ids=["one kernel", "NCCL"])
@pytest.mark.parametrize("options", [{}, GRAPHS], ids=["plain", "recorded"])
@pytest.mark.parametrize(("norm", "rows"), [("RMSNorm", 1), ("RMSNorm", 32), ("LayerNorm", 5)])
def test_kernels_that_start_early_read_the_weights_of_their_call(ranks, options, reached, norm, rows):
    for found in ranks.run(CASES + "decoded", 120, reached=reached, norm=norm, rows=rows, **options):
        print(found)
        assert found["worst"] < 1e-2 and found["kernels"] > 0 and found["same"]
        assert bool(found["notes"]) != reached
        assert found["epilogues"] >= 8 if reached else found["epilogues"] == 0
        assert found["replays"] >= 8 if options else True


@pytest.mark.parametrize("options", [{}, GRAPHS], ids=["plain", "recorded"])
def test_a_job_that_is_called_off_ends_a_kernel_that_waits(ranks, options):
    for kind, message, took in ranks.run(CASES + "called_off", 90, **options):
        print(f"{kind} after {took:.2f} s")
        assert kind == "PlanMismatchError" and "rank 1 has had enough" in message
        assert took < 15
