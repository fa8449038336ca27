"""Results that view inputs, inputs that share memory from a later call on, inputs that are freed: as in eager."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import dcompile
from dcompile.capture.aliasing.input_memory import COUNTED
from tests import nursery
from tests.fuzz.recordings import recorded


def half(x):
    x.mul_(2)
    return x[: x.shape[0] // 2]


def inner(x):
    x.transpose(0, 1)[0] += 1
    return x[1 : x.shape[0] - 1].t()


def behind_one_another(x):
    x.add_(1)
    return x.unsqueeze(0).expand(x.shape[0], *x.shape)[1:]


def part(x):
    x.add_(1)
    return x.unbind(1)[1].view_as(x[:, 0])


def strided(x):
    seen = x.as_strided(x.shape, x.stride())
    x[0] = 0.5
    return seen


def strided_part(x):
    x[0] = 0.5
    return x[1:].as_strided((x.shape[0] - 2, 2), x.stride())


# Dynamo itself looks at .grad of a graph's input that is no leaf
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("columns", [slice(0, 8), slice(2, 6)], ids=("all columns", "some columns"))
@pytest.mark.parametrize(
    ("function", "learns"),
    [(part, False)]  # eager's has a history of its own that nobody may change, with gradients
    + [
        (function, learns)
        for function in (half, inner, behind_one_another, strided, strided_part)
        for learns in (False, True)
    ],
)
def test_a_look_at_an_input_that_is_changed(function, columns, learns):
    """AOTAutograd began at the front of the memory that the input is a part of, with several sizes."""
    compiled = dcompile.compile(function, dynamic=True)
    for size in (6, 8):
        whole = [torch.arange(200.0).requires_grad_(learns) * 1 for _ in range(2)]
        inputs = [x[4 : 4 + 8 * size].view(size, 8)[:, columns] for x in whole]
        got, want = compiled(inputs[0]), function(inputs[1])
        assert torch.equal(got, want) and got.stride() == want.stride()
        assert got.storage_offset() == want.storage_offset()
        assert torch.equal(*whole)


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_input_that_looks_at_its_elements_twice_is_filled(dynamic):
    def function(seen, other):
        seen.zero_()
        return other + 1

    ours, eager, other = torch.randn(4, 6), torch.randn(4, 6), torch.randn(3)
    got = dcompile.compile(function, dynamic=dynamic)(ours.unfold(-1, 2, 1), other)
    assert torch.equal(got, function(eager.unfold(-1, 2, 1), other))
    assert torch.equal(ours, eager)


def both(a, b):
    a.mul_(2)
    return b.view(-1)[:2], a.t(), b[0], a.unsqueeze(0), b.diagonal(), b


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("learns", [False, True])
def test_looks_at_inputs_that_share_memory(learns):
    """AOTAutograd repeated them on the base of both, as if it were the input."""
    sides = []
    for function in (both, dcompile.compile(both)):
        leaf = torch.arange(6.0, requires_grad=learns)
        whole = (leaf * 1).view(3, 2)
        results = function(whole[:2], whole[1:])
        gradient = torch.autograd.grad(sum(x.square().sum() for x in results), leaf) if learns else ()
        with torch.no_grad():
            whole.mul_(10)
        sides.append([x.detach() for x in (whole, *results, *gradient)])
    torch.testing.assert_close(sides[1], sides[0], rtol=0, atol=0)


def test_a_look_as_another_dtype_at_memory_that_is_changed_behind_another_input_is_refused():
    def bits(a, b):
        a.mul_(2)
        return b.view(torch.int32)

    whole = torch.arange(6.0).view(3, 2)
    with pytest.raises(BackendCompilerFailed, match="a result views an input as another dtype"):
        dcompile.compile(bits)(whole[:2], whole[1:])


@pytest.fixture(autouse=True)
def compilers() -> None:
    """The compiler itself: kernels of ours are what counts on strides."""


def turned(a: torch.Tensor, row: torch.Tensor, look: torch.Tensor) -> torch.Tensor:
    """Dynamo runs `t_` by itself; what comes after it takes `row` and `look`, and so the tensor that both look at."""
    a.t_()
    most = look.amax(0) + row
    look[:, 1] = most[0]
    return most


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("shape", [(3, 3), (2, 3)], ids=str)
def test_a_base_that_is_turned_between_calls(shape, replayed, learns):
    def inputs():
        a = torch.arange(float(shape[0] * shape[1])).view(shape).clone()  # no view itself
        weight = torch.ones(shape[1], requires_grad=learns)
        return weight, a, a[0], a.view_as(a)

    def step(call, weight, a, row, look):
        result = call(a, row, look) * weight
        if learns:
            result.sum().backward()
        return result

    with recorded() if replayed else contextlib.nullcontext():
        options = {"triton.cudagraphs": replayed, "receipt": False}
        compiled = dcompile.compile(turned, dynamic=False, options=options)
        ours, stock = inputs(), inputs()
        for _ in range(6):
            torch.testing.assert_close(step(compiled, *ours), step(turned, *stock), rtol=0, atol=0)
            for found, wanted in zip(ours, stock, strict=True):
                assert torch.equal(found, wanted) and found.stride() == wanted.stride()
    assert not replayed or dcompile.receipt(compiled).replays
    torch.compiler.reset()


def update(x, y):
    x.mul_(2)
    return x + y


LAYOUTS = {
    "apart": lambda base: (base[:4].clone(), base[4:].clone()),
    "overlapping": lambda base: (base[:4], base[2:6]),
    "otherwise": lambda base: (base[1:5], base[:4]),
    "one memory": lambda base: (base[:4], base[:4].view(2, 2).view(4)),
    "neighbours": lambda base: (base[:4], base[4:]),
    "interleaved": lambda base: (base[::2], base[1::2]),
}


def assert_like_eager(compiled, function, make, *shape):
    base = torch.arange(1.0, 9.0).view(shape or (8,))
    other = base.clone()
    expected = function(*make(base))
    assert torch.equal(compiled(*make(other)), expected) and torch.equal(other, base)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("first", LAYOUTS)
def test_memory_is_shared_as_each_call_has_it(first, dynamic):
    compiled = dcompile.compile(update, dynamic=dynamic)
    for kind in (first, *LAYOUTS):
        assert_like_eager(compiled, update, LAYOUTS[kind])


def test_what_runs_eagerly_is_counted_and_nothing_else():
    compiled = dcompile.compile(update)
    for kind in ("apart", "neighbours", "apart"):
        assert_like_eager(compiled, update, LAYOUTS[kind])
    assert not dcompile.receipt(compiled).fallbacks
    for _ in range(2):
        assert_like_eager(compiled, update, LAYOUTS["overlapping"])
    assert dcompile.receipt(compiled).fallbacks == {COUNTED: 2}


def test_gradients_of_what_runs_eagerly():
    def scaled(weight, x, y):
        x.mul_(2)
        return (weight * x * y).sum()

    compiled = dcompile.compile(scaled)
    for make in (LAYOUTS["apart"], LAYOUTS["overlapping"], LAYOUTS["apart"]):
        found = []
        for function in (scaled, compiled):
            weight = torch.ones(4, requires_grad=True)
            function(weight, *make(torch.arange(1.0, 9.0))).backward()
            found.append(weight.grad)
        assert torch.equal(*found)


def test_a_buffer_that_changes_and_a_window_of_it():
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("held", torch.arange(1.0, 9.0))

        def forward(self, x):
            self.held.mul_(2)
            return x + self.held[:4]

    own, stock = dcompile.compile(Memory()), Memory()
    for x in (torch.ones(4), None, torch.ones(4)):
        given = [module.held[2:6] if x is None else x for module in (own, stock)]
        assert torch.equal(own(given[0]), stock(given[1])) and torch.equal(own.held, stock.held)


def test_a_parameter_and_an_argument_that_is_a_window_of_it():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.arange(1.0, 9.0), requires_grad=False)

        def forward(self, x):
            x.add_(1)
            return x * self.w[:4]

    own, stock = dcompile.compile(Adds()), Adds()
    for window in (False, True):
        given = [module.w.data[:4] if window else torch.ones(4) for module in (own, stock)]
        assert torch.equal(own(given[0]), stock(given[1])) and torch.equal(own.w, stock.w)


def test_many_tensors():
    def step(params, grads):
        torch._foreach_add_(params, grads, alpha=-1.0)

    compiled = dcompile.compile(step)
    for shared in (False, True):
        found = []
        for function in (step, compiled):
            params = list(torch.arange(40.0).clone().view(10, 4).unbind())
            grads = [params[(n + 1) % 10][:] if shared else torch.ones(4) * n for n in range(10)]
            function(params, grads)
            found.append(torch.stack(params))
        assert torch.equal(*found)


def test_functions_that_change_nothing_are_asked_nothing(compilers):
    compiled = dcompile.compile(lambda x, y: x + y)
    for kind in LAYOUTS:
        assert_like_eager(compiled, lambda x, y: x + y, LAYOUTS[kind])
    assert not dcompile.receipt(compiled).fallbacks


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """What is wrong with each case, from a process that may end with a segmentation fault."""
    command = [nursery.python(), "-m", "tests.capture.resized"]  # born with torch imported
    done = subprocess.run(
        command, env=dict(os.environ), capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize("case", ["freed", "filled", "gathered", "twice", "anew"])
def test_memory_is_read_before_it_is_freed_and_written_after_it_is_made(case: str, found: dict[str, str]) -> None:
    assert found[f"{case} False"] == ""


@pytest.mark.parametrize("case", ["freed", "gathered", "twice"])
def test_the_backward_computes_with_what_the_forward_had(case: str, found: dict[str, str]) -> None:
    assert found[f"{case} True"] == ""
