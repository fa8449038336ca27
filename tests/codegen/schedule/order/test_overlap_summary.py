"""What is reported about each collective agrees with the schedule of hand-built programs."""

import pytest

from dcompile.codegen.schedule.order.overlap_collectives import (
    overlap_collectives,
    overlap_lines,
    predict_schedule,
    summarize_overlap,
)
from tests.codegen.schedule.order.test_overlap_collectives import GROUPS, backward, forward, machine


def test_a_gather_that_is_used_at_once_is_exposed_and_a_prefetched_one_is_hidden():
    program = overlap_collectives(forward([500, 500]), machine(), GROUPS, early_bytes=1 << 20)
    first, second = summarize_overlap(program, machine(), GROUPS)
    assert (first.bucket, first.kind, first.group) == ("gather0", "all_gather", "g")
    assert (first.earliest_start, first.start, first.wait, first.latest_wait) == (0, 0, 0, 0)
    assert first.exposed_seconds == pytest.approx(first.seconds) and first.hidden_behind == ()
    assert second.earliest_start == second.start == 0 and second.wait == second.latest_wait == 2
    assert second.exposed_seconds == 0 and second.hidden_behind == ("k_a0_0",)  # it takes as long as one kernel


def test_times_are_those_of_the_predicted_schedule():
    program = overlap_collectives(backward([500, 800, 300]), machine(), GROUPS)
    rows, _, exposed = predict_schedule(program, machine(), GROUPS)
    found = summarize_overlap(program, machine(), GROUPS)
    expected = {name: (took, held) for name, lane, _, took, held in rows if lane != "compute"}
    assert {c.bucket: (1e6 * c.seconds, 1e6 * c.exposed_seconds) for c in found} == {
        name: pytest.approx(times, abs=2e-3) for name, times in expected.items()
    }
    assert 1e6 * sum(c.exposed_seconds for c in found) == pytest.approx(exposed, abs=1e-2)
    assert all(c.earliest_start <= c.start <= c.wait <= c.latest_wait for c in found)


def test_a_line_names_places_and_what_hides_the_collective():
    program = overlap_collectives(forward([500, 4000], kernels=5), machine(), GROUPS, early_bytes=1 << 20)
    first, second = overlap_lines(program, machine(), GROUPS)
    begins = "may start before step 0 (k_a0_0), starts before step 0 (k_a0_0), "
    assert first.startswith(f"all_gather gather0 over g: {begins}") and first.endswith(" hidden behind nothing")
    assert second == (
        f"all_gather gather1 over g: {begins}is waited for before step 5 (k_a1_0), is needed before step 5 (k_a1_0); "
        "8.0 us, 3.0 us exposed, hidden behind k_a0_0, k_a0_1, k_a0_2 and 2 more"
    )
