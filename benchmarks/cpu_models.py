"""Benchmark of whole training steps on CPU against inductor: step time, memory and compile time.

python -m benchmarks.cpu_models [--threads N] [--only llama,resnet] [--no-cold] [--no-memory] [--keep FILE] [--json]
                                [--save]

Forward and backward of the models in benchmarks/models.py. Step times: eager, inductor and dcompile in one process,
interleaved, after their losses and gradients have been compared. Compile times and memory: one fresh process with empty
caches per model and peer. Ratios are speed-ups of dcompile: above 1, dcompile is faster.

Memory has two figures. "Tensors" is the peak of bytes allocated by torch during later steps. It includes parameters,
gradients, and memory that the compiler keeps between calls. "Resident" is the process's high-water mark during later
steps minus its memory before the model. It includes Python objects that compilation leaves.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common, first_light
from benchmarks.first_light import COMPILERS, PEERS, Case

NAMES = (
    "llama_block", "llama_block_bf16", "llama", "llama_bf16", "gpt2", "bert", "vit", "resnet", "convnext", "mlp",
    "lstm", "unet", "t5", "moe",
)  # fmt: skip
MODULE = "benchmarks.cpu_models"
TIMEOUT = 1800.0
TENSORS = "tensors:"
LATER = "later steps"


def case(name: str) -> Case:
    """Return a model's training step without the optimizer; its results are the loss and all gradients."""
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
    """Return the larger relative difference: of the losses, or of all gradients as one vector."""
    loss = abs(float(actual[0]) - float(expected[0])) / abs(float(expected[0]))
    pairs = [(a.double(), b.double()) for a, b in zip(actual[1:], expected[1:], strict=True)]
    error, norm = (
        sum(float(t.square().sum()) for t in ts) ** 0.5 for ts in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    return common.worst_of((loss, error / norm))


def tolerance(name: str) -> float:
    """Return a model's tolerance. float32: another order of sums. bfloat16: other roundings. Random: another mask."""
    from benchmarks.models import MODELS

    return 2.0 if MODELS[name].random else 0.1 if name.endswith("bf16") else 1e-3


def time_steps(name: str, seconds: float, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Time all peers interleaved, in a child process, after one step of each is compared with eager's."""
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


def tensor_memory(step_of: Case, peer: str) -> dict[str, float]:
    """Measure, in a child process, the allocator's peak over later steps, and the allocations of one step."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    first_light.compiler_of(peer)(lambda x: x.exp() + 1)(torch.zeros(64))
    # acc_events: without it, torch 2.11 warns about several cycles, although the profiler has one here
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        step = first_light.build(step_of, peer)
        for _ in range(3):
            step()
        with record_function(LATER):
            for _ in range(2):
                step()
    events = found.profiler.kineto_results.events()
    (begin,) = (event.start_ns() for event in events if event.name() == LATER)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = peak = 0
    for when, nbytes in changes:
        live += nbytes
        peak = max(peak, live) if when >= begin else live
    count = sum(when >= begin and nbytes > 0 for when, nbytes in changes)
    return {"tensors_mib": peak / 2**20, "allocations": count / 2}


def summary(lines: Sequence[dict[str, Any]], threads: int) -> dict[str, Any]:
    """Return the result that --json prints and --save writes."""
    found = first_light.summary(lines, threads)
    slower = [line["name"] for line in lines if line.get("over_eager", 1.0) < 1]
    memory = map(_memory_ratio, lines)
    return {
        **found,
        "benchmark": "cpu_models",
        "slower_than_eager": slower,
        "more_memory_than_inductor": _needing_more(lines),
        "geomean_memory_over_inductor": common.geomean([ratio for ratio in memory if ratio is not None]),
    }


def _memory_ratio(line: dict[str, Any]) -> float | None:
    """Return inductor's tensor memory over dcompile's: above 1, dcompile needs less."""
    found = [line["memory"].get(peer, {}).get("tensors_mib") for peer in COMPILERS]
    return found[0] / found[1] if all(found) else None


def _needing_more(lines: Sequence[dict[str, Any]]) -> list[str]:
    return [line["name"] for line in lines if (ratio := _memory_ratio(line)) is not None and ratio < 1]


def memory_page(lines: Sequence[dict[str, Any]]) -> str:
    """Return the table of tensors' memory as text."""
    rows = []
    for line in lines:
        found = line["memory"]
        cells = [f"{found[p]['tensors_mib']:.1f} ({found[p]['allocations']:.0f})" if p in found else "-" for p in PEERS]
        ratio = _memory_ratio(line)
        rows.append([line["name"], *cells, "-" if ratio is None else f"{ratio:.2f}"])
    table = common.table(["tensors, MiB (allocations a step)", *PEERS, "inductor over dcompile"], rows)
    return f"{table}\nmore memory than inductor, if by bytes: {', '.join(_needing_more(lines)) or 'none'}"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = common.parser("cpu_models", __doc__, [*NAMES], seconds=10.0)
    parser.add_argument("--no-cold", dest="cold", action="store_false", help="leave out compile times, resident memory")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave out tensors' memory")
    parser.add_argument("--keep", default="", help="file of finished lines: a later run goes on where this one stopped")
    return common.parse(parser, [*NAMES], arguments)


def run_child(arguments: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(arguments.threads)
    (name,) = arguments.only
    if arguments.child == "steps":
        common.hand_back(time_steps(name, arguments.seconds, common.CLOCKS[arguments.clock]))
    elif arguments.child.startswith(TENSORS):
        common.hand_back(tensor_memory(case(name), arguments.child.removeprefix(TENSORS)))
    else:
        common.hand_back(first_light.compile_cold(case(name), arguments.child))


def measure_memory(name: str, arguments: argparse.Namespace, errors: dict[str, str]) -> dict[str, Any]:
    """Measure each peer's memory in a separate process; failures are added to `errors`."""
    found = {}
    for peer in PEERS:
        command = ["--only", name, "--threads", str(arguments.threads), "--child", TENSORS + peer]
        result = common.in_fresh_process(MODULE, command, arguments.threads, TIMEOUT)
        if "error" in result:
            errors[f"memory {peer}"] = result["error"]
        else:
            found[peer] = result
    return found


def line_of(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures of one model."""
    print(f"measuring {name} ...", file=sys.stderr, flush=True)
    line = first_light.measure(name, arguments, MODULE, TIMEOUT)
    return {**line, "memory": measure_memory(name, arguments, line["errors"]) if arguments.memory else {}}


def main() -> int:
    arguments = parse_arguments()
    if arguments.child:
        run_child(arguments)
        return 0
    lines = common.resumed(
        arguments.only, lambda name: line_of(name, arguments), Path(arguments.keep) if arguments.keep else None
    )
    result = {**summary(lines, arguments.threads), "clock": arguments.clock}
    print(first_light.page(result))
    if arguments.memory:
        print(memory_page(lines))
    if result["slower_than_eager"]:
        print(f"slower than eager: {', '.join(result['slower_than_eager'])}")
    return common.finish("cpu_models", "cpu", result, keep=arguments.save, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
