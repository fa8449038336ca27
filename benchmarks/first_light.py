"""Benchmark of one Llama block and its kernels against inductor: step time, compile time and memory.

python -m benchmarks.first_light [--threads N] [--only llama_block,softmax] [--json] [--save]

Step times: eager, inductor and dcompile in one process, interleaved. Compile times and memory: one fresh process with
empty caches for each line and peer. A throw-away function first pays a peer's costs for each machine or process
(imports, inductor's precompiled header), which are listed separately. Ratios are speed-ups of dcompile: above 1,
dcompile is faster.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import common

PEERS = ("eager", "inductor", "dcompile")
COMPILERS = PEERS[1:]
SIZE = 2048
MODULE = "benchmarks.first_light"
TIMEOUT = 900.0

Step = Callable[[], Any]
"""Function that runs once and returns the tensors to compare with eager's."""


@dataclass(frozen=True, slots=True)
class Case:
    """A line: `make(compiled)` builds a step with inputs from a fixed seed; `compiled` is torch.compile or identity."""

    name: str
    make: Callable[[Callable[[Any], Any]], Step]


def compiler_of(peer: str) -> Callable[[Any], Any]:
    import torch

    if peer == "eager":
        return lambda target: target
    options = {"options": {"receipt": False}} if peer == "dcompile" else {}
    return lambda target: torch.compile(target, backend=peer, fullgraph=True, dynamic=False, **options)


def llama_block(compiled: Callable[[Any], Any]) -> Step:
    """Make forward and backward of one decoder layer: width 768, 12 heads, MLP 2048, 2 x 512 tokens."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=768, num_attention_heads=12, num_key_value_heads=12, intermediate_size=2048)
    config._attn_implementation = "sdpa"
    block = LlamaDecoderLayer(config, 0)
    x = torch.randn(2, 512, 768, requires_grad=True)
    gradient = torch.randn(2, 512, 768)
    position_embeddings = LlamaRotaryEmbedding(config)(x.detach(), torch.arange(512)[None])
    call = compiled(block)

    def step() -> Any:
        block.zero_grad()
        x.grad = None
        y = call(x, position_embeddings=position_embeddings)
        y.backward(gradient)
        return [y.detach(), x.grad, *(p.grad for p in block.parameters())]

    return step


def rms_norm_forward(compiled: Callable[[Any], Any]) -> Step:
    import torch

    def rms_norm(x: Any, weight: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    return _without_gradients(compiled(rms_norm), torch.randn(SIZE, SIZE), torch.randn(SIZE))


def rms_norm_backward(compiled: Callable[[Any], Any]) -> Step:
    import torch

    def backward(dy: Any, x: Any, weight: Any) -> Any:
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        scaled = dy * weight
        dx = rstd * (scaled - x * rstd.pow(2) * (scaled * x).mean(-1, keepdim=True))
        return dx, (dy * x * rstd).sum(0)

    inputs = (torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE), torch.randn(SIZE))
    return _without_gradients(compiled(backward), *inputs)


def softmax(compiled: Callable[[Any], Any]) -> Step:
    import torch

    return _without_gradients(compiled(lambda x: torch.softmax(x, -1)), torch.randn(SIZE, SIZE))


def cross_entropy(compiled: Callable[[Any], Any]) -> Step:
    """Make forward and backward of cross-entropy."""
    import torch

    call = compiled(lambda logits, labels: torch.nn.functional.cross_entropy(logits, labels))
    logits = torch.randn(SIZE, SIZE, requires_grad=True)
    labels = torch.randint(0, SIZE, (SIZE,))

    def step() -> Any:
        loss = call(logits, labels)
        return [loss.detach(), *torch.autograd.grad(loss, logits)]

    return step


def adamw(compiled: Callable[[Any], Any], dtype: str = "float32") -> Step:
    """Make one parameter's update in place, with the step count in a tensor as in torch's capturable AdamW."""
    import torch

    def update(p: Any, g: Any, m: Any, v: Any, count: Any) -> None:
        count += 1
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        correction1, correction2 = 1 - 0.9**count, 1 - 0.999**count
        p.mul_(1 - 1e-3 * 0.01)
        p.sub_(1e-3 / correction1 * m / ((v / correction2).sqrt() + 1e-8))

    tensors = [torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE), torch.zeros(SIZE, SIZE), torch.zeros(SIZE, SIZE)]
    tensors = [*(tensor.to(getattr(torch, dtype)) for tensor in tensors), torch.zeros(())]
    run = _without_gradients(compiled(update), *tensors)

    def step() -> Any:
        run()
        return tensors

    return step


def _without_gradients(function: Callable[..., Any], *inputs: Any) -> Step:
    import torch

    def step() -> Any:
        with torch.no_grad():
            return function(*inputs)

    return step


CASES = {
    case.name: case
    for case in (
        Case("llama_block", llama_block),
        Case("rms_norm_forward", rms_norm_forward),
        Case("rms_norm_backward", rms_norm_backward),
        Case("softmax", softmax),
        Case("cross_entropy", cross_entropy),
        Case("adamw", adamw),
    )
}


def build(case: Case, peer: str) -> Step:
    """Build a peer's step, with the same inputs for every peer."""
    import torch

    torch.manual_seed(0)
    return case.make(compiler_of(peer))


def largest_difference(actual: Any, expected: Any) -> float:
    """Return the largest difference of two elements, over the largest element of their tensor."""
    import torch

    pairs = zip(_tensors(actual), _tensors(expected), strict=True)
    return common.worst_of(
        float((a - b).abs().max() / b.abs().max().clamp(min=torch.finfo(b.dtype).tiny)) for a, b in pairs
    )


def _tensors(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def time_steps(case: Case, seconds: float, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Time all peers interleaved, in a child process, after one step of each is compared with eager's."""
    steps, errors = {}, {}
    for peer in PEERS:
        try:
            steps[peer] = build(case, peer)
            first = copy.deepcopy(_tensors(steps[peer]()))
            if peer == "eager":
                expected = first
            elif (difference := largest_difference(first, expected)) > 1e-4:
                raise ArithmeticError(f"differs from eager by {difference:.1e} of the largest element")
        except Exception as error:  # one peer's failure must not hide the others' numbers
            if peer == "eager":
                raise
            steps.pop(peer, None)
            errors[peer] = f"{type(error).__name__}: {error}".splitlines()[0]
    timings = common.time_interleaved(steps, seconds, clock=clock)
    return {"steps": {peer: dataclasses.asdict(timing) for peer, timing in timings.items()}, "errors": errors}


def compile_cold(case: Case, peer: str) -> dict[str, Any]:
    """Measure, in a child process, seconds to the end of the first step, and the memory of later steps."""
    import torch

    start = time.perf_counter()
    with torch.no_grad():
        compiler_of(peer)(lambda x: x.exp() + 1)(torch.zeros(64))
    first_use = time.perf_counter() - start
    before = common.resident_mib()
    step = build(case, peer)
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    common.resident_mib()  # returns the memory of compilation to the system
    return {"first_use": first_use, "seconds": seconds, "peak_mib": common.peak_mib_during(step) - before}


def measure(
    name: str,
    arguments: argparse.Namespace,
    module: str = MODULE,
    timeout: float = TIMEOUT,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure one line of the table."""
    shared = ["--only", name, "--threads", str(arguments.threads), "--seconds", str(arguments.seconds), *more]
    shared += ["--clock", arguments.clock]
    line = common.in_fresh_process(module, [*shared, "--child", "steps"], arguments.threads, timeout)
    if "error" in line:
        return {"name": name, "steps": {}, "cold": {}, "errors": {"steps": line["error"]}}
    line = {"name": name, **line, "cold": {}}
    for peer in PEERS if arguments.cold else ():
        cold = common.in_fresh_process(module, [*shared, "--child", peer], arguments.threads, timeout)
        if "error" in cold:
            line["errors"][f"cold {peer}"] = cold["error"]
        else:
            line["cold"][peer] = cold
    return {**line, **ratios(line)}


def ratios(line: Mapping[str, Any]) -> dict[str, float]:
    """Return dcompile's speed-up over each peer that both have times for."""
    found = {}
    for peer in ("inductor", "eager"):
        if {peer, "dcompile"} <= line["steps"].keys():
            found[f"over_{peer}"] = line["steps"][peer]["median"] / line["steps"]["dcompile"]["median"]
    if {*COMPILERS} <= line["cold"].keys():
        found["compile_over_inductor"] = line["cold"]["inductor"]["seconds"] / line["cold"]["dcompile"]["seconds"]
    return found


def summary(lines: Sequence[Mapping[str, Any]], threads: int) -> dict[str, Any]:
    """Return the result that --json prints and --save writes."""
    means = {
        f"geomean_{key}": common.geomean([line[key] for line in lines if key in line])
        for key in ("over_inductor", "over_eager", "compile_over_inductor")
    }
    complete = all(not line["errors"] for line in lines)
    return {"benchmark": "first_light", "complete": complete, **means, "environment": common.environment(threads),
            "lines": list(lines)}  # fmt: skip


def page(result: Mapping[str, Any]) -> str:
    """Return the tables as text."""
    header = ["step, ms: median (fastest)", *PEERS, "spread", "over inductor", "over eager"]
    rows = []
    for line in result["lines"]:
        steps = line["steps"]
        cells = [f"{_ms(steps[p], 'median')} ({_ms(steps[p], 'fastest')})" if p in steps else "failed" for p in PEERS]
        spread = max((step["spread"] for step in steps.values()), default=0.0)
        rows.append(
            [line["name"], *cells, f"{spread:.0%}", *(_ratio(line, f"over_{p}") for p in ("inductor", "eager"))]
        )
    parts = [common.table(header, rows)]
    if any(line["cold"] for line in result["lines"]):
        header = ["cold compile, s (first use); peak, MiB", *PEERS, "over inductor"]
        rows = [
            [line["name"], *(_cold(line["cold"].get(p), p) for p in PEERS), _ratio(line, "compile_over_inductor")]
            for line in result["lines"]
        ]
        parts.append(common.table(header, rows))
    where = result["environment"]
    means = (f"{_ratio(result, f'geomean_{key}')} {key}" for key in ("over_inductor", "over_eager"))
    parts.append(
        f"geometric means of dcompile's speed-up: {', '.join(means)}; "
        f"of compiling: {_ratio(result, 'geomean_compile_over_inductor')} over inductor\n"
        f"{where['cpu']}, {where['threads']} thread(s), load {where['load']}, "
        f"torch {where['torch']}, {where['compiler']}"
    )
    parts += [f"{line['name']}: {who}: {what}" for line in result["lines"] for who, what in line["errors"].items()]
    return "\n\n".join(parts)


def _ms(step: Mapping[str, float], field: str) -> str:
    return f"{step[field] * 1e3:.2f}"


def _ratio(line: Mapping[str, Any], key: str) -> str:
    return f"{line[key]:.2f}" if line.get(key) is not None else "-"


def _cold(cold: Mapping[str, float] | None, peer: str) -> str:
    if cold is None:
        return "-"
    seconds = "" if peer == "eager" else f"{cold['seconds']:.1f} ({cold['first_use']:.1f}); "
    return f"{seconds}{cold['peak_mib']:.0f}"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = common.parser("first_light", __doc__, [*CASES], seconds=8.0)
    parser.add_argument("--no-cold", dest="cold", action="store_false", help="leave out compile times and memory")
    return common.parse(parser, [*CASES], arguments)


def run_child(arguments: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(arguments.threads)
    case = CASES[arguments.only[0]]
    if arguments.child == "steps":
        common.hand_back(time_steps(case, arguments.seconds, common.CLOCKS[arguments.clock]))
    else:
        common.hand_back(compile_cold(case, arguments.child))


def main() -> int:
    arguments = parse_arguments()
    if arguments.child:
        run_child(arguments)
        return 0
    lines = []
    for name in arguments.only:
        print(f"measuring {name} ...", file=sys.stderr)
        lines.append(measure(name, arguments))
    result = {**summary(lines, arguments.threads), "clock": arguments.clock}
    print(page(result))
    return common.finish("first_light", "cpu", result, keep=arguments.save, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
