"""Is dcompile faster than inductor on whole training steps, with less memory and a fraction of the compile time?

python -m benchmarks.cpu_models [--threads N] [--only llama,resnet] [--no-cold] [--json] [--save]

Forward and backward of the models in benchmarks/models.py. Step times: eager, inductor and dcompile in one process,
interleaved, after their losses and gradients have been compared. Compile times and memory: one fresh process with empty
caches per model and peer. Ratios are speed-ups of dcompile: above 1, dcompile is faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import common, first_light
from benchmarks.first_light import COMPILERS, PEERS, Case

NAMES = (
    "llama_block", "llama_block_bf16", "llama", "llama_bf16", "gpt2", "bert", "vit", "resnet", "convnext", "mlp",
    "lstm", "unet", "t5", "moe",
)  # fmt: skip
MODULE = "benchmarks.cpu_models"
TIMEOUT = 1800.0


def case(name: str) -> Case:
    """A model's training step without the optimizer; its results are the loss and all gradients."""
    from benchmarks.models import MODELS

    model = MODELS[name]

    def make(compiled: Callable[[Any], Any]) -> first_light.Step:
        module = model.make().to(model.dtype)
        batch = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in model.batch().items()}
        call = compiled(module)

        def step() -> Any:
            module.zero_grad()
            loss = call(**batch)
            loss.backward()
            return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]

        return step

    return Case(name, make)


def difference(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """The larger of the losses' relative difference and that of all gradients as one vector."""
    loss = abs(float(actual[0]) - float(expected[0])) / abs(float(expected[0]))
    pairs = [(a.double(), b.double()) for a, b in zip(actual[1:], expected[1:], strict=True)]
    error, norm = (
        sum(float(t.square().sum()) for t in ts) ** 0.5 for ts in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    return max(loss, error / norm)


def tolerance(name: str) -> float:
    """float32: sums in another order. bfloat16: roundings at other places (inductor's). Random: another mask."""
    from benchmarks.models import MODELS

    return 2.0 if MODELS[name].random else 0.1 if name.endswith("bf16") else 1e-3


def time_steps(name: str, seconds: float, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Child process: all peers interleaved, after one step of each has been compared with eager's."""
    steps, errors, expected = {}, {}, []
    for peer in PEERS:
        try:
            steps[peer] = first_light.build(case(name), peer)
            first = [tensor.clone() for tensor in steps[peer]()]
            if peer == "eager":
                expected = first
            elif not (found := difference(first, expected)) <= tolerance(name):
                raise ArithmeticError(f"differs from eager by {found:.1e}")
        except Exception as error:  # one peer's failure must not hide the others' numbers
            if peer == "eager":
                raise
            steps.pop(peer, None)
            errors[peer] = f"{type(error).__name__}: {error}".splitlines()[0]
    timings = common.time_interleaved(steps, seconds, clock=clock)
    return {"steps": {peer: dataclasses.asdict(timing) for peer, timing in timings.items()}, "errors": errors}


def summary(lines: Sequence[dict[str, Any]], threads: int) -> dict[str, Any]:
    """What --json prints and --save keeps."""
    found = first_light.summary(lines, threads)
    slower = [line["name"] for line in lines if line.get("over_eager", 1.0) < 1]
    memory = [
        cold["inductor"]["peak_mib"] / cold["dcompile"]["peak_mib"]
        for line in lines
        if {*COMPILERS} <= (cold := line["cold"]).keys()
    ]
    return {
        **found,
        "benchmark": "cpu_models",
        "slower_than_eager": slower,
        "geomean_memory_over_inductor": common.geomean(memory),
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = common.parser("cpu_models", __doc__, [*NAMES], seconds=10.0)
    parser.add_argument("--no-cold", dest="cold", action="store_false", help="leave out compile times and memory")
    return common.parse(parser, [*NAMES], arguments)


def run_child(arguments: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(arguments.threads)
    (name,) = arguments.only
    if arguments.child == "steps":
        common.hand_back(time_steps(name, arguments.seconds, common.CLOCKS[arguments.clock]))
    else:
        common.hand_back(first_light.compile_cold(case(name), arguments.child))


def main() -> int:
    arguments = parse_arguments()
    if arguments.child:
        run_child(arguments)
        return 0
    lines = []
    for name in arguments.only:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        lines.append(first_light.measure(name, arguments, MODULE, TIMEOUT))
    result = {**summary(lines, arguments.threads), "clock": arguments.clock}
    print(first_light.page(result))
    if result["slower_than_eager"]:
        print(f"slower than eager: {', '.join(result['slower_than_eager'])}")
    return common.finish("cpu_models", "cpu", result, keep=arguments.save, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
