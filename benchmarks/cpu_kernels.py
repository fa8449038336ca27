"""Benchmark of dcompile's CPU kernels against hand-written loops, inductor and eager.

python -m benchmarks.cpu_kernels [--threads 1,2] [--dtype float32,bfloat16] [--only softmax,adamw] [--runs 3] [--json]
                                 [--save]

Eager, inductor, dcompile and the hand-written kernels of benchmarks/plain run in one process, interleaved. The
allocator keeps freed memory, since mapping fresh pages costs more than most of these kernels. Hand-written kernels are
built with dcompile's flags, and write to existing memory. All peers read the same tensors, since a row reduction of
16 MB took 352 or 381 us depending on the address. Only optimizers have their own tensors, as they change them. Ratios
are speed-ups of dcompile: above 1, dcompile is faster. One thread is timed by CPU time, which excludes other programs.

Addresses of tensors and the load of the machine differ between processes. So kernels that are limited by memory vary
more between processes than within one. With `--runs`, each line has several processes, each after one pass over all
lines, and ratios are the medians of theirs.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import statistics
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
    """A kernel. `make` builds the step of a compiler or of eager, `by_hand` that of plain loops, from the same seed.

    Without `gradients`, all steps run in one `torch.no_grad()`, as in inference. Otherwise each call of all peers but
    the loops would enter it. After 8 MB of other data were read, that took 22 of a call's 69 us in addition to a kernel
    of 343 us.
    """

    name: str
    make: Callable[[Compile], Step]
    by_hand: Callable[[], Step]
    gradients: bool = True


def kernel(
    name: str,
    dtype: str,
    inputs: Callable[[], tuple[Any, ...]],
    function: Callable[..., Any],
    outputs: Callable[..., tuple[Any, ...]],
    sizes: tuple[int, ...] = (SIZE, SIZE),
) -> Case:
    """Make a case without gradients. The plain kernel takes inputs, outputs (allocated once by `outputs`) and sizes."""
    inputs = functools.cache(inputs)

    def make(compiled: Compile) -> Step:
        given, call = inputs(), compiled(function)
        return lambda: call(*given)

    def by_hand() -> Step:
        given = inputs()
        results = outputs(*given)

        def step() -> Any:
            plain.call(name, dtype, *given, *results, *sizes)
            return results

        return step

    return Case(name, make, by_hand, gradients=False)


def _randn(dtype: str, *shapes: tuple[int, ...]) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        import torch

        return tuple(torch.randn(shape, dtype=getattr(torch, dtype)) for shape in shapes)

    return make


def _like_first(x: Any, *_: Any) -> tuple[Any, ...]:
    import torch

    return (torch.empty_like(x),)


# --- cases ------------------------------------------------------------------------------------------------------------


def rms_norm(x: Any, weight: Any) -> Any:
    import torch

    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def rms_norm_gradients(dy: Any, x: Any, weight: Any) -> Any:
    import torch

    dtype, (dy, x, weight) = x.dtype, (t.float() for t in (dy, x, weight))
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    scaled = dy * weight
    dx = rstd * (scaled - x * rstd.pow(2) * (scaled * x).mean(-1, keepdim=True))
    return dx.to(dtype), (dy * x * rstd).sum(0).to(dtype)


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
LOGITS = (CE_ROWS, VOCABULARY)


@functools.cache
def _logits_and_labels(dtype: str) -> tuple[Any, Any]:
    import torch

    logits = torch.randn(LOGITS).to(getattr(torch, dtype)).requires_grad_()
    return logits, torch.randint(0, VOCABULARY, (CE_ROWS,))


def _logits(dtype: str, lse: bool = False) -> tuple[Any, ...]:
    """Return (logits, labels), and with `lse` the rows' float32 logsumexp, which a backward reads."""
    logits, labels = _logits_and_labels(dtype)
    logits = logits.detach()
    return (logits, labels, logits.float().logsumexp(-1)) if lse else (logits, labels)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits, labels)


def cross_entropy_gradient(logits: Any, labels: Any, lse: Any) -> Any:
    import torch

    hit = torch.nn.functional.one_hot(labels, logits.shape[1])
    return ((torch.exp(logits.float() - lse[:, None]) - hit) / logits.shape[0]).to(logits.dtype)


def cross_entropy_and_gradient(logits: Any, labels: Any) -> Any:
    wide = logits.float()
    lse = wide.logsumexp(-1)
    loss = (lse - wide.gather(1, labels[:, None])[:, 0]).mean()
    return loss.to(logits.dtype), cross_entropy_gradient(logits, labels, lse)


def autograd_ce_backward(compiled: Compile, dtype: str) -> Step:
    import torch

    (logits, labels), call = _logits_and_labels(dtype), compiled(_cross_entropy)
    loss = call(logits, labels)
    return lambda: torch.autograd.grad(loss, logits, retain_graph=True)


def autograd_ce(compiled: Compile, dtype: str) -> Step:
    import torch

    (logits, labels), call = _logits_and_labels(dtype), compiled(_cross_entropy)

    def step() -> Any:
        loss = call(logits, labels)
        return [loss.detach(), *torch.autograd.grad(loss, logits)]

    return step


def _loss(logits: Any, _: Any) -> tuple[Any, ...]:
    return (logits.new_empty(()),)


def _loss_and_gradient(logits: Any, labels: Any) -> tuple[Any, ...]:
    return *_loss(logits, labels), *_like_first(logits)


def cross_entropies(dtype: str) -> tuple[Case, ...]:
    """Return cases of cross-entropy: kernels from formulas, as for RMSNorm's backward, and training with only the loss.

    The latter includes autograd's engine for all peers but the loops. For eight elements, cross-entropy's backward
    takes 190 us after reading 16 MB of other data, for eager and dcompile. Repeated calls take 53 us (two Intel cores,
    2026-11-26).
    """
    given, with_lse = functools.partial(_logits, dtype), functools.partial(_logits, dtype, lse=True)
    forward = kernel("cross_entropy_forward", dtype, given, _cross_entropy, _loss, LOGITS)
    backward = kernel("cross_entropy_backward", dtype, with_lse, cross_entropy_gradient, _like_first, LOGITS)
    both = kernel("cross_entropy_both", dtype, given, cross_entropy_and_gradient, _loss_and_gradient, LOGITS)
    return forward, backward, both, *(
        Case(f"autograd_{case.name}", functools.partial(make, dtype=dtype), case.by_hand)
        for case, make in ((backward, autograd_ce_backward), (both, autograd_ce))
    )  # fmt: skip


def adamw_by_hand(dtype: str) -> Step:
    import torch

    tensors = [torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE), torch.zeros(SIZE, SIZE), torch.zeros(SIZE, SIZE)]
    tensors = [tensor.to(getattr(torch, dtype)) for tensor in tensors]
    count = torch.zeros(())

    def step() -> Any:
        count.add_(1)
        taken = count.item()
        plain.call("adamw", dtype, *tensors, SIZE * SIZE, 1 - 0.9**taken, 1 - 0.999**taken)
        return [*tensors, count]

    return step


TENSORS, ELEMENTS = 16, 1 << 18


def _parameters(dtype: str) -> list[Any]:
    import torch

    kind = getattr(torch, dtype)
    parameters = [torch.nn.Parameter(torch.randn(ELEMENTS).to(kind)) for _ in range(TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.randn(ELEMENTS).to(kind)
    return parameters


def adamw_many(compiled: Compile, dtype: str) -> Step:
    """Make a step of torch.optim.AdamW over 16 parameters; eager's is the fused one, which inductor cannot compile."""
    import torch

    parameters = _parameters(dtype)
    options = {"foreach": True} if compiled is _compiler("inductor") else {"fused": True}
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, **options)
    call, values = compiled(optimizer.step), [parameter.detach() for parameter in parameters]

    def step() -> Any:
        call()
        return values  # as hand-written loops do: making 16 tensors in each step took 40 to 60 us of 4 ms

    return step


def adamw_many_by_hand(dtype: str) -> Step:
    import torch

    parameters = _parameters(dtype)
    values, gradients = [p.detach() for p in parameters], [p.grad for p in parameters]
    means, squares = ([torch.zeros_like(p) for p in values] for _ in range(2))
    taken = 0

    def step() -> Any:
        nonlocal taken
        taken += 1
        tables = (values, gradients, means, squares)
        plain.call("adamw_many", dtype, *tables, TENSORS, ELEMENTS, 1 - 0.9**taken, 1 - 0.999**taken)
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


DTYPES = ("float32", "bfloat16")
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2}
"""Largest differences from eager. One unit in the last place of bfloat16 is at most 1/128 of the largest element."""


def cases(dtype: str) -> dict[str, Case]:
    """Return all kernels on tensors of one dtype."""
    row, one, two, three = (SIZE,), _randn(dtype, MATRIX), _randn(dtype, MATRIX, MATRIX), _randn(dtype, *[MATRIX] * 3)
    found = (
        kernel("rms_norm_forward", dtype, _randn(dtype, MATRIX, row), rms_norm, _like_first),
        kernel("rms_norm_backward", dtype, _randn(dtype, MATRIX, MATRIX, row), rms_norm_gradients, _dx_and_dw),
        kernel("layer_norm_forward", dtype, _randn(dtype, MATRIX, row, row), layer_norm, _like_first),
        kernel("softmax", dtype, one, softmax, _like_first),
        *cross_entropies(dtype),
        Case("adamw", functools.partial(adamw, dtype=dtype), functools.partial(adamw_by_hand, dtype)),
        Case("adamw_many", functools.partial(adamw_many, dtype=dtype), functools.partial(adamw_many_by_hand, dtype)),
        kernel("bias_gelu", dtype, _randn(dtype, MATRIX, row), bias_gelu, _like_first),
        kernel("swiglu", dtype, two, swiglu, _like_first, ALL),
        kernel("pointwise", dtype, three, pointwise, _like_first, ALL),
        kernel("sum_columns", dtype, one, lambda x: x.sum(0), _columns),
        kernel("sum_rows", dtype, one, lambda x: x.sum(1), _rows),
        kernel("argmax_rows", dtype, one, lambda x: x.argmax(1), _positions),
        kernel("transpose", dtype, one, lambda x: x.t().contiguous(), _like_first),
    )
    return {case.name: case for case in found}


NAMES = (
    "rms_norm_forward", "rms_norm_backward", "layer_norm_forward", "softmax", "cross_entropy_forward",
    "cross_entropy_backward", "cross_entropy_both", "autograd_cross_entropy_backward", "autograd_cross_entropy_both",
    "adamw", "adamw_many", "bias_gelu", "swiglu", "pointwise", "sum_columns", "sum_rows", "argmax_rows", "transpose",
)  # fmt: skip
SAMPLE = 0.006
"""Seconds of one sample: short, so that each peer has many samples in a line's time."""


# --- measuring --------------------------------------------------------------------------------------------------------


def time_case(
    case: Case, seconds: float, tolerance: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Time all peers interleaved, in a child process, after one step of each is compared with eager's."""
    import torch

    with torch.set_grad_enabled(case.gradients):
        return _timed(case, seconds, tolerance, clock)


def _timed(case: Case, seconds: float, tolerance: float, clock: Callable[[], float]) -> dict[str, Any]:
    import torch

    steps, errors, expected = {}, {}, None
    for peer in (*PEERS, "plain"):
        torch.manual_seed(0)
        try:
            steps[peer] = case.by_hand() if peer == "plain" else case.make(_compiler(peer))
            first = copy.deepcopy(_tensors(steps[peer]()))
            expected = first if peer == "eager" else expected
            if (difference := largest_difference(first, expected)) > tolerance:
                raise ArithmeticError(f"differs from eager by {difference:.1e} of the largest element")
        except Exception as error:  # one peer's failure must not hide the others' numbers
            if peer == "eager":
                raise
            steps.pop(peer, None)
            errors[peer] = f"{type(error).__name__}: {error}".splitlines()[0]
    timings = common.time_interleaved(steps, seconds, SAMPLE, clock=clock)
    return {"steps": {peer: dataclasses.asdict(timing) for peer, timing in timings.items()}, "errors": errors}


@functools.cache
def _compiler(peer: str) -> Compile:
    """Return a peer's compiler, as in first_light, but with graph breaks allowed: optimizers' steps have some."""
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
    """Run all cases in one process, so that a compiler's costs for each process occur once."""
    import torch
    from torch._functorch import config

    config.donated_buffer = False  # the backward of one forward is timed many times
    (threads,), (dtype,) = arguments.threads, arguments.dtype
    torch.set_num_threads(threads)
    made, lines = cases(dtype), []
    for name in arguments.only:
        torch.compiler.reset()
        print(f"measuring {name} {dtype} on {threads} thread(s) ...", file=sys.stderr, flush=True)
        try:
            timed = time_case(made.pop(name), arguments.seconds, TOLERANCES[dtype], common.CLOCKS[arguments.clock])
        except Exception as error:
            timed = {"steps": {}, "errors": {"eager": f"{type(error).__name__}: {error}".splitlines()[0]}}
        lines.append({"name": name, "dtype": dtype, "threads": threads, **timed})
    common.hand_back({"lines": lines})


def ratios(line: Mapping[str, Any]) -> dict[str, float]:
    """Return dcompile's speed-up over each peer that both have times for."""
    steps = line["steps"]
    return {
        f"over_{peer}": steps[peer]["median"] / steps["dcompile"]["median"]
        for peer in OTHERS
        if {peer, "dcompile"} <= steps.keys()
    }


def over_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine one kernel's lines of several processes: medians of times and ratios, and all errors.

    `runs` contains each process's ratios.
    """
    if len(runs) == 1:
        return dict(runs[0])
    steps = {}
    for peer in dict.fromkeys(peer for run in runs for peer in run["steps"]):
        timed = [run["steps"][peer] for run in runs if peer in run["steps"]]
        steps[peer] = {field: statistics.median(timing[field] for timing in timed) for field in timed[0]}
        steps[peer] |= {"fastest": min(t["fastest"] for t in timed), "rounds": sum(t["rounds"] for t in timed)}
    each = [{name: run[name] for name in run if name.startswith("over_")} for run in runs]
    names = dict.fromkeys(name for found in each for name in found)
    medians = {name: statistics.median(found[name] for found in each if name in found) for name in names}
    errors = {}
    for who in dict.fromkeys(who for run in runs for who in run["errors"]):
        told = [run["errors"][who] for run in runs if who in run["errors"]]
        errors[who] = f"in {len(told)} of {len(runs)} runs: {'; '.join(dict.fromkeys(told))}"
    same = {name: runs[0][name] for name in ("name", "dtype", "threads")}
    return {**same, "steps": steps, "errors": errors, **medians, "runs": each}


def summary(lines: Sequence[Mapping[str, Any]], threads: Sequence[int]) -> dict[str, Any]:
    """Return the result that --json prints and --save writes."""
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
    """Return the table as text."""
    columns = (*PEERS, "plain")
    header = ["median ms", "dtype", "threads", *columns, "spread", *(f"over {peer}" for peer in OTHERS)]
    rows = []
    for line in result["lines"]:
        steps = line["steps"]
        times = [f"{steps[peer]['median'] * 1e3:.2f}" if peer in steps else "failed" for peer in columns]
        spread = max((step["spread"] for step in steps.values()), default=0.0)
        speedups = [_speedup(line, f"over_{peer}") for peer in OTHERS]
        rows.append([line["name"], line["dtype"], str(line["threads"]), *times, f"{spread:.0%}", *speedups])
    where = result["environment"]
    means = ", ".join(f"{result[f'geomean_over_{p}']:.2f} over {p}" for p in OTHERS if result[f"geomean_over_{p}"])
    parts = [
        common.table(header, rows),
        f"geometric means of dcompile's speed-up: {means}\n{where['cpu']}, load {where['load']}, "
        f"torch {where['torch']}, {where['compiler']}",
    ]
    parts += [
        f"{line['name']} {line['dtype']}: {who}: {what}"
        for line in result["lines"]
        for who, what in line["errors"].items()
    ]
    return "\n\n".join(parts)


def _speedup(line: Mapping[str, Any], name: str) -> str:
    """Format the median speed-up, with minimum and maximum of several processes."""
    if name not in line:
        return "-"
    found = [run[name] for run in line.get("runs", ()) if name in run]
    return f"{line[name]:.2f}" + (f" ({min(found):.2f}-{max(found):.2f})" if found else "")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = common.parser("cpu_kernels", __doc__, NAMES, seconds=4.0, several=True)
    parser.add_argument("--dtype", default=",".join(DTYPES), help=f"some of {','.join(DTYPES)}, one run each")
    parser.add_argument("--runs", type=int, default=1, help="processes for each line, whose median counts; default: 1")
    parsed = common.parse(parser, NAMES, arguments)
    if parsed.runs < 1:
        parser.error(f"--runs {parsed.runs}: at least one")
    parsed.threads = list(dict.fromkeys(int(count) for count in parsed.threads.split(",")))
    parsed.dtype = parsed.dtype.split(",")
    if unknown := [dtype for dtype in parsed.dtype if dtype not in DTYPES]:
        parser.error(f"--dtype {unknown[0]}: not one of {','.join(DTYPES)}")
    return parsed


def measured(arguments: argparse.Namespace, threads: int, dtype: str) -> list[dict[str, Any]]:
    """Measure the lines of one process."""
    clock = ("cpu" if threads == 1 else "wall") if arguments.clock == "auto" else arguments.clock
    child = ["--child", "steps", "--only", ",".join(arguments.only), "--seconds", str(arguments.seconds)]
    child += ["--threads", str(threads), "--dtype", dtype, "--clock", clock]
    found = common.in_fresh_process(MODULE, child, threads, TIMEOUT, KEEP_MEMORY)
    if "error" in found:
        errors = {"process": found["error"]}
        return [{"name": name, "dtype": dtype, "threads": threads, "steps": {}, "errors": errors}
                for name in arguments.only]  # fmt: skip
    return [{**line, **ratios(line)} for line in found["lines"]]


def main() -> int:
    arguments = parse_arguments()
    if arguments.child:
        run_child(arguments)
        return 0
    kinds = list(itertools.product(arguments.threads, arguments.dtype))
    runs = [[line for kind in kinds for line in measured(arguments, *kind)] for _ in range(arguments.runs)]
    lines = [over_runs(of_one) for of_one in zip(*runs, strict=True)]
    result = {**summary(lines, arguments.threads), "clock": arguments.clock, "runs": arguments.runs}
    print(page(result))
    return common.finish("cpu_kernels", "cpu", result, keep=arguments.save, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
