"""Warm starts of dcompile beside inductor's: what `compile_time --warm` measures.

Each compiler has a cache of its own, which one start before has filled; that one is told as the cold start. Rounds
interleave the two, medians are compared. Lines of several depths tell what a start costs for each layer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

MODULE = "benchmarks.compile_time"
TIMEOUT = 1800.0
CASES = ("llama_4", "llama_16", "llama_32")
CACHES = {"dcompile": "DCOMPILE_CACHE_DIR", "inductor": "TORCHINDUCTOR_CACHE_DIR"}
"""Compilers -> the variable that says where their caches are."""


def line_of(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One model: a cold start of each compiler, and rounds of warm ones."""
    found: dict[str, list[dict[str, Any]]] = {peer: [] for peer in CACHES}
    with tempfile.TemporaryDirectory(prefix="dcompile-bench-") as folder:
        for turn in range(arguments.rounds + 1):
            for peer, variable in list(CACHES.items())[:: 1 if turn % 2 else -1]:
                settings = {variable: str(Path(folder) / peer)}
                child = ["--child", peer, "--only", name]
                found[peer].append(common.in_fresh_process(MODULE, child, arguments.threads, TIMEOUT, settings))
    errors = {peer: run["error"] for peer, runs in found.items() for run in runs if "error" in run}
    return {"name": name, "errors": errors, **({} if errors else compared(found))}


def compared(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians of warm starts, and ratios: of the whole, and less what a compiler does once in a process."""
    cold = {peer: runs[0]["total"] for peer, runs in found.items()}
    totals = {peer: statistics.median(run["total"] for run in runs[1:]) for peer, runs in found.items()}
    seconds = {peer: statistics.median(run["seconds"] for run in runs[1:]) for peer, runs in found.items()}
    return {
        "cold": cold,
        "warm": totals,
        "seconds": seconds,
        "cold_over_inductor": cold["dcompile"] / cold["inductor"],
        "warm_over_inductor": totals["dcompile"] / totals["inductor"],
        "seconds_over_inductor": seconds["dcompile"] / seconds["inductor"],
    }


def summary(lines: Sequence[Mapping[str, Any]], threads: int) -> dict[str, Any]:
    """What --json prints."""
    named = {line["name"]: line for line in lines if not line["errors"]}
    depth = [named[name]["warm"]["dcompile"] for name in ("llama_4", "llama_32") if name in named]
    return {
        "benchmark": "warm_starts",
        "complete": all(not line["errors"] for line in lines),
        **{f"{name}_warm_over_inductor": line["warm_over_inductor"] for name, line in named.items()},
        "warm_32_over_4": depth[1] / depth[0] if len(depth) == 2 else None,
        "environment": common.environment(threads),
        "lines": list(lines),
    }


def page(result: Mapping[str, Any]) -> str:
    """For people: a table, and what is aimed at."""
    header = (
        "seconds",
        "inductor cold",
        "cold",
        "inductor warm",
        "warm",
        "warm/inductor",
        "of own seconds",
        "cold/inductor",
    )
    good = [line for line in result["lines"] if not line["errors"]]
    rows = [
        [
            line["name"],
            *(f"{line[start][peer]:.2f}" for start in ("cold", "warm") for peer in ("inductor", "dcompile")),
            *(f"{line[key]:.2f}" for key in ("warm_over_inductor", "seconds_over_inductor", "cold_over_inductor")),
        ]
        for line in good
    ]
    failed = [f"{line['name']}: {peer}: {text}" for line in result["lines"] for peer, text in line["errors"].items()]
    figures = [f"{key}: {value}" for key, value in result.items() if isinstance(value, bool | int | float)]
    return "\n".join([common.table(header, rows), "", *figures, *failed])


def main(arguments: argparse.Namespace) -> int:
    """Run the lines that were asked for."""
    names = arguments.only.split(",") if arguments.only else list(CASES)
    kept = Path(arguments.keep) if arguments.keep else None
    lines = common.resumed(names, lambda name: line_of(name, arguments), kept)
    result = summary(lines, arguments.threads)
    sys.stdout.write(page(result) + "\n")
    return common.finish("warm_starts", "cpu", result, keep=arguments.save, as_json=arguments.json)
