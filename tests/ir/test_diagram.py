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
    assert "in 4.0 KiB, out 4.0 KiB" in text and "1 inputs, 1 outputs" in text and "y 4.0 KiB" in text


def test_an_empty_program_is_a_picture_too():
    assert ElementTree.fromstring(draw(Program("none", (), (), (), ()))).get("width") == "360"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (20 << 20, "20.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_bytes(count, text):
    assert bytes_text(count) == text


def test_sizes_that_only_run_time_knows():
    assert buffer_bytes(Buffer("x", "float32", (2, 3), (3, 1))) == 24
    assert buffer_bytes(Buffer("x", "float32", (var("s0"),), (1,))) is None
