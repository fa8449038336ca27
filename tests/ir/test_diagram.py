"""Programs in DOT: every step is a box, every flow a line; Graphviz's command draws them where there is one."""

import re
import shutil
from xml.etree import ElementTree

import pytest

from dcompile.ir import diagram
from dcompile.ir.buffers import Buffer
from dcompile.ir.diagram import COLOURS, buffer_bytes, bytes_text, dot, flows, kind_of, render
from dcompile.ir.index import var
from dcompile.ir.nodes import Collective, Extern, Program, View, Wait
from tests.ir.fuzz import random_program

SVG = "http://www.w3.org/2000/svg"
STRING = r'"(?:[^"\\]|\\["\\n])*"'
STATEMENT = re.compile(
    rf"  (?:[\w ]+(?: -> \w+)? \[\w+=(?:\w+|{STRING})(?:, \w+=(?:\w+|{STRING}))*\]|subgraph legend .*)"
)


def planted(folder, monkeypatch, script):
    """A command `dot` that is this script."""
    command = folder / "dot"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed):
    program, _ = random_program(seed, size=12)
    first, *lines, last, end = dot(program).split("\n")
    assert (first, last, end) == ("digraph {", "}", "")
    assert all(map(STATEMENT.fullmatch, lines)), lines
    assert len([line for line in lines if re.match(r"  s\d+ \[", line)]) == len(program.steps)
    assert len([line for line in lines if re.match(r"  s\d+ -> s\d+ \[", line)]) == len(flows(program.steps))


def test_kinds_sizes_and_names_are_shown_and_quoted():
    buffers = tuple(Buffer(name, "float32", (256, 4), (4, 1)) for name in "xyz")
    origin = ('layers.0: aten.mm (a"b.py:3)',)
    call = Extern("aten.mm", (View("x", (256, 4), (4, 1)),), (), ("y",), "alloc", origin=origin)
    steps = (call, Collective("all_reduce", "b0", "ddp", ("y",)), Wait("b0", ("y",)))
    program = Program("graph", ("x",), (View("y", (256, 4), (4, 1)),), buffers, steps)
    assert [kind_of(step) for step in steps] == ["library", "collective", "wait"]
    assert flows(steps) == {(0, 1): ["y"], (1, 2): ["y"]}
    text = dot(program)
    assert 'label="graph: 3 steps, 1 input, 1 output"' in text
    assert r'label="aten.mm\nlayers.0\nin 4.0 KiB, out 4.0 KiB\n1 input, 1 output"' in text
    assert r"(a\"b.py:3)\nreads x" in text and 's0 -> s1 [label="y 4.0 KiB"' in text
    assert [text.count(colour) for colour in COLOURS.values()] == [1, 2, 1, 2, 2]  # once in the legend


def test_graphviz_draws_what_it_is_given(tmp_path, monkeypatch):
    planted(tmp_path, monkeypatch, f"""echo '<!DOCTYPE svg>'; echo '<svg xmlns="{SVG}">'; cat; echo '</svg>'""")
    picture = ElementTree.fromstring(render("digraph {}"))
    assert picture.tag == f"{{{SVG}}}svg" and picture.text == "\ndigraph {}"


def test_without_graphviz_there_is_no_picture(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda command: None)
    assert render("digraph {}") is None


def test_a_graph_that_takes_too_long_has_no_picture(tmp_path, monkeypatch):
    planted(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(diagram, "RENDER_TIMEOUT_S", 0.2)
    assert render("digraph {}") is None


def test_what_graphviz_refuses_has_no_picture(tmp_path, monkeypatch):
    planted(tmp_path, monkeypatch, "echo '<svg>'; exit 1")
    assert render("digraph {}") is None


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (20 << 20, "20.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_bytes(count, text):
    assert bytes_text(count) == text


def test_sizes_that_only_run_time_knows():
    assert buffer_bytes(Buffer("x", "float32", (2, 3), (3, 1))) == 24
    assert buffer_bytes(Buffer("x", "float32", (var("s0"),), (1,))) is None
