"""Numbers in the program text are worked out by ATen while compiling."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.codegen.lower.lower import lower, numbers_of
from dcompile.ir.nodes import Apply, Const, Loop

X = torch.arange(1.0, 9.0)


def traced(function):
    return make_fx(function, tracing_mode="fake")(X)


def test_a_number_is_a_constant_of_the_loop_that_uses_it():
    gm = traced(lambda x: x / torch.log(torch.tensor(7.0) / 2))
    lowered = lower(gm, "graph")
    (loop,) = lowered.program.steps
    assert isinstance(loop, Loop) and not lowered.constants and len(lowered.program.inputs) == 1
    numbers = [value.value for value in loop.body if isinstance(value, Const)]
    eagers = torch.log(torch.tensor(3.5)).item()
    assert numbers == [eagers] and numbers[0] != math.log(3.5), "to the last bit of float32"
    assert not any(isinstance(value, Apply) and value.op == "log" for value in loop.body)


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(True, torch.bool), (2**40 + 1, torch.int64), (0.1, torch.float64), (float("inf"), torch.float32)],
    ids=str,
)
def test_dtypes_keep_their_values(number, dtype):
    gm = traced(lambda x: x + torch.tensor(number, dtype=dtype).to(torch.float64))
    assert set(numbers_of(gm).values()) == {number}
    call = torch.compile(lambda x: x + torch.tensor(number, dtype=dtype), backend="dcompile", fullgraph=True)
    assert torch.equal(call(X), X + torch.tensor(number, dtype=dtype))


def test_what_may_change_is_left_alone():
    def drawn(x):
        return x * torch.rand_like(torch.tensor(1.0)) * torch.tensor([3.0, 4.0]).sum()

    found = numbers_of(traced(drawn))
    assert [str(node.target) for node in found] == ["aten.lift_fresh_copy.default"]


def test_other_libraries_operations_run_with_the_program_alone():
    runs = []

    @torch.library.custom_op("dcompile_test::exchanged", mutates_args=())
    def exchanged(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x * 2

    exchanged.register_fake(lambda x: torch.empty_like(x))
    gm = traced(lambda x: x * torch.ops.dcompile_test.exchanged(torch.tensor(3.0)))
    runs.clear()  # tracing looks at what constants are worth
    found = numbers_of(gm)
    assert [str(node.target) for node in found] == ["aten.lift_fresh_copy.default"] and not runs


def test_a_changed_number_is_another_program():
    @torch.compile(backend="dcompile", fullgraph=True)
    def scaled(x, by):
        return x * torch.sqrt(torch.tensor(float(by)))

    for by in (4, 9, 4):
        assert torch.equal(scaled(X, by), X * math.sqrt(by))
