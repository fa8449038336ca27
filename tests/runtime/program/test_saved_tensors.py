"""What autograd hands to a backward may lie otherwise than what the forward saved."""

from __future__ import annotations

import pytest
import torch

import dcompile
from dcompile.runtime.program.saved_tensors import NOTE, SavedLayouts


def scaled(a: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return a * m


def looked_at(a: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return torch.addmm(a, m.as_strided(m.shape, m.stride()), m)


CHANGES = {
    "turned": lambda m: m.data.t(),
    "every second": lambda m: m.data.repeat_interleave(2, 1)[:, ::2],
}


def gradients(function, change, symbolic: bool) -> list[torch.Tensor]:
    """After a second step, when layouts have been seen to be right once."""
    torch.manual_seed(0)
    rows = 4 if not symbolic else 6
    a, m = torch.rand(rows, rows, requires_grad=True), torch.rand(rows, rows, requires_grad=True)
    torch.autograd.grad(function(a, m).sum(), [a, m])
    total = (function(a, m) * torch.arange(float(rows * rows)).view(rows, rows)).sum()
    m.data = change(m)
    return list(torch.autograd.grad(total, [a, m]))


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_with_new_data_between_forward_and_backward(change: str, symbolic: bool) -> None:
    compiled = torch.compile(scaled, backend="dcompile", dynamic=symbolic, options={"receipt": False})
    got = gradients(compiled, CHANGES[change], symbolic)
    for x, y in zip(got, gradients(scaled, CHANGES[change], symbolic), strict=True):
        torch.testing.assert_close(x, y)


def test_a_look_by_strides_keeps_the_memory_that_it_saw() -> None:
    compiled = torch.compile(looked_at, backend="dcompile", options={"receipt": False})
    got = gradients(compiled, CHANGES["turned"], False)
    for x, y in zip(got, gradients(looked_at, CHANGES["turned"], False), strict=True):
        torch.testing.assert_close(x, y)


def test_hooks_that_return_saved_tensors_in_another_order() -> None:
    compiled = dcompile.compile(lambda x: x.exp(), options={"receipt": False})
    x = torch.rand(4, 5).t().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda y: y, lambda y: y.contiguous()):
        y = compiled(x)
    factors = torch.arange(20.0).view(5, 4)
    (y * factors).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp() * factors)
    assert NOTE in str(dcompile.receipt(compiled))


def test_another_shape_is_an_error() -> None:
    saved = SavedLayouts(((torch.float32, (2, 3), (3, 1), "cpu", False),), [])
    assert saved.check(torch.ones(2, 3)) and saved.check(torch.ones(2, 3)) and not saved.check(torch.ones(3, 2).t())
    assert saved.fit(torch.ones(3, 2).t())[0].is_contiguous()
    assert saved.fit(torch.ones(2, 3).double())[0].dtype == torch.float32
    with pytest.raises(RuntimeError, match="is another tensor in the backward"):
        saved.fit(torch.ones(1, 3))
