"""tools/code_budget.py: what counts as a line of code, and that a budget rises only with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import code_budget
from tools.code_budget import Size

TEXT = '''"""A docstring
of two lines."""

# a comment
import os  # counts


class Thing:
    """Not counted."""

    size: int = 3
    """An attribute's, not counted either."""

    def text(self):
        return """one
        two"""
'''


def test_a_line_counts_if_it_has_a_token_outside_comments_and_docstrings():
    assert code_budget.count_lines(TEXT) == 6


def test_folders_are_summed(tmp_path: Path):
    (tmp_path / "ir" / "deep").mkdir(parents=True)
    (tmp_path / "api.py").write_text("a = 1\n")
    (tmp_path / "ir" / "nodes.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "ir" / "deep" / "x.py").write_text("")
    assert code_budget.measure(tmp_path) == {".": Size(1, 1), "ir": Size(2, 2)}


def test_a_budget_falls_by_itself_and_rises_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    package, file = tmp_path / "dcompile", tmp_path / "budget.txt"
    package.mkdir()

    def run(text: str, *given: str) -> int:
        (package / "api.py").write_text(text)
        return code_budget.main([*given], package, file)

    assert run("a = 1\n" * 3, "--update") == 1, "a new folder is a raise, too"
    assert run("a = 1\n" * 3, "--update", "--reason", "it begins") == 0
    assert run("a = 1\n" * 2) == 0 and code_budget.read(file.read_text())[0] == {".": Size(3, 1)}
    assert run("a = 1\n" * 2, "--update") == 0 and code_budget.read(file.read_text())[0] == {".": Size(2, 1)}
    capsys.readouterr()
    assert run("a = 1\n" * 5) == 1
    assert "dcompile/.: 5 lines, its budget is 2\nshorten something" in capsys.readouterr().err
    assert run("a = 1\n" * 5, "--update") == 1, "no raise without a reason"
    assert run("a = 1\n" * 5, "--update", "--reason", "attention on CPUs") == 0
    sizes, reasons = code_budget.read(file.read_text())
    assert sizes == {".": Size(5, 1)}
    assert len(reasons) == 2 and reasons[1].endswith("5 lines, its budget is 2: attention on CPUs")


def test_the_package_is_within_its_budget():
    assert code_budget.main([]) == 0
