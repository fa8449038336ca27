"""Figures of the docs are those of the files of results, which are one for each benchmark and device."""

from __future__ import annotations

import json
import math
import statistics
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


def test_each_benchmark_and_device_has_one_file() -> None:
    results = figures.read_results()
    wrong = sorted(result.path.name for result in results if result.path.name != result.file_name)
    assert not wrong, "files of single runs: python -m tools.figures --join"
    old = [f"{result.path.name}: {result.date}" for result in figures.superseded(results)]
    assert not old, "newer runs have all figures of these: python -m tools.figures --join"


def test_joins_runs_that_have_a_newest_figure(tmp_path: Path) -> None:
    ours, theirs = {"dcompile": {"ms": 1.0}}, {"torch.compile": {"ms": 2.0}}
    write(tmp_path, 1, {"1B": ours})
    write(tmp_path, 2, {"160M": ours, "1B": theirs})
    (file,) = figures.join(tmp_path)
    assert file.name == "gpu_train-nvidia-h200.json" and [*tmp_path.iterdir()] == [file]
    write(tmp_path, 3, {"1B": {**ours}})
    assert [result.date for result in figures.superseded(figures.read_results(tmp_path))] == ["20260101T000000"]
    assert figures.join(tmp_path) == [file]
    assert [result.date for result in figures.read_results(tmp_path)] == ["20260103T000000", "20260102T000000"]


def test_ratio_is_of_one_file(tmp_path: Path) -> None:
    write(tmp_path, 1, {"1B": {"torch.compile": {"ms": 4.0}, "dcompile": {"ms": 3.0}}})
    write(tmp_path, 2, {"1B": {"torch.compile": {"ms": 8.0}}})
    rows = figures.steps_table(figures.read_results(tmp_path))
    assert "| 1B | dcompile | 3 | 0.75 | - | - |" in rows
    assert "| 1B | torch.compile | 8 | 1.00 | - | - |" in rows


def newest(benchmark: str, device: str) -> figures.Result:
    results = figures.read_results()
    return next(result for result in results if (result.benchmark, result.device) == (benchmark, device))


def speed(lines: dict, peer: str) -> float:
    """Geometric mean of a peer's speed over eager."""
    return math.exp(statistics.mean(math.log(line["eager"]["ms"] / line[peer]["ms"]) for line in lines.values()))


def test_numbers_of_the_readme_are_those_of_the_files() -> None:
    text = (ROOT / "README.md").read_text()
    llama = newest_line("gpu_ddp_fsdp", "2 x NVIDIA H100", "1B-ddp")
    ours, theirs = (llama[peer]["ms"] for peer in ("dcompile", "torch.compile"))
    assert f"| 1B Llama, DDP, two H100: step | {ours:.0f} ms | {theirs:.0f} ms |" in text
    models = newest("gpu_models", "NVIDIA H100").data["lines"]
    assert len(models) == 14
    means = [speed(models, peer) for peer in ("dcompile", "torch.compile")]
    assert f"one H100: speed over eager | {means[0]:.2f} | {means[1]:.2f} |" in text
    starts = [line["total"] for line in newest("compile_time", "Intel Xeon").data["lines"]]
    shares = [total["cold"] / total["inductor"] for total in starts]
    assert f"| {min(shares):.2f} to {max(shares):.2f} of torch.compile's time |" in text and len(shares) == 6


def newest_line(benchmark: str, device: str, name: str) -> dict:
    found = (result for result in figures.read_results() if (result.benchmark, result.device) == (benchmark, device))
    return next(result.data["lines"][name] for result in found if name in result.data["lines"])
