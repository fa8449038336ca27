"""Pictures of planned programs: bars where the cost model has them, gaps where it waits, memory with its peak."""

import re

from dcompile.explain.html import draw_memory, draw_schedule

SPANS = [
    ("rows", "compute", 0.0, 100.0, 0.0),
    ("bucket0", "ddp", 100.0, 300.0, 150.0),
    ("columns", "compute", 100.0, 150.0, 0.0),
    ("end", "compute", 400.0, 100.0, 0.0),
]


def bars(svg):
    """(left, width, title) of everything that has a title."""
    pattern = r'<rect x="([\d.]+)" [^>]*width="([\d.]+)"[^>]*><title>([^<]*)</title>'
    return [(float(left), float(width), title) for left, width, title in re.findall(pattern, svg)]


def test_a_collective_has_its_own_lane_and_compute_waits_for_it():
    drawn = bars(draw_schedule("backward0", "backward", SPANS))
    assert [title for *_, title in drawn] == [
        "rows: 100 us", "columns: 150 us", "end: 100 us", "bucket0: 300 us, 150 us exposed"
    ]  # fmt: skip
    (_, first, _), (second, width, _), (third, *_), (left, *_) = drawn
    assert left == second and abs(width - 1.5 * first) < 0.1
    assert third - (second + width) > first, "a gap of 150 us"


def test_what_is_too_narrow_to_be_seen_is_drawn_as_one():
    many = [(f"step{number}", "compute", number * 0.1, 0.1, 0.0) for number in range(10_000)]
    drawn = bars(draw_schedule("forward0", "forward", many))
    assert len(drawn) == 1 and drawn[0][2].startswith("step0, step1, step2, step3, ...: 1 ms")


def test_a_program_of_which_nothing_is_foreseen_has_no_picture():
    assert draw_schedule("forward0", "forward", []) == "" and draw_memory([]) == "" == draw_memory([0, 0])


def test_memory_is_drawn_with_its_peak():
    picture = draw_memory([1024, 4096, 2048])
    assert "peak 4.0 KiB at step 1" in picture and "0 to 2" in picture
    heights = [float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)", picture)]
    assert heights[2] == min(heights)
