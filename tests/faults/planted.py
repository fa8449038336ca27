"""Faults planted in the compiler, and what `dcompile.bisect` must name: a dozen by hand, and all kinds in a model.

Each fault is one small change to one place, as a slip of a programmer makes it. `plant` makes it until the block ends.
`python -m tests.faults.campaign` plants them in thirty models.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any
from unittest.mock import patch

import torch

from dcompile import pipeline
from dcompile.codegen.emit.cpp import ops
from dcompile.codegen.lower.registry import RULES
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import as_index, substitute
from dcompile.ir.nodes import Apply, Const, Load, Loop, Program, Reduce, Value
from dcompile.ir.ops import DTYPES, OPS
from dcompile.passes import Row

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


# --- mistakes in one kernel -------------------------------------------------------------------------------------------


def _first(body: Sequence[Value], fits: Callable[[Value], bool]) -> int | None:
    return next((place for place, value in enumerate(body) if fits(value)), None)


def _with(body: tuple[Value, ...], place: int, value: Value) -> tuple[Value, ...]:
    return (*body[:place], value, *body[place + 1 :])


def _is_apply(*ops: str) -> Callable[[Value], bool]:
    return lambda value: isinstance(value, Apply) and value.op in ops


def other_operation(body: tuple[Value, ...]) -> tuple[Value, ...] | None:
    """One operation becomes its neighbour in the table."""
    place = _first(body, _is_apply(*OTHER))
    if place is None:
        return None
    value = body[place]
    assert isinstance(value, Apply)
    return _with(body, place, replace(value, op=OTHER[value.op]))


def swapped_operands(body: tuple[Value, ...]) -> tuple[Value, ...] | None:
    """Two operands change places: the other one of two tensors, the other branch, another key of random numbers."""
    place = _first(body, _is_apply("sub", "div", "where", "lt", "gt", "pow", "philox"))
    if place is None:
        return None
    value = body[place]
    assert isinstance(value, Apply)
    *rest, one, two = value.args
    args = (one, rest[0], two) if value.op == "philox" else (*rest, two, one)
    return _with(body, place, replace(value, args=args))


def missing_term(body: tuple[Value, ...]) -> tuple[Value, ...] | None:
    """A sum of two has one of them: also the gradient of another use."""
    place = _first(body, lambda v: isinstance(v, Apply) and v.op == "add" and DTYPES[v.dtype] == "float")
    if place is None:
        return None
    value = body[place]
    assert isinstance(value, Apply)
    return _with(body, place, replace(value, op="max", args=(value.args[0],) * 2))


def wrong_scale(body: tuple[Value, ...]) -> tuple[Value, ...] | None:
    """A constant is twice what it should be."""

    def fits(value: Value) -> bool:
        return isinstance(value, Const) and DTYPES[value.dtype] == "float" and abs(value.value) not in (0, inf)

    place = _first(body, fits)
    if place is None:
        return None
    value = body[place]
    assert isinstance(value, Const)
    return _with(body, place, replace(value, value=value.value * 2))


def other_reduction(body: tuple[Value, ...]) -> tuple[Value, ...] | None:
    """A sum over a row becomes a maximum, or the other way."""
    other = {"sum": "max", "max": "min", "prod": "sum"}
    place = _first(body, lambda v: isinstance(v, Reduce) and v.op in other and DTYPES[v.dtype] == "float")
    if place is None:
        return None
    value = body[place]
    assert isinstance(value, Reduce)
    return _with(body, place, replace(value, op=other[value.op]))


def stale_index(body: tuple[Value, ...]) -> tuple[Value, ...] | None:
    """Each row reads what the first one reads."""
    place = _first(body, lambda v: isinstance(v, Load) and "i0" in v.index.variables)
    if place is None:
        return None
    value = body[place]
    assert isinstance(value, Load)
    return _with(body, place, replace(value, index=substitute(value.index, {"i0": as_index(0)}, {})))


Body = Callable[[tuple[Value, ...]], tuple[Value, ...] | None]
OTHER = {
    "add": "sub", "sub": "add", "mul": "add", "div": "mul", "max": "min", "min": "max", "lt": "le", "le": "lt",
    "gt": "ge", "ge": "gt", "eq": "ne", "exp": "expm1", "log": "log1p", "sin": "cos", "cos": "sin", "sqrt": "rsqrt",
    "rsqrt": "sqrt", "tanh": "sigmoid", "sigmoid": "tanh", "reciprocal": "neg",
}  # fmt: skip
BODIES: tuple[Body, ...] = (
    other_operation, swapped_operands, missing_term, wrong_scale, other_reduction, stale_index,
)  # fmt: skip
"""Mistakes in what a kernel computes."""


def _in_body(change: Body) -> Callable[[Loop], Loop | None]:
    @functools.wraps(change)
    def changed(loop: Loop) -> Loop | None:
        body = change(loop.body)
        return None if body is None else replace(loop, body=body)

    return changed


def rounded_store(loop: Loop) -> Loop | None:
    """A float32 result is rounded to bfloat16 on its way."""
    for at, store in enumerate(loop.stores):
        if loop.body[store.value].dtype == "float32" and store.mode == "set":
            end = len(loop.body)
            body = (*loop.body, Apply("cast", (store.value,), "bfloat16"), Apply("cast", (end,), "float32"))
            stores = (*loop.stores[:at], replace(store, value=end + 1), *loop.stores[at + 1 :])
            return replace(loop, body=body, stores=stores)
    return None


def lost_store(loop: Loop) -> Loop | None:
    """One of a kernel's results is not written: a gradient among them is lost, and the memory is stale."""
    return replace(loop, stores=loop.stores[1:]) if len(loop.stores) > 1 else None


def short_rows(loop: Loop) -> Loop | None:
    """The last element of each row is left out: of a sum, and of what is written."""
    (*rest, last) = loop.inner or ((),)
    return replace(loop, inner=(*rest, last - 1)) if isinstance(last, int) and last > 1 and not loop.product else None


def one_row_less(loop: Loop) -> Loop | None:
    """The last row is left out."""
    (*rest, last) = loop.outer or ((),)
    return replace(loop, outer=(*rest, last - 1)) if isinstance(last, int) and last > 1 and not loop.product else None


LOOPS: tuple[Callable[[Loop], Loop | None], ...] = (
    *map(_in_body, BODIES), rounded_store, lost_store, short_rows, one_row_less,
)  # fmt: skip
"""Mistakes in one kernel."""


def in_loop(change: Callable[[Loop], Loop | None], number: int) -> Callable[..., Program]:
    """Of a pass over programs that did something: the loop that is `number`th among those that have it changes."""

    def spoil(program: Program, before: Program, *_: Any) -> Program:
        if program == before:
            return program
        found = [(at, new) for at, s in enumerate(program.steps) if isinstance(s, Loop) and (new := change(s))]
        if len(found) <= number:
            return program
        at, new = found[number]
        return replace(program, steps=(*program.steps[:at], new, *program.steps[at + 1 :]))

    return spoil


def lost_step(program: Program, before: Program, *_: Any) -> Program:
    """Of a pass that did something: the last kernel is gone, so that what it writes is stale."""
    at = next((at for at in reversed(range(len(program.steps))) if isinstance(program.steps[at], Loop)), None)
    if at is None or program == before or len(program.steps) < 2:
        return program
    return replace(program, steps=(*program.steps[:at], *program.steps[at + 1 :]))


def in_nest(change: Body) -> Callable[..., Any]:
    """Of a decision about a kernel's nest: its body changes."""

    def spoil(plan: Any, *_: Any) -> Any:
        body = change(plan.nest.body)
        return plan if body is None else replace(plan, nest=replace(plan.nest, body=body))

    return spoil


def short_nest(plan: Any, *_: Any) -> Any:
    """Of a decision about a kernel's nest: its innermost loop ends one too early."""
    (*rest, last) = plan.nest.elements or (None,)
    if last is None or not isinstance(last.size, int) or last.size < 2:
        return plan
    return replace(plan, nest=replace(plan.nest, elements=(*rest, replace(last, size=last.size - 1))))


# --- the table: what the test suite plants ----------------------------------------------------------------------------


ADD, MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
ANOTHER_KEY = in_loop(_in_body(swapped_operands), 0)
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
    Fault("random numbers have another key", "dropout", loops("fuse", ANOTHER_KEY), "pass", "fuse"),
    Fault("a sum lacks its last term", "attention", loops("fuse", in_loop(short_rows, 0)), "pass", "fuse"),
    Fault("a result is rounded", "gated", loops("fuse", in_loop(rounded_store, 0)), "pass", "fuse"),
    Fault("a result is not written", "perceptron", loops("fuse", in_loop(lost_store, 0)), "pass", "fuse"),
)

# --- every kind of fault in a model -----------------------------------------------------------------------------------


WRONG_TEXT = {
    "add": "{0} - {1}", "sub": "{1} - {0}", "mul": "{0} + {1}", "div": "{0} * {1}", "neg": "{0}", "exp": "exp_(-{0})",
    "fma": "fma_({0}, {2}, {1})", "sqrt": "{0}", "rsqrt": "1 / {0}", "sigmoid": "sigmoid_(-{0})", "log1p": "log_({0})",
    "max": "min_({0}, {1})", "min": "max_({0}, {1})", "tanh": "sigmoid_({0})", "one_plus_erf": "erf_({0})",
    "reciprocal": "{0}", "log": "log1p_({0})", "sin": "cos_({0})", "cos": "sin_({0})", "abs": "{0}",
    "where": "{0} ? {2} : {1}", "lt": "{0} <= {1}", "le": "{0} < {1}", "gt": "{0} >= {1}", "ge": "{0} > {1}",
}  # fmt: skip
"""Operation -> a wrong way to print it."""
WRONG_RULE = {
    "gelu.default": "silu.default", "exp.default": "expm1.default", "sigmoid.default": "tanh.default",
    "silu.default": "sigmoid.default", "mul.Tensor": "add.Tensor", "add.Tensor": "mul.Tensor",
    "log1p.default": "log.default", "_softmax.default": "_log_softmax.default", "neg.default": "abs.default",
    "rsqrt.default": "sqrt.default", "mean.dim": "sum.dim_IntList", "sub.Tensor": "add.Tensor",
    "div.Tensor": "mul.Tensor", "relu.default": "abs.default", "tanh.default": "sigmoid.default",
    "_log_softmax.default": "_softmax.default", "sin.default": "cos.default", "cos.default": "sin.default",
    "log.default": "log1p.default", "sqrt.default": "rsqrt.default", "elu.default": "leaky_relu.default",
    "amax.default": "amin.default", "cumsum.default": "cumprod.default", "abs.default": "neg.default",
    "reciprocal.default": "neg.default", "softplus.default": "elu.default", "minimum.default": "maximum.default",
    "maximum.default": "minimum.default", "square.default": "abs.default", "lt.Scalar": "le.Scalar",
    "gt.Scalar": "ge.Scalar", "gt.Tensor": "ge.Tensor",
    "_softmax_backward_data.default": "_log_softmax_backward_data.default",
}  # fmt: skip
LOOP_PASSES = (
    "fuse", "rematerialize", "interchange_reductions", "split_row_reductions", "remove_dead_steps",
    "use_online_softmax", "accumulate_matmuls", "order_inner_loops", "split_column_reductions", "group_updates",
)  # fmt: skip
NEST_PASSES = ("parallelize", "hoist_values", "keep_values", "vectorize", "stream_stores")


@dataclass(eq=False)
class Recorded:
    """What the passes did while a model was compiled without faults, by which faults without effect are left out."""

    results: dict[str, list[tuple[Any, tuple[Any, ...]]]] = field(default_factory=dict)
    """Pass -> (what it returned, its arguments), in order."""
    targets: set[str] = field(default_factory=set)
    """ATen operations that were lowered."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is compiled until the block ends."""

        def keep(name: str) -> Callable[..., Any]:
            def kept(result: Any, *args: Any) -> Any:
                self.results.setdefault(name, []).append((result, args))
                return result

            return kept

        def lowering(op: str, rule: Any) -> Any:
            def lower(*args: Any, **kwargs: Any) -> Any:
                self.targets.add(op)
                return rule.lower(*args, **kwargs)

            return replace(rule, lower=lower)

        with contextlib.ExitStack() as stack:
            for rows, names in ((pipeline.loop_passes, (*LOOP_PASSES, PLAN)), (pipeline.nest_passes, NEST_PASSES)):
                for name in names:
                    stack.enter_context(spoilt(rows, name, keep(name)))
            stack.enter_context(patch.dict(RULES, {op: lowering(op, rule) for op, rule in RULES.items()}))
            yield

    def changes(self, name: str, spoil: Callable[..., Any]) -> bool:
        """Whether a fault of a pass changes what it returned for any program or kernel."""
        return any(spoil(result, *args) != result for result, args in self.results.get(name, ()))

    def operations(self) -> set[str]:
        """Operations of the kernels."""
        plans = (result for name in NEST_PASSES for result, _ in self.results.get(name, ()))
        return {value.op for plan in plans for value in plan.nest.body if isinstance(value, Apply)}


def products(model: str, known: Recorded) -> Iterator[Fault]:
    """Every kind of fault in a model, where it changes something of what was compiled."""
    used = known.operations()
    for op in sorted(used & WRONG_TEXT.keys()):
        yield Fault(f"{op} is printed wrong in {model}", model, cpp(op, WRONG_TEXT[op]), "kernel", f"op {op}")
    for op in sorted(op for op in used if not OPS[op].exact and OPS[op].rule == "same"):
        text = f"({ops.SPELLING[op]}) * 1.01f"
        yield Fault(f"{op} is 1 % off in {model}", model, cpp(op, text), "kernel", f"op {op}")
    for op, other in WRONG_RULE.items():
        if f"aten.{op}" in known.targets and f"aten.{other}" in RULES:
            yield Fault(f"{op} is lowered wrong in {model}", model, rule(op, other), "lowering rule", f"aten.{op}")
    for name in LOOP_PASSES:
        for change in LOOPS:
            for number in range(2):
                if known.changes(name, spoil := in_loop(change, number)):
                    what = f"{name}: {change.__name__} {number} in {model}"
                    yield Fault(what, model, loops(name, spoil), "pass", name)
        if known.changes(name, lost_step):
            yield Fault(f"{name}: lost_step in {model}", model, loops(name, lost_step), "pass", name)
    if known.changes(PLAN, reuses_memory):
        yield Fault(f"memory is used twice in {model}", model, loops(PLAN, reuses_memory), "pass", PLAN)
    for name in NEST_PASSES:
        for spoil, what in (*((in_nest(body), body.__name__) for body in BODIES), (short_nest, "short_nest")):
            if known.changes(name, spoil):
                plant = functools.partial(spoilt, pipeline.nest_passes, name, spoil)
                yield Fault(f"{name}: {what} in {model}", model, plant, "pass", name)
