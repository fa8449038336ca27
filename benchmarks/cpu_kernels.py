"""Are dcompile's CPU kernels as fast as plain loops written by hand, and faster than inductor's and eager's?

python -m benchmarks.cpu_kernels [--threads 1,2] [--only softmax,adamw] [--json] [--save]

Eager, inductor, dcompile and the hand-written kernels of benchmarks/plain run in one process, interleaved, under one
allocator setting (memory is kept, since mapping fresh pages costs more than most of these kernels). The hand-written
ones are built with dcompile's flags and write to memory that is there already. Ratios are speed-ups of dcompile: above
1, dcompile is faster.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import common, plain
from benchmarks.first_light import Step, adamw, largest_difference

PEERS = ("eager", "inductor", "dcompile")
OTHERS = ("plain", "inductor", "eager")
SIZE = 2048
MODULE = "benchmarks.cpu_kernels"
TIMEOUT = 3600.0
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(1 << 28),
}

Compile = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """`make` builds the step of a compiler or of eager, `by_hand` that of the plain loops, from the same seed."""

    name: str
    make: Callable[[Compile], Step]
    by_hand: Callable[[], Step]
    tolerance: float = 1e-4


def kernel(
    name: str,
    inputs: Callable[[], tuple[Any, ...]],
    function: Callable[..., Any],
    outputs: Callable[..., tuple[Any, ...]],
    sizes: tuple[int, ...] = (SIZE, SIZE),
    tolerance: float = 1e-4,
) -> Case:
    """A case without gradients. The plain kernel takes inputs, outputs (allocated by `outputs` once) and sizes."""

    def make(compiled: Compile) -> Step:
        import torch

        given, call = inputs(), compiled(function)

        def step() -> Any:
            with torch.no_grad():
                return call(*given)

        return step

    def by_hand() -> Step:
        given = inputs()
        results = outputs(*given)

        def step() -> Any:
            plain.call(name, *given, *results, *sizes)
            return results

        return step

    return Case(name, make, by_hand, tolerance)


def _randn(*shapes: tuple[int, ...], dtype: str = "float32") -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        import torch

        return tuple(torch.randn(shape, dtype=getattr(torch, dtype)) for shape in shapes)

    return make


def _like_first(x: Any, *_: Any) -> tuple[Any, ...]:
    import torch

    return (torch.empty_like(x),)


# --- what is measured -------------------------------------------------------------------------------------------------


def rms_norm(x: Any, weight: Any) -> Any:
    import torch

    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def rms_norm_gradients(dy: Any, x: Any, weight: Any) -> Any:
    import torch

    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    scaled = dy * weight
    dx = rstd * (scaled - x * rstd.pow(2) * (scaled * x).mean(-1, keepdim=True))
    return dx, (dy * x * rstd).sum(0)


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    import torch

    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)


def softmax(x: Any) -> Any:
    return x.softmax(-1)


def bias_gelu(x: Any, bias: Any) -> Any:
    import torch

    return torch.nn.functional.gelu(x + bias, approximate="tanh")


def swiglu(gate: Any, up: Any) -> Any:
    import torch

    return torch.nn.functional.silu(gate) * up


def pointwise(a: Any, b: Any, c: Any) -> Any:
    return (a * b + c).relu() * a - b


CE_ROWS, VOCABULARY = 128, 32000


def _logits_and_labels() -> tuple[Any, Any]:
    import torch

    return torch.randn(CE_ROWS, VOCABULARY, requires_grad=True), torch.randint(0, VOCABULARY, (CE_ROWS,))


def _cross_entropy(logits: Any, labels: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits, labels)


def ce_forward(compiled: Compile) -> Step:
    import torch

    (logits, labels), call = _logits_and_labels(), compiled(_cross_entropy)

    def step() -> Any:
        with torch.no_grad():
            return call(logits, labels)

    return step


def ce_backward(compiled: Compile) -> Step:
    import torch

    (logits, labels), call = _logits_and_labels(), compiled(_cross_entropy)
    loss = call(logits, labels)
    return lambda: torch.autograd.grad(loss, logits, retain_graph=True)


def ce_both(compiled: Compile) -> Step:
    import torch

    (logits, labels), call = _logits_and_labels(), compiled(_cross_entropy)

    def step() -> Any:
        loss = call(logits, labels)
        return [loss.detach(), *torch.autograd.grad(loss, logits)]

    return step


def ce_by_hand(name: str) -> Callable[[], Step]:
    def by_hand() -> Step:
        import torch

        logits, labels = _logits_and_labels()
        logits = logits.detach()
        loss, gradient, lse = torch.empty(()), torch.empty_like(logits), logits.logsumexp(-1)
        arguments, results = {
            "cross_entropy_forward": ((logits, labels, loss), [loss]),
            "cross_entropy_backward": ((logits, labels, lse, gradient), [gradient]),
            "cross_entropy_both": ((logits, labels, loss, gradient), [loss, gradient]),
        }[name]

        def step() -> Any:
            plain.call(name, *arguments, CE_ROWS, VOCABULARY)
            return results

        return step

    return by_hand


def adamw_by_hand() -> Step:
    import torch

    tensors = [torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE), torch.zeros(SIZE, SIZE), torch.zeros(SIZE, SIZE)]
    count = torch.zeros(())

    def step() -> Any:
        count.add_(1)
        taken = count.item()
        plain.call("adamw", *tensors, SIZE * SIZE, 1 - 0.9**taken, 1 - 0.999**taken)
        return [*tensors, count]

    return step


TENSORS, ELEMENTS = 16, 1 << 18


def _parameters() -> list[Any]:
    import torch

    parameters = [torch.nn.Parameter(torch.randn(ELEMENTS)) for _ in range(TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.randn(ELEMENTS)
    return parameters


def adamw_many(compiled: Compile) -> Step:
    """torch.optim.AdamW over 16 parameters; eager's is its fused one, the fastest it has."""
    import torch

    parameters = _parameters()
    options = {"fused": True} if compiled is _as_it_is else {"foreach": True}
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, **options)
    call = compiled(optimizer.step)

    def step() -> Any:
        call()
        return [parameter.detach() for parameter in parameters]

    return step


def adamw_many_by_hand() -> Step:
    import torch

    parameters = _parameters()
    values, gradients = [p.detach() for p in parameters], [p.grad for p in parameters]
    means, squares = ([torch.zeros(ELEMENTS) for _ in parameters] for _ in range(2))
    taken = 0

    def step() -> Any:
        nonlocal taken
        taken += 1
        tables = (values, gradients, means, squares)
        plain.call("adamw_many", *tables, TENSORS, ELEMENTS, 1 - 0.9**taken, 1 - 0.999**taken)
        return values

    return step


MATRIX = (SIZE, SIZE)
ALL = (SIZE * SIZE,)


def _columns(x: Any) -> tuple[Any, ...]:
    return (x.new_empty(x.shape[1]),)


def _rows(x: Any) -> tuple[Any, ...]:
    return (x.new_empty(x.shape[0]),)


def _positions(x: Any) -> tuple[Any, ...]:
    import torch

    return (torch.empty(x.shape[0], dtype=torch.int64),)


def _dx_and_dw(dy: Any, x: Any, weight: Any) -> tuple[Any, ...]:
    import torch

    return torch.empty_like(x), torch.empty_like(weight)


CASES = {
    case.name: case
    for case in (
        kernel("rms_norm_forward", _randn(MATRIX, (SIZE,)), rms_norm, _like_first),
        kernel("rms_norm_backward", _randn(MATRIX, MATRIX, (SIZE,)), rms_norm_gradients, _dx_and_dw),
        kernel("layer_norm_forward", _randn(MATRIX, (SIZE,), (SIZE,)), layer_norm, _like_first),
        kernel("softmax", _randn(MATRIX), softmax, _like_first),
        *(
            Case(name, make, ce_by_hand(name))
            for name, make in (
                ("cross_entropy_forward", ce_forward),
                ("cross_entropy_backward", ce_backward),
                ("cross_entropy_both", ce_both),
            )
        ),
        Case("adamw", adamw, adamw_by_hand),
        Case("adamw_many", adamw_many, adamw_many_by_hand),
        kernel("bias_gelu", _randn(MATRIX, (SIZE,)), bias_gelu, _like_first),
        kernel("swiglu", _randn(MATRIX, MATRIX), swiglu, _like_first, ALL),
        kernel("pointwise", _randn(MATRIX, MATRIX, MATRIX), pointwise, _like_first, ALL),
        kernel("sum_columns", _randn(MATRIX), lambda x: x.sum(0), _columns),
        kernel("sum_rows", _randn(MATRIX), lambda x: x.sum(1), _rows),
        kernel("argmax_rows", _randn(MATRIX), lambda x: x.argmax(1), _positions),
        kernel("transpose", _randn(MATRIX), lambda x: x.t().contiguous(), _like_first),
        # one unit in the last place of bfloat16 is 1/128 of the largest element at most
        kernel("rms_norm_bf16", _randn(MATRIX, (SIZE,), dtype="bfloat16"), rms_norm, _like_first, tolerance=1e-2),
        kernel("swiglu_bf16", _randn(MATRIX, MATRIX, dtype="bfloat16"), swiglu, _like_first, ALL, tolerance=1e-2),
    )
}


# --- measuring --------------------------------------------------------------------------------------------------------


def time_case(case: Case, seconds: float, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Child process: all peers interleaved, after one step of each has been compared with eager's."""
    import torch

    steps, errors, expected = {}, {}, None
    for peer in (*PEERS, "plain"):
        torch.manual_seed(0)
        try:
            steps[peer] = case.by_hand() if peer == "plain" else case.make(_compiler(peer))
            first = copy.deepcopy(_tensors(steps[peer]()))
            expected = first if peer == "eager" else expected
            if (difference := largest_difference(first, expected)) > case.tolerance:
                raise ArithmeticError(f"differs from eager by {difference:.1e} of the largest element")
        except Exception as error:  # one peer's failure must not hide the others' numbers
            if peer == "eager":
                raise
            steps.pop(peer, None)
            errors[peer] = f"{type(error).__name__}: {error}".splitlines()[0]
    timings = common.time_interleaved(steps, seconds, clock=clock)
    return {"steps": {peer: dataclasses.asdict(timing) for peer, timing in timings.items()}, "errors": errors}


def _compiler(peer: str) -> Compile:
    """As first_light's, but a graph may break: optimizers' steps do."""
    import torch

    if peer == "eager":
        return _as_it_is
    options = {"options": {"receipt": False}} if peer == "dcompile" else {}
    return lambda target: torch.compile(target, backend=peer, dynamic=False, **options)


def _as_it_is(target: Any) -> Any:
    return target


def _tensors(value: Any) -> list[Any]:
    return [t.detach().double() for t in (value if isinstance(value, list | tuple) else [value])]


def run_child(arguments: argparse.Namespace) -> None:
    """All cases in one process, so that what a compiler pays once per process is paid once."""
    import torch
    from torch._functorch import config

    config.donated_buffer = False  # the backward of one forward is timed again and again
    threads = arguments.threads[0]
    torch.set_num_threads(threads)
    lines = []
    for name in arguments.only:
        torch.compiler.reset()
        print(f"measuring {name} on {threads} thread(s) ...", file=sys.stderr, flush=True)
        try:
            timed = time_case(CASES[name], arguments.seconds, common.CLOCKS[arguments.clock])
        except Exception as error:
            timed = {"steps": {}, "errors": {"eager": f"{type(error).__name__}: {error}".splitlines()[0]}}
        lines.append({"name": name, "threads": threads, **timed})
    common.hand_back({"lines": lines})


def ratios(line: Mapping[str, Any]) -> dict[str, float]:
    """How many times faster dcompile is, where both numbers are there."""
    steps = line["steps"]
    return {
        f"over_{peer}": steps[peer]["median"] / steps["dcompile"]["median"]
        for peer in OTHERS
        if {peer, "dcompile"} <= steps.keys()
    }


def summary(lines: Sequence[Mapping[str, Any]], threads: Sequence[int]) -> dict[str, Any]:
    """What --json prints and --save keeps."""
    means = {
        f"geomean_over_{peer}": common.geomean([line[f"over_{peer}"] for line in lines if f"over_{peer}" in line])
        for peer in OTHERS
    }
    lowest = {
        f"lowest_over_{peer}": min((line[f"over_{peer}"] for line in lines if f"over_{peer}" in line), default=None)
        for peer in OTHERS
    }
    complete = bool(lines) and all(not line["errors"] for line in lines)
    return {"benchmark": "cpu_kernels", "complete": complete, **means, **lowest,
            "environment": common.environment(max(threads)), "lines": list(lines)}  # fmt: skip


def page(result: Mapping[str, Any]) -> str:
    """The table for people."""
    columns = (*PEERS, "plain")
    header = ["median ms", "threads", *columns, "spread", *(f"over {peer}" for peer in OTHERS)]
    rows = []
    for line in result["lines"]:
        steps = line["steps"]
        times = [f"{steps[peer]['median'] * 1e3:.2f}" if peer in steps else "failed" for peer in columns]
        spread = max((step["spread"] for step in steps.values()), default=0.0)
        speedups = [f"{line[f'over_{peer}']:.2f}" if f"over_{peer}" in line else "-" for peer in OTHERS]
        rows.append([line["name"], str(line["threads"]), *times, f"{spread:.0%}", *speedups])
    where = result["environment"]
    means = ", ".join(f"{result[f'geomean_over_{p}']:.2f} over {p}" for p in OTHERS if result[f"geomean_over_{p}"])
    parts = [
        common.table(header, rows),
        f"geometric means of dcompile's speed-up: {means}\n{where['cpu']}, load {where['load']}, "
        f"torch {where['torch']}, {where['compiler']}",
    ]
    parts += [f"{line['name']}: {who}: {what}" for line in result["lines"] for who, what in line["errors"].items()]
    return "\n\n".join(parts)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=f"1,{len(os.sched_getaffinity(0))}", help="thread counts, one run each")
    parser.add_argument("--only", default=",".join(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=4.0, help="time for the steps of one line")
    parser.add_argument("--clock", choices=common.CLOCKS, default="wall", help="cpu: for one thread on a busy machine")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/cpu_kernels-cpu-DATE.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    parsed.only = parsed.only.split(",")
    parsed.threads = list(dict.fromkeys(int(count) for count in parsed.threads.split(",")))
    if unknown := [name for name in parsed.only if name not in CASES]:
        parser.error(f"--only {unknown[0]}: not one of {','.join(CASES)}")
    return parsed


def main() -> int:
    arguments = parse_arguments()
    if arguments.child:
        run_child(arguments)
        return 0
    lines: list[dict[str, Any]] = []
    for threads in arguments.threads:
        child = ["--child", "--only", ",".join(arguments.only), "--seconds", str(arguments.seconds)]
        child += ["--threads", str(threads), "--clock", arguments.clock]
        found = common.in_fresh_process(MODULE, child, threads, TIMEOUT, KEEP_MEMORY)
        if "error" in found:
            lines.append({"name": "all", "threads": threads, "steps": {}, "errors": {"process": found["error"]}})
        else:
            lines += [{**line, **ratios(line)} for line in found["lines"]]
    result = {**summary(lines, arguments.threads), "clock": arguments.clock}
    print(page(result))
    return common.finish("cpu_kernels", "cpu", result, keep=arguments.save, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
