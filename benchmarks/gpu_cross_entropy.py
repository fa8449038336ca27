"""Benchmark of a language model's last layer with its loss, in bfloat16: time, memory and exactness.

    python -m benchmarks.gpu_cross_entropy [--only plain,frozen] [--size 16384,248320,2048] [--json] [--save]

Lines are kinds of losses, forward and backward: plain `F.cross_entropy`, of logits in float32 as Hugging Face's models
compute it, with a soft cap, and with a frozen layer. Peers take turns, and times are medians. Memory is the peak above
inputs and gradients. The error is that of the gradients of some rows and some classes, relative to float64. A peer that
runs out of memory is printed so.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import dcompile
from benchmarks.common import environment, finish, gpu_time, middle_and_spread, rotated, table

PEERS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda function: function,
    "torch.compile": torch.compile,
    "dcompile": lambda function: dcompile.compile(function, options={"receipt": False}),
    "dcompile classes": lambda function: dcompile.compile(function, options={"receipt": False, "chunked_loss": 16}),
}
SLICE = 64
"""Rows and classes whose gradients are compared."""
CHUNK_ROWS = 1024
"""Rows of logits at a time in float64: 2 GB."""


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def wide(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def capped(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((torch.tanh(F.linear(hidden, weight) / 30.0) * 30.0).float(), labels)


CASES: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "plain": (plain, True), "float32": (wide, True), "capped": (capped, True), "frozen": (wide, False),
}  # fmt: skip
"""Name -> (loss, whether the layer is trained)."""


class Peer:
    """One way to compute a loss and its gradients."""

    def __init__(self, name: str, case: str, given: tuple[torch.Tensor, ...]) -> None:
        self.name, (function, trained) = name, CASES[case]
        self.given = given
        self.learning = given[: 1 + trained]
        given[1].requires_grad_(trained)
        torch._dynamo.reset()
        self.call = PEERS[name](function)

    def step(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.call(*self.given), self.learning)

    def peak_gb(self) -> float:
        """Return the peak of a step above inputs and gradients, in 10^9 bytes."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        found = self.step()
        torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        return float(peak - sum(gradient.nbytes for gradient in found)) / 1e9


@torch.no_grad()
def exact(case: str, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients in float64: of the first `SLICE` rows of the input, and of the first classes of the layer."""
    hidden, weight, labels = given
    matrix, cap = weight.double(), 30.0 if case == "capped" else 0.0
    by_hidden = hidden.new_zeros(SLICE, hidden.shape[1], dtype=torch.float64)
    by_weight = hidden.new_zeros(SLICE, hidden.shape[1], dtype=torch.float64)
    for first in range(0, len(hidden), CHUNK_ROWS):
        rows, target = hidden[first : first + CHUNK_ROWS].double(), labels[first : first + CHUNK_ROWS]
        logits = rows @ matrix.t()
        slope = torch.ones((), dtype=torch.float64, device=rows.device)
        if cap:
            logits = torch.tanh(logits / cap)
            slope = (1 - logits.square())[:, :SLICE] if first else 1 - logits.square()
            logits = logits * cap
        shares = logits.sub_(logits.logsumexp(1, keepdim=True)).exp_()
        shares[torch.arange(len(rows), device=rows.device), target] -= 1
        if not first:
            by_hidden = ((shares * slope)[:SLICE] @ matrix) / len(hidden)
            slope = slope[:, :SLICE] if cap else slope
        by_weight += (shares[:, :SLICE] * slope).t() @ rows / len(hidden)
    return by_hidden, by_weight


def measure(case: str, given: tuple[torch.Tensor, ...], rounds: int, steps: int) -> dict[str, Any]:
    """Warm up all peers, time them in turn, and measure memory and error of each."""
    line: dict[str, Any] = {}
    peers, true = [], exact(case, given)
    for name in PEERS:
        peer = Peer(name, case, given)
        try:
            found = peer.step()
            errors = [
                float((one[:SLICE].double() - other).norm() / other.norm())
                for one, other in zip(found, true, strict=False)
            ]
            del found
            line[name] = {"error": max(errors), "peak_gb": peer.peak_gb()}
            peers.append(peer)
        except torch.OutOfMemoryError:
            line[name] = {"failed": "out of memory"}
        gc.collect()
        torch.cuda.empty_cache()
    samples: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for turn in range(rounds):
        for peer in rotated(peers, turn):
            peer.step()
            samples[peer.name].append(gpu_time(peer.step, steps))
    for name, taken in samples.items():
        line[name] |= middle_and_spread(taken)
    return line


def rows_of(case: str, line: dict[str, Any]) -> list[list[str]]:
    """Return the lines of the table."""
    found = []
    for name, part in line.items():
        label = f"{case} {name}"
        if "ms" not in part:
            found.append([label, part["failed"], "", "", ""])
            continue
        cells = [f"{part['ms']:.1f}", f"{part['spread']:.0%}", f"{part['peak_gb']:.2f}", f"{part['error']:.2e}"]
        found.append([label, *cells])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help=f"losses, of {', '.join(CASES)}")
    parser.add_argument("--size", default="16384,248320,2048", help="rows, classes and width")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each round")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    arguments = parser.parse_args()
    rows, classes, width = map(int, arguments.size.split(","))
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(classes, width, device="cuda") / width**0.5).bfloat16().requires_grad_()
    given = hidden, weight, torch.randint(0, classes, (rows,), device="cuda")
    lines = {case: measure(case, given, arguments.rounds, arguments.steps) for case in arguments.only.split(",")}
    found = [cells for case, line in lines.items() for cells in rows_of(case, line)]
    print(table(["loss", "ms", "spread", "peak GB above", "error"], found))
    device = torch.cuda.get_device_name()
    result = {"benchmark": "gpu_cross_entropy", "complete": True, "lines": lines, "size": arguments.size,
              "device": device,
              "environment": {**environment(torch.get_num_threads()), "cuda": torch.version.cuda}}  # fmt: skip
    return finish("gpu_cross_entropy", device.replace(" ", "-").lower(), result, keep=arguments.save,
                  as_json=arguments.json)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
