"""Losses by parts of the classes, on a GPU: eager's values and gradients, in less memory than the logits take."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import dcompile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROWS, WIDTH, CLASSES = 2048, 256, 32_000


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layer(x).tanh()), targets)


def step(model: torch.nn.Module, *args: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(*args)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]


def peak(model: torch.nn.Module, before: int, *args: torch.Tensor) -> int:
    """The most bytes during a step beyond `before`; what the compiler keeps between steps counts."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(model, *args)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_eagers_and_logits_are_never_there_as_a_whole(dtype: torch.dtype, recorded: bool) -> None:
    torch.manual_seed(0)
    model = Model().to("cuda", dtype)
    args = torch.randn(ROWS, WIDTH, device="cuda", dtype=dtype), torch.randint(CLASSES, (ROWS,), device="cuda")
    want = step(copy.deepcopy(model).double(), args[0].double(), args[1])
    eager = step(model, *args)
    copied, logits = copy.deepcopy(model), ROWS * CLASSES * dtype.itemsize
    before = torch.cuda.memory_allocated()
    assert peak(model, before, *args) > 2 * logits
    torch._dynamo.reset()
    call = dcompile.compile(copied, options={"chunked_loss": 8, "triton.cudagraphs": recorded})
    for _ in range(4):  # recorded as a CUDA graph from the third on
        found = step(call, *args)
    for ours, theirs, true in zip(found, eager, want, strict=True):
        scale = true.abs().max()
        error, allowed = (ours.double() - true).abs().max() / scale, (theirs.double() - true).abs().max() / scale
        assert error <= 2 * allowed + 1e-6, (error, allowed)
    if not recorded:
        del found, theirs, ours
        assert peak(call, before, *args) < logits
    assert "8 parts" in str(dcompile.receipt(call).notes)
