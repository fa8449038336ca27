"""Attention written out in float32, on a GPU: eager's gradients, and scores saved in 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import dcompile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
BATCH, HEADS, ROWS, WIDTH = 4, 8, 1024, 64


def attention(q, k, v, mask):
    scores = q @ k.transpose(-2, -1) * WIDTH**-0.5 + mask
    return F.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_eagers_in_less_memory(dtype):
    torch.manual_seed(0)
    args = [torch.randn(BATCH, HEADS, ROWS, WIDTH, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
    mask = torch.full((ROWS, ROWS), -30.0, device="cuda").triu(1)
    weights = torch.randn(BATCH, HEADS, ROWS, WIDTH, device="cuda", dtype=dtype)

    def step(call, *args):
        result = call(*args, mask.to(args[0].dtype) if args[0].dtype == torch.float64 else mask)
        return [result.detach(), *torch.autograd.grad((result * weights).sum(), args)]

    exact = step(attention, *(x.detach().double().requires_grad_() for x in args))
    eager = step(attention, *args)
    torch._dynamo.reset()
    call = dcompile.compile(attention)
    for _ in range(2):
        found = step(call, *args)
    for ours, theirs, true in zip(found, eager, exact, strict=True):
        off, allowed = ((one.double() - true).norm() for one in (ours, theirs))
        assert off <= 1.05 * allowed
    before = torch.cuda.memory_allocated()
    result = call(*args, mask)
    scores = BATCH * HEADS * ROWS * ROWS * dtype.itemsize
    assert torch.cuda.memory_allocated() - before - result.nbytes < 1.1 * scores, "only scores are saved"
    assert result.grad_fn is not None and dcompile.receipt(call).kernels
