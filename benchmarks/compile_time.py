"""How long until the first training step is through: cold against inductor, warm against aot_eager, and where it goes.

python -m benchmarks.compile_time [--threads N] [--only llama_block,gpt2] [--peers aot_eager,inductor]
                                  [--rounds 3] [--keep FILE] [--json] [--save]
python -m benchmarks.compile_time --warm [--only llama_16,llama_16_length] [--rounds 3]

Every figure is of a fresh process: from the first use of the compiler (its imports included) to the end of the first
forward and backward. Cold: empty caches, dcompile's or inductor's. Warm: a cache that one process before has filled.
Rounds interleave all four, and medians are compared: wall time, and CPU time for machines that others use too. Against
inductor it is told for the whole (`total_over_inductor`) and for the model's own seconds (`cold_over_inductor`), less
what a peer does once per process, such as inductor's imports and its precompiled header. Sources must not change while
this runs: dcompile's cache notices, and warm starts compile.

With --warm (`benchmarks/warm_starts.py`), warm starts of dcompile beside those of inductor, by depth, and the first
batch of another length: each compiler has a cache that one start before has filled.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

MODULE = "benchmarks.compile_time"
TIMEOUT = 900.0
STAGES = ("dynamo", "aot", "lower", "schedule", "emit", "build", "load", "run")
"""Where the time of a cold start goes. `load`: keys, libraries, the host program; `run`: a second step's time."""
PARTS = {"lower": "lower", "emit": "emit", "host": "emit", "build": "build"}
"""Stages as the pass log names them; all its other lines are passes of the schedule."""


def llama(layers: int) -> Any:
    """A narrow Llama: what grows with depth is compiling, not running."""
    import transformers

    from benchmarks.models import VOCABULARY, Language

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=176, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return Language(transformers.LlamaForCausalLM(config))


CASES = ("llama_block", "llama_4", "llama_32", "gpt2", "bert", "resnet")
"""llama_N: N layers, narrow; the others are those of cpu_models."""
LENGTH = "_length"
"""What ends the name of a line that measures the first batch of another length."""


def make(name: str) -> tuple[Any, Mapping[str, Any]]:
    """A model and its batch."""
    import torch

    from benchmarks.models import MODELS, tokens

    torch.manual_seed(0)
    if name in MODELS:
        return MODELS[name].make(), MODELS[name].batch()
    return llama(int(name.removesuffix(LENGTH).removeprefix("llama_"))), tokens(1, 64)()


# --- child process ----------------------------------------------------------------------------------------------------


def measure(name: str, peer: str) -> dict[str, Any]:
    """Seconds of the first use of a compiler, then of one model's first step; of dcompile also where they went."""
    import torch

    model, batch = make(name)
    began, cpu = time.perf_counter(), sum(os.times()[:4])
    log: list[str] = []
    clock: dict[str, float] = {"aot": 0.0, "compile": 0.0}
    options: dict[str, Any] = {}
    if peer == "dcompile":
        options["options"] = {"receipt": False, "log": "passes"}
        _watch(log, clock)

    dynamic = None if name.endswith(LENGTH) else False

    def compiled(target: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(target, backend=peer, fullgraph=True, dynamic=dynamic, **options)

    with torch.no_grad():
        compiled(lambda x: x.exp() + 1)(torch.zeros(64))
    first_use = time.perf_counter() - began
    call = compiled(model)
    if dynamic is None:
        from benchmarks.models import tokens

        call(**batch).backward()
        first_use, batch = 0.0, tokens(1, 96)()
    log.clear()
    clock |= {"aot": 0.0, "compile": 0.0}
    step = _timed(lambda: call(**batch).backward())
    cpu = sum(os.times()[:4]) - cpu  # with that of compilers that were waited for
    run = min(_timed(lambda: call(**batch).backward()) for _ in range(2))
    result = {"first_use": first_use, "seconds": step, "total": first_use + step, "cpu": cpu}
    if peer == "dcompile":
        import dcompile

        receipt = dcompile.receipt(call)
        counts = ("kernels", "kernel_calls", "built", "cache_hits", "graphs_cached")
        result |= {"stages": stages(log, clock, step, run), "counts": {c: getattr(receipt, c) for c in counts}}
    return result


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _watch(log: list[str], clock: dict[str, float]) -> None:
    """Keep dcompile's log, and time AOTAutograd (which calls our compiler for the forward) and our compiler."""
    from dcompile import compat
    from dcompile.compiler import CachingCompiler

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.append(record.getMessage())

    logging.getLogger("dcompile.passes").addHandler(Lines())

    def timed(function: Callable[..., Any], name: str, less: str | None = None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began, before = time.perf_counter(), clock.get(less or "", 0.0)
            try:
                return function(*args, **kwargs)
            finally:
                clock[name] += time.perf_counter() - began - (clock.get(less or "", 0.0) - before)

        return call

    compat.aot.aot_compile = timed(compat.aot.aot_compile, "aot", less="compile")
    CachingCompiler.compile_graph = timed(CachingCompiler.compile_graph, "compile")  # type: ignore[method-assign]


def stages(log: Sequence[str], clock: Mapping[str, float], step: float, run: float) -> dict[str, float]:
    """Seconds of each stage. What is neither logged nor AOTAutograd nor running is Dynamo."""
    found = dict.fromkeys(STAGES, 0.0)
    for line in log:
        if match := re.search(r"^\w+ (\w+): ([0-9.]+) ms", line):
            found[PARTS.get(match[1], "schedule")] += float(match[2]) / 1e3
    logged = sum(found.values())
    found |= {"aot": clock["aot"], "run": run, "load": clock["compile"] - logged}
    return found | {"dynamo": step - clock["aot"] - clock["compile"] - run}


# --- the whole --------------------------------------------------------------------------------------------------------


def line_of(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One model: rounds of dcompile cold and warm, inductor cold, and aot_eager."""

    def child(peer: str, cache: str | None = None) -> dict[str, Any]:
        # inductor's directory is always empty; its caches stay on, as users have them: it reuses within one start
        settings = {"DCOMPILE_CACHE_DIR": cache} if cache else {}
        return common.in_fresh_process(MODULE, ["--child", peer, "--only", name], arguments.threads, TIMEOUT, settings)

    others = [peer for peer in ("inductor", "aot_eager") if peer in arguments.peers]
    found: dict[str, list[dict[str, Any]]] = {peer: [] for peer in ("cold", "warm", *others)}
    with tempfile.TemporaryDirectory(prefix="dcompile-bench-") as folder:
        for turn in range(arguments.rounds):
            found["cold"].append(child("dcompile", None if turn else folder))  # the first fills the warm starts' cache
            for peer in ("warm", *others)[:: 1 if turn % 2 else -1]:
                found[peer].append(child("dcompile", folder) if peer == "warm" else child(peer))
    errors = {peer: run["error"] for peer, runs in found.items() for run in runs if "error" in run}
    return {"name": name, "errors": errors, **({} if errors else compared(found))}


def compared(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians, and the figures that are aimed at."""
    totals = {peer: statistics.median(run["total"] for run in runs) for peer, runs in found.items()}
    seconds = {peer: statistics.median(run["seconds"] for run in runs) for peer, runs in found.items()}
    cpu = {peer: statistics.median(run["cpu"] for run in runs) for peer, runs in found.items()}
    cold, warm = (_usual(found[peer]) for peer in ("cold", "warm"))
    line = {
        "total": totals,
        "seconds": seconds,
        "warm_worked": any(run["counts"]["built"] or run["counts"]["graphs_cached"] != 2 for run in found["warm"]),
        "stages": {"cold": cold["stages"], "warm": warm["stages"]},
        "counts": cold["counts"],
    }
    if "aot_eager" in found:
        line["warm_beyond_aot_eager"] = totals["warm"] - totals["aot_eager"]
        line["cpu_beyond_aot_eager"] = cpu["warm"] - cpu["aot_eager"]
    if "inductor" in found:
        line["cold_over_inductor"] = seconds["cold"] / seconds["inductor"]
        line["total_over_inductor"] = totals["cold"] / totals["inductor"]
    return line


def _usual(runs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The run whose seconds are the median, the longer one of two."""
    return sorted(runs, key=lambda run: float(run["seconds"]))[len(runs) // 2]


def summary(lines: Sequence[Mapping[str, Any]], threads: int) -> dict[str, Any]:
    """What --json prints and --save keeps."""
    named = {line["name"]: line for line in lines if not line["errors"]}
    kernels = {name: named[name]["counts"]["kernels"] for name in ("llama_4", "llama_32") if name in named}
    return {
        "benchmark": "compile_time",
        "complete": all(not line["errors"] for line in lines),
        "geomean_cold_over_inductor": common.geomean(_all(named, "cold_over_inductor")),
        "worst_cold_over_inductor": max(_all(named, "cold_over_inductor"), default=None),
        "worst_total_over_inductor": max(_all(named, "total_over_inductor"), default=None),
        "worst_warm_beyond_aot_eager": max(_all(named, "warm_beyond_aot_eager"), default=None),
        "worst_cpu_beyond_aot_eager": max(_all(named, "cpu_beyond_aot_eager"), default=None),
        "warm_compiled_nothing": not any(line["warm_worked"] for line in named.values()),
        "kernels_32_over_4": kernels["llama_32"] / kernels["llama_4"] if len(kernels) == 2 else None,
        "environment": common.environment(threads),
        "lines": list(lines),
    }


def _all(lines: Mapping[str, Mapping[str, Any]], figure: str) -> list[float]:
    return [line[figure] for line in lines.values() if figure in line]


def page(result: Mapping[str, Any]) -> str:
    """For people: two tables, and what is aimed at."""
    good = [line for line in result["lines"] if not line["errors"]]
    rows = [
        [
            line["name"],
            *(f"{line['total'][peer]:.2f}" if peer in line["total"] else "-" for peer in
              ("inductor", "cold", "warm", "aot_eager")),
            *(f"{line[figure]:.2f}" if figure in line else "-" for figure in
              ("total_over_inductor", "cold_over_inductor")),
            *(f"{line[figure]:+.2f}" if figure in line else "-" for figure in
              ("warm_beyond_aot_eager", "cpu_beyond_aot_eager")),
            f"{line['counts']['kernels']} of {line['counts']['kernel_calls']}",
        ]
        for line in good
    ]  # fmt: skip
    header = (
        "seconds",
        "inductor",
        "cold",
        "warm",
        "aot_eager",
        "cold/inductor",
        "of own seconds",
        "warm-aot_eager",
        "of CPU time",
        "kernels of calls",
    )
    times = [
        [f"{line['name']} {start}", *(f"{line['stages'][start][stage]:.2f}" for stage in STAGES)]
        for line in good
        for start in ("cold", "warm")
    ]
    failed = [f"{line['name']}: {peer}: {text}" for line in result["lines"] for peer, text in line["errors"].items()]
    return "\n".join(
        [
            common.table(header, rows),
            "",
            common.table(("seconds of dcompile", *STAGES), times),
            "",
            *(f"{key}: {value}" for key, value in result.items() if isinstance(value, bool | int | float)),
            *failed,
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="", help="lines, comma-separated")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each peer")
    parser.add_argument("--peers", default="aot_eager,inductor", help="what dcompile is compared with")
    parser.add_argument("--keep", default="", help="file of finished lines: a later run goes on where this one stopped")
    parser.add_argument("--warm", action="store_true", help="warm starts beside inductor's, by depth, another length")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",") if arguments.only else list(CASES)
    if arguments.child:
        common.hand_back(measure(names[0], arguments.child))
        return 0
    if arguments.warm:
        from benchmarks import warm_starts

        return warm_starts.main(arguments)
    lines = common.resumed(
        names, lambda name: line_of(name, arguments), Path(arguments.keep) if arguments.keep else None
    )
    result = summary(lines, arguments.threads)
    sys.stdout.write(page(result) + "\n")
    if arguments.save:
        sys.stdout.write(f"{common.save('compile_time', 'cpu', result)}\n")
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
    return 0 if result["complete"] else 1


if __name__ == "__main__":
    sys.exit(main())
