"""Runs models through AOTAutograd, `lower` and the reference interpreter, with ATen for the library calls."""

from __future__ import annotations

import functools
import operator
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._dynamo.backends.common import aot_autograd

from dcompile import compat
from dcompile.codegen.lower import registry
from dcompile.codegen.lower.decompositions.table import table
from dcompile.codegen.lower.lower import lower
from dcompile.ir.interpret import execute
from dcompile.ir.nodes import Extern, Loop, Program, Verbatim, View
from dcompile.ir.verify import verify


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def check_bounds(positions: np.ndarray, low: int, high: int) -> np.ndarray:
    if positions.size and (positions.min() < low or positions.max() >= high):
        raise IndexError(f"positions {positions.min()}..{positions.max()} outside [{low}, {high})")
    return positions


class Externs(dict):
    """Every ATen op, on NumPy arrays; in place, it returns what became of its first argument."""

    def __contains__(self, op: object) -> bool:
        return True

    def get(self, op: str, default: Any = None) -> Any:  # collectives: one rank
        return default

    def __missing__(self, op: str) -> Any:
        if op == "dcompile.check_bounds":
            return check_bounds
        namespace, name, overload = op.split(".")
        function = getattr(getattr(getattr(torch.ops, namespace), name), overload)

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                result = function(*map(_to_torch, args), **{k: _to_torch(v) for k, v in kwargs.items()})
            if isinstance(result, (tuple, list)):
                return tuple(_from_torch(item) for item in result)
            return () if result is None else _from_torch(result)

        return call


def _to_torch(arg: Any) -> Any:
    if isinstance(arg, (np.ndarray, np.generic)):
        return torch.from_numpy(np.array(arg))
    if isinstance(arg, tuple):
        return [_to_torch(item) for item in arg]
    if isinstance(arg, str) and arg.startswith("torch."):
        return eval(arg)
    return arg


def _from_torch(result: Any) -> Any:
    return to_numpy(result).copy() if isinstance(result, torch.Tensor) else result


@dataclass
class Seen:
    """What lowering made of the graphs of one model."""

    programs: list[Program] = field(default_factory=list)
    nodes: int = 0
    seconds: float = 0.0

    @property
    def fallbacks(self) -> Counter[str]:
        return Counter(s.op for p in self.programs for s in p.steps if isinstance(s, Extern) and s.fallback)

    @property
    def library(self) -> Counter[str]:
        return Counter(s.op for p in self.programs for s in p.steps if isinstance(s, Extern) and not s.fallback)

    @property
    def loops(self) -> int:
        return sum(isinstance(s, Loop) for p in self.programs for s in p.steps)


def run(program: Program, constants: dict[str, Any], args: list[Any]) -> list[Any]:
    """One call of a program in the interpreter, on torch tensors; inputs are changed in place where it says so."""
    tensors = dict(zip(program.inputs, [*args, *constants.values()], strict=True))
    result = execute(program, {name: to_numpy(t) for name, t in tensors.items()}, Externs(any=None))
    for name, tensor in tensors.items():
        if any(name in step.writes for step in program.steps):
            with torch.no_grad():
                tensor.copy_(torch.from_numpy(result.inputs[name]))
    outputs: list[Any] = []
    for output, view in zip(result.outputs, program.outputs, strict=True):
        if isinstance(view, View):
            dtype = getattr(torch, program.table[view.buffer].dtype)
            once = tuple(1 if stride == 0 else size for size, stride in zip(view.shape, view.strides, strict=True))
            memory = torch.empty_strided(once, view.strides, dtype=dtype)
            values = torch.from_numpy(np.asarray(output))
            memory.copy_(values[tuple(slice(size) for size in once)])
            outputs.append(memory.as_strided(view.shape, view.strides))
        else:
            outputs.append(output)
    return outputs


def compile_with(seen: Seen, function: Any) -> Any:
    """`function` compiled so that its graphs run in the interpreter."""

    def compiler(gm: Any, _: Any) -> Any:
        fakes = next(iter(reversed(gm.graph.nodes))).args[0]
        start = time.perf_counter()
        lowered = lower(gm, "graph")
        seen.seconds += time.perf_counter() - start
        seen.nodes += len(gm.graph.nodes)
        seen.programs.append(lowered.program)
        verify(lowered.program)
        for node, view in zip(fakes, lowered.program.outputs, strict=True):
            if isinstance(view, View):
                value = node.meta["val"]
                for size, stride, expected in zip(value.shape, view.strides, value.stride(), strict=True):
                    assert size <= 1 or stride == expected or 0 in value.shape, (node, view, value.stride())

        def call(args: list[Any]) -> list[Any]:
            given = list(args)
            args.clear()
            return run(lowered.program, lowered.constants, given)

        call._boxed_call = True
        return call

    partition = functools.partial(compat.aot.min_cut_partition, fusible=registry.fusible_ops())
    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=table(fallback_random=True),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def run_aten(program: Program, constants: dict[str, Any], args: list[Any]) -> list[Any]:
    """A program of library calls alone, on torch tensors and host numbers."""
    values = dict(zip(program.inputs, [*args, *constants.values()], strict=True))

    def argument(arg: Any) -> Any:
        if isinstance(arg, View):
            whole = program.table[arg.buffer]
            assert (arg.shape, arg.strides, arg.offset) == (whole.shape, whole.strides, 0)
            return values[arg.buffer]
        if isinstance(arg, Verbatim):
            return eval(arg.text)
        return [argument(item) for item in arg] if isinstance(arg, tuple) else arg

    for step in program.steps:
        assert isinstance(step, Extern)
        given = [argument(arg) for arg in step.args]
        result = _function(step.op)(*given, **{key: argument(arg) for key, arg in step.kwargs})
        if step.mode == "alloc":
            results = result if isinstance(result, (tuple, list)) else [result]
            values |= {out: r for out, r in zip(step.outs, results, strict=True) if out is not None}
    return [values[o.buffer] if isinstance(o, View) else o for o in program.outputs]


def _function(op: str) -> Any:
    first, _, rest = op.partition(".")
    if first in ("aten", "prims"):
        return operator.attrgetter(op)(torch.ops)
    if op == "dcompile.call":
        return lambda function, *args: function(*args)
    return operator.attrgetter(rest)({"operator": operator, "torch": torch}[first])
