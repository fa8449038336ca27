"""Faults planted in the compiler: kinds of fault, models, and what `dcompile.bisect` must name. A table, for more.

Each fault is one small change to one place, as a slip of a programmer makes it. `plant` makes it until the block ends.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from dcompile import pipeline
from dcompile.codegen.emit.cpp import ops
from dcompile.codegen.lower.registry import RULES
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Apply, Loop, Program, Value
from dcompile.passes import Row

# --- models -----------------------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    """Linear layers, GELU, a LayerNorm and a Softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 48), nn.LayerNorm(48), nn.Linear(48, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(nn.functional.gelu(self.up(x)))).softmax(-1)


class Attention(nn.Module):
    """One block of a transformer, whose attention is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(16), nn.Linear(16, 48, bias=False), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)) / 4.0
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return x + self.out(weights @ v) * torch.sigmoid(x)


class Gated(nn.Module):
    """A gated product, and statistics that change in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.norm = nn.Linear(8, 32), nn.Linear(8, 32), nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(nn.functional.silu(self.gate(x)) * self.up(x))
        return (hidden * hidden).mean(-1).exp().log1p()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (Perceptron, (12, 8)),
    "attention": (Attention, (2, 10, 16)),
    "gated": (Gated, (12, 8)),
}
"""Name -> how to make it, and the shape of its input."""


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model, and an input whose gradient is wanted."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    return build(), torch.randn(shape, requires_grad=True)


# --- kinds of fault ---------------------------------------------------------------------------------------------------

Planted = contextlib.AbstractContextManager[Any]


def spelled(op: str, text: str) -> Planted:
    """The C++ emitter prints an operation as another one."""
    return patch.dict(ops.SPELLING, {op: text})  # type: ignore[arg-type]


def lowered_as(op: str, other: str) -> Planted:
    """A lowering rule does what another one is for."""
    return patch.dict(RULES, {op: replace(RULES[op], lower=RULES[other].lower)})


@contextlib.contextmanager
def spoilt(rows: Callable[[], Any], name: str, spoil: Callable[..., Any]) -> Iterator[None]:
    """A pass makes one mistake: `spoil(result, *arguments)` is what it returns."""
    row: Row = next(row for row in rows() if row.name == name)
    right = row.run

    @functools.wraps(right)
    def wrong(*args: Any) -> Any:
        return spoil(right(*args), *args)

    object.__setattr__(row, "run", wrong)
    try:
        yield
    finally:
        object.__setattr__(row, "run", right)


def _exchanged(body: tuple[Value, ...], op: str, other: str) -> tuple[Value, ...]:
    """A loop's body with its first `op` replaced."""
    place = next((n for n, value in enumerate(body) if isinstance(value, Apply) and value.op == op), None)
    if place is None:
        return body
    value = body[place]
    assert isinstance(value, Apply)
    return (*body[:place], replace(value, op=other), *body[place + 1 :])


def exchanges(op: str, other: str) -> Callable[..., Program]:
    """Of a pass over programs that did something: one operation of the first loop that has it becomes another."""

    def spoil(program: Program, before: Program, *_: Any) -> Program:
        steps, done = list(program.steps), program == before
        for place, step in enumerate(steps):
            if isinstance(step, Loop) and not done and (body := _exchanged(step.body, op, other)) != step.body:
                steps[place], done = replace(step, body=body), True
        return replace(program, steps=tuple(steps))

    return spoil


def exchanges_in_nest(op: str, other: str) -> Callable[..., Any]:
    """Of a decision about a kernel's nest: one operation becomes another."""

    def spoil(plan: Any, *_: Any) -> Any:
        return replace(plan, nest=replace(plan.nest, body=_exchanged(plan.nest.body, op, other)))

    return spoil


def reuses_memory(program: Program, *_: Any) -> Program:
    """Of the memory plan: one temporary is placed on another that is still read."""
    first, last = {}, {}
    for place, step in enumerate(program.steps):
        for name in step.reads | step.writes:
            first.setdefault(name, place)
            last[name] = place
    held = [buffer for buffer in program.buffers if buffer.storage == "arena" and buffer.extent]

    def collide(one: Buffer, other: Buffer) -> bool:
        return one.nbytes <= other.nbytes and first[other.name] < first[one.name] < last[other.name]

    found = next(((one, other) for one in held for other in held if one is not other and collide(one, other)), None)
    if found is None:
        return program
    moved = replace(found[0], offset=found[1].offset)
    return replace(program, buffers=tuple(moved if b is found[0] else b for b in program.buffers))


def retargets(op: Any, other: Any) -> Callable[..., Any]:
    """Of a pass over FX graphs: the first call of an operation calls another."""

    def spoil(report: Any, gm: Any, *_: Any) -> Any:
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.target is op:
                node.target = other
                gm.recompile()
                break
        return report

    return spoil


PLAN, ROWS = "plan_memory_for_peak", "keep_rows_contiguous"


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One planted fault."""

    name: str
    model: str
    plant: Callable[[], Planted]
    kind: str
    """Of the place that must be named."""
    place: str
    """What must be in its name, or in the notes: the pass, the operation."""
    program: str = ""
    """Where it shows first; empty: anywhere."""


def _joint() -> Any:
    return pipeline.JOINT_PASSES


def loops(name: str, spoil: Callable[..., Any]) -> Callable[[], Planted]:
    return lambda: spoilt(pipeline.loop_passes, name, spoil)


def nests(name: str, op: str, other: str) -> Callable[[], Planted]:
    return lambda: spoilt(pipeline.nest_passes, name, exchanges_in_nest(op, other))


def joint(name: str, op: Any, other: Any) -> Callable[[], Planted]:
    return lambda: spoilt(_joint, name, retargets(op, other))


def cpp(op: str, text: str) -> Callable[[], Planted]:
    return lambda: spelled(op, text)


def rule(op: str, other: str) -> Callable[[], Planted]:
    return lambda: lowered_as(f"aten.{op}", f"aten.{other}")


ADD, MUL, SUB = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.sub.Tensor
FAULTS = (
    Fault("mul is printed as add", "gated", cpp("mul", "{0} + {1}"), "kernel", "op mul"),
    Fault("sub is printed the other way", "perceptron", cpp("sub", "{1} - {0}"), "kernel", "op sub"),
    Fault("erf is printed as tanh", "perceptron", cpp("one_plus_erf", "1 + tanh_({0})"), "kernel", "op one_plus_erf"),
    Fault("sigmoid has half its input", "attention", cpp("sigmoid", "sigmoid_({0} / 2)"), "kernel", "op sigmoid"),
    Fault("exp is one part in 1000 off", "gated", cpp("exp", "exp_({0}) * 1.001f"), "kernel", "op exp"),
    Fault("GELU is lowered as ReLU", "perceptron", rule("gelu.default", "relu.default"), "lowering rule", "gelu"),
    Fault("exp is lowered as sinh", "gated", rule("exp.default", "sinh.default"), "lowering rule", "aten.exp.default"),
    Fault("fusion swaps an operation", "gated", loops("fuse", exchanges("mul", "add")), "pass", "fuse"),
    Fault("fusion loses a sign", "attention", loops("fuse", exchanges("sub", "add")), "pass", "fuse"),
    Fault("memory is used twice", "perceptron", loops(PLAN, reuses_memory), "pass", PLAN),
    Fault("vectors swap an operation", "gated", nests("vectorize", "mul", "add"), "pass", "vectorize"),
    Fault("a joint pass swaps an operation", "attention", joint(ROWS, MUL, ADD), "pass", ROWS),
)

WRONG_TEXT = {
    "add": "{0} - {1}", "sub": "{1} - {0}", "mul": "{0} + {1}", "div": "{0} * {1}", "neg": "{0}", "exp": "exp_(-{0})",
    "fma": "fma_({0}, {2}, {1})", "sqrt": "{0}", "rsqrt": "1 / {0}", "sigmoid": "sigmoid_(-{0})", "log1p": "log_({0})",
    "max": "min_({0}, {1})", "tanh": "sigmoid_({0})", "one_plus_erf": "erf_({0})", "reciprocal": "{0}",
}  # fmt: skip
"""Operation -> a wrong way to print it."""
WRONG_RULE = {
    "gelu.default": "silu.default", "exp.default": "expm1.default", "sigmoid.default": "tanh.default",
    "silu.default": "sigmoid.default", "mul.Tensor": "add.Tensor", "add.Tensor": "mul.Tensor",
    "log1p.default": "log.default", "_softmax.default": "_log_softmax.default", "neg.default": "abs.default",
    "rsqrt.default": "sqrt.default", "mean.dim": "sum.dim_IntList",
}  # fmt: skip
WRONG_OPERATION = {"mul": "add", "sub": "add", "add": "sub", "div": "mul"}
LOOP_PASSES = ("fuse", "rematerialize", "interchange_reductions", "split_row_reductions", "remove_dead_steps")
NEST_PASSES = ("parallelize", "hoist_values", "keep_values", "vectorize", "stream_stores")


def products() -> Iterator[Fault]:
    """Every kind of fault in every model; many have no effect there."""
    for model in MODELS:
        for op, text in WRONG_TEXT.items():
            yield Fault(f"{op} is printed wrong in {model}", model, cpp(op, text), "kernel", f"op {op}")
        for op, other in WRONG_RULE.items():
            if f"aten.{op}" in RULES and f"aten.{other}" in RULES:
                yield Fault(f"{op} is lowered wrong in {model}", model, rule(op, other), "lowering rule", f"aten.{op}")
        for op, other in WRONG_OPERATION.items():
            for name in LOOP_PASSES:
                plant = loops(name, exchanges(op, other))
                yield Fault(f"{name} spoils {op} in {model}", model, plant, "pass", name)
            for name in NEST_PASSES:
                yield Fault(f"{name} spoils {op} in {model}", model, nests(name, op, other), "pass", name)
