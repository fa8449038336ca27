"""Inputs that are overwritten: in their own memory, after everything that reads what was there."""

from __future__ import annotations

import copy
import functools
from math import prod
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.codegen.lower.lower import lower
from dcompile.ir.nodes import Extern, Loop
from dcompile.ir.verify import verify
from tests.codegen.lower.lowered import run
from tests.fuzz.recordings import recorded
from tests.traits import change_cpu


def check(function: Any, *args: torch.Tensor) -> list[Any]:
    gm = make_fx(lambda *a: function(*a), tracing_mode="fake")(*args)
    lowered = lower(gm, "graph")
    verify(lowered.program)
    ours, theirs = [a.clone() for a in args], [a.clone() for a in args]
    expected = function(*theirs)
    actual = run(lowered.program, lowered.constants, ours)
    for a, e in zip([*actual, *ours], [*expected, *theirs], strict=True):
        torch.testing.assert_close(a, e)
    return list(lowered.program.steps)


def test_a_running_mean() -> None:
    def step(mean: torch.Tensor, x: torch.Tensor) -> Any:
        new = mean * 0.9 + x.mean(0) * 0.1
        out = x - mean
        mean.copy_(new)
        return (out,)

    steps = check(step, torch.randn(4), torch.randn(3, 4))
    assert all(isinstance(s, Loop) for s in steps)


def test_lazy_readers_are_computed_first() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        before = (x + 1).t()
        x.copy_(y)
        return (before * y.t(),)

    check(step, torch.randn(3, 4), torch.randn(3, 4))


def test_a_source_that_reads_other_elements_goes_through_a_copy() -> None:
    def step(x: torch.Tensor) -> Any:
        x.copy_(x.flip(0) * 2)
        return ()

    assert len(check(step, torch.randn(5))) == 2


def test_a_source_that_reads_the_same_elements_needs_no_copy() -> None:
    def step(x: torch.Tensor) -> Any:
        x.copy_(x * 2)
        return ()

    assert len(check(step, torch.randn(5))) == 1


def test_counters_and_casts() -> None:
    def step(n: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        n.copy_(n + 1)
        x.copy_(y)
        return (y * 2,)

    check(step, torch.tensor(3), torch.randn(4).to(torch.bfloat16), torch.randn(4))


def test_other_in_place_operations_on_inputs_are_library_calls() -> None:
    def step(x: torch.Tensor, where: torch.Tensor) -> Any:
        doubled = x * 2
        torch.ops.aten.index_put_(x, [where], torch.ones(2))
        return (doubled.sum(),)

    steps = check(step, torch.randn(5), torch.tensor([1, 3]))
    calls = [s for s in steps if isinstance(s, Extern)]
    assert [c.mode for c in calls] == ["mutate"] and calls[0].effect


# --- positions known at run time, as a cache takes a token ------------------------------------------------------------


def put(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> Any:
    """A functionalised `cache[:, at] = new`, and what is read of the cache afterwards."""
    after = torch.ops.aten.index_put(cache, [None, at], new)
    cache.copy_(after)
    return (after.sum(1),)


def put_after_a_look(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> Any:
    before = cache[0] * 2
    after = torch.ops.aten.index_put(cache, [None, at], new)
    cache.copy_(after)
    return before, after + 1


def put_twice(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> Any:
    after = torch.ops.aten.index_put(torch.ops.aten.index_put(cache, [None, at], new), [None, at + 1], new)
    cache.copy_(after)
    return (after.sum(),)


def put_and_add(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> Any:
    after = torch.ops.aten.index_put(cache, [None, at], new, True)
    cache.copy_(after)
    return (after.sum(),)


ARGS = torch.randn(3, 9), torch.randn(3, 1), torch.tensor([4])


def in_place(steps: list[Any]) -> bool:
    """Is the cache written by the library, or by a loop over what is new alone?"""
    loops = [step for step in steps if isinstance(step, Loop) and "arg0_1" in step.writes]
    return all(prod(loop.outer) < 27 for loop in loops) and any("arg0_1" in step.writes for step in steps)


@pytest.mark.parametrize("at", [4, -2, 8])
def test_a_cache_takes_values_in_place(at: int, monkeypatch: Any) -> None:
    change_cpu(monkeypatch, checks_while_writing=True)
    steps = check(put, *ARGS[:2], torch.tensor([at]))
    (writer,) = [step for step in steps if "arg0_1" in step.writes]
    assert in_place(steps) and isinstance(writer, Loop) and writer.outer == (3, 1)


def test_a_position_outside_of_the_cache_is_found(monkeypatch: Any) -> None:
    change_cpu(monkeypatch, checks_while_writing=True)
    gm = make_fx(put, tracing_mode="fake")(*ARGS)
    lowered = lower(gm, "graph")
    with pytest.raises(IndexError):
        run(lowered.program, lowered.constants, [*ARGS[:2], torch.tensor([9])])


def test_several_positions_are_the_librarys(monkeypatch: Any) -> None:
    change_cpu(monkeypatch, checks_while_writing=True)
    steps = check(put, ARGS[0], torch.randn(3, 2), torch.tensor([4, 7]))
    assert in_place(steps) and not any("arg0_1" in step.writes for step in steps if isinstance(step, Loop))


@pytest.mark.parametrize("function", [put_after_a_look, put_twice, put_and_add])
def test_else_it_is_written_whole(function: Any, monkeypatch: Any) -> None:
    change_cpu(monkeypatch, checks_while_writing=True)
    assert not in_place(check(function, *ARGS))


def test_on_the_cpu_the_library_takes_positions_that_were_checked() -> None:
    steps = check(put, *ARGS)
    assert in_place(steps)
    assert [s.op for s in steps if isinstance(s, Extern)] == ["dcompile.check_bounds", "aten.index_put_.default"]


class Moving(torch.nn.Module):
    """Gives a frozen layer other memory in its forward, as momentum encoders do."""

    def __init__(self, how):
        super().__init__()
        self.how, self.a, self.b = how, torch.nn.Linear(16, 8), torch.nn.Linear(16, 8).requires_grad_(False)

    def forward(self, x):
        y = self.a(x)
        for a, b in zip(self.a.parameters(), self.b.parameters(), strict=True):
            match self.how:
                case "average":
                    b.data = b.data * 0.5 + a.data
                case "share":
                    b.data = a.data
                case "swap":
                    a.data, b.data = b.data, a.data
                case "fewer":
                    b.data = b.data[:1] * 2
                case "otherwise":
                    b.data = (b.data.mT * 2).contiguous().mT if b.data.dim() > 1 else b.data
        return (y * self.b(x)).sum()


@pytest.mark.parametrize("how", ["average", "share", "swap", "fewer", "otherwise"])
def test_a_parameter_whose_data_is_replaced_in_the_forward(how):
    stock = Moving(how)
    module = dcompile.compile(copy.deepcopy(stock), options={"receipt": False})
    for x in torch.randn(3, 2, 16).unbind():
        for model in (stock, module):
            model.zero_grad()
            model(x).backward()
        torch.testing.assert_close(module.state_dict(), stock.state_dict())
        torch.testing.assert_close(module.a.weight.grad, stock.a.weight.grad)
        assert (module.a.weight.data_ptr() == module.b.weight.data_ptr()) == (how == "share")


@pytest.mark.parametrize("how", ["average", "fewer"])
def test_a_forward_that_replaces_data_is_not_recorded(how):
    """No replay would do it; "fewer" gives it another shape, and leaves the graph to the library."""
    stock = Moving(how)
    with recorded(), torch.no_grad():
        module = dcompile.compile(copy.deepcopy(stock), options={"triton.cudagraphs": True})
        for x in torch.randn(5, 2, 16).unbind():
            torch.testing.assert_close(module(x), stock(x))
            torch.testing.assert_close(module.state_dict(), stock.state_dict())
    receipt = dcompile.receipt(module)
    assert not receipt.recordings and any("other memory (.data = ...)" in note for note in receipt.notes)


def test_a_buffer_that_training_changes_counts_it():
    """What autograd has saved of it before, elsewhere, is an error in the backward, no wrong gradient."""
    n = torch.ones(3)

    @functools.partial(dcompile.compile, options={"receipt": False})
    def function(x):
        n.add_(1)
        return x.sin() * 2

    x = torch.randn(3, requires_grad=True)
    for _ in range(3):
        before, version = x * n, n._version
        result = function(x)
        assert n._version > version
        result.sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.sum().backward()


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_gpus_kernel_reads_no_memory_of_the_cpu(place):
    """A number that is put at one position, and the position, may be tensors of the CPU."""
    aten = torch.ops.aten

    def put(x, index, value):
        changed = aten.index_put(x, [index], value)
        aten.copy_(x, changed)
        return (changed + 1,)

    with FakeTensorMode() as mode:
        index, value = torch.empty(1, dtype=torch.int64, device=place), torch.empty((), device=place)
        gm = make_fx(put)(torch.empty(3, 4, device="cuda"), index, value)
    with mode:
        program = lower(gm, "graph").program
    loops = [step for step in program.steps if isinstance(step, Loop)]
    assert loops and all(program.table[name].device == "cuda" for step in loops for name in step.reads | step.writes)
