"""tools/compare_programs.py finds each difference between two revisions that matters, and no other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tools import compare_programs
from tools.collect_programs import DcompileRevision, ProgramCollector, TextNormaliser
from tools.compare_programs import (
    ERROR,
    GRAPH,
    HOST,
    KERNEL,
    KERNELS,
    LIBRARY,
    ORDER,
    PlannedPrograms,
    compare,
    main,
    parse_renames,
)

PROGRAM = {
    GRAPH: "x = add(a, b)\n",
    ORDER: "lower\nfuse\n",
    "passes/lower.txt": "y = add(x, 1)\n",
    "passes/fuse.txt": "y = add(x, 1)\n",
    KERNELS: f"{KERNEL}int one;\n{KERNEL}int two;\n",
    HOST: "call(kernel0)\n",
}


def write_programs(folder: Path, **programs: Mapping[str, str]) -> Path:
    for program, files in programs.items():
        for name, text in files.items():
            path = folder / program / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


def compare_texts(tmp_path: Path, old, new, *renamed: str, lines: int = 40):
    found: list[str] = []
    old, new = write_programs(tmp_path / "old", **old), write_programs(tmp_path / "new", **new)
    return compare(PlannedPrograms(old, parse_renames(renamed)), PlannedPrograms(new), lines, found.append), found


# --- normalising ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# File: /tmp/x-1/dcompile/runtime/quick.py:12 in f", "# File: dcompile/*.py in f"),
        ('File "/tmp/a/dcompile/runtime/quick.py", line 7, in f', 'File "dcompile/*.py", line , in f'),
        ("# as runtime/quick.py", "# as dcompile/*.py"),
        ("/home/dcompile/tests/models/zoo.py:129", "/home/dcompile/tests/models/zoo.py:129"),
        ("from dcompile.runtime.quick import look", "from dcompile.* import look"),
        ("dcompile.runtime.quick.look(x)", "dcompile.*.look(x)"),
        ("torch.ops.dcompile.check_bounds(x)", "torch.ops.dcompile.check_bounds(x)"),
        ("run.function('dcompile.check_bounds')", "run.function('dcompile.check_bounds')"),
        ("def dcompile_rows_1a2b3c4d(a0):", "def dcompile_rows(a0):"),
        ("dcompile_entry_31", "dcompile_entry"),
        ("Llama_dcompile_entry_31", "dcompile_entry"),
        ("<f at 0x7f1234567890>", "<f at 0x*>"),
        ("float32(0x1.6a09e60000000p-1f)", "float32(0x1.6a09e60000000p-1f)"),
    ],
)
def test_places_in_the_source_tree_are_hidden(text, expected):
    assert TextNormaliser(["dcompile.runtime", "dcompile.runtime.quick"])(text) == expected


def test_kernels_are_numbered_by_first_use():
    assert TextNormaliser([])("call(kffff); call(kabcd)", ["kabcd", "kffff"]) == "call(kernel1); call(kernel0)"


# --- comparing folders ------------------------------------------------------------------------------------------------


def test_equal_programs_have_no_differences(tmp_path):
    result, lines = compare_texts(tmp_path, {"a": PROGRAM, "b": PROGRAM}, {"a": PROGRAM, "b": PROGRAM})
    assert (result.programs, result.kernels, result.differing, lines) == (2, 4, [], [])


def test_the_first_pass_that_differs_is_shown_and_later_ones_are_named(tmp_path):
    changed = PROGRAM | {"passes/lower.txt": "y = add(x, 2)\n", "passes/fuse.txt": "y = add(x, 2)\n"}
    result, lines = compare_texts(tmp_path, {"a": PROGRAM}, {"a": changed})
    assert result.differing == ["a"] and result.differing_kernels == 0
    assert lines[0] == "a: passes/lower.txt, passes/fuse.txt"
    assert "-y = add(x, 1)\n+y = add(x, 2)" in lines[1] and len(lines) == 2


def test_a_change_in_many_kernels_is_shown_once(tmp_path):
    changed = PROGRAM | {KERNELS: f"{KERNEL}int one;\n{KERNEL}int three;\n"}
    result, lines = compare_texts(tmp_path, dict.fromkeys("abc", PROGRAM), dict.fromkeys("abc", changed))
    assert result.differing == ["a", "b", "c"] and (result.kernels, result.differing_kernels) == (6, 3)
    assert sum("+int three;" in line for line in lines) == 1
    assert lines[-1] == "(2 more files differ in the same lines as one above)"


def test_another_order_of_kernels_changes_no_kernel(tmp_path):
    turned = PROGRAM | {KERNELS: f"{KERNEL}int two;\n{KERNEL}int one;\n"}
    result, _ = compare_texts(tmp_path, {"a": PROGRAM}, {"a": turned})
    assert result.differing == ["a"] and result.differing_kernels == 0


def test_a_long_difference_is_cut(tmp_path):
    changed = PROGRAM | {HOST: "".join(f"call({n})\n" for n in range(100))}
    _, lines = compare_texts(tmp_path, {"a": PROGRAM}, {"a": changed}, lines=10)
    shown = lines[1].splitlines()
    assert len(shown) == 11 and shown[-1] == "... 94 more lines"


def test_a_program_of_one_revision_alone_is_a_difference(tmp_path):
    result, lines = compare_texts(tmp_path, {"a": PROGRAM}, {"a": PROGRAM, "b": PROGRAM, "c": {ERROR: "KeyError: 1\n"}})
    assert result.differing == [f"c/{ERROR}", "b"] and result.failures == 1
    assert lines == [f"c/{ERROR}: planned -> KeyError: 1", "b: only in the new revision"]


def test_a_pass_that_is_gone_is_a_difference(tmp_path):
    fewer = {name: text for name, text in PROGRAM.items() if name != "passes/fuse.txt"} | {ORDER: "lower\n"}
    result, lines = compare_texts(tmp_path, {"a": PROGRAM}, {"a": fewer})
    assert result.differing == ["a"] and lines[0].startswith("a: passes/fuse.txt")


def test_renamed_words_and_passes_are_no_difference(tmp_path):
    renamed = {name.replace("fuse", "merge"): text.replace("fuse", "merge") for name, text in PROGRAM.items()}
    assert compare_texts(tmp_path, {"a": PROGRAM}, {"a": renamed})[0].differing == ["a"]
    assert not compare_texts(tmp_path / "told", {"a": PROGRAM}, {"a": renamed}, "fuse=merge")[0].differing


# --- command line -----------------------------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch):
    """PlannedProgramss are filled with these programs, in place of what revisions plan: revision -> its programs."""
    programs: dict[str | None, Mapping[str, Mapping[str, str]]] = {}
    monkeypatch.setattr(
        compare_programs,
        "collect",
        lambda folders, options: [write_programs(folder, **programs[name]) for folder, name in folders.items()],
    )
    return programs


def test_exit_status_says_whether_there_are_differences(planned, capsys, tmp_path):
    planned |= {"old": {"a": PROGRAM}, None: {"a": PROGRAM}, "new": {"a": PROGRAM | {HOST: "other()\n"}}}
    assert main(["old"]) == 0
    assert capsys.readouterr().out == "1 programs, 2 kernels: 0 programs and 0 kernels differ\n"
    assert main(["old", "new", "--out", str(tmp_path / "kept")]) == 1
    assert "+other()" in capsys.readouterr().out
    assert (tmp_path / "kept/new/a" / HOST).read_text() == "other()\n"


def test_misuse_has_a_status_of_its_own(planned, capsys, tmp_path):
    planned |= {"old": {}, None: {}}
    (tmp_path / "something").touch()
    for arguments in (["old"], ["old", "--rename", "fuse"], ["old", "--out", str(tmp_path)]):
        assert main(arguments) == 2
        assert "compare_programs: " in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["old", "--lines", "few"])
    assert ended.value.code == 2


def test_revisions_are_checked_out_and_others_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compare_programs, "ROOT", tmp_path / "tree")
    source = tmp_path / "tree/dcompile/__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text("committed")
    git = ("git", "-C", str(tmp_path / "tree"), "-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "first")):
        subprocess.run([*git, *command], check=True, capture_output=True)
    source.write_text("changed since")
    for revision, text in (("HEAD", "committed"), (None, "changed since")):
        folder = compare_programs.check_out(revision, tmp_path / str(revision))
        assert (folder / "dcompile/__init__.py").read_text() == text
    assert main(["no-such-revision"]) == 2
    assert "no revision 'no-such-revision'" in capsys.readouterr().err


def test_a_collector_that_fails_is_no_empty_difference(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compare_programs, "check_out", lambda revision, folder: tmp_path)
    failing = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(compare_programs, "start_collector", lambda *_: subprocess.Popen(failing))
    assert main(["HEAD"]) == 2
    assert "ended with status 3" in capsys.readouterr().err


# --- planning ---------------------------------------------------------------------------------------------------------


def normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x - x.mean(-1, keepdim=True)) * w).relu() + torch.arange(8)


def collect(out: Path) -> PlannedPrograms:
    x = torch.randn(4, 8, requires_grad=True)
    ProgramCollector(out, DcompileRevision()).collect("normed", lambda explain: explain(normed, x, torch.randn(8)))
    return PlannedPrograms(out)


@pytest.mark.usefixtures("compiled_anew")
def test_a_skipped_pass_is_a_difference_and_planning_twice_is_none(monkeypatch, tmp_path):
    first, second = collect(tmp_path / "first"), collect(tmp_path / "second")
    devices = [f"normed/{device}/{graph}" for device in ("cpu", "gpu") for graph in ("backward0", "forward0")]
    assert first.programs == devices and not first.failures
    for device, spelling in (("cpu", 'extern "C"'), ("gpu", "@triton.jit")):
        files = first.files(f"normed/{device}/forward0")
        assert spelling in files[KERNELS] and "kernel0" in files[HOST] and "fuse\n" in files[ORDER]
        assert (spelling != "@triton.jit") == ("typedef" in files[LIBRARY] or "using" in files[LIBRARY])
    same = compare(first, second, 40, print)
    assert same.programs == 4 and same.kernels >= 4 and not same.differing
    monkeypatch.setenv("DCOMPILE_SKIP", "fuse")
    lines: list[str] = []
    other = compare(first, collect(tmp_path / "third"), 40, lines.append)
    assert other.differing == devices and any("passes/fuse.txt" in line for line in lines)


@pytest.mark.usefixtures("compiled_anew")
def test_a_case_that_fails_is_written_down(tmp_path):
    def fail(explain):
        raise KeyError("no such model")

    ProgramCollector(tmp_path, DcompileRevision()).collect("broken", fail)
    assert (tmp_path / "broken" / ERROR).read_text() == "KeyError: 'no such model'\n"
