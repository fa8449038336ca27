"""Benchmark of the time to the first training step: cold against inductor, warm against aot_eager, and its stages.

python -m benchmarks.compile_time [--threads N] [--only llama_block,gpt2] [--peers aot_eager,inductor]
                                  [--rounds 3] [--keep FILE] [--json] [--save]
python -m benchmarks.compile_time --warm [--only llama_16] [--rounds 3]

Each figure is from a fresh process. It is the time from the compiler's first use, including imports, to the end of the
first forward and backward. Cold: empty caches, dcompile's or inductor's. Warm: a cache filled by one process before.
Rounds interleave all four, and medians are compared: wall time, and CPU time for shared machines. There are two ratios
to inductor: of the whole (`total_over_inductor`) and of the model's own seconds (`cold_over_inductor`). The latter
excludes costs of each process, such as inductor's imports and precompiled header. Sources must not change while
this runs: dcompile's cache notices, and warm starts compile.

With --warm (`benchmarks/warm_starts.py`), warm starts of dcompile beside those of inductor, by depth: each compiler has
a cache that one start before has filled.
"""

from __future__ import annotations

import argparse
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
"""Stages of a cold start. `load`: keys, libraries, the host program; `run`: a second step's time."""
PARTS = {"lower": "lower", "emit": "emit", "host": "emit", "build": "build"}
"""Name in the log of passes -> stage; all other lines of the log are passes of the schedule."""


def llama(layers: int) -> Any:
    """Make a narrow Llama, so that compile time, not run time, grows with depth."""
    import transformers

    from benchmarks.models import VOCABULARY, Language

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=176, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return Language(transformers.LlamaForCausalLM(config))


CASES = ("llama_block", "llama_4", "llama_32", "gpt2", "bert", "resnet", "other_lengths_16")
"""llama_N: N layers, narrow; other_lengths_N: see `OTHER_LENGTHS`; the others are those of cpu_models."""


def make(name: str) -> tuple[Any, Mapping[str, Any]]:
    """A model and its batch."""
    import torch

    from benchmarks.models import MODELS, tokens

    torch.manual_seed(0)
    if name in MODELS:
        return MODELS[name].make(), MODELS[name].batch()
    return llama(int(name.rpartition("_")[2])), tokens(1, 64)()


# --- child process ----------------------------------------------------------------------------------------------------


OTHER_LENGTHS = "other_lengths_"
"""other_lengths_N: the first batch of another length of a Llama of N layers, caches filled by a process before."""


def measure_other_length(layers: int, peer: str) -> dict[str, Any]:
    """Return the seconds of the first batch of a length, and of the first one of another length (symbolic sizes)."""
    import torch

    from benchmarks.models import tokens

    model, batches = llama(layers), [tokens(1, length)() for length in (64, 96)]
    options = {"options": {"receipt": False}} if peer == "dcompile" else {}
    call: Any = torch.compile(model, backend=peer, fullgraph=True, **options)
    began, cpu = time.perf_counter(), sum(os.times()[:4])
    times = []
    for batch in batches:
        call(**batch).backward()
        times.append((time.perf_counter(), sum(os.times()[:4])))
    (first, first_cpu), (other, other_cpu) = times
    return {"first": first - began, "other": other - first, "cpu": [first_cpu - cpu, other_cpu - first_cpu]}


def line_of_lengths(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure another length with dcompile and with inductor, each with its own caches, filled by a process before."""
    layers = name.removeprefix(OTHER_LENGTHS)
    peers = ("dcompile", *(("inductor",) if "inductor" in arguments.peers else ()))
    found: dict[str, list[dict[str, Any]]] = {peer: [] for peer in peers}
    with tempfile.TemporaryDirectory(prefix="dcompile-bench-") as folder:
        caches = {"DCOMPILE_CACHE_DIR": f"{folder}/ours", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        for turn in range(arguments.rounds + 1):
            for peer in peers[:: 1 if turn % 2 else -1]:
                given = ["--child", peer, "--only", OTHER_LENGTHS + layers]
                run = common.in_fresh_process(MODULE, given, arguments.threads, TIMEOUT, caches)
                found[peer] += [run] if turn or "error" in run else []
    errors = {peer: run["error"] for peer, runs in found.items() for run in runs if "error" in run}
    if errors:
        return {"name": name, "errors": errors}
    seconds = {peer: statistics.median(run["other"] for run in runs) for peer, runs in found.items()}
    cpu = {peer: statistics.median(run["cpu"][1] for run in runs) for peer, runs in found.items()}
    ratio = {"other_over_inductor": seconds["dcompile"] / seconds["inductor"]} if "inductor" in seconds else {}
    return {"name": name, "errors": {}, "other_seconds": seconds, "other_cpu": cpu, **ratio}


def measure(name: str, peer: str) -> dict[str, Any]:
    """Measure the first use of a compiler, then one model's first step; for dcompile, also its stages, in seconds."""
    import torch

    if name.startswith(OTHER_LENGTHS):
        return measure_other_length(int(name.removeprefix(OTHER_LENGTHS)), peer)
    model, batch = make(name)
    began, cpu = time.perf_counter(), sum(os.times()[:4])
    log: list[str] = []
    clock: dict[str, float] = {"aot": 0.0, "compile": 0.0}
    options: dict[str, Any] = {}
    if peer == "dcompile":
        options["options"] = {"receipt": False, "log": "passes"}
        _watch(log, clock)

    def compiled(target: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(target, backend=peer, fullgraph=True, dynamic=False, **options)

    with torch.no_grad():
        compiled(lambda x: x.exp() + 1)(torch.zeros(64))
    first_use = time.perf_counter() - began
    log.clear()
    clock |= {"aot": 0.0, "compile": 0.0}
    call = compiled(model)
    step = _timed(lambda: call(**batch).backward())
    cpu = sum(os.times()[:4]) - cpu  # includes finished child processes, such as compilers
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
    """Collect dcompile's log; time AOTAutograd, which calls dcompile's compiler for the forward, and that compiler."""
    from dcompile import compat
    from dcompile.compiler.caching import CachingCompiler

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
    """Return the seconds of each stage. The remainder, after logged stages, AOTAutograd and the run, is Dynamo."""
    found = dict.fromkeys(STAGES, 0.0)
    for line in log:
        if match := re.search(r"^\w+ (\w+): ([0-9.]+) ms", line):
            found[PARTS.get(match[1], "schedule")] += float(match[2]) / 1e3
    logged = sum(found.values())
    found |= {"aot": clock["aot"], "run": run, "load": clock["compile"] - logged}
    return found | {"dynamo": step - clock["aot"] - clock["compile"] - run}


# --- the whole --------------------------------------------------------------------------------------------------------


def line_of(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one model: rounds of dcompile cold and warm, inductor cold, and aot_eager."""
    if name.startswith(OTHER_LENGTHS):
        return line_of_lengths(name, arguments)

    def child(peer: str, cache: str | None = None) -> dict[str, Any]:
        # inductor's directory is always empty; its caches stay on, as for users, for reuse within one start
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
    """Return medians, and the figures with targets."""
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
    """Return the run with the median of seconds, the longer one of two."""
    return sorted(runs, key=lambda run: float(run["seconds"]))[len(runs) // 2]


def summary(lines: Sequence[Mapping[str, Any]], threads: int) -> dict[str, Any]:
    """Return the result that --json prints and --save writes."""
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
        "worst_other_length_over_inductor": max(_all(named, "other_over_inductor"), default=None),
        "warm_compiled_nothing": not any(line.get("warm_worked") for line in named.values()),
        "kernels_32_over_4": kernels["llama_32"] / kernels["llama_4"] if len(kernels) == 2 else None,
        "environment": common.environment(threads),
        "lines": list(lines),
    }


def _all(lines: Mapping[str, Mapping[str, Any]], figure: str) -> list[float]:
    return [line[figure] for line in lines.values() if figure in line]


def page(result: Mapping[str, Any]) -> str:
    """Return two tables and the targets as text."""
    good = [line for line in result["lines"] if not line["errors"] and "counts" in line]
    lengths = [line for line in result["lines"] if "other_seconds" in line]
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
            *(f"{line['name']}: seconds {line['other_seconds']}, of CPU time {line['other_cpu']}" for line in lengths),
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
    parser.add_argument("--warm", action="store_true", help="warm starts beside inductor's, by depth")
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
    return common.finish("compile_time", "cpu", result, keep=arguments.save, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
