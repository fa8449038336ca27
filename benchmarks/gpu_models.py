"""Benchmark of whole training steps on a GPU against torch.compile and eager: step time, memory and warm-up.

    python -m benchmarks.gpu_models [--only bert,vit] [--jobs 7] [--longest] [--json] [--save]
    python -m benchmarks.gpu_models --merge FIRST.json SECOND.json

Forward and backward of the models in benchmarks/amp_models.py, float32 parameters under bfloat16 autocast. Each model
has a process of its own with empty caches, and its peers are timed there in turn, round after round, by CUDA events.
With `--jobs N`, N processes build their peers at the same time, which affects warm-up seconds. Then they take turns, so
nothing else runs while one is timed. A line is written when it is done.

Warm-up is the time of the first three steps. Both compilers are imported before, and later peers of `--peers` profit
from PyTorch's caches of earlier traces. Memory is the peak of bytes requested by tensors in a later step. It includes
parameters, and memory that the peer keeps between steps, such as pools of CUDA graphs. Kernels and idle time are those
of one profiled step; idle is the time in which no kernel runs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import dcompile
from benchmarks.amp_models import MODELS, Model, without_dropout
from benchmarks.common import (
    MARK,
    RESULTS,
    environment,
    finish,
    geomean,
    gpu_time,
    hand_back,
    middle_and_spread,
    rotated,
    table,
)

PEERS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model,
    "torch.compile": torch.compile,
    "dcompile": lambda model: dcompile.compile(model, options={"receipt": False}),
    "dcompile autocast_experts": lambda model: dcompile.compile(
        model, options={"receipt": False, "autocast_experts": True}
    ),
    "dcompile reduce-overhead": lambda model: dcompile.compile(
        model, options={"receipt": False, "triton.cudagraphs": True}
    ),
}
DEFAULT = ("eager", "torch.compile", "dcompile")
OURS = "dcompile"
READY = "READY"


class Training:
    """A peer on one model: its steps and their measurements."""

    def __init__(self, peer: str, kind: Model, device: torch.device, *, small: bool, dropout: bool) -> None:
        torch.manual_seed(0)
        before = allocated(device)
        self.kind = kind
        with device:
            model = kind.make(small).train(kind.training)
        self.model = (model if dropout else without_dropout(model)).to(device)
        self.batch = {key: value.to(device) for key, value in kind.batch(small).items()}
        self.device = device
        self.peer = peer
        self.call = PEERS[peer](self.model)
        began = time.perf_counter()
        torch.manual_seed(1)
        first = self.step()
        self.loss = float(first.float().mean())
        self.gradients = gradients(self.model) if kind.training else [first.float().cpu()]
        del first
        for _ in range(2):
            self.step()
        synchronize(device)
        self.warm_up = time.perf_counter() - began
        self.clear()
        self.kept = allocated(device) - before

    def step(self) -> torch.Tensor:
        """Run forward and backward, and return the loss; in inference, return the result."""
        self.clear()
        cast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.kind.autocast)
        with cast, torch.set_grad_enabled(self.kind.training):
            loss = self.call(**self.batch)
        if self.kind.training:
            loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Drop the gradients."""
        self.model.zero_grad(set_to_none=True)

    def time(self, steps: int) -> float:
        """Return the milliseconds a step, averaged over `steps`."""
        if self.device.type == "cpu":
            began = time.perf_counter()
            for _ in range(steps):
                self.step()
            return (time.perf_counter() - began) * 1e3 / steps
        return gpu_time(self.step, steps)

    def look(self) -> dict[str, Any]:
        """Measure memory, kernels and idle time of a step."""
        if self.device.type == "cpu":
            return {}
        self.clear()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = asked_for("current", self.device)
        self.step()
        torch.cuda.synchronize()
        peak = asked_for("peak", self.device) - before + self.kept
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step()
            torch.cuda.synchronize()
        self.clear()
        events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        busy, whole = busy_of(sorted((event.time_range.start, event.time_range.end) for event in events))
        return {
            "peak_mib": peak / 2**20,
            "kernels": len(events),
            "busy_ms": busy / 1e3,
            "idle_ms": (whole - busy) / 1e3,
            "longest": longest((event.name, event.time_range.end - event.time_range.start) for event in events),
        }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    """Return the bytes of tensors, and those that CUDA graphs' pools reserve beyond their tensors."""
    if device.type == "cpu":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    pools = (s for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))
    return asked_for("current", device) + sum(s["total_size"] - s["allocated_size"] for s in pools)


def asked_for(when: str, device: torch.device) -> int:
    """Return the bytes that tensors have requested: now ("current") or at most ("peak").

    The allocator may return up to 1 MiB more for each, depending on blocks that earlier peers have freed. With the same
    parameters, two peers differed by 2 MiB on a Llama (H200).
    """
    return int(torch.cuda.memory_stats(device)[f"requested_bytes.all.{when}"])


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return all gradients, on the CPU."""
    return [parameter.grad.float().cpu() for parameter in model.parameters() if parameter.grad is not None]


def difference(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the norm of the difference of all gradients as one vector, over the norm of the wanted ones."""
    pairs = list(zip(found, wanted, strict=True))
    error = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return (error / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5  # type: ignore[no-any-return]


def busy_of(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (time covered by spans, time from the first start to the last end) of spans in order of their starts."""
    busy, reached = 0.0, spans[0][0] if spans else 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy, reached - spans[0][0] if spans else 0.0


def longest(events: Iterator[tuple[str, float]] | Any, count: int = 30) -> list[tuple[str, int, float]]:
    """Return (kernel, launches, milliseconds) of the kernels with the most time in all."""
    total: dict[str, list[float]] = {}
    for name, microseconds in events:
        total.setdefault(name[:100], []).append(microseconds)
    ranked = sorted(total.items(), key=lambda item: -sum(item[1]))[:count]
    return [(name, len(taken), sum(taken) / 1e3) for name, taken in ranked]


# --- one model --------------------------------------------------------------------------------------------------------


def build(kind: Model, arguments: argparse.Namespace) -> tuple[list[Training], dict[str, Any]]:
    """Build and warm up all peers, and compare them with eager's first loss, or with its result in inference.

    Gradients are compared without dropout.
    """
    device = torch.device(arguments.device)
    torch._dynamo.config.recompile_limit = 64  # the peers share the code of their classes
    if device.type == "cuda":  # libraries' first allocations count for no peer
        ones = torch.ones(256, 256, device=device, requires_grad=True)
        (ones @ ones).sum().backward()
    for compiler in ("torch._inductor.compile_fx", "dcompile.pipeline"):  # imports count for no peer either
        importlib.import_module(compiler)
    line: dict[str, Any] = {}
    peers: list[Training] = []
    for peer in arguments.peers.split(","):
        try:
            made = Training(peer, kind, device, small=arguments.small, dropout=arguments.dropout)
            line[peer] = {"loss": made.loss, "warm_up_s": made.warm_up}
            if peers:
                line[peer]["loss_difference"] = abs(made.loss - peers[0].loss) / abs(peers[0].loss)
                if not (arguments.dropout and kind.training):
                    line[peer]["gradient_difference"] = difference(made.gradients, peers[0].gradients)
            peers.append(made)
        except Exception as error:  # a peer that fails is a result, and no reason to lose the others
            line[peer] = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}
        gc.collect()
        if device.type == "cuda":  # others warm up too
            torch.cuda.empty_cache()
    for made in peers:
        made.gradients = []
    return peers, line


def measure(peers: list[Training], line: dict[str, Any], rounds: int, steps: int) -> dict[str, Any]:
    """Time the peers in turn, then measure memory and kernels of a step of each."""
    samples: dict[str, list[float]] = {peer.peer: [] for peer in peers}
    for turn in range(rounds):
        for peer in rotated(peers, turn):
            samples[peer.peer].append(peer.time(steps))
            peer.clear()
    for peer in peers:
        line[peer.peer] |= {**middle_and_spread(samples[peer.peer]), **peer.look()}
        if peer.peer.startswith(OURS):
            receipt = dcompile.receipt(peer.call)
            line[peer.peer] |= {
                "notes": list(receipt.notes), "own_kernels": receipt.kernel_calls, "fallbacks": dict(receipt.fallbacks),
                "graphs": receipt.graphs, "graph_breaks": receipt.graph_breaks,
            }  # fmt: skip
    return line


def child(kind: Model, arguments: argparse.Namespace) -> None:
    """Build the peers, report that, wait for the turn, and measure."""
    peers, line = build(kind, arguments)
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    sys.stdin.readline()
    hand_back(measure(peers, line, arguments.rounds, arguments.steps))


# --- all models -------------------------------------------------------------------------------------------------------


def run(names: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all models; `jobs` of them are built at a time, then measured one after another."""
    lines: dict[str, Any] = {}
    for first in range(0, len(names), arguments.jobs):
        together = names[first : first + arguments.jobs]
        with tempfile.TemporaryDirectory(prefix="dcompile-bench-") as folder:
            processes = {name: _start(name, folder, arguments) for name in together}
            for process in processes.values():
                _until(process, READY)
            for name, process in processes.items():
                lines[name] = _turn(process, Path(folder, f"{name}.err"))
                lines[name]["jobs"] = len(together)
                show(name, lines[name], arguments.longest)
                if arguments.out:
                    with open(arguments.out, "a") as out:
                        out.write(json.dumps({"lines": {name: lines[name]}}) + "\n")
    return lines


def _start(name: str, folder: str, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    own = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{name}/inductor", "DCOMPILE_CACHE_DIR": f"{folder}/{name}/dcompile",
           "TRITON_CACHE_DIR": f"{folder}/{name}/triton"}  # fmt: skip
    command = [sys.executable, "-m", arguments.module, *sys.argv[1:], "--child", name]
    with open(f"{folder}/{name}.err", "w") as errors:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **own}
        )


def _until(process: subprocess.Popen[str], mark: str) -> str:
    assert process.stdout is not None
    return next((line for line in process.stdout if line.startswith(mark)), "")


def _turn(process: subprocess.Popen[str], errors: Path) -> dict[str, Any]:
    """Let a process measure; return its line, or its last output as an error."""
    assert process.stdin is not None
    try:
        process.stdin.write("go\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # the process has ended: its output is read below
    found = _until(process, MARK)
    process.wait()
    if not found:
        last = (errors.read_text().strip().splitlines() or ["no output"])[-1]
        return {"eager": {"error": f"exit {process.returncode}: {last}"[:400]}}
    line: dict[str, Any] = json.loads(found.removeprefix(MARK))
    return line


def show(name: str, line: dict[str, Any], with_longest: bool) -> None:
    """Print a table of one model, and of each peer's longest kernels."""
    rows = []
    found = {peer: part for peer, part in line.items() if isinstance(part, dict)}
    base = found.get("eager", {}).get("ms")
    for peer, part in found.items():
        if "ms" not in part:
            rows.append([peer, part.get("error", "not measured"), *[""] * 8])
            continue
        compared = part.get("gradient_difference", part.get("loss_difference", 0.0))
        rows.append([
            peer, f"{part['ms']:.2f}", f"{part['spread']:.0%}", f"{base / part['ms']:.2f}" if base else "",
            f"{part.get('peak_mib', 0):.0f}", str(part.get("kernels", "")), f"{part.get('busy_ms', 0):.2f}",
            f"{part.get('idle_ms', 0):.2f}", f"{part['warm_up_s']:.1f}", f"{compared:.1e}",
        ])  # fmt: skip
    head = [name, "ms", "spread", "over eager", "peak MiB", "kernels", "busy ms", "idle ms", "warm-up s", "off by"]
    print(table(head, rows), flush=True)
    for peer, part in found.items() if with_longest else ():
        listed = [[kernel, str(count), f"{ms:.3f}"] for kernel, count, ms in part.get("longest", ())]
        print(f"\n{table([peer, 'launches', 'ms'], listed)}", flush=True)


def summary(lines: dict[str, Any], benchmark: str = "gpu_models") -> dict[str, Any]:
    """Return geometric means, and the lines that miss their targets."""

    def ratios(field: str, peer: str, ours: str = OURS) -> dict[str, float]:
        both = {n: (line.get(peer, {}).get(field), line.get(ours, {}).get(field)) for n, line in lines.items()}
        return {name: a / b for name, (a, b) in both.items() if a and b}

    eager, stock, memory = ratios("ms", "eager"), ratios("ms", "torch.compile"), ratios("peak_mib", "torch.compile")
    warm_up = ratios("warm_up_s", "torch.compile")
    failed = [n for n, line in lines.items() for part in line.values() if isinstance(part, dict) and "error" in part]
    return {
        "benchmark": benchmark,
        "complete": bool(lines) and not failed,
        "geomean_over_eager": geomean([*eager.values()]),
        "geomean_over_torch_compile": geomean([*stock.values()]),
        "torch_compile_over_eager": geomean([*ratios("ms", "eager", "torch.compile").values()]),
        "slower_than_eager": [name for name, ratio in eager.items() if ratio < 1],
        "slower_than_torch_compile": [name for name, ratio in stock.items() if ratio < 1],
        "more_memory_than_torch_compile": [name for name, ratio in memory.items() if ratio < 1],
        "warm_up_of_torch_compile": geomean([1 / ratio for ratio in warm_up.values()]),
        "warm_up_not_half_of_torch_compile": [name for name, ratio in warm_up.items() if ratio < 2],
        "failed": failed,
        "lines": lines,
    }


def merged(files: Sequence[str], benchmark: str = "gpu_models") -> dict[str, Any]:
    """Merge several runs: the last result of each line. Files are results, or outputs of `--out`."""
    lines: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for file in files:
        for text in Path(file).read_text().splitlines():
            result = json.loads(text) if text.startswith("{") and text.endswith("}") else {}
            lines |= result.get("lines", {})
        whole = _whole(Path(file))
        lines |= whole.get("lines", {})
        kept |= {key: value for key, value in whole.items() if key in ("device", "environment")}
    return {**summary(lines, benchmark), **kept}


def _whole(file: Path) -> dict[str, Any]:
    """Load a file that is one JSON document; return {} if it has a document in each line."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError:
        return {}
    return found


def parse(
    arguments: Sequence[str] | None = None,
    models: Mapping[str, Model] = MODELS,
    about: str | None = __doc__,
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(models), help=f"models, of {', '.join(models)}")
    parser.add_argument("--peers", default=",".join(DEFAULT), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps of each peer in a round")
    parser.add_argument("--jobs", type=int, default=1, help="models that warm up at a time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small models, to try the script")
    parser.add_argument("--no-dropout", dest="dropout", action="store_false", help="and compare gradients with eager's")
    parser.add_argument("--longest", action="store_true", help="list the kernels that take longest")
    parser.add_argument("--merge", nargs="+", help="show files of earlier runs as one")
    parser.add_argument("--out", help="add each line to this file as soon as it is there")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help=f"keep the result in {RESULTS.name}/")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    unknown = [name for name in parsed.only.split(",") if name not in models]
    unknown += [peer for peer in parsed.peers.split(",") if peer not in PEERS]
    if unknown:
        parser.error(f"{unknown[0]}: there is no such model or peer")
    return parsed


def main(models: Mapping[str, Model] = MODELS, benchmark: str = "gpu_models", about: str | None = __doc__) -> int:
    """Run the command line of a benchmark with these models; return the exit status."""
    arguments = parse(models=models, about=about)
    arguments.module = f"benchmarks.{benchmark}"
    if arguments.child:
        child(models[arguments.child], arguments)
        return 0
    if arguments.merge:
        result = merged(arguments.merge, benchmark)
        for name, line in result["lines"].items():
            show(name, line, arguments.longest)
    else:
        if arguments.device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("this needs a CUDA GPU; --device cpu --small tries the script")
        lines = run(arguments.only.split(","), arguments)
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        found = {**environment(torch.get_num_threads()), "cuda": torch.version.cuda}
        result = {**summary(lines, benchmark), "device": device, "environment": found}
    print({key: value for key, value in result.items() if key not in ("lines", "environment")})
    label = result.get("device", "cpu").replace(" ", "-").lower()
    return finish(benchmark, label, result, keep=arguments.save, as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
