"""How results lie to one another."""

from __future__ import annotations

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
