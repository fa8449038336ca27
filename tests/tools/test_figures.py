"""Figures of the docs are those of the files of results, and no file is kept that newer ones replace."""

from __future__ import annotations

import json
from pathlib import Path

from tools import figures

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "lab" / "figures.md"


def write(folder: Path, day: int, lines: object, **more: object) -> Path:
    path = folder / f"gpu_train-nvidia-h200-202601{day:02}T000000.json"
    environment = {"torch": "2.13.0", "cpu": "any"}
    data = {"benchmark": "gpu_train", "device": "NVIDIA H200", "environment": environment, "lines": lines, **more}
    path.write_text(json.dumps(data))
    return path


def test_page_is_current(update_golden: bool) -> None:
    page = figures.page(figures.read_results())
    if update_golden:
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "run: pytest tests/tools/test_figures.py --update-golden"


def test_no_superseded_file_is_kept() -> None:
    old = [path.name for path in figures.superseded(figures.read_results())]
    assert not old, "newer files hold all lines of these: git rm them"


def test_file_with_a_line_of_its_own_is_kept(tmp_path: Path) -> None:
    ours, theirs = {"dcompile": {"ms": 1.0}}, {"torch.compile": {"ms": 2.0}}
    replaced = write(tmp_path, 1, {"1B": ours})
    write(tmp_path, 2, {"160M": ours, "1B": theirs})
    write(tmp_path, 3, {"1B": {**ours}})
    assert figures.superseded(figures.read_results(tmp_path)) == [replaced]


def test_ratio_is_of_one_file(tmp_path: Path) -> None:
    write(tmp_path, 1, {"1B": {"torch.compile": {"ms": 4.0}, "dcompile": {"ms": 3.0}}})
    write(tmp_path, 2, {"1B": {"torch.compile": {"ms": 8.0}}})
    rows = figures.steps_table(figures.read_results(tmp_path))
    assert "| 1B | dcompile | 3 | 0.75 | - | - |" in rows
    assert "| 1B | torch.compile | 8 | 1.00 | - | - |" in rows
