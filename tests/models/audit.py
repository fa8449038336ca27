"""Where wrong values come from: every graph beside ATen, and every kernel beside the interpreter, on the same inputs.

    python -m tests.models.audit deberta-v2 train --device cuda

runs one aspect of one architecture. After each call of a compiled graph it prints which results differ from those of
the same graph run by ATen, and which kernels make something else of what they read than the interpreter of programs
does. For the second, the graph runs once more with every buffer among its results, so that none shares memory: what is
wrong in the first run and right in the second is the memory plan's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from dcompile.codegen.emit.host import program as host_program
from dcompile.compiler.caching import CachingCompiler
from dcompile.compiler.driver import PendingGraph, Pipeline, ProgramPlan, _report
from dcompile.config import Config
from dcompile.ir.buffers import Buffer
from dcompile.ir.interpret import GARBAGE, interpret
from dcompile.ir.nodes import Arg, Extern, Loop, Program, Verbatim, View
from dcompile.ir.symbols import sources, specialise
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.program.executable import HostProgram

TOLERANCE = 1e-4
"""Of the largest element: float32 sums in another order."""
HUGE = 1e30
"""From here on numbers stand for infinity: they do not say how large the others are."""


def exposed(pipeline: Pipeline, gm: Any, request: Any, cache: KernelCache) -> tuple[Program, HostProgram, list[str]]:
    """The graph with every buffer that a step writes among its results; the program, and those buffers' names."""
    lowered = pipeline._lower(gm, request, aten=False)
    program = replace(lowered.program, donated=())
    *passes, plan_memory = pipeline._passes
    for row in passes:
        program = row.run(program, *row.given(request))
    written = frozenset().union(*(step.writes for step in program.steps))
    hidden = {*program.inputs, *(b.name for b in program.buffers if not b.is_tensor)}
    shown = [b for b in program.buffers if b.name in written - hidden]
    views = tuple(View(b.name, b.shape, b.strides) for b in shown)
    program = plan_memory.run(replace(program, outputs=program.outputs + views), *plan_memory.given(request))
    kernels = pipeline.emit(program, request)
    plan = ProgramPlan(lowered, program, kernels, _report(program, kernels))
    building = pipeline._compilers.begin(kernels, pipeline._arch(gm), cache)
    made, _ = pipeline.finish(
        PendingGraph(plan, host_program.emit(program, kernels, recycle=False), building), gm, request, cache
    )
    return program, HostProgram(request.name, made), [b.name for b in shown]


class Audited:
    """A compiled graph that is looked at in each call."""

    def __init__(self, ours: HostProgram, gm: Any, request: Any, config: Config, cache: KernelCache) -> None:
        self.ours = ours
        aten, own = Pipeline(replace(config, kernels="aten")), Pipeline(config)
        made, _ = aten.finish(aten.begin(gm, request, cache), gm, request, cache)
        self.theirs = HostProgram(request.name, made)
        self.program, self.shown, self.names = exposed(own, gm, request, cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ours, name)

    def __call__(self, args: list[Any], **more: Any) -> list[Any]:
        expected, second, given = (_copies(args) for _ in range(3))
        theirs = self.theirs(expected[:], **more)
        everything = self.shown(second[:], **more)
        results = self.ours(args, **more)
        count = len(results)
        print(f"{self.ours.name}: {count} results, {len(self.names)} buffers")
        for place, (a, b, c) in enumerate(zip(results, theirs, everything, strict=False)):
            if text := _difference(a, b):
                again = _difference(c, b) or "right"
                print(f"  result {place} {self.program.outputs[place]}: {text}; with every buffer kept: {again}")
        known = dict(zip(self.program.inputs, given + self.shown._constants, strict=True))
        known |= dict(zip(self.names, everything[count:], strict=True))
        for text in self._steps(known):
            print("  " + text)
        return results

    def _steps(self, known: dict[str, Any]) -> Iterator[str]:
        sizes = () if self.shown._sizes is None else self.shown._sizes([known[name] for name in self.program.inputs])
        program = specialise(self.program, dict(zip(sources(self.program), sizes, strict=True)))
        written = frozenset().union(*(step.writes for step in program.steps))
        table = program.table
        for number, step in enumerate(program.steps):
            names = step.reads | step.writes
            lost = {n for n in names if n not in known} | step.reads & step.writes
            lost |= step.reads & written & frozenset(program.inputs)
            if lost:
                yield f"{number} {type(step).__name__}: not looked at, for {sorted(lost)}"
            elif isinstance(step, Loop):
                yield from self._kernel(number, step, table, known)
            elif isinstance(step, Extern) and step.mode != "mutate" and not step.effect:
                yield from self._call(number, step, known)

    def _kernel(self, number: int, step: Loop, table: dict[str, Buffer], known: dict[str, Any]) -> Iterator[str]:
        buffers = tuple(replace(table[n], storage=None, offset=0) for n in sorted(step.reads | step.writes))
        reads = tuple(sorted(step.reads))
        outputs = tuple(View(n, table[n].shape, table[n].strides) for n in sorted(step.writes))
        one = Program("one", reads, outputs, buffers, (step,))
        wanted = interpret(one, {name: _array(known[name]) for name in reads})
        for view, want in zip(outputs, wanted, strict=True):
            got = torch.from_numpy(_array(known[view.buffer]))
            want = np.asarray(want)
            untouched = np.frombuffer(bytes([GARBAGE] * 8), want.dtype)[0]
            gaps = np.isnan(want) if want.dtype.kind == "f" else want == untouched
            want = torch.from_numpy(np.where(gaps, got.numpy(), want))
            if text := _difference(got, want):
                where = f"{step.origin[:2]} {step.outer}x{step.inner} -> {view.buffer}"
                yield f"kernel {number} {step.name} {where}: {text}"

    def _call(self, number: int, step: Extern, known: dict[str, Any]) -> Iterator[str]:
        library, name, overload = step.op.split(".")
        call = getattr(getattr(getattr(torch.ops, library), name), overload)
        results = call(*(_given(a, known) for a in step.args), **{key: _given(a, known) for key, a in step.kwargs})
        for out, want in zip(step.outs, results if isinstance(results, (tuple, list)) else (results,), strict=False):
            if out is not None and (text := _difference(known[out], want)):
                yield f"call {number} {step.op} -> {out}: {text}"


def _given(arg: Arg, known: dict[str, Any]) -> Any:
    if isinstance(arg, View):
        base = known[arg.buffer]
        return torch.as_strided(base, arg.shape, arg.strides, base.storage_offset() + arg.offset)
    if isinstance(arg, tuple):
        return [_given(item, known) for item in arg]
    return eval(arg.text, {"torch": torch}) if isinstance(arg, Verbatim) else arg


def _copies(args: list[Any]) -> list[Any]:
    return [_copy(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach())


def _array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return np.lib.stride_tricks.as_strided(wide.numpy(), wide.shape, [s * wide.element_size() for s in wide.stride()])


def _difference(a: Any, b: Any) -> str:
    if not isinstance(b, torch.Tensor) or not b.numel():
        return "" if isinstance(b, torch.Tensor) or a == b else f"{a} for {b}"
    if a.shape != b.shape:
        return f"{tuple(a.shape)} for {tuple(b.shape)}"
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    off = (a - b).abs()
    off[a.isnan() & b.isnan() | (a == b)] = 0
    usual = b.abs()[b.abs() < HUGE]
    scale = float(usual.max()) if usual.numel() else 1.0
    worst = float(off.max())
    if worst <= TOLERANCE * scale + 1e-7:
        return ""
    count = int((off > TOLERANCE * scale).sum())
    place = tuple(int(n) for n in torch.unravel_index(off.argmax(), off.shape))
    pair = f"{float(a[place]):.6g} for {float(b[place]):.6g}"
    return f"{count} of {b.numel()} differ, at {place} {pair} (largest {scale:.3g})"


@contextlib.contextmanager
def auditing() -> Iterator[None]:
    """Every graph that is compiled meanwhile is looked at in each call."""
    compile_graph = CachingCompiler._compile

    def audited(self: Any, cache: Any, key: Any, objection: str, gm: Any, request: Any, foreseen: Any) -> Any:
        ours = compile_graph(self, cache, None, objection, gm, request, None)
        return Audited(ours, gm, request, self.config, cache)

    with mock.patch.multiple(CachingCompiler, _compile=audited, _found=lambda *_: None):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("aspect", nargs="?", default="train")
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    os.environ["TEST_DEVICE"] = chosen.device
    from tests.models.aspects import ASPECTS
    from tests.models.test_gpu import ALL
    from tests.subject import anew

    with anew(), torch._dynamo.config.patch(allow_rnn=True), auditing():
        ASPECTS[chosen.aspect](ALL[chosen.name])
    print("equal to eager")


if __name__ == "__main__":
    main()
