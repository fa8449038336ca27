"""Benchmark of GPU kernels against eager and torch.compile, relative to the speed of a memory copy.

    python -m benchmarks.gpu_kernels [--only swiglu_forward,adamw] [--peers eager,inductor,dcompile] [--json] [--save]
    python -m benchmarks.gpu_kernels --merge FIRST.json SECOND.json

Shapes are those of an 8B Llama with 8192 tokens, bfloat16. Each call is timed by CUDA events after four writes of
1 GiB, which flush the L2 cache and let the host run ahead. The figure is the median. `share` is the operation's minimum
traffic divided by its time, relative to the bandwidth of `copy_` on the same GPU in the same run. The targets are 85 %
forward and 75 % backward.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.common import environment, finish, geomean, last_lines, stored, table, worst_of

TOKENS, WIDTH, INNER, VOCABULARY, HEADS, KV_HEADS = 8192, 4096, 14336, 128256, 32, 8
PEERS = ("eager", "inductor", "dcompile")
TARGETS = {"forward": 0.85, "backward": 0.75}
AHEAD = 4
"""Number of 1 GiB writes before a call.

One takes 0.35 ms on an H100, and the host, if shared, may take longer to launch a backward. With one write, a kernel of
0.1 ms measured 0.29 ms, and inductor's of 0.17 ms measured 0.25 ms."""
Function = Callable[..., Any]
Step = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A kernel: `make(compiled)` builds a step that returns its results; `nbytes` is its minimum traffic."""

    make: Callable[[Callable[[Any], Any]], Step]
    nbytes: float
    kind: str
    tolerance: float = 2e-2


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def _forward(function: Function, inputs: Callable[[], tuple[Any, ...]], nbytes: float, **more: Any) -> Case:
    def make(compiled: Callable[[Any], Any]) -> Step:
        given, call = inputs(), compiled(function)

        def step() -> Any:
            with torch.no_grad():
                return call(*given)

        return step

    return Case(make, nbytes, "forward", **more)


def _backward(function: Function, inputs: Callable[[], tuple[Any, ...]], nbytes: float, **more: Any) -> Case:
    def make(compiled: Callable[[Any], Any]) -> Step:
        given, call = inputs(), compiled(function)
        wanted = [x.requires_grad_() for x in given if x.is_floating_point() and x.dim()]
        y = call(*given)
        outputs = tuple(y) if isinstance(y, (tuple, list)) else (y,)
        gradients = [torch.randn_like(out) if out.dim() else torch.ones_like(out) for out in outputs]
        return lambda: torch.autograd.grad(outputs, wanted, gradients, retain_graph=True)

    return Case(make, nbytes, "backward", **more)


# --- cases ------------------------------------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return total, rms_norm(total, w)


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (WIDTH,), w, b)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), labels)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + _turned(q) * sin, k * cos + _turned(k) * sin


def _rope_inputs() -> tuple[Any, ...]:
    """Return queries and keys in the layout of their projections: heads inside tokens."""
    q = randn(1, TOKENS, HEADS, WIDTH // HEADS).transpose(1, 2)
    k = randn(1, TOKENS, KV_HEADS, WIDTH // HEADS).transpose(1, 2)
    angles = torch.randn(1, TOKENS, WIDTH // HEADS, device="cuda")
    return q, k, angles.cos().bfloat16(), angles.sin().bfloat16()


def _rope_backward(compiled: Callable[[Any], Any]) -> Step:
    q, k, cos, sin = _rope_inputs()
    wanted = [q.requires_grad_(), k.requires_grad_()]
    outputs = compiled(rope)(q, k, cos, sin)
    gradients = [torch.randn_like(out) for out in outputs]
    return lambda: torch.autograd.grad(outputs, wanted, gradients, retain_graph=True)


def _labels() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")


def _adamw(compiled: Callable[[Any], Any]) -> Step:
    """Make a step of torch.optim.AdamW over eight float32 matrices; eager's is the fused one, the fastest."""
    parameters = [torch.nn.Parameter(randn(WIDTH, WIDTH, dtype=torch.float32)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    how = {"fused": True} if compiled is as_it_is else {"foreach": True, "capturable": True}
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, **how)
    call = compiled(optimizer.step)

    def step() -> Any:
        with torch.no_grad():
            call()
        return [parameter.detach() for parameter in parameters]

    return step


T, D, M, V = TOKENS, WIDTH, INNER, VOCABULARY
CASES: dict[str, Case] = {
    "rms_norm_forward": _forward(rms_norm, lambda: (randn(T, D), randn(D)), 4 * T * D),
    "rms_norm_backward": _backward(rms_norm, lambda: (randn(T, D), randn(D)), 6 * T * D),
    "add_rms_norm_forward": _forward(add_rms_norm, lambda: (randn(T, D), randn(T, D), randn(D)), 8 * T * D),
    "add_rms_norm_backward": _backward(add_rms_norm, lambda: (randn(T, D), randn(T, D), randn(D)), 8 * T * D),
    "layer_norm_forward": _forward(layer_norm, lambda: (randn(T, D), randn(D), randn(D)), 4 * T * D),
    "layer_norm_backward": _backward(layer_norm, lambda: (randn(T, D), randn(D), randn(D)), 6 * T * D),
    "softmax_forward": _forward(softmax, lambda: (randn(4 * T, D),), 16 * T * D),
    "softmax_backward": _backward(softmax, lambda: (randn(4 * T, D),), 24 * T * D),
    "cross_entropy_forward": _forward(cross_entropy, lambda: (randn(T, V), _labels()), 2 * T * V, tolerance=1e-3),
    "cross_entropy_backward": _backward(cross_entropy, lambda: (randn(T, V), _labels()), 4 * T * V),
    "swiglu_forward": _forward(swiglu, lambda: (randn(T, M), randn(T, M)), 6 * T * M),
    "swiglu_backward": _backward(swiglu, lambda: (randn(T, M), randn(T, M)), 10 * T * M),
    "rope_forward": _forward(rope, _rope_inputs, 4 * T * (D + D // 4)),
    "rope_backward": Case(_rope_backward, 4 * T * (D + D // 4), "backward"),
    "adamw": Case(_adamw, 28 * 8 * D * D, "forward", 1e-4),
}


# --- measuring --------------------------------------------------------------------------------------------------------


def as_it_is(target: Any) -> Any:
    return target


def compiler(peer: str) -> Callable[[Any], Any]:
    """Return a peer's compiler."""
    if peer == "eager":
        return as_it_is
    options = {"options": {"receipt": False}} if peer == "dcompile" else {}
    return lambda target: torch.compile(target, backend=peer, dynamic=False, **options)


class Clock:
    """Times calls on the GPU, each with an empty L2 cache."""

    def __init__(self) -> None:
        self.waste = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")

    def __call__(self, step: Step, rounds: int) -> list[float]:
        """Return the milliseconds of each of `rounds` calls."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
        for start, end in events:
            for _ in range(AHEAD):
                self.waste.zero_()
            start.record()
            step()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]


def copy_rate(clock: Clock) -> float:
    """Return the bytes a second that `copy_` of 2 GiB reads and writes."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    times = clock(lambda: target.copy_(source), 20)
    return 2 * source.nbytes / (statistics.median(times[3:]) * 1e-3)


def difference(got: Any, want: Any) -> float:
    """Return the largest difference between results, over the largest element of each."""
    pairs = zip(_tensors(got), want, strict=True)
    return worst_of(((a.float() - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in pairs)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in (value if isinstance(value, (list, tuple)) else [value])]


def measure(case: Case, peers: Sequence[str], rate: float, clock: Clock, rounds: int) -> dict[str, Any]:
    """Measure all peers on one case, one after another; each is compared with eager first."""
    line: dict[str, Any] = {"kind": case.kind, "bytes": case.nbytes, "peers": {}, "errors": {}}
    want: list[torch.Tensor] = []
    for peer in peers:
        torch.manual_seed(0)
        torch.compiler.reset()
        try:
            step = case.make(compiler(peer))
            got = step()
            if not want:
                want = [copy.deepcopy(tensor).float() for tensor in _tensors(got)]
            elif (found := difference(got, want)) > case.tolerance:
                raise ArithmeticError(f"differs from {peers[0]} by {found:.1e} of the largest element")
            del got
            clock(step, 3)
            median = statistics.median(clock(step, rounds))
            line["peers"][peer] = {"ms": median, "share": case.nbytes / (median * 1e-3) / rate}
        except Exception as error:  # one peer's failure must not hide the others' numbers
            line["errors"][peer] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        step = None
        torch.cuda.empty_cache()
    return line


def row(name: str, line: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    peers = line["peers"]
    cells = [f"{peers[p]['ms']:.3f} ({peers[p]['share']:.0%})" if p in peers else "failed" for p in PEERS]
    ours = peers.get("dcompile", {})
    ratios = [f"{peers[p]['ms'] / ours['ms']:.2f}" if p in peers and ours else "" for p in PEERS[:2]]
    met = "" if not ours else "yes" if ours["share"] >= TARGETS[line["kind"]] else "no"
    return [name, f"{line['bytes'] / 1e6:.0f}", *cells, *ratios, met]


HEADER = ["ms (share of copying)", "MB", *PEERS, "over eager", "over inductor", "target"]


def summary(lines: dict[str, Any], rate: float) -> dict[str, Any]:
    """Return the result that --json prints and --save writes."""
    means = {}
    for peer in PEERS[:2]:
        both = [line["peers"] for line in lines.values() if {peer, "dcompile"} <= line["peers"].keys()]
        means[f"geomean_over_{peer}"] = geomean([p[peer]["ms"] / p["dcompile"]["ms"] for p in both])
    for kind, target in TARGETS.items():
        shares = [
            n["peers"]["dcompile"]["share"] for n in lines.values() if n["kind"] == kind and "dcompile" in n["peers"]
        ]
        means[f"{kind}_at_target"] = f"{sum(share >= target for share in shares)} of {len(shares)}"
    return {"benchmark": "gpu_kernels", "complete": bool(lines) and not any(n["errors"] for n in lines.values()),
            **means, "copy_bytes_per_second": rate, "lines": lines}  # fmt: skip


def merged(files: Sequence[str]) -> dict[str, Any]:
    """Merge several runs: the last result of each line."""
    results = stored(files)
    kept = {key: value for key, value in results[-1].items() if key in ("device", "environment")}
    return {**summary(last_lines(results), results[-1]["copy_bytes_per_second"]), **kept}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="cases, comma-separated")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--merge", nargs="+", help="show files of earlier runs as one")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    arguments = parser.parse_args()
    if arguments.merge:
        result = merged(arguments.merge)
    else:
        result = run(arguments.only.split(","), arguments.peers.split(","), arguments.rounds)
    print(table(HEADER, [row(name, line) for name, line in result["lines"].items()]))
    print({key: value for key, value in result.items() if key not in ("lines", "environment")})
    return finish("gpu_kernels", result["device"].replace(" ", "-").lower(), result, keep=arguments.save,
                  as_json=arguments.json)  # fmt: skip


def run(names: Sequence[str], peers: Sequence[str], rounds: int) -> dict[str, Any]:
    """Measure cases, and print each when it is done."""
    from torch._functorch import config

    config.donated_buffer = False  # the backward of one forward is timed many times
    clock = Clock()
    rate = copy_rate(clock)
    print(f"{torch.cuda.get_device_name()}: copying moves {rate / 1e12:.2f} TB/s", flush=True)
    lines = {}
    for name in names:
        lines[name] = measure(CASES[name], peers, rate, clock, rounds)
        print("  ".join(row(name, lines[name])), *lines[name]["errors"].values(), flush=True)
    found = {**environment(torch.get_num_threads()), "cuda": torch.version.cuda}
    return {**summary(lines, rate), "device": torch.cuda.get_device_name(), "environment": found}


if __name__ == "__main__":
    raise SystemExit(main())
