"""Many rows times a few elements as an expression: what GPUs get is tried on the CPU here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.codegen.lower.decompositions.table import table
from dcompile.codegen.lower.lower import Lowered, lower
from dcompile.ir.nodes import Extern, Loop
from dcompile.ir.verify import verify
from tests.codegen.lower.lowered import run
from tests.traits import change_cpu

ROWS = 1 << 14
linear = torch.nn.functional.linear


def lowered(function: Any, *args: torch.Tensor) -> Lowered:
    found = lower(make_fx(function, tracing_mode="fake", decomposition_table=table())(*args), "graph")
    verify(found.program)
    return found


def inputs(dtype: torch.dtype, rows: int = ROWS, depth: int = 4, columns: int = 4, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(*size).to(dtype) for size in ((rows, depth), (columns, depth), (columns,))]


@pytest.fixture
def _on_the_cpu(monkeypatch: Any) -> None:
    change_cpu(monkeypatch, has_row_matmul=True)


@pytest.mark.usefixtures("_on_the_cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_the_sum_is_rounded_once(dtype: torch.dtype, biased: bool) -> None:
    args = inputs(dtype, depth=5, columns=3)[: 2 + biased]
    found = lowered(linear, *args)
    assert [type(step) for step in found.program.steps] == [Loop]
    (got,) = run(found.program, found.constants, args)
    want = linear(*(arg.double() for arg in args))
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert (got == want.to(dtype)).float().mean() > (0.99 if dtype != torch.float32 else 0.1)


@pytest.mark.usefixtures("_on_the_cpu")
def test_readers_compute_the_product() -> None:
    def talk(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear(x.permute(0, 2, 3, 1), w).permute(0, 3, 1, 2).relu()

    x, w = torch.randn(2, 4, 128, 64), inputs(torch.float32)[1]
    found = lowered(talk, x, w)
    copy, product = found.program.steps
    assert isinstance(copy, Loop) and isinstance(product, Loop) and not product.inner
    assert product.stores[0].buffer == found.program.outputs[0].buffer
    torch.testing.assert_close(run(found.program, found.constants, [x, w])[0], talk(x, w))


@pytest.mark.usefixtures("_on_the_cpu")
@pytest.mark.parametrize("sizes", [{"rows": ROWS - 1}, {"depth": 9}, {"columns": 17}], ids=str)
def test_other_products_are_the_librarys(sizes: dict[str, int]) -> None:
    found = lowered(linear, *inputs(torch.bfloat16, **sizes))
    assert any(isinstance(step, Extern) for step in found.program.steps)


def test_a_cpu_has_a_library_for_them() -> None:
    found = lowered(linear, *inputs(torch.float32))
    assert any(isinstance(step, Extern) for step in found.program.steps)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gives_eagers_values(dtype: torch.dtype) -> None:
    def talk(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # along columns: else the bias has no gradient, and both are nothing but rounding errors
        return linear(x.view(8, 32, 64, 4), w, b).permute(0, 3, 1, 2).softmax(1)

    compiled = dcompile.compile(talk, options={"receipt": False})
    off, allowed = [0.0] * 3, [0.0] * 3
    for seed in range(8):  # a gradient has 16 elements or 4, so one draw says little
        x, w, b = (arg.cuda().requires_grad_() for arg in inputs(dtype, seed=seed))
        grad = torch.randn(8, 4, 32, 64, device="cuda", dtype=dtype)
        exact = [arg.detach().double().requires_grad_() for arg in (x, w, b)]
        want = torch.autograd.grad(talk(*exact), exact, grad.double())
        ours, eagers = (torch.autograd.grad(call(x, w, b), (x, w, b), grad) for call in (compiled, talk))
        for place, (got, eager, double) in enumerate(zip(ours, eagers, want, strict=True)):
            off[place] += float((got.double() - double).norm() ** 2)
            allowed[place] += float((eager.double() - double).norm() ** 2)
    assert all(one <= 1.2**2 * other for one, other in zip(off, allowed, strict=True)), (off, allowed)
