"""What several inputs look at, of other strides than in the first call."""

from __future__ import annotations

import contextlib

import pytest
import torch

import dcompile
from tests.fuzz.recordings import recorded


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
