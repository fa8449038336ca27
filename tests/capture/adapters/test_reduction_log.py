"""DDP's logging data of backwards that programs reduce: which one is sampled, averages, and buckets."""

from types import SimpleNamespace

from dcompile.capture.adapters.reduction_log import MAX_KEPT_BACKWARDS, ReductionLog
from dcompile.collectives.contract import ParamInfo

ORDER = ((2, 0), (3, 1))
PARAMS = [ParamInfo(number, f"p{number}", (number + 1, 2), "float32", "cpu") for number in range(4)]
PLACES = {0: 0, 2: 1, 3: 2}
"""The reducer has no place for parameter 1, which is frozen."""


def reduced(*times_ns, order=ORDER):
    return SimpleNamespace(order=order, times_ns=list(times_ns))


def test_the_sampled_backward_is_the_first_behind_its_start():
    log = ReductionLog(PARAMS, PLACES)
    assert log.times(0) == {} and log.logged(0) == ({}, {})
    for step in range(3):
        start = 100 * step
        log.record(start, [reduced(start + 10, start + 30, start + 45), reduced(start + 20, start + 40, start + 60)])
    found = log.times(95)
    assert found["backward_comm_time_start"] == 110 and found["backward_comm_time_end"] == 160
    assert found["backward_compute_time_end"] == 140 and found["backward_compute_time"] == 40
    assert found["avg_backward_comm_time"] == 50 and found["backward_compute_comm_overlap_time"] == 30
    assert log.times(999)["backward_comm_time_start"] == 210


def test_programs_without_all_reduces_have_no_times_and_old_ones_go():
    log = ReductionLog(PARAMS, PLACES)
    log.record(0, [reduced(0, 0, 0)])
    assert log.times(0) == {}
    for step in range(MAX_KEPT_BACKWARDS + 5):
        log.record(step, [reduced(step + 1, step + 1, step + 2)])
    assert log.times(0)["backward_comm_time_start"] == 6


def test_buckets_are_told_by_places_in_the_reducer():
    log = ReductionLog(PARAMS, PLACES)
    log.record(0, [reduced(1, 2, 3)])
    texts, numbers = log.logged(0)
    assert texts == {
        "rebuilt_bucket_sizes": "32, 32",
        "rebuilt_per_bucket_param_indices": "1 0, 2",
        "prev_iteration_grad_ready_order_indices": "1, 0, 2",
    }
    assert numbers["has_rebuilt_buckets"] == 1 and numbers["backward_comm_time"] == 2


def test_on_gpus_there_are_no_times():
    log = ReductionLog([ParamInfo(0, "p", (2,), "float32", "cuda")], {0: 0})
    log.record(0, [reduced(1, 2, 3, order=((0,),))])
    assert log.logged(0)[1] == {"has_rebuilt_buckets": 1}
