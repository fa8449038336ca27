"""Benchmark of training steps on one GPU: eager, torch.compile and dcompile on a Hugging Face Llama, in one process.

    python -m benchmarks.gpu_train --only 160M --json
    python -m benchmarks.gpu_train --merge FIRST.json SECOND.json

A step is forward with loss, backward, fused AdamW, zero_grad; parameters are bfloat16. Peers with "+ optimizer" in
their names compile AdamW's step, too. For torch.compile it has many small operations (`foreach`), since torch.compile
cannot compile the fused one. These peers, and max-autotune, run only with --peers. All peers are built first, then
timed in turn, round after round, by CUDA events. Memory, kernels and idle time are those of one step of each peer.
Memory is the allocator's peak beyond parameters and optimizer. Kernels are counted by torch.profiler, and idle is the
time in which none runs. `160M-waiting` is the model 160M with one step in its middle that no CUDA graph can record.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import dcompile
from benchmarks.common import (
    environment,
    finish,
    gpu_time,
    last_peers,
    middle_and_spread,
    rotated,
    stored,
    table,
)


@dataclass(frozen=True)
class Shape:
    """A Llama and its batch."""

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    inner: int
    rows: int
    length: int
    vocabulary: int = 32000
    waits: bool = False
    """Whether a step in the middle waits for the device, so that no CUDA graph can record it."""


SHAPES = {
    "1B": Shape(16, 2048, 32, 8, 8192, rows=4, length=2048),
    "8B": Shape(32, 4096, 32, 8, 14336, rows=1, length=4096, vocabulary=128256),
    "3B": Shape(28, 3072, 24, 8, 8192, rows=2, length=4096, vocabulary=128256),
    "8B-layers": Shape(4, 4096, 32, 8, 14336, rows=1, length=8192, vocabulary=512),
    "160M": Shape(12, 768, 12, 12, 3072, rows=4, length=1024),
    "160M-waiting": Shape(12, 768, 12, 12, 3072, rows=4, length=1024, waits=True),
    "30M": Shape(8, 512, 8, 8, 1408, rows=32, length=64, vocabulary=4096),
    "tiny": Shape(2, 64, 4, 2, 128, rows=2, length=64, vocabulary=256),
}
"""Name -> shape. `tiny` tests the benchmark itself; `8B-layers` is four of 8B's layers with hardly a head."""


def compiled(function: Any) -> Any:
    return dcompile.compile(function, options={"receipt": False})


def recorded(function: Any) -> Any:
    return dcompile.compile(function, options={"receipt": False, "triton.cudagraphs": True})


def tuned(function: Any) -> Any:
    return dcompile.compile(function, mode="max-autotune-no-cudagraphs")


PEERS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model,
    "torch.compile": torch.compile,
    "torch.compile reduce-overhead": lambda model: torch.compile(model, mode="reduce-overhead"),
    "dcompile": compiled,
    "dcompile reduce-overhead": recorded,
    "dcompile max-autotune": lambda model: dcompile.compile(model, mode="max-autotune"),
    "dcompile max-autotune-no-cudagraphs": tuned,
    "dcompile max-autotune-no-cudagraphs but epilogue_fusion": lambda model: dcompile.compile(
        model, options={"max_autotune": True, "epilogue_fusion": False}
    ),
}
DEFAULT_PEERS = tuple(PEERS)[:5]
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "torch.compile + optimizer": torch.compile,
    "dcompile + optimizer": compiled,
    "dcompile reduce-overhead + optimizer": recorded,
    "dcompile max-autotune-no-cudagraphs + optimizer": tuned,
    "dcompile max-autotune + optimizer": PEERS["dcompile max-autotune"],
}
"""Peers that compile their optimizer's step as well, in the same way as the model."""


def make(shape: Shape, device: Any = "cuda", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Make the model, with the same parameters each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=shape.length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype).train()
    if shape.waits:
        middle = model.model.layers[shape.layers // 2]
        middle.input_layernorm = torch.nn.Sequential(Wait(), middle.input_layernorm)
    return model


@torch.library.custom_op("dcompile_benchmarks::wait", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def wait(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, once the host has waited for it, as operators do that exchange tokens among experts."""
    if x.is_cuda:
        torch.cuda.current_stream().synchronize()
    return x.clone()


wait.register_fake(torch.empty_like)
wait.register_autograd(lambda ctx, gradient: wait(gradient))


class Wait(torch.nn.Module):
    """A step that waits for the device, in the forward and in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return wait(x)


class Training:
    """A peer: its model, its optimizer, and measurements of its steps."""

    def __init__(self, name: str, shape: Shape, device: str = "cuda") -> None:
        model, whole = make(shape, device), OPTIMIZERS.get(name)
        self.call = (whole or PEERS[name])(model)
        kind = "foreach" if whole is torch.compile else "fused"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **{kind: True})
        self.update = self.optimizer.step if whole is None else whole(self.optimizer.step)
        self.tokens = torch.randint(0, shape.vocabulary, (shape.rows, shape.length), device=device)
        self.name, self.losses = name, list[float]()
        began = time.perf_counter()
        for _ in range(4):  # compiles, warms up, records
            self.losses.append(float(self.step()))
        if device != "cpu":
            torch.cuda.synchronize()
        self.warm_up = time.perf_counter() - began

    def step(self) -> torch.Tensor:
        """Run one step; return the loss."""
        loss = self.call(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def time(self, steps: int) -> float:
        """Return the milliseconds a step, averaged over `steps`."""
        return gpu_time(self.step, steps)

    def look(self) -> dict[str, Any]:
        """Measure memory, kernels and idle time of a step."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step()
            torch.cuda.synchronize()
        events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        spans = sorted((event.time_range.start, event.time_range.end) for event in events)
        busy, reached = 0.0, spans[0][0] if spans else 0.0
        for start, end in spans:
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        whole = reached - spans[0][0] if spans else 0.0
        return {
            "peak_mib": peak / 2**20,
            "kernels": len(events),
            "busy_ms": busy / 1e3,
            "idle_ms": (whole - busy) / 1e3,
            "longest": _longest(events),
        }


def _longest(events: Sequence[Any], count: int = 25) -> list[tuple[str, int, float]]:
    """Return (kernel, launches, milliseconds) of the kernels with the most time in all."""
    total: dict[str, list[float]] = {}
    for event in events:
        total.setdefault(event.name[:90], []).append(event.time_range.end - event.time_range.start)
    ranked = sorted(total.items(), key=lambda item: -sum(item[1]))[:count]
    return [(name, len(taken), sum(taken) / 1e3) for name, taken in ranked]


def measure(label: str, names: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Measure all peers on one model."""
    torch._dynamo.config.recompile_limit = 64  # the peers' models share the code of their class
    shape, line = SHAPES[label], {}
    peers = []
    for name in names:
        try:
            peers.append(Training(name, shape))
        except Exception as error:  # a peer that fails is a result, and no reason to lose the others
            line[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        gc.collect()
    samples: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for turn in range(rounds):
        for peer in rotated(peers, turn):
            samples[peer.name].append(peer.time(steps))
    for peer in peers:
        line[peer.name] = {
            **middle_and_spread(samples[peer.name]),
            "warm_up_s": peer.warm_up,
            "losses": peer.losses,
            **peer.look(),
        }
        if peer.name.startswith("dcompile"):
            receipt = dcompile.receipt(peer.call)
            line[peer.name] |= {"notes": list(receipt.notes), "own_kernels": receipt.kernel_calls}
    return line


def show(label: str, line: dict[str, Any], longest: bool) -> None:
    """Print a table of one model, and of each peer's longest kernels."""
    base = line.get("torch.compile", {}).get("ms")
    rows = []
    for name, found in line.items():
        if "error" in found:
            rows.append([name, found["error"], *[""] * 7])
            continue
        ratio = f"{found['ms'] / base:.2f}" if base else ""
        rows.append(
            [
                name, f"{found['ms']:.2f}", f"{found['spread']:.0%}", ratio, f"{found['peak_mib']:.0f}",
                str(found["kernels"]), f"{found['busy_ms']:.1f}", f"{found['idle_ms']:.1f}",
                f"{found['warm_up_s']:.0f}",
            ]
        )  # fmt: skip
    head = [label, "ms", "spread", "of torch.compile", "peak MiB", "kernels", "busy ms", "idle ms", "warm-up s"]
    print(table(head, rows), flush=True)
    for name, found in line.items() if longest else ():
        listed = [[kernel, str(count), f"{ms:.3f}"] for kernel, count, ms in found.get("longest", ())]
        print(f"\n{table([name, 'launches', 'ms'], listed)}", flush=True)


def merged(files: Sequence[str]) -> dict[str, Any]:
    """Merge several runs: the last result of each peer of each model."""
    results = stored(files)
    return summary(last_peers(results)) | {
        key: value for key, value in results[-1].items() if key in ("device", "environment")
    }


def summary(lines: dict[str, Any]) -> dict[str, Any]:
    """Return a result with these lines."""
    complete = all("error" not in found for line in lines.values() for found in line.values())
    return {"benchmark": "gpu_train", "lines": lines, "complete": complete}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all models, and print each when it is done."""
    lines: dict[str, Any] = {}
    for label in arguments.only.split(","):
        lines[label] = measure(label, arguments.peers.split(","), arguments.rounds, arguments.steps)
        show(label, lines[label], arguments.longest)
        gc.collect()
        torch.cuda.empty_cache()
    found = {**environment(torch.get_num_threads()), "cuda": torch.version.cuda}
    return {**summary(lines), "device": torch.cuda.get_device_name(), "environment": found}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="1B,160M", help=f"models, of {', '.join(SHAPES)}")
    parser.add_argument(
        "--peers",
        default=",".join(DEFAULT_PEERS),
        help=f"what to time, comma-separated, of {', '.join([*PEERS, *OPTIMIZERS])}",
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="steps of each peer in a round")
    parser.add_argument("--longest", action="store_true", help="list the kernels that take longest")
    parser.add_argument("--merge", nargs="+", metavar="FILE", help="show files of earlier runs as one")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    arguments = parser.parse_args(given)
    if arguments.merge:
        result = merged(arguments.merge)
        for label, line in result["lines"].items():
            show(label, line, arguments.longest)
    elif torch.cuda.is_available():
        result = run(arguments)
    else:
        parser.error("this needs a CUDA GPU")
    device = str(result.get("device", "none")).replace(" ", "-").lower()
    return finish("gpu_train", device, result, keep=arguments.save, as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
