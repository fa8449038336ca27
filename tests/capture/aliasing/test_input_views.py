"""Results that look at an input which the graph changes lie where they lie in eager mode."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import dcompile
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
