"""Benchmark of matmul epilogue fusion under max_autotune.

    python -m benchmarks.gpu_products [--only relu_768,residual_2048] [--rounds 7] [--json] [--save]

Lines are blocks of models in bfloat16 with 8192 tokens, each without gradients and as a training step (forward and
backward). dcompile runs them with `max_autotune`, with and without `epilogue_fusion`. Both take turns, long enough to
reach the clocks of training, and figures are medians. Results are compared with eager's. `ended` is from the receipt.

`benchmarks/gpu_few_rows.py` measures products of 2 to 16 rows.
"""

from __future__ import annotations

import argparse
import copy
import gc
import re
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import dcompile
from benchmarks.common import environment, finish, gpu_time, table

TOKENS = 8192
OPTIONS = {"without": {"max_autotune": True, "epilogue_fusion": False}, "with": {"max_autotune": True}}


class Block(nn.Module):
    """Two linear layers with operations in between; in models, norms follow, whose kernels include residuals."""

    def __init__(self, width: int, inner: int, act: Callable[..., Any], *, bias: bool, gate: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.gate = nn.Linear(width, inner, bias=bias) if gate else None
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x)
        return self.down(hidden)


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank (LoRA)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x)) * 2.0


class Residual(nn.Module):
    """A residual without a norm after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


def encoder(width: int, count: int) -> nn.Module:
    """Make torch's own transformer, whose layers have ReLU by default."""
    layer = nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, count, enable_nested_tensor=False)


def squared(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "relu_768": lambda: (Block(768, 3072, F.relu, bias=True), (TOKENS, 768)),
    "relu_2048": lambda: (Block(2048, 8192, F.relu, bias=True), (TOKENS, 2048)),
    "squared_relu_768": lambda: (Block(768, 3072, squared, bias=False), (TOKENS, 768)),
    "squared_relu_2048": lambda: (Block(2048, 8192, squared, bias=False), (TOKENS, 2048)),
    "gelu_768": lambda: (Block(768, 3072, lambda x: F.gelu(x, approximate="tanh"), bias=True), (TOKENS, 768)),
    "gelu_1024": lambda: (Block(1024, 4096, F.gelu, bias=True), (TOKENS, 1024)),
    "swiglu_2048": lambda: (Block(2048, 8192, F.silu, bias=False, gate=True), (TOKENS, 2048)),
    "residual_2048": lambda: (Residual(2048), (TOKENS, 2048)),
    "encoder_1024": lambda: (encoder(1024, 1), (16, TOKENS // 16, 1024)),
    "lora_4096": lambda: (Adapted(4096, 16), (TOKENS, 4096)),
}


def steps(module: nn.Module, call: Any, x: torch.Tensor, gradient: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return both ways to run a block. Gradients are dropped, so that each step writes new ones."""

    def inference() -> Any:
        with torch.no_grad():
            return call(x)

    def training() -> Any:
        y = call(x)
        y.backward(gradient)
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        module.zero_grad()
        x.grad = None
        return grads

    return {"inference": inference, "training": training}


def medians(calls: dict[str, Callable[[], Any]], rounds: int, seconds: float = 0.1) -> dict[str, float]:
    """Return the median milliseconds of each call, timed in turn, round after round."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in sorted(calls, reverse=bool(number % 2)):
            count = max(3, round(seconds * 1e3 / gpu_time(calls[name], 3)))
            taken[name].append(gpu_time(calls[name], count))
    return {name: statistics.median(times) for name, times in taken.items()}


def differs(got: Any, want: Any) -> float:
    """Return the largest relative difference of results, as norms over all elements."""
    pairs = zip(*((x if isinstance(x, list) else [x]) for x in (got, want)), strict=True)
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Measure one block: milliseconds by option and mode, and the fused epilogues."""
    torch.manual_seed(0)
    module, shape = CASES[name]()
    module = module.to("cuda", torch.bfloat16)
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)
    line: dict[str, Any] = {"ms": {}, "ended": {}}
    calls: dict[str, dict[str, Callable[[], Any]]] = {"inference": {}, "training": {}}
    for peer, options in OPTIONS.items():
        own = copy.deepcopy(module)
        call = dcompile.compile(own, options={"receipt": False, **options})
        for way, step in steps(own, call, x, gradient).items():
            want = steps(module, module, x, gradient)[way]()
            if (found := differs(step(), want)) > 3e-2:
                raise ArithmeticError(f"{name} {peer} {way} differs from eager by {found:.1e} of its norm")
            calls[way][peer] = step
            if peer == "with":
                notes = [n for n in dcompile.receipt(call).notes if "end in the loop" in n]
                line["ended"][way] = [note.removeprefix("max_autotune: ") for note in notes]
    for way, both in calls.items():
        line["ms"][way] = medians(both, rounds)
    return line


def run(names: list[str], rounds: int) -> dict[str, Any]:
    lines: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            lines[name] = measure(name, rounds)
            for cells in rows(name, lines[name]):
                print("  ".join(cells), flush=True)
        except Exception as error:  # one block's failure must not hide the others' numbers
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            print(name, failed[name], flush=True)
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return {"benchmark": "gpu_products", "complete": not failed, "lines": lines, "errors": failed,
            "device": torch.cuda.get_device_name(),
            "environment": {**environment(torch.get_num_threads()), "cuda": torch.version.cuda}}  # fmt: skip


def rows(name: str, line: dict[str, Any]) -> list[list[str]]:
    """Return the lines of the table."""
    found = []
    for way, ms in line["ms"].items():
        ended = "; ".join(re.sub(r" products end in the loop behind them:?", "", note) for note in line["ended"][way])
        ratio = f"{ms['with'] / ms['without']:.3f}"
        found.append([f"{name} {way}", f"{ms['without']:.3f}", f"{ms['with']:.3f}", ratio, ended])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help=f"blocks, of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    arguments = parser.parse_args()
    result = run(arguments.only.split(","), arguments.rounds)
    every = [cells for name, line in result["lines"].items() for cells in rows(name, line)]
    print(table(["ms", "without", "with", "ratio", "ended"], every))
    return finish("gpu_products", result["device"].replace(" ", "-").lower(), result, keep=arguments.save,
                  as_json=arguments.json)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
