"""Functions shared by benchmarks: interleaved timing, fresh processes, memory, the machine's description, files."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MARK = "RESULT "
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: median over rounds, minimum, and the interquartile range over the median."""

    median: float
    fastest: float
    spread: float
    rounds: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        quarters = statistics.quantiles(samples, n=4)
        median = statistics.median(samples)
        return cls(median, min(samples), (quarters[2] - quarters[0]) / median, len(samples))


def time_interleaved(
    peers: Mapping[str, Callable[[], object]],
    seconds: float,
    shortest_sample: float = 0.02,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time all peers in turn, round after round, so that a slow phase of the machine affects all of them.

    Each peer follows each other one equally often (`orders`). A sample has several short calls, since one of 0.1 ms
    would measure the clock and the scheduler. On a shared machine, `clock` may be `time.process_time`: with one thread
    it excludes the time of other processes.
    """
    calls: dict[str, int] = {}
    longest = 0.0
    for name, call in peers.items():
        for _ in range(3):
            once = _time(call, 1, clock)
        calls[name] = max(1, math.ceil(shortest_sample / once))
        longest += calls[name] * once
    rounds = min(200, max(7, int(seconds / longest)))
    samples: dict[str, list[float]] = {name: [] for name in peers}
    turns = orders(list(peers))
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for name in turns[turn % len(turns)]:
                samples[name].append(_time(peers[name], calls[name], clock))
    finally:
        gc.enable()
    return {name: Timing.of(taken) for name, taken in samples.items()}


def orders(peers: Sequence[str]) -> list[list[str]]:
    """Return orders of the peers in which each directly follows each other one equally often: a Williams design.

    A peer finds caches as the previous one leaves them. With a rotated order, dcompile always ran after inductor.
    Hand-written loops always ran after dcompile, which leaves the data that it has read in the last-level cache.
    dcompile's first call of cross-entropy after another peer, forward and backward, took 2.6 ms, the eighth 2.1 ms
    (Zen 4).
    E. J. Williams, Experimental designs balanced for the estimation of residual effects of treatments (1949).
    """
    count = len(peers)
    zigzag = [(n + 1) // 2 if n % 2 else -(n // 2) for n in range(count)]
    rows = [[peers[(start + step) % count] for step in zigzag] for start in range(count)]
    return rows if count % 2 == 0 else rows + [row[::-1] for row in rows]


def rotated(peers: Sequence[Any], turn: int) -> list[Any]:
    """Return the peers in the order of a turn: each turn starts with another one."""
    return [peers[(turn + place) % len(peers)] for place in range(len(peers))]


def middle_and_spread(samples: Sequence[float]) -> dict[str, float]:
    """Return the median of samples in ms, and how far they are apart, relative to it."""
    middle = statistics.median(samples)
    return {"ms": middle, "spread": (max(samples) - min(samples)) / middle}


def _time(call: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(calls):
        call()
    return (clock() - start) / calls


def gpu_time(step: Callable[[], object], steps: int) -> float:
    """Return the milliseconds a step on the GPU, averaged over `steps`."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / steps


def in_fresh_process(
    module: str, arguments: Sequence[str], threads: int, timeout: float, settings: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run `python -m module arguments` with empty compiler caches; return the argument of its call of `hand_back`.

    `settings`: additional environment variables.
    """
    with tempfile.TemporaryDirectory(prefix="dcompile-bench-") as folder:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DCOMPILE_")},
            "OMP_NUM_THREADS": str(threads),
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "DCOMPILE_CACHE_DIR": f"{folder}/dcompile",
            **(settings or {}),
        }
        command = [sys.executable, "-m", module, *arguments]
        try:
            process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"still running after {timeout:.0f} s"}
    results = [line for line in process.stdout.splitlines() if line.startswith(MARK)]
    if process.returncode or not results:
        last = (process.stderr.strip().splitlines() or ["no output"])[-1]
        return {"error": f"exit {process.returncode}: {last}"}
    result: dict[str, Any] = json.loads(results[-1].removeprefix(MARK))
    return result


def resumed(names: Sequence[str], run: Callable[[str], dict[str, Any]], kept: Path | None) -> list[dict[str, Any]]:
    """Return a line for each name, from the file `kept` or from `run`; add new lines without errors to the file."""
    texts = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    done = {line["name"]: line for line in map(json.loads, texts)}
    for name in names:
        if name in done:
            continue
        done[name] = run(name)
        if kept is not None and not done[name]["errors"]:
            with kept.open("a") as file:
                file.write(json.dumps(done[name]) + "\n")
    return [done[name] for name in names]


def hand_back(result: Mapping[str, Any]) -> None:
    """Send a result to the parent process, through standard output."""
    sys.stdout.write(f"{MARK}{json.dumps(result)}\n")
    sys.stdout.flush()


def resident_mib() -> float:
    """Return the resident MiB of this process, after freed memory is returned to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return _status_mib("VmRSS")


def peak_mib_during(call: Callable[[], object], calls: int = 3) -> float:
    """Return the peak resident MiB of this process while `call` runs. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    for _ in range(calls):
        call()
    return _status_mib("VmHWM")


def _status_mib(field: str) -> float:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, f"/proc/self/status has no {field}"
    return int(found[1]) / 1024


def environment(threads: int) -> dict[str, Any]:
    """Describe the conditions of a measurement: hardware, versions, threads, and the machine's load."""
    import torch  # torch.__version__ names the build (+cpu, +cu130), which the package's version does not

    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in ("dcompile", "transformers")},
        "compiler": _first_line(os.environ.get("CXX", "g++"), "--version"),
        "commit": _first_line("git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _first_line(*command: str) -> str:
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return output.splitlines()[0] if output else "unknown"


def geomean(values: Sequence[float]) -> float | None:
    """Return the geometric mean; None without values."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def worst_of(differences: Iterable[float]) -> float:
    """Return the largest difference; infinite if any is NaN, which `max` may skip."""
    found = [0.0, *differences]
    return math.inf if any(map(math.isnan, found)) else max(found)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table: columns are as wide as their longest cell, the first one is left-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    aligned = [
        [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def save(benchmark: str, device: str, result: Mapping[str, Any]) -> Path:
    """Write `results/BENCHMARK-DEVICE-DATE.json`, DATE to the second so that no run replaces another.

    `python -m tools.figures --join` moves it into the file of its benchmark and device.
    """
    RESULTS.mkdir(exist_ok=True)
    date = re.sub(r"[^0-9T]", "", str(result["environment"]["date"])[:19])
    path = RESULTS / f"{benchmark}-{device}-{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def stored(files: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Load results of earlier runs, for `--merge`; of a file of several runs, the oldest first."""
    found: list[dict[str, Any]] = []
    for file in files:
        try:
            data = json.loads(Path(file).read_text())
        except (OSError, ValueError) as error:
            raise SystemExit(f"--merge: {file} is no result of a benchmark: {error}") from error
        runs = data.get("runs") if isinstance(data, dict) else None
        runs = reversed(runs) if isinstance(runs, list) else [data]
        for run in runs:
            if not isinstance(run, dict) or "lines" not in run:
                raise SystemExit(f"--merge: {file} is no result of a benchmark: it holds no lines")
            found.append(run)
    return found


def last_lines(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last result of each line."""
    return {name: line for result in results for name, line in result["lines"].items()}


def last_peers(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the last result of each peer of each line, for lines that map peers by name."""
    lines: dict[str, dict[str, Any]] = {}
    for result in results:
        for label, line in result["lines"].items():
            lines.setdefault(label, {}).update(line)
    return lines


def parser(
    benchmark: str, doc: str | None, names: Sequence[str], seconds: float, *, several: bool = False
) -> argparse.ArgumentParser:
    """Make a parser with the shared arguments of CPU benchmarks; `doc`: the module's docstring, `names`: its lines.

    With `several`, thread counts are a list, and the clock may depend on them.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if several:
        counts = ",".join(map(str, sorted({1, cores})))
        made.add_argument("--threads", default=counts, help=f"thread counts, one run each; default: {counts}")
    else:
        made.add_argument("--threads", type=int, default=cores, help="default: all cores")
    made.add_argument("--only", default=",".join(names), help=f"some of {','.join(names)}")
    made.add_argument("--seconds", type=float, default=seconds, help="time for the steps of one line")
    clocks = (*CLOCKS, *(["auto"] if several else []))
    text = "cpu: for one thread on a busy machine" + "; auto: cpu for one thread, wall for more" * several
    made.add_argument("--clock", choices=clocks, default="auto" if several else "wall", help=text)
    made.add_argument("--json", action="store_true", help="end with one line of JSON")
    made.add_argument("--save", action="store_true", help=f"write benchmarks/results/{benchmark}-cpu-DATE.json")
    made.add_argument("--child", help=argparse.SUPPRESS)
    return made


def parse(
    made: argparse.ArgumentParser, names: Sequence[str], arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse arguments; `only` becomes a list of known lines."""
    parsed = made.parse_args(arguments)
    parsed.only = parsed.only.split(",")
    if unknown := [name for name in parsed.only if name not in names]:
        made.error(f"--only {unknown[0]}: not one of {','.join(names)}")
    return parsed


def finish(benchmark: str, device: str, result: dict[str, Any], *, keep: bool, as_json: bool) -> int:
    """Finish a benchmark: write the file and the line of JSON; return the exit status, which is 0 if all lines ran."""
    if keep:
        print(f"saved {save(benchmark, device, result)}")
    if as_json:
        print(json.dumps(result))
    return 0 if result["complete"] else 1
