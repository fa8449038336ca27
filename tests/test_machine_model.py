import dataclasses
import json

import pytest

from dcompile.machine_model import TABLE, Link, collective_seconds, from_record, round_figures, table_figures, to_record

H200 = TABLE["h200"]


def test_device_names_find_their_line():
    assert table_figures("cpu").name == "cpu"
    assert table_figures("NVIDIA H200").name == "h200"
    assert table_figures("NVIDIA A100-SXM4-80GB").name == "a100"
    assert table_figures("NVIDIA B300").name == "h100"  # unknown: the nearest there is


@pytest.mark.parametrize("figures", TABLE.values(), ids=TABLE)
def test_records_keep_everything(figures):
    assert from_record(json.loads(json.dumps(to_record(figures)))) == figures


@pytest.mark.parametrize(
    "change",
    [
        {"memory_gbs": 0},
        {"memory_gbs": "fast"},
        {"tflops": []},
        {"links": [[2, 1.0]]},
        {"links": [[2, float("nan"), 1.0, 1.0]]},
        {"interference": -1},
        {"crowding": None},
        {"sustained": 0},
        {"library_us": None},
    ],
)
def test_what_is_no_record_is_refused(change):
    with pytest.raises(ValueError, match="not the figures"):
        from_record({**to_record(H200), **change})
    with pytest.raises(ValueError, match="is missing"):
        from_record({})


def test_rounding_is_coarse_and_settles():
    noisy = dataclasses.replace(H200, memory_gbs=H200.memory_gbs * 1.03)
    assert round_figures(noisy).memory_gbs == round_figures(H200).memory_gbs
    assert round_figures(round_figures(H200)) == round_figures(H200)
    assert round_figures(H200).memory_gbs == pytest.approx(H200.memory_gbs, rel=0.1)


def test_a_group_inside_a_node_is_served_by_the_smallest_link_that_reaches_all():
    assert [H200.link(n).ranks for n in (2, 3, 8)] == [2, 8, 8]


def test_collectives_cost_what_a_ring_moves():
    line = dataclasses.replace(H200, links=(Link(8, gbs=100.0, latency_us=10.0, hop_us=2.0),), network=None)
    gather = collective_seconds(line, "all_gather", 8 * 10**8, 8)
    assert gather == pytest.approx(7e-3 + 24e-6)
    assert collective_seconds(line, "reduce_scatter", 8 * 10**8, 8) == gather
    assert collective_seconds(line, "all_reduce", 8 * 10**8, 8) == pytest.approx(14e-3 + 38e-6)
    assert collective_seconds(line, "all_reduce", 8 * 10**8, 1) < 1e-5


def test_between_nodes_the_adapters_of_a_group_add_up():
    wire = Link(1 << 20, gbs=10.0, latency_us=20.0, hop_us=5.0)
    line = dataclasses.replace(H200, links=(Link(8, gbs=100.0, latency_us=10.0, hop_us=2.0),), network=wire)
    size = 10**9
    whole_nodes = collective_seconds(line, "all_gather", size, 16)  # a ring for each of eight adapters
    assert whole_nodes == pytest.approx((20 + 14 * 2 + 5) * 1e-6 + size * 15 / 16 / 80e9)
    one_of_each = collective_seconds(line, "all_gather", size, 2, stride=8)
    assert one_of_each == pytest.approx((20 + 5) * 1e-6 + size / 2 / 10e9)
    many = [collective_seconds(line, "all_gather", 1000, n) for n in (64, 1024)]
    assert many[1] > 10 * many[0]  # a ring's latency grows with its ranks
    trees = [collective_seconds(line, "all_reduce", 1000, n) for n in (64, 1024)]
    assert trees[1] < 2 * trees[0]  # that of a tree with their logarithm


@pytest.mark.parametrize(
    ("kind", "mib", "measured_ms"),
    [
        ("all_gather", 116, 0.260),
        ("all_gather", 416, 0.854),
        ("reduce_scatter", 416, 0.894),
        ("all_reduce", 416, 1.391),
    ],
)
def test_two_h200_are_met_within_a_quarter(kind, mib, measured_ms):
    assert collective_seconds(H200, kind, mib << 20, 2) * 1e3 == pytest.approx(measured_ms, rel=0.25)
