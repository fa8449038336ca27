"""Runs of kernels: what is one call, what ends a run, and when memory is released."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from dcompile.codegen.emit.host import batch_launches
from dcompile.codegen.emit.host import program as host_program
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Loop, Program, Store
from dcompile.ir.parse import parse
from tests.codegen.emit import cpp_kernel, loops
from tests.runtime.program.test_executable import load


def scale(name: str, source: str, target: str, n: int, factor: float) -> str:
    return f"loop {name} [{n}]  # model.{name}\n  {target}[i0] = mul({source}[i0], {factor})"


def text(program: Program) -> str:
    return host_program.emit(program, cpp_kernel.emit_all(program))


def program_of(head: str, *lines: str) -> Program:
    return parse("\n".join((f"program {head}", *lines)))


def steps(n: int, count: int) -> Program:
    """b1 = 2 x, b2 = 2 b1 and so on: all but the last are needed once."""
    names = ["x", *(f"b{number}" for number in range(1, count + 1))]
    buffers = (f"  {name}: float32[{n}] @ {'input' if name == 'x' else 'out'}+0" for name in names)
    scales = (scale(target, source, target, n, 2.0) for source, target in itertools.pairwise(names))
    return program_of("steps(x)", *buffers, *scales, f"return ({names[-1]})")


def test_kernels_side_by_side_are_one_call_and_one_alone_is_its_own() -> None:
    many, one = text(steps(8, 5)), text(steps(8, 1))
    assert many.count("run.calls(") == 1 and "run.kernel(" not in many
    assert one.count("run.kernel(") == 1 and "run.calls(" not in one
    (got,) = load(steps(8, 5))([torch.arange(8.0)])
    assert got.tolist() == [32.0 * i for i in range(8)]


def test_an_optimizers_tensors_take_one_call() -> None:
    """Updates in place of tensors of several sizes, each its own kernel; all addresses come with the call."""
    sizes = (3, 5, 70000)
    buffers = (f"  p{n}: float32[{n}] @ input+0" for n in sizes)
    updates = (scale(f"s{n}", f"p{n}", f"p{n}", n, 3.0) for n in sizes)
    program = program_of(f"update({', '.join(f'p{n}' for n in sizes)})", *buffers, *updates, "return ()")
    assert text(program).count("run.calls(3,") == 1
    executable = load(program)
    for _ in range(2):
        given = [torch.arange(float(n)) for n in sizes]
        assert executable([*given]) == []
        assert all(torch.equal(tensor, 3 * torch.arange(float(n))) for tensor, n in zip(given, sizes, strict=True))


@pytest.mark.parametrize("n", [16, batch_launches.CPU_ROOM_BYTES])
def test_a_large_result_ends_a_run_that_holds_as_much_memory(n: int) -> None:
    """Small ones wait to be released until the whole run is through."""
    lines = [line.strip() for line in text(steps(n, 4)).split("def call(")[1].splitlines()]
    first = next(place for place, line in enumerate(lines) if line.startswith("del "))
    allocations = [place for place, line in enumerate(lines) if line.startswith("b") and " = " in line]
    assert len(allocations) == 4
    assert (first > allocations[-1]) == (n == 16)
    (got,) = load(steps(n, 4))([torch.ones(n)])
    assert torch.equal(got, torch.full((n,), 16.0))


def test_a_kernel_that_may_fail_is_a_call_of_its_own() -> None:
    """Its line names it, and what comes behind a failure does not run."""
    body = loops.Body()
    quotient = body.op("floordiv", body.load("x", loops.I0, "int64"), body.load("z", loops.I0, "int64"), dtype="int64")
    names = "abcde"
    divide = Loop("divide", (3,), (), tuple(body.values), (Store("c", loops.I0, quotient),), ("model.ratio",))
    copy = loops.Body()
    value = copy.load("x", loops.I0, "int64")
    copies = {n: Loop(n, (3,), (), tuple(copy.values), (Store(n, loops.I0, value),), ("model.copy",)) for n in "abde"}
    buffers = [Buffer(name, "int64", (3,), (1,), storage="input") for name in ("x", "z", *names)]
    steps = tuple(copies.get(name, divide) for name in names)
    program = Program("divisions", tuple(b.name for b in buffers), (), tuple(buffers), steps)
    assert text(program).count("_launch0(") == 2, "equal tables are one"
    assert text(program).count("run.kernel(") == 1
    executable, x = load(program), torch.tensor([7, 8, 9])
    for divisor, expected in ((torch.tensor([1, 0, 1]), 0), (torch.tensor([1, 1, 1]), 1)):
        given = [torch.zeros(3, dtype=torch.int64) for _ in names]
        context = contextlib.nullcontext() if expected else pytest.raises(RuntimeError, match="ZeroDivisionError")
        with context as caught:
            executable([x, divisor, *given])
        assert [torch.equal(tensor, x) for tensor in given[3:]] == [bool(expected)] * 2
        assert all(torch.equal(tensor, x) for tensor in given[:2])
        if caught is not None:
            assert "model.ratio" in "".join(caught.value.__notes__)
