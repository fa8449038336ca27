"""A result that a graph returns several times, by several names."""

from __future__ import annotations

import torch


def test_is_one_tensor_behind_a_graph_break() -> None:
    """Two that overlap would be changed by way of `as_strided` there, which AOTAutograd refuses."""

    def function(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v = a * 2
        one = v.detach()
        other = one.to(one.dtype)
        v.transpose(0, -1).add_(1)
        torch._dynamo.graph_break()
        one.relu_()
        other.as_strided((2,), (1,)).add_(1)
        return one, other

    a = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    got = torch.compile(function, backend="dcompile", options={"receipt": False})(a)
    assert got[0] is got[1]
    assert torch.equal(got[0], function(a)[0])
    torch.compiler.reset()
