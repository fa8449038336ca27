"""Print tables of the benchmarks' figures from `benchmarks/results/`, which has one file for each benchmark and device.

`python -m tools.figures` prints the page `docs/lab/figures.md`. A benchmark's `--save` writes a file of one run, with a
date in its name. `--join` moves such runs into the file of their benchmark and device, the newest first. It drops runs
of which each figure (of one line and peer) is in a newer one; git has these.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a benchmark."""

    path: Path
    data: Mapping[str, Any]
    date: str
    """Date and time as YYYYMMDDTHHMMSS."""

    @property
    def benchmark(self) -> str:
        return str(self.data["benchmark"])

    @property
    def device(self) -> str:
        """Name of the GPU, with the count if there are several; without a GPU, of the processor."""
        name = str(self.data.get("device") or self.data["environment"]["cpu"])
        name = name.replace("(R)", "").replace(" Processor", "")
        name = {"NVIDIA H100 80GB HBM3": "NVIDIA H100"}.get(name, name)
        ranks = self.data.get("ranks", 1)
        return name if ranks == 1 else f"{ranks} x {name}"

    @property
    def file_name(self) -> str:
        """Name of the file that has all runs of this benchmark on this device."""
        device = re.sub(r"[^a-z0-9]+", "-", self.device.lower().replace(" x ", "x-"))
        return f"{self.benchmark}-{device}.json"

    @property
    def day(self) -> str:
        return f"{self.date[:4]}-{self.date[4:6]}-{self.date[6:8]}"

    @property
    def measured(self) -> frozenset[tuple[str, str]]:
        """Pairs (line, peer) of all figures."""
        return frozenset((line, peer) for line, peers in lines_of(self.data) for peer in peers)


def lines_of(data: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each line of a file with the names of its peers."""
    if isinstance(data.get("settings"), Mapping):
        yield str(data["settings"]["kind"]), list(data["peers"])
    elif isinstance(data["lines"], Mapping):
        for name, line in data["lines"].items():
            yield name, list(line.get("peers", line)) if isinstance(line.get("peers", line), Mapping) else [""]
    else:
        for line in data["lines"]:
            yield " ".join(str(line[key]) for key in ("name", "dtype", "threads") if key in line), [""]


def read_results(folder: Path = RESULTS) -> list[Result]:
    """Read all runs, the newest first: of joined files, and of files of one run."""
    found = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        if isinstance(data.get("runs"), list):
            found += [Result(path, run, run["measured"]) for run in data["runs"]]
        else:
            found.append(Result(path, data, path.stem.rsplit("-", 1)[1]))
    return sorted(found, key=lambda result: (result.date, result.path.name), reverse=True)


def superseded(results: Iterable[Result]) -> list[Result]:
    """Return runs whose lines and peers are all in newer runs of the same benchmark and device."""
    seen: dict[tuple[str, str], set[tuple[str, str]]] = {}
    old = []
    for result in results:
        known = seen.setdefault((result.benchmark, result.device), set())
        if result.measured <= known:
            old.append(result)
        known |= result.measured
    return old


def join(folder: Path = RESULTS) -> list[Path]:
    """Write one file for each benchmark and device, without superseded runs; remove all others. Return the files."""
    results = read_results(folder)
    old = superseded(results)
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        if result not in old:
            runs.setdefault(result.file_name, []).append({"measured": result.date, **result.data})
    for path in {result.path for result in results}:
        path.unlink()
    written = []
    for name, theirs in sorted(runs.items()):
        written.append(folder / name)
        written[-1].write_text(json.dumps({"benchmark": theirs[0]["benchmark"], "runs": theirs}, indent=1) + "\n")
    return written


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.1f}"


BASES = ("torch.compile", "inductor")
"""Peers that others are compared with; the first that a line has."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def steps_table(results: Sequence[Result]) -> list[str]:
    """Return each peer's newest milliseconds in each line, and their ratio to torch.compile's in the same file."""
    newest: dict[str, dict[str, tuple[Mapping[str, Any], float | None]]] = {}
    for result in results:
        for name, line in result.data["lines"].items():
            peers = line.get("peers", line)
            base = next((peers[peer].get("ms") for peer in BASES if peer in peers), None)
            for peer, figure in peers.items():
                if isinstance(figure, Mapping) and "ms" in figure:
                    newest.setdefault(name, {}).setdefault(peer, (figure, base))
    rows = []
    for name, peers in newest.items():
        for peer, (figure, base) in peers.items():
            rest = [_milliseconds(figure["ms"]), _ratio(figure["ms"] / base if base else None)]
            memory, warm_up = figure.get("peak_mib"), figure.get("warm_up_s")
            memory = figure["peak_gb"] * 1e9 / 2**20 if "peak_gb" in figure else memory
            rest += ["-" if memory is None else f"{memory:.0f}", "-" if warm_up is None else f"{warm_up:.0f}"]
            rows.append((name, peer, *rest))
    return table(("line", "peer", "ms", "of torch.compile's", "peak MiB", "warm-up s"), rows)


def speed_table(results: Sequence[Result]) -> list[str]:
    """Return, for lines of CPU benchmarks, dcompile's speed-up over each other peer."""
    newest: dict[str, Mapping[str, Any]] = {}
    for result in results:
        for line in result.data["lines"]:
            name = " ".join(str(line[key]) for key in ("name", "dtype", "threads") if key in line)
            newest.setdefault(name, line)
    others = [key for key in ("over_plain", "over_inductor", "over_eager") if any(key in n for n in newest.values())]
    head = ("line", "ms", *(f"speed {key.replace('_', ' ')}" for key in others))
    rows = [
        (
            name,
            _milliseconds(line["steps"]["dcompile"]["median"] * 1e3),
            *(_ratio(line.get(key)) for key in others),
        )
        for name, line in newest.items()
    ]
    return table(head, rows)


def start_table(results: Sequence[Result]) -> list[str]:
    """Return the seconds to the first step: cold, warm and of other compilers."""
    newest: dict[str, Mapping[str, float]] = {}
    for result in results:
        for line in result.data["lines"]:
            if "total" in line:
                newest.setdefault(line["name"], line["total"])
    kinds = ("inductor", "cold", "warm", "aot_eager")
    rows = [
        (name, *(f"{total[kind]:.1f}" for kind in kinds), _ratio(total["cold"] / total["inductor"]))
        for name, total in newest.items()
    ]
    return table(("line", "inductor, cold s", "cold s", "warm s", "aot_eager s", "cold of inductor's"), rows)


def ranks_table(results: Sequence[Result]) -> list[str]:
    """Return each peer's step in training on CPU ranks, and its ratio to stock's."""
    newest: dict[str, Mapping[str, Any]] = {}
    for result in results:
        newest.setdefault(result.data["settings"]["kind"], result.data["peers"])
    rows = [
        (kind, peer, _milliseconds(figure["ms"]), _ratio(figure["of_stock"]), f"{figure['warm_up_s']:.1f}")
        for kind, peers in newest.items()
        for peer, figure in peers.items()
    ]
    return table(("wrapper", "peer", "ms", "of stock's", "warm-up s"), rows)


def decode_table(results: Sequence[Result]) -> list[str]:
    """Return each peer's newest milliseconds a token, with its floor and its ratio to torch.compile's in its file."""
    newest: dict[str, tuple[str, ...]] = {}
    for result in results:
        lines, floors = result.data["lines"], result.data["floor_ms"]
        for name, line in lines.items():
            if "ms" not in line:
                continue
            peer, _, batch = name.partition(", batch ")
            base = lines.get(name.replace(peer, "torch.compile reduce-overhead"), {}).get("ms")
            floor = floors[batch or "1"] if isinstance(floors, Mapping) else floors
            known = "copy_bytes_per_second" in result.data or "H200" in result.device  # older floors are an H200's
            share = f"{floor / line['ms']:.0%}" if known else "-"
            rest = _milliseconds(line["ms"]), share, _ratio(line["ms"] / base if base else None)
            newest.setdefault(name, (batch or "1", peer, *rest, f"{line['warm_up_s']:.0f}"))
    head = ("batch", "peer", "ms a token", "of the floor", "of torch.compile reduce-overhead's", "warm-up s")
    return table(head, newest.values())


def few_rows_table(results: Sequence[Result]) -> list[str]:
    """Return microseconds of the library and of dcompile's tiles in each line, with shares of a copy's rate."""
    newest: dict[str, Mapping[str, Any]] = {}
    for result in results:
        for name, line in result.data["lines"].items():
            newest.setdefault(name, line)
    who = ("library", "usual", "best")
    rows = [
        (name, *(f"{line['us'][n]:.1f} ({line['shares'][n]:.0%})" for n in who), line["usual"], line["best"])
        for name, line in newest.items()
    ]
    return table(("line", "library us", "usual tile us", "best tile us", "usual tile", "best tile"), rows)


SECTIONS: Mapping[str, tuple[str, Callable[[Sequence[Result]], list[str]]]] = {
    "gpu_ddp_fsdp": ("DDP and FSDP2 on GPUs", steps_table),
    "gpu_train": ("Training on one GPU", steps_table),
    "gpu_models": ("Models on one GPU", steps_table),
    "gpu_breadth": ("What else people compile, on one GPU", steps_table),
    "gpu_sweep": ("Models that nobody had looked at before, on one GPU", steps_table),
    "gpu_cross_entropy": ("A language model's last layer with its loss, on one GPU", steps_table),
    "gpu_deepspeed": ("DeepSpeed on GPUs", steps_table),
    "gpu_decode": ("Decoding on GPUs", decode_table),
    "gpu_few_rows": ("Products of few rows on one GPU", few_rows_table),
    "gpu_kernels": ("Kernels on one GPU", steps_table),
    "overlap_cpu": ("DDP and FSDP2 on two CPU ranks", ranks_table),
    "cpu_models": ("Models on a CPU, forward and backward", speed_table),
    "cpu_kernels": ("Kernels on a CPU", speed_table),
    "first_light": ("The first benchmark on a CPU", speed_table),
    "compile_time": ("Start-up on a CPU", start_table),
}
"""Benchmark -> heading, and function that makes its tables."""


def page(results: Sequence[Result]) -> str:
    """Return the whole page: a section for each benchmark, a table for each device."""
    lines = [
        "# Figures",
        "",
        "This page is printed by `python -m tools.figures` from `benchmarks/results/`, a file for each table.",
        "Each figure is the newest of its line and peer. Several dates mean that runs had different lines or peers.",
        "Peers of one run ran in turn in one process or job. Compare figures of one table only.",
        "[figures-explained.md](figures-explained.md) says what the lines are, and what limits them.",
        "",
    ]
    for benchmark, (heading, write) in SECTIONS.items():
        lines += [f"## {heading}", "", f"`python -m benchmarks.{benchmark}`", ""]
        found = [result for result in results if result.benchmark == benchmark]
        for device in dict.fromkeys(result.device for result in found):
            theirs = [result for result in found if result.device == device]
            dates = ", ".join(dict.fromkeys(result.day for result in theirs))
            torch_versions = ", ".join(dict.fromkeys(result.data["environment"]["torch"] for result in theirs))
            lines += [f"{device}, torch {torch_versions}, {dates}", "", *write(theirs), ""]
    return "\n".join(lines)


def main() -> None:
    """Print the page, or join files of single runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--join", action="store_true", help="move files of single runs into those of their benchmarks")
    if parser.parse_args().join:
        sys.stdout.writelines(f"{path}\n" for path in join())
    else:
        sys.stdout.write(page(read_results()))


if __name__ == "__main__":
    main()
