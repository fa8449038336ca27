"""Few rows times a matrix as a loop of ours: what GPUs get is tried on the CPU here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.codegen.lower.decompositions.table import table
from dcompile.codegen.lower.lower import Lowered, lower
from dcompile.codegen.nest.contraction import find_contraction
from dcompile.codegen.nest.loop_nest import flatten_loop
from dcompile.codegen.schedule.fusion.fuse import fuse
from dcompile.codegen.schedule.order.dependences import remove_dead_steps
from dcompile.device_traits import CPU, CUDA
from dcompile.ir.nodes import Extern, Loop
from dcompile.ir.verify import verify
from tests.codegen.lower.lowered import run
from tests.traits import change_cpu

N, K = 320, 512
linear = torch.nn.functional.linear


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: Any) -> None:
    change_cpu(monkeypatch, has_row_matmul=True)


def lowered(function: Any, *args: torch.Tensor, **more: Any) -> Lowered:
    gm = make_fx(lambda *a: function(*a), tracing_mode="fake", decomposition_table=table())(*args)
    found = lower(gm, "graph", **more)
    verify(found.program)
    return found


def kinds(found: Lowered) -> list[type]:
    return [type(step) for step in found.program.steps]


def weight(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(N, K).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_the_sum_is_rounded_once(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(0)
    args = [torch.randn(1, K).to(dtype), weight(dtype), *([torch.randn(N).to(dtype)] if biased else [])]
    found = lowered(linear, *args)
    assert kinds(found) == [Loop]
    (got,) = run(found.program, found.constants, args)
    x, w, *b = (arg.double() for arg in args)
    want = x @ w.t() + (b[0] if b else 0)
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-4)
    assert (got == want.to(dtype)).float().mean() > (0.98 if dtype != torch.float32 else 0.1)


def test_products_of_one_row_share_kernels_with_what_surrounds_them() -> None:
    """As the projections of a gated layer: gate, up and their product in one, down and what it is added to in one."""

    def layer(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return x + linear(torch.nn.functional.silu(linear(x, gate)) * linear(x, up), down)

    args = [torch.randn(1, K), torch.randn(2048, K), torch.randn(2048, K), torch.randn(K, 2048)]
    found = lowered(layer, *args)
    program = fuse(found.program)
    assert [(step.outer, step.inner) for step in program.steps if isinstance(step, Loop)] == [
        ((2048,), (K,)),
        ((K,), (2048,)),
    ]
    (got,) = run(program, found.constants, args)
    torch.testing.assert_close(got, layer(*args), rtol=1e-4, atol=1e-2)


def wide(rows: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Few rows, and the weights of gate, up and down."""
    shapes = (rows, K), (1024, K), (1024, K), (K, 1024)
    return [torch.randn(*shape).div(8).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("rows", "dtype"), [(2, torch.float16), (7, torch.bfloat16), (16, torch.bfloat16)])
def test_several_rows_share_kernels_with_what_surrounds_them(rows: int, dtype: torch.dtype) -> None:
    def layer(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return x + linear(torch.nn.functional.silu(linear(x, gate)) * linear(x, up), down)

    torch.manual_seed(0)
    args = wide(rows, dtype)
    found = lowered(layer, *args)
    program = fuse(found.program)
    loops = [step for step in program.steps if isinstance(step, Loop)]
    assert [(step.outer, step.inner) for step in loops] == [((rows, 1024), (K,)), ((rows, K), (1024,))]
    products = [find_contraction(flatten_loop(step)) for step in loops]
    assert [product and (len(product.products), product.row_count) for product in products] == [(2, rows), (1, rows)]
    (got,) = run(program, found.constants, args)
    torch.testing.assert_close(got.float(), layer(*map(torch.Tensor.float, args)), rtol=2e-2, atol=2e-2)


def test_a_bias_is_added_before_the_sum_is_rounded() -> None:
    torch.manual_seed(0)
    x, w, *_ = wide(4)
    b = torch.randn(1024).bfloat16()
    found = lowered(linear, x, w, b)
    (got,) = run(found.program, found.constants, [x, w, b])
    want = x.double() @ w.double().t() + b
    assert kinds(found) == [Loop] and (got == want.bfloat16()).float().mean() > 0.98


@pytest.mark.parametrize("transposed_first", [True, False])
@pytest.mark.parametrize("rows", [1, 5])
def test_integers_are_cast_while_they_are_multiplied(rows: int, transposed_first: bool) -> None:
    """As the weights of torchao's int8 recipe, and scaled afterwards."""

    def scaled(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w.t().to(x.dtype) if transposed_first else w.to(x.dtype).t()) * s

    torch.manual_seed(0)
    args = [wide(rows)[0], torch.randint(-128, 128, (1024, K), dtype=torch.int8), torch.rand(1024).bfloat16() / 64]
    found = lowered(scaled, *args)
    program = fuse(remove_dead_steps(found.program))
    (step,) = program.steps
    assert isinstance(step, Loop) and args[1].shape in {program.table[name].shape for name in step.reads}
    assert (find_contraction(flatten_loop(step)) is not None) == (rows > 1)
    (got,) = run(program, found.constants, args)
    x, w, s = (arg.double() for arg in args)
    torch.testing.assert_close(got.double(), x @ w.t() * s, rtol=2e-2, atol=1e-2)


def test_integers_that_are_overwritten_are_cast_before() -> None:
    def changed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        matrix = w.to(x.dtype)
        w.zero_()
        return torch.mm(x, matrix.t())

    args = [wide(4)[0], torch.randint(-128, 128, (1024, K), dtype=torch.int8)]
    want = args[0].double() @ args[1].double().t()
    found = lowered(changed, *args)
    (got,) = run(fuse(remove_dead_steps(found.program)), found.constants, args)
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=1.0)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.mm, (wide(17)[0], wide(1)[1].t())),
        (torch.mm, (wide(8)[0], wide(1)[3])),
        (torch.mm, (torch.randn(K, 8).bfloat16().t(), wide(1)[1].t())),
        (torch.mm, (torch.randn(8, 516).bfloat16(), torch.randn(1024, 516).bfloat16().t())),
        (torch.mm, (wide(8)[0], wide(1)[1][:256].t())),
        (torch.mm, (torch.randn(2, K), torch.randn(2048, K).t())),
    ],
    ids=["seventeen rows", "matrix by rows", "columns", "no whole 16 bytes", "small", "float32"],
)
def test_other_products_of_several_rows_are_the_librarys(function: Any, args: Any) -> None:
    assert kinds(lowered(function, *args)) == [Extern]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.mm, (torch.randn(2, K), weight().t())),
        (torch.mm, (torch.randn(1, K), torch.randn(K, N))),
        (torch.mm, (torch.randn(1, 8), torch.randn(N, 8).t())),
        (torch.mm, (torch.randn(1, K, dtype=torch.float64), weight(torch.float64).t())),
        (lambda b, x, w: torch.addmm(b, x, w, alpha=2), (torch.randn(N), torch.randn(1, K), weight().t())),
    ],
    ids=["two rows", "columns apart", "short", "float64", "scaled"],
)
def test_other_products_are_the_librarys(function: Any, args: Any) -> None:
    assert kinds(lowered(function, *args)) == [Extern]


def test_who_multiplies_is_an_option() -> None:
    args = torch.randn(1, K), weight().t()
    assert kinds(lowered(torch.mm, *args)) == [Loop]
    assert kinds(lowered(torch.mm, *args, own_rows=False)) == [Extern]


def test_by_default_on_gpus_alone(monkeypatch: Any) -> None:
    monkeypatch.undo()
    assert CUDA.has_row_matmul and not CPU.has_row_matmul
    assert kinds(lowered(torch.mm, torch.randn(1, K), weight().t())) == [Extern]
