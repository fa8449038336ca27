"""Verdicts and the page of public scripts, and a script that the child runs; no checkout is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scripts.report import Run, distance, last_words, own_lines, page, section, verdict
from tests.scripts.subjects import SUBJECTS

EAGER = Run(losses=(4.0, 3.0), first=2.0, later=(0.2, 0.2), peak=1e9, lines=10)
INDUCTOR = replace(EAGER, losses=(4.0, 3.0003), first=20.0, later=(0.3, 0.1), breaks={"a": 1})
RUNS = {"eager": EAGER, "inductor": INDUCTOR, "dcompile": replace(INDUCTOR, first=10.0)}


def test_a_side_as_good_as_inductor_passes() -> None:
    assert verdict(RUNS, "float32") == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"losses": (4.0, 3.0009)}, "losses differ from eager's by 3.0e-04, allowed are 2.0e-04"),
        ({"losses": (4.0, float("nan"))}, "losses differ from eager's by inf"),
        ({"losses": (4.0,)}, "losses differ from eager's by inf"),
        ({"breaks": {"a": 1, "b": 1}}, "2 graph breaks, TorchInductor has 1"),
        ({"first": 22.0}, "first step 1.10 of TorchInductor's"),
        ({"later": (0.1, 0.2)}, "later steps 2.00 of TorchInductor's"),
        ({"peak": 2e9}, "peak memory 2.00 of TorchInductor's"),
        ({"failure": "ValueError: no"}, "fails: ValueError: no"),
    ],
)
def test_what_is_worse_is_told(change: dict[str, object], said: str) -> None:
    found = verdict({**RUNS, "dcompile": replace(RUNS["dcompile"], **change)}, "float32")
    assert len(found) == 1 and found[0].startswith(said), found


def test_a_break_that_the_receipt_names_is_explained() -> None:
    run = replace(RUNS["dcompile"], breaks={"a": 2}, own_lines=("dcompile: 2 graphs, 2 graph breaks",))
    assert verdict({**RUNS, "dcompile": run}, "float32") == []
    silent = replace(run, own_lines=("dcompile: 1 graph, no graph break",))
    assert verdict({**RUNS, "dcompile": silent}, "float32") != []


def test_nothing_is_compared_with_a_side_that_has_died() -> None:
    died = Run("RuntimeError: no")
    assert verdict({**RUNS, "inductor": died}, "bfloat16") == []
    assert verdict({**RUNS, "eager": died, "inductor": died}, "float32") == []


def test_losses_are_compared_by_their_size() -> None:
    assert distance((1.0, 202.0), (1.0, 200.0)) == pytest.approx(0.01)
    assert distance((), ()) == float("inf")


def test_lines_of_a_log() -> None:
    own = ("[rank0] dcompile: 1 graph", "2026-11-28 22:48:43,364 - dcompile.passes - INFO - planned", "dcompile: note")
    log = f"step 1\n\x1b[32m{own[0]}\x1b[0m\n{own[1]}\n{own[2]}\nthe dcompile backend: this\nValueError: a\nend\n"
    assert own_lines(log) == own
    assert last_words(log) == "ValueError: a"
    assert last_words("one\ntwo\n") == "two"


def test_a_run_replaces_its_own_section() -> None:
    first = page("", {"a, CPU": section("a, CPU", ["x"], RUNS, []), "b, CPU": section("b, CPU", ["y"], RUNS, ["slow"])})
    second = page(first, {"a, CPU": section("a, CPU", ["z"], RUNS, ["wrong"])})
    assert "| a, CPU | Passes. |" in first and "| a, CPU | Does not pass: wrong. |" in second
    assert "- x" not in second and "- z" in second and "- y" in second
    assert second.count("## ") == 3 and page(second, {}) == second


def test_a_verdict_without_a_peer_says_so() -> None:
    alone = section("a", [], {"eager": EAGER, "dcompile": EAGER}, [])
    assert "not compared with TorchInductor" in alone and "not compared" not in section("a", [], RUNS, [])


def test_names_of_scripts_differ() -> None:
    names = [subject.name for subject in SUBJECTS]
    assert len({*names}) == len(names)


def test_eager_mode_goes_without_the_arguments_of_a_compiler() -> None:
    for subject in SUBJECTS:
        assert not any("{backend}" in part for part in subject.command("dcompile", False))
        assert len(subject.command("eager", False)) == len(subject.command("inductor", False)) - len(subject.compiled)


SCRIPT = """
import sys, torch
assert sys.argv == ["script.py", "--steps", "3"], sys.argv
model = torch.nn.Linear(4, 1)
compiled = torch.compile(model)
optimizers = [torch.optim.SGD([p], 0.01) for p in model.parameters()]
for step in range(int(sys.argv[2])):
    for part in range(2):
        compiled(torch.ones(2, 4)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_steps_of_a_script_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    child = Path(__file__).with_name("child.py")
    command = [sys.executable, str(child), str(tmp_path / "eager"), "eager", "script.py", "--steps", "3"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    found = json.loads((tmp_path / "eager.0.json").read_text())
    assert len(found["losses"]) == 3 and found["losses"][0] > found["losses"][1] > 0
    assert len(found["later"]) == 2 and found["first"] > 0 and found["peak"] > 1e6
    assert found["graphs"] == 1 and not found["breaks"]
    Run(**found)
