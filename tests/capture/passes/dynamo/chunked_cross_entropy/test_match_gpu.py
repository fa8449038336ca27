"""Losses by parts, on a GPU: eager's values and gradients, in less memory than the logits take."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dcompile
from dcompile.operators import matmul_ops  # noqa: F401  defines the operators

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
    receipt = dcompile.receipt(call)
    assert "8 parts" in str(receipt.notes) and receipt.kernels


WIDE = 16_384, 32_768, 1024
"""Rows, classes and width for which the cost model chooses parts of the rows: logits of 1.1 GB, sums of 134 MB."""


def loss_of(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def under_autocast(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return loss_of(hidden, weight, labels)


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize(
    ("function", "dtype", "scale"),
    [(loss_of, torch.bfloat16, 1.0), (loss_of, torch.float16, 1024.0), (under_autocast, torch.float32, 1.0)],
    ids=["bfloat16", "float16", "autocast"],
)
def test_without_being_asked_gradients_are_no_further_off_than_eagers(
    function: Callable[..., torch.Tensor], dtype: torch.dtype, scale: float, recorded: bool
) -> None:
    torch.manual_seed(0)
    rows, classes, width = WIDE
    hidden, weight = (torch.randn(size, width, device="cuda") / width**0.25 for size in (rows, classes))
    labels = torch.randint(classes, (rows,), device="cuda")
    labels[::7] = -100
    given = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels

    def step(call: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[torch.Tensor]:
        loss = call(*args)
        return [loss.detach(), *torch.autograd.grad(loss * scale, args[:2])]

    exact = step(loss_in_float64, *(x.detach().double().requires_grad_() for x in given[:2]), labels)
    eager = step(function, *given)
    torch._dynamo.reset()
    call = dcompile.compile(function, options={"triton.cudagraphs": recorded, "receipt": False})
    for _ in range(4):
        found = step(call, *given)
    for number, (ours, theirs, true) in enumerate(zip(found, eager, exact, strict=True)):
        off, allowed = ((one.double() - true).norm() for one in (ours, theirs))
        assert off <= 1.02 * allowed + (2.5e-7 * true.norm() if number == 0 else 0), (number, off, allowed)
    receipt = dcompile.receipt(call)
    assert any("with their gradients" in note for note in receipt.notes) and receipt.kernels
    if not recorded:
        del found, ours, eager, theirs
        gc.collect()  # else collected where the statistics are read: models of earlier tests would count
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(call, *given)
        assert torch.cuda.max_memory_allocated() - before < 0.75 * rows * classes * 2


def loss_in_float64(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matmuls_with_float32_sums_add_in_place(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(384, 256, device="cuda").to(dtype), torch.randn(256, 512, device="cuda").to(dtype)
    ops = torch.ops.dcompile_matmul
    sums = ops.mm_float32(x, y)
    exact = x.double() @ y.double()
    assert sums.dtype == torch.float32 and torch.allclose(sums.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ops.addmm_float32(sums, x, y), 2 * sums, rtol=1e-5, atol=1e-4)
    before, at = torch.cuda.memory_allocated(), sums.data_ptr()
    ops.addmm_float32.out(sums, x, y, out=sums)
    assert sums.data_ptr() == at and torch.cuda.memory_allocated() == before
    assert torch.allclose(sums.double(), 2 * exact, rtol=1e-5, atol=1e-4)
