"""Matrix products of our own: values for all layouts, one value whatever the threads, and who is served."""

from __future__ import annotations

import pytest
import torch

import dcompile
from dcompile.codegen.emit.cpp import sgemm
from dcompile.codegen.emit.cpp.compile import build
from dcompile.codegen.emit.host import program as host_program
from dcompile.codegen.emit.target import Kernels
from dcompile.collectives.contract import ProgramReport
from dcompile.config import Config
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import var
from dcompile.ir.nodes import Extern, Program, View
from dcompile.runtime.program.artifact import CompiledGraph, Loadable
from dcompile.runtime.program.executable import HostProgram
from tests.codegen.emit.harness import store

LAYOUTS = ("rows", "columns", "slice", "every second")


def matrix(layout: str, rows: int, columns: int, batch: tuple[int, ...] = ()) -> torch.Tensor:
    """A matrix, or several, that lies in memory in a certain way."""
    match layout:
        case "rows":
            return torch.randn(*batch, rows, columns)
        case "columns":
            return torch.randn(*batch, columns, rows).mT
        case "slice":
            return torch.randn(*batch, rows + 2, columns + 5)[..., 1:-1, 3:-2]
        case _:
            return torch.randn(*batch, 2 * rows, 3 * columns)[..., ::2, ::3]


def buffer(name: str, value: torch.Tensor, storage: str) -> tuple[Buffer, View]:
    strides = tuple(value.stride())
    return Buffer(name, "float32", tuple(value.shape), strides, storage=storage), View(
        name, tuple(value.shape), strides
    )


def program_of(op: str, args: list[torch.Tensor], out: torch.Tensor) -> Program:
    buffers, views = zip(*(buffer(f"x{n}", arg, "input") for n, arg in enumerate(args)), strict=True)
    result, shown = buffer("y", out, "out")
    step = Extern(f"aten.{op}.default", views, (), ("y",), "out")
    return Program(op, tuple(b.name for b in buffers), (shown,), (*buffers, result), (step,))


def load(program: Program) -> HostProgram:
    """A program of one product, which our kernel must serve."""
    kernels = sgemm.replace_matmuls(Kernels(), program)
    assert list(kernels.products) == [0], f"not served: {program.steps[0]}"
    built = build(kernels.sources, Config(), store())
    graph = CompiledGraph(host_program.emit(program, kernels), (), (), 0, built.keys, ProgramReport())
    return HostProgram(program.name, Loadable(graph, built.libraries, {}))


def run(op: str, args: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """What our kernel makes of a call."""
    (found,) = load(program_of(op, args, out))([*args])
    assert found.stride() == out.stride()
    return found


def check(op: str, args: list[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Within the rounding of float32 sums of the exact result."""
    exact = getattr(torch, op)(*(a.double() for a in args))
    found = run(op, args, exact.float() if out is None else out)
    depth = args[-1].shape[-2]
    bound = 2e-7 * (2 + depth**0.5) * args[-2].abs().amax().double() * args[-1].abs().amax() * max(1, depth**0.5 / 4)
    assert float((found.double() - exact).abs().max()) < float(bound)
    return found


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_all_layouts(left, right):
    torch.manual_seed(0)
    check("mm", [matrix(left, 45, 70), matrix(right, 70, 83)])


@pytest.mark.parametrize("rows", [2, 3, 5, 7, 9, 13, 14, 15, 17, 28, 31, 505, 519])
def test_remainders_of_rows(rows):
    check("mm", [torch.randn(rows, 33), torch.randn(33, 40)])
    check("mm", [torch.randn(33, rows).t(), torch.randn(33, 40)])


@pytest.mark.parametrize("columns", [2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 65])
def test_remainders_of_columns(columns):
    check("mm", [torch.randn(30, 19), torch.randn(19, columns)])
    check("mm", [torch.randn(30, 19), torch.randn(columns, 19).t()])


@pytest.mark.parametrize("depth", [2, 3, 255, 256, 257, 700])
def test_depths(depth):
    check("mm", [torch.randn(20, depth), torch.randn(depth, 36)])
    check("addmm", [torch.randn(36), torch.randn(20, depth), torch.randn(36, depth).t()])


def test_something_is_added():
    a, b = torch.randn(29, 300), torch.randn(300, 41)
    for start in (torch.randn(41), torch.randn(1, 41), torch.randn(29, 41), torch.randn(29, 50)[:, 4:45]):
        check("addmm", [start, a, b])
    check("baddbmm", [torch.randn(3, 29, 41), torch.randn(3, 29, 300), torch.randn(3, 300, 41)])
    check("baddbmm", [torch.randn(3, 1, 41), torch.randn(3, 29, 300), torch.randn(3, 300, 41)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches(layout):
    check("bmm", [matrix(layout, 20, 37, (5,)), matrix(layout, 37, 18, (5,))])
    check("bmm", [matrix(layout, 20, 37).expand(5, 20, 37), matrix(layout, 37, 18, (5,))])


def test_results_by_columns_and_with_longer_rows():
    a, b = torch.randn(40, 64), torch.randn(64, 50)
    check("mm", [a, b], torch.empty(50, 40).t())
    check("addmm", [torch.randn(50, 40).t(), a, b], torch.empty(50, 40).t())
    found = check("mm", [a, b], torch.empty_strided((40, 50), (64, 1)))
    assert found.stride() == (64, 1)


def test_bits_do_not_depend_on_threads():
    torch.manual_seed(1)
    a, b = torch.randn(200, 600), torch.randn(600, 300)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            found.append(run("mm", [a, b], torch.empty(200, 300)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])
    whole = run("mm", [a[57:111], b[:, 40:90]], torch.empty(54, 50))
    assert torch.equal(found[0][57:111, 40:90], whole), "nor on what else is computed"


def test_sums_of_nothing_are_what_they_are_added_to():
    found = run("addmm", [torch.arange(40.0), torch.empty(20, 4)[:, :0], torch.empty(0, 40)], torch.empty(20, 40))
    assert torch.equal(found, torch.arange(40.0).expand(20, 40))


def test_sizes_that_vary():
    rows, inner = var("s0"), var("s1")
    shapes = {"bias": ((48,), (1,)), "x": ((rows, inner), (inner, 1)), "w": ((inner, 48), (1, inner))}
    buffers = [Buffer(name, "float32", *layout, storage="input") for name, layout in shapes.items()]
    views = tuple(View(b.name, b.shape, b.strides) for b in buffers)
    out = Buffer("y", "float32", (rows, 48), (48, 1), storage="out")
    shown = View("y", out.shape, out.strides)
    step = Extern("aten.addmm.default", views, (), ("y",), "out")
    executable = load(Program("dynamic", tuple(shapes), (shown,), (*buffers, out), (step,)))
    for rows_now, inner_now in ((20, 70), (33, 300), (300, 5)):
        bias, x, w = torch.randn(48), torch.randn(rows_now, inner_now), torch.randn(48, inner_now).t()
        (found,) = executable([bias, x, w])
        torch.testing.assert_close(found, torch.addmm(bias, x, w), rtol=1e-4, atol=1e-4)


def test_what_is_not_finite_stays_so():
    a, b = torch.zeros(20, 30), torch.ones(30, 33)
    a[3, 4], b[4, 32] = torch.inf, torch.nan
    a[19, 0] = torch.nan
    assert torch.equal(run("mm", [a, b], torch.empty(20, 33)).isfinite(), (a @ b).isfinite())


def test_who_is_not_served():
    a, b = torch.randn(20, 30), torch.randn(30, 40)

    def served(op: str, args: list[torch.Tensor], out: torch.Tensor) -> bool:
        return bool(sgemm.replace_matmuls(Kernels(), program_of(op, args, out)).products)

    assert served("mm", [a, b], torch.empty(20, 40))
    assert not served("mm", [a[:1], b], torch.empty(1, 40)), "a vector: memory decides, and nothing is to be packed"
    assert not served("mm", [a, b], torch.empty(40, 80)[::2, ::2]), "a result without contiguous rows or columns"
    assert not served("addmm", [torch.randn(20, 1), a, b], torch.empty(20, 40)), "a column that is added to all columns"
    assert not served("dot", [a[0], a[1]], torch.empty(()))
    whole = program_of("addmm", [torch.randn(40), a, b], torch.empty(20, 40))
    (step,) = whole.steps
    assert isinstance(step, Extern)
    scaled = Extern(step.op, step.args, (("alpha", 0.5),), step.outs, step.mode)
    assert sgemm.replace_matmul(scaled, whole.table) is None


def test_the_setting_decides():
    x, w = torch.randn(64, 48), torch.randn(48, 80)
    counts = []
    for who in ("own", "aten"):
        call = dcompile.compile(lambda x, w: (x @ w).relu(), options={"matmul": who, "receipt": False})
        torch.testing.assert_close(call(x, w), (x @ w).relu(), rtol=1e-5, atol=1e-5)
        receipt = dcompile.receipt(call)
        counts.append((receipt.kernel_calls, receipt.library_calls))
    assert counts == [(2, 0), (1, 1)]
