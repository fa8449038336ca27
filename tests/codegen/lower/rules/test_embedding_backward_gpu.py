"""Gradients of embeddings on a GPU, against float64's. `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dcompile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("compiled_anew"),
]
ROWS, WIDTH = 32000, 520


def tokens(kind, count):
    if kind == "equal":
        return torch.full((count,), 17, device="cuda")
    found = torch.randint(0, ROWS, (count,), device="cuda")
    if kind == "half equal":
        found[::2] = 17
    return found


@pytest.mark.parametrize("kind", ["different", "half equal", "equal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("count", [8192, 4091])
def test_gradients(kind, dtype, count):
    torch.manual_seed(0)
    table = torch.randn(ROWS, WIDTH, device="cuda").to(dtype).requires_grad_()
    given = torch.randn(count, WIDTH, device="cuda").to(dtype)
    index = tokens(kind, count)

    def gradient(function, table):
        (found,) = torch.autograd.grad(function(index, table), table, given.to(table.dtype))
        return found

    call = dcompile.compile(lambda i, t: F.embedding(i, t, padding_idx=5), options={"receipt": False})
    first, second = (gradient(call, table) for _ in range(2))
    assert torch.equal(first, second)
    assert dcompile.receipt(call).fallbacks == {}
    exact = gradient(lambda i, t: F.embedding(i, t, padding_idx=5), table.detach().double().requires_grad_())
    eagers = gradient(lambda i, t: F.embedding(i, t, padding_idx=5), table)
    allowed = float((eagers.double() - exact).abs().max()) + torch.finfo(dtype).eps * float(exact.abs().max())
    assert float((first.double() - exact).abs().max()) <= 1.5 * allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_tied_weights_get_one_gradient(dtype):
    torch.manual_seed(0)
    table = (torch.randn(ROWS, 64, device="cuda") / 8).to(dtype).requires_grad_()
    index = torch.randint(0, ROWS, (4, 256), device="cuda", dtype=torch.int32)

    def loss(index, table):
        return F.cross_entropy((F.embedding(index, table) @ table.t()).flatten(0, 1).float(), index.flatten().long())

    call = dcompile.compile(loss, options={"receipt": False})
    (found,) = torch.autograd.grad(call(index, table), table)
    (wanted,) = torch.autograd.grad(loss(index, table), table)
    scale = float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=scale * (2e-2 if dtype == torch.bfloat16 else 1e-4))
    assert dcompile.receipt(call).fallbacks == {}
