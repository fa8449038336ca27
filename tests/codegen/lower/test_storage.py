"""Operations whose offset counts from the start of a storage, on tensors that lie anywhere in the arena."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "input": lambda x: x.as_strided((3,), (2,), 1) * 2,
    "input relative": lambda x: x.as_strided((3,), (2,)) * 2,
    "result": lambda x: (x @ x.t()).as_strided((2, 2), (1, 4), 3) + 1,
    "look at a part of an input": lambda x: x[:3, 0].as_strided((2, 2), (1, 2), 0).as_strided((2, 2), (1, 2), 1),
    "slice of a result": lambda x: (x * 2)[1:].as_strided((3,), (1,), 0) + 1,
    "scatter into a result": lambda x: torch.as_strided_scatter((x + 1) @ (x @ x.t())[:3], x[0, :2], (2,), (3,), 4) * 3,
    "scatter over all": lambda x: torch.as_strided_scatter(torch.zeros(12), (-x).view(4, 3), (4, 3), (3, 1), 0) * 3,
}  # fmt: skip


@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("name", CASES)
def test_offsets_count_from_the_start_of_the_storage(name: str, offset: int) -> None:
    x = torch.arange(20.0)[offset : offset + 12].view(4, 3)
    call = torch.compile(CASES[name], backend="dcompile", fullgraph=True, options={"receipt": False})
    assert torch.equal(call(x), CASES[name](x))
    torch.compiler.reset()


def test_the_gradient_of_adaptive_pooling_over_a_sequence() -> None:
    """Its backward squeezes in place, which functionalization turns into as_strided_scatter into zeros in the arena."""
    torch.manual_seed(0)
    norm, head = nn.LayerNorm(32), nn.Linear(32, 2)

    def model(x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.adaptive_avg_pool1d(norm(x).transpose(1, 2), 1)
        return nn.functional.cross_entropy(head(pooled.flatten(1)), torch.tensor([0, 1]))

    gradients = []
    for run in (model, torch.compile(model, backend="dcompile", fullgraph=True, options={"receipt": False})):
        x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        run(x).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 1e-3
    torch.compiler.reset()
