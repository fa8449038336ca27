"""How results lie to one another."""

from __future__ import annotations

import copy

import pytest
import torch

import dcompile


def looking(x: torch.Tensor) -> list[torch.Tensor]:
    """A result, and three that look at it as other dtypes, two of them by way of one look."""
    y = x * 2
    whole = y.detach().view(torch.int32)
    return [whole, y, whole[1:], y.detach().view(torch.uint8).view(-1)]


@pytest.mark.parametrize("learns", [False, True])
def test_a_result_seen_as_another_dtype_lies_in_the_same_memory(learns: bool) -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(learns)
    model = dcompile.compile(looking, options={"receipt": False})
    for _ in range(2):
        got, want = model(x), looking(x)
        for results in (got, want):
            with torch.no_grad():
                results[1].add_(1)
        assert [a.data_ptr() - got[1].data_ptr() for a in got] == [a.data_ptr() - want[1].data_ptr() for a in want]
        assert [a._version for a in got] == [a._version for a in want]
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    if learns:
        assert torch.equal(*(torch.autograd.grad(results[1].sum(), x)[0] for results in (got, want)))
    assert not dcompile.receipt(model).fallbacks


class Counting(torch.nn.Module):
    """Adds to what comes in, and counts that."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.arange(4.0))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x += self.shift
        self.steps += 1
        return x.sin(), x.sum(1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_model_that_changes_its_input_and_a_buffer_returns_its_results() -> None:
    """AOTAutograd returned the buffer in place of the first one."""
    eager = Counting()
    compiled = dcompile.compile(copy.deepcopy(eager), options={"receipt": False})
    start = torch.linspace(-1, 1, 12).view(3, 4)
    for _ in range(2):
        inputs = [start.clone().requires_grad_() for _ in range(2)]
        got, want = (model(x * 1) for model, x in zip((compiled, eager), inputs, strict=True))
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(a.sum() + b.prod(), x) for (a, b), x in zip((got, want), inputs, strict=True)]
        torch.testing.assert_close(*grads)
    assert compiled.steps == eager.steps == 2


def seen(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    y = x * w
    with torch.no_grad():
        return [y, x[:-1], w.t(), y[1:], (y * 2)[0], x.detach()]


def test_a_leaf_that_is_a_view_keeps_its_gradient_as_a_result() -> None:
    """An input with gaps, converted to what it is."""
    x = torch.linspace(-1, 1, 12).view(3, 4)[:, ::2].requires_grad_()
    model = dcompile.compile(lambda x: (x.to(torch.float32), x * 2), options={"receipt": False})
    for _ in range(2):
        same, twice = model(x)
        assert same is x and torch.equal(torch.autograd.grad((same * twice).sum(), x)[0], 4 * x)
        with torch.no_grad():
            assert model(x)[0] is x and x.requires_grad


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_made_without_gradients_passes_none_on(dynamic: bool) -> None:
    """AOTAutograd makes it anew, with gradients."""
    inputs = [[torch.linspace(0, 1, 9).view(3, 3).requires_grad_() for _ in range(2)] for _ in range(2)]
    model = dcompile.compile(seen, dynamic=dynamic, options={"receipt": False})
    got, want = model(*inputs[0]), seen(*inputs[1])
    assert [(a.requires_grad, a.is_leaf) for a in got] == [(a.requires_grad, a.is_leaf) for a in want]
    for results in (got, want):
        torch.stack([a.square().sum() for a in results]).sum().backward()
    torch.testing.assert_close(*([x.grad for x in given] for given in inputs))
    got[1].data.add_(1)
    assert torch.equal(got[1], inputs[0][0][:-1])  # it still looks at the input


def masks(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two looks at what has no gradient, beside a result that has one; the one is changed behind a break."""
    mask = -x
    whole, first = mask.view_as(mask), mask[:, 0]
    y = (x * w).sum()
    torch._dynamo.graph_break()
    whole.sin_()
    return whole, first, first * 2, y


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("dynamic", [False, True])
def test_looks_at_a_result_without_gradient_are_known_as_such_behind_a_break(dynamic: bool) -> None:
    """With several sizes, AOTAutograd ended in an assertion where neither was a view."""
    x, w = torch.linspace(0, 1, 12).view(3, 4), torch.ones(4, requires_grad=True)
    got = dcompile.compile(masks, dynamic=dynamic, options={"receipt": False})(x, w)
    torch.testing.assert_close(got, masks(x, w))
    assert got[0].data_ptr() == got[1].data_ptr()
