"""Pictures of programs: every step is a box, every flow a line, lines lead down, boxes do not overlap."""

import re
from xml.etree import ElementTree

import pytest

from dcompile.ir.diagram import buffer_bytes, bytes_text, draw, flows, kind_of
from dcompile.ir.index import var
from dcompile.ir.nodes import Buffer, Collective, Extern, Program, View, Wait
from tests.ir.fuzz import random_program

SVG = "{http://www.w3.org/2000/svg}"


def boxes_of(picture):
    kinds = ("kernel", "library", "fallback", "collective", "wait")
    return [group for kind in kinds for group in picture.iter(f"{SVG}g") if group.get("class") == kind]


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed):
    program, _ = random_program(seed, size=12)
    picture = ElementTree.fromstring(draw(program))
    boxes = boxes_of(picture)
    assert len(boxes) == len(program.steps)
    lines = [group for group in picture.iter(f"{SVG}g") if group.get("class") == "flow"]
    assert len(lines) == len(flows(program.steps))
    for line in lines:
        points = [float(number) for number in re.findall(r"-?[0-9.]+", line.find(f"{SVG}path").get("d"))]
        assert points[-1] > points[1]  # downwards
    seen = []
    for box in boxes:
        rect = {name: float(box.find(f"{SVG}rect").get(name)) for name in ("x", "y", "width", "height")}
        left, right, top = rect["x"], rect["x"] + rect["width"], rect["y"]
        assert left >= 0 and right <= float(picture.get("width"))
        assert not any(top == other and left < end and start < right for start, end, other in seen)
        seen.append((left, right, top))


def size_of(text):
    """Left, right, top and bottom of a text, by the width that characters have here."""
    small = text.get("font-size") == "8"
    left, base = float(text.get("x")), float(text.get("y"))
    return left, left + len(text.text) * (5 if small else 6.2), base - (7 if small else 9), base + 2


@pytest.mark.parametrize("seed", range(8))
def test_words_beside_lines_are_whole_and_apart_and_off_the_boxes(seed):
    picture = ElementTree.fromstring(draw(random_program(seed, size=12)[0]))
    labels = [size_of(text) for text in picture.iter(f"{SVG}text") if text.get("class") == "label"]
    assert len(labels) == len([group for group in picture.iter(f"{SVG}g") if group.get("class") == "flow"])
    rects = [
        {name: float(value) for name, value in box.find(f"{SVG}rect").items() if name in ("x", "y", "width", "height")}
        for box in boxes_of(picture)
    ]
    others = [(r["x"], r["x"] + r["width"], r["y"], r["y"] + r["height"]) for r in rects]
    for number, (left, right, top, bottom) in enumerate(labels):
        assert left >= 0 and right <= float(picture.get("width"))
        for start, end, upper, lower in [*labels[:number], *others]:
            assert right <= start or end <= left or bottom <= upper or lower <= top


def test_title_and_legend_are_whole_however_small_the_picture_is():
    for name in ("none", "a" * 90):
        picture = ElementTree.fromstring(draw(Program(name, (), (), (), ())))
        texts = {text.text: size_of(text) for text in picture.findall(f"{SVG}text")}
        assert [*texts] == [
            f"{name}: 0 steps, 0 inputs, 0 outputs",
            "kernel",
            "library",
            "fallback",
            "collective",
            "wait",
        ]
        assert all(right <= float(picture.get("width")) for _, right, _, _ in texts.values())


def test_kinds_sizes_and_names_are_shown_and_escaped():
    buffers = tuple(Buffer(name, "float32", (256, 4), (4, 1)) for name in "xyz")
    call = Extern(
        "aten.<mm>", (View("x", (256, 4), (4, 1)),), (), ("y",), "alloc", origin=("layers.0: aten.mm (a.py:3)",)
    )
    steps = (call, Collective("all_reduce", "b0", "ddp", ("y",)), Wait("b0", ("y",)))
    program = Program("graph", ("x",), (View("y", (256, 4), (4, 1)),), buffers, steps)
    assert [kind_of(step) for step in steps] == ["library", "collective", "wait"]
    assert flows(steps) == {(0, 1): ["y"], (1, 2): ["y"]}
    text = draw(program)
    ElementTree.fromstring(text)
    assert "aten.&lt;mm&gt;" in text and "layers.0" in text and "a.py:3" in text
    assert (
        "in 4.0 KiB, out 4.0 KiB" in text
        and "1 input, 1 output" in text
        and "1 inputs" not in text
        and "3 steps, 1 input, 1 output" in text
        and "y 4.0 KiB" in text
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (20 << 20, "20.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_bytes(count, text):
    assert bytes_text(count) == text


def test_sizes_that_only_run_time_knows():
    assert buffer_bytes(Buffer("x", "float32", (2, 3), (3, 1))) == 24
    assert buffer_bytes(Buffer("x", "float32", (var("s0"),), (1,))) is None
