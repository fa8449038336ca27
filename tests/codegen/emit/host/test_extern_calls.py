"""Products as BLAS describes them: checked by reading memory as cuBLAS would; and how a host program calls them."""

from dataclasses import astuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dcompile.codegen.emit.host import program as host_program
from dcompile.codegen.emit.host.extern_calls import geometry, measurable_geometries
from dcompile.codegen.emit.target import Kernels
from dcompile.collectives.contract import ProgramReport
from dcompile.compiler import autotune
from dcompile.compiler.driver import Pipeline
from dcompile.config import Config
from dcompile.ir.buffers import Buffer
from dcompile.ir.gemm import Geometry
from dcompile.ir.index import contiguous_strides, var
from dcompile.ir.nodes import SCALE, Extern, Program, View

ROWS, INNER, COLUMNS = 16, 24, 8


def buffer(name, shape, strides=None, dtype="bfloat16", device="cuda"):
    return Buffer(name, dtype, shape, strides or contiguous_strides(shape), device)


def product(left, right, out, op="aten.mm.default", kwargs=(), added=()):
    return Extern(op, (*added, left, right), kwargs, (out.name,), "out")


def column_by_column(memory, rows, columns, lead, turned):
    """A matrix as BLAS sees it in flat memory."""
    if turned:
        return column_by_column(memory, columns, rows, lead, False).T
    return np.array([[memory[column * lead + row] for column in range(columns)] for row in range(rows)])


@pytest.mark.parametrize("left_turned", [False, True])
@pytest.mark.parametrize("right_turned", [False, True])
@pytest.mark.parametrize("wider", [0, 8])
def test_what_blas_reads_is_what_torch_multiplies(left_turned, right_turned, wider):
    def lying(name, rows, columns, turned):
        shape = (columns, rows) if turned else (rows, columns)
        lead = shape[1] + wider
        return buffer(name, shape, (lead, 1)), View(name, (rows, columns), (1, lead) if turned else (lead, 1))

    x, left = lying("x", ROWS, INNER, left_turned)
    w, right = lying("w", INNER, COLUMNS, right_turned)
    y = buffer("y", (ROWS, COLUMNS), (COLUMNS + wider, 1))
    found = geometry(product(left, right, y), {b.name: b for b in (x, w, y)})
    assert found is not None and (found.m, found.n, found.k) == (COLUMNS, ROWS, INNER)
    draw = np.random.default_rng(0)
    flat = {b.name: draw.standard_normal(b.shape[0] * b.strides[0]) for b in (x, w)}

    def seen(view):
        strides = tuple(8 * stride for stride in view.strides)
        return np.lib.stride_tricks.as_strided(flat[view.buffer], view.shape, strides)

    a = column_by_column(flat["w"], found.m, found.k, found.lead_a, found.transposed_a)
    b = column_by_column(flat["x"], found.k, found.n, found.lead_b, found.transposed_b)
    np.testing.assert_array_equal((a @ b).T, seen(left) @ seen(right))
    assert found.lead_out == COLUMNS + wider


X, W, Y = buffer("x", (ROWS, INNER)), buffer("w", (INNER, COLUMNS)), buffer("y", (ROWS, COLUMNS))


def whole(b):
    return View(b.name, b.shape, b.strides)


def found(x=X, w=W, y=Y, left=None, **more):
    step = product(left or whole(x), whole(w), y, **more)
    return geometry(step, {b.name: b for b in (x, w, y)})


def test_a_product_that_scales_has_the_same_geometry():
    nothing = View("x", (1, 1), (1, 1))
    scaled = {"op": "aten.addmm.default", "added": (nothing,), "kwargs": (("beta", 0), ("alpha", SCALE))}
    assert found(**scaled) == found() is not None


@pytest.mark.parametrize(
    "how",
    [
        {"x": buffer("x", (ROWS, INNER), device="cpu"), "y": buffer("y", (ROWS, COLUMNS), device="cpu")},
        {"y": buffer("y", (ROWS, COLUMNS), dtype="float32")},
        {"y": buffer("y", (ROWS, COLUMNS), (1, ROWS))},
        {"x": buffer("x", (var("s0"), INNER))},
        {"x": buffer("x", (ROWS, INNER), (INNER + 1, 1))},  # rows that begin at no multiple of 16 bytes
        {"left": View("x", (ROWS, INNER), (INNER, 1), 4)},
        {"x": buffer("x", (ROWS, INNER), (2 * INNER, 2))},
        {"op": "aten.addmm.default", "added": (View("y", (COLUMNS,), (1,)),)},
    ],
    ids=["cpu", "float32", "out turned", "symbol", "rows apart", "begins at 8 bytes", "strided", "bias"],
)
def test_what_is_left_to_aten(how):
    assert found(**how) is None


def program(count, small=0):
    """So many large products, and some of a hundredth of their size."""
    outs = [buffer(f"y{n}", (ROWS, COLUMNS)) for n in range(count)]
    steps = [product(whole(X), whole(W), out) for out in outs]
    thin = buffer("thin", (INNER, 2), (8, 1))
    few = [buffer(f"z{n}", (2, 2), (8, 1)) for n in range(small)]
    steps += [product(View("x", (2, INNER), (INNER, 1)), View("thin", (INNER, 2), (8, 1)), out) for out in few]
    views = tuple(map(whole, (*outs, *few)))
    return Program("p", ("x", "w", "thin"), views, (X, W, thin, *outs, *few), tuple(steps))


def test_only_products_that_are_much_of_the_work_are_measured():
    assert measurable_geometries(program(3, small=1)) == {found(): 3}
    assert len(measurable_geometries(program(1, small=8))) == 2


def test_a_chosen_algorithm_is_called_with_both_factors_and_the_result():
    text = host_program.emit(program(2, small=1), Kernels(()), chosen={found(): (1, 2, 3)})
    assert f"_op0 = run.product('aten.mm.default', {astuple(found())}, (1, 2, 3))" in text
    assert "_op0(x, w, y0)" in text and "_op0(x, w, y1)" in text
    assert text.count("torch.mm") == 1, "what was not chosen is ATen's"
    assert "run.product" not in host_program.emit(program(2), Kernels(()))


def test_a_chosen_algorithm_gets_what_it_was_chosen_for():
    chosen = {found(): (1, 2, 3)}
    text = host_program.emit(program(2), Kernels(()), chosen=chosen)
    assert "if (_p_x | _p_w) & 15:\n            return run.realigned(call, args, (), buckets" in text
    assert "realigned" not in host_program.emit(program(2), Kernels(())), "ATen multiplies what begins anywhere"
    step = Extern("aten.clone.default", (whole(X),), (), ("copy",), "fresh")
    copy = buffer("copy", (ROWS, INNER))
    steps = (step, product(whole(copy), whole(W), Y))
    late = Program("p", ("x", "w"), (whole(Y),), (X, W, copy, Y), steps)
    text = host_program.emit(late, Kernels(()), chosen=chosen)
    assert f"if copy.stride() != {copy.strides}:" in text, "tracing may be wrong about a library's result"


def test_a_geometry_is_rebuilt_from_the_text():
    assert Geometry(*astuple(found())) == found()


class Nodes:
    """What a pipeline reads off an FX graph: the devices of its values."""

    def __init__(self):
        node = SimpleNamespace(meta={"val": torch.empty(1, device="meta")})
        self.graph = SimpleNamespace(nodes=[node])


@pytest.fixture
def measured(monkeypatch):
    """Geometries that a pipeline has measured; the second half of them, ATen is best at."""
    seen = []

    def choose(geometries, device):
        seen.append((list(geometries), device.type))
        return dict.fromkeys(seen[-1][0][: len(seen[-1][0]) // 2 + 1], (7,))

    monkeypatch.setattr(autotune, "choose", choose)
    return seen


def test_a_pipeline_measures_each_geometry_once_and_says_what_it_came_to(measured):
    pipeline = Pipeline(Config.make("max-autotune"))
    plans = [
        SimpleNamespace(program=program(count, small), report=ProgramReport()) for count, small in ((3, 0), (1, 8))
    ]
    first, second = (pipeline._chosen(plan, Nodes()) for plan in plans)
    assert first == {found(): (7,)} and [len(new) for new, _ in measured] == [1, 1] and measured[0][1] == "meta"
    assert len(second) == 2
    assert plans[0].report.notes == ["max_autotune: 3 of 3 large products by another algorithm than ATen's"]


def test_nothing_is_measured_where_algorithms_are_to_be_deterministic(measured, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    plan = SimpleNamespace(program=program(3), report=ProgramReport())
    assert Pipeline(Config.make("max-autotune"))._chosen(plan, Nodes()) == {} and not measured
    assert "nothing is measured" in plan.report.notes[0]
