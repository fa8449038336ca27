"""Figures of the docs are those of the files of results, which are one for each benchmark and device."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
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


def readme_figures() -> Iterator[str]:
    """What the files say where the README's table has a figure, in its order."""
    two, four = "gpu_ddp_fsdp", "4 x NVIDIA H200"

    def times(benchmark: str, device: str, name: str, ours: str = "dcompile", theirs: str = "torch.compile") -> str:
        line = newest_line(benchmark, device, name)
        return f"{line[theirs]['ms'] / line[ours]['ms']:.2f}"

    starts = [line["total"] for line in newest("compile_time", "AMD EPYC").data["lines"]]
    shares = [total["inductor"] / total["cold"] for total in starts]
    assert len(shares) == 6
    yield f"{min(shares):.1f} to {max(shares):.1f} x"
    graphs = "dcompile reduce-overhead"
    yield f"two H200; dcompile records CUDA graphs | {times(two, '2 x NVIDIA H200', '160M-fsdp2-mixed', graphs)} x"
    zero = times("gpu_deepspeed", "2 x NVIDIA H200", "1B-zero3", "dcompile zero", "inductor")
    yield f"DeepSpeed ZeRO-3, bfloat16, two H200 | {zero} x"
    decoded = [
        min(result.data["lines"][peer]["ms"] for result in decodings if peer in result.data["lines"])
        for decodings in [[r for r in figures.read_results() if r.device == "NVIDIA H200 x2 manual"]]
        for peer in ("torch.compile reduce-overhead", graphs)
    ]
    yield f"one decoded token; both record CUDA graphs | {decoded[0] / decoded[1]:.2f} x"
    swept: dict[str, dict] = {}
    for result in figures.read_results():
        if result.benchmark == "gpu_sweep":
            for name, line in result.data["lines"].items():
                swept[name] = line | swept.get(name, {})  # the newest first
    slower = [
        line["torch.compile"]["ms"] / line["dcompile"]["ms"]
        for line in swept.values()
        if "ms" in line.get("torch.compile", {}) and "ms" in line.get("dcompile", {})
    ]
    sweep = f"{len(slower)} models that no rule was written for, one H200 or H100"
    yield f"{sweep} (least {min(slower):.2f}, most {max(slower):.2f}) | {mean(slower):.2f} x"
    yield f"FSDP2 with mixed precision, two H200 | {times(two, '2 x NVIDIA H200', '1B-fsdp2-mixed')} x"
    steps = [line["steps"] for line in newest("cpu_models", "AMD EPYC").data["lines"]]
    small = [step["inductor"]["median"] / step["dcompile"]["median"] for step in steps]
    assert len(small) == 14
    yield f"float32 (least {min(small):.2f}, most {max(small):.2f}) | {mean(small):.2f} x"
    recorded = times(two, four, "1B-fsdp2", graphs)
    yield f"four H200 (with recorded CUDA graphs {recorded}) | {times(two, four, '1B-fsdp2')} x"
    yield f"checkpointed, two H200 | {times(two, '2 x NVIDIA H200', '8B-fsdp2-mixed-checkpointed')} x"
    yield f"tensorwise, one H200 | {times('gpu_breadth', 'NVIDIA H200', 'float8')} x"
    yield f"0.54 of the memory | {times('gpu_breadth', 'NVIDIA H200', 'logits')} x"


def mean(values: list[float]) -> float:
    """Geometric mean."""
    return math.exp(statistics.mean(map(math.log, values)))


def test_numbers_of_the_readme_are_those_of_the_files() -> None:
    text = (ROOT / "README.md").read_text()
    table = text.split("## Measured")[1].split("## Beside")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and " x |" in row]
    wanted = list(readme_figures())
    assert [row for row, figure in zip(rows, wanted, strict=True) if figure not in row] == []
    llama = newest_line("gpu_ddp_fsdp", "2 x NVIDIA H200", "1B-ddp")
    ours, theirs = (llama[peer]["ms"] for peer in ("dcompile", "torch.compile"))
    assert f"takes {ours:.0f} ms a step, with torch.compile {theirs:.0f}" in " ".join(text.split())


def newest_line(benchmark: str, device: str, name: str) -> dict:
    found = (result for result in figures.read_results() if (result.benchmark, result.device) == (benchmark, device))
    return next(result.data["lines"][name] for result in found if name in result.data["lines"])
