"""Which regions a compiler is asked for, by its row, and what becomes of what it raises or returns.

Results of a call are checked once, brought to the graph's strides, and given memory of their own.
"""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.errors import DcompileError
from dcompile.kernel_backends.compile_region import RegionCall, compile_region
from dcompile.kernel_backends.names import NAMED, KernelBackend, NamedBackend, find_backend
from tests.kernel_backends.fakes import eager

X = torch.arange(6.0).reshape(2, 3)


def region(function=torch.sin, *inputs, mode="fake"):
    return make_fx(lambda *values: (function(*values),), tracing_mode=mode)(*(inputs or (X,)))


def compiler(function=eager, **row) -> KernelBackend:
    return KernelBackend("other", "1", NamedBackend((), "", **row), function)


@pytest.mark.parametrize(
    ("gm", "row", "trains", "reason"),
    [
        (region(), {"trains": False}, True, "training graph"),
        (region(mode="symbolic"), {}, False, "symbolic sizes"),
        (region(torch.sin, X.bfloat16()), {"dtypes": ("float32",)}, False, "dtype bfloat16"),
        (region(lambda x: x > 0), {"dtypes": ("float32",)}, False, "dtype bool"),
    ],
)
def test_row_says_what_is_not_asked_for(gm, row, trains, reason) -> None:
    def never(gm, inputs):
        raise AssertionError("asked")

    assert compile_region(compiler(never, **row), gm, trains) == reason


def test_run_times_of_the_index_refuse_training_and_bfloat16() -> None:
    for name in ("onnxruntime", "openvino"):
        backend = KernelBackend(name, "", NAMED[name])
        assert compile_region(backend, region(), True) == "training graph"
        assert compile_region(backend, region(torch.sin, X.bfloat16()), False) == "dtype bfloat16"


def test_what_a_compiler_raises_is_the_reason() -> None:
    def fails(gm, inputs):
        raise ValueError("no rule for this\nTraceback and more")

    def long(gm, inputs):
        raise ValueError("x" * 500)

    assert compile_region(compiler(fails), region(), False) == "ValueError: no rule for this"
    assert len(compile_region(compiler(long), region(), False)) < 220
    assert "returned a int, not a callable" in compile_region(compiler(lambda gm, inputs: 3), region(), False)


def test_functions_of_several_arguments_and_boxed_ones() -> None:
    def boxed(gm, inputs):
        def call(values):
            (x,) = values
            values.clear()
            return gm(x)

        call._boxed_call = True
        return call

    for function in (eager, boxed):
        made = compile_region(compiler(function), region(), False)
        given = [X]
        assert torch.equal(made(given)[0], X.sin()) and given == []


def test_callable_takes_symbolic_sizes_and_training() -> None:
    backend = find_backend(eager)
    assert callable(compile_region(backend, region(mode="symbolic"), True))


LAYOUT = ((2, 3), (3, 1), torch.float32)


def call(function, *layouts) -> RegionCall:
    return RegionCall(0, "other", function, layouts or (LAYOUT,), "region 0 of forward0")


def test_one_result_is_a_tensor_and_several_are_a_tuple() -> None:
    one, bare = call(lambda values: (values[0] + 1,)), call(lambda values: values[0] + 1)
    two = call(lambda values: [values[0] + 1, values[0] * 2], LAYOUT, LAYOUT)
    for _ in range(2):
        assert torch.equal(one([X]), X + 1) and torch.equal(bare([X]), X + 1)
        plus, twice = two([X])
        assert torch.equal(plus, X + 1) and torch.equal(twice, X * 2)


def test_results_that_share_memory_become_copies() -> None:
    made = call(lambda values: (values[0], y := values[0] + 1, y), LAYOUT, LAYOUT, LAYOUT)
    for _ in range(2):
        same, plus, again = made([X])
        same += 1
        plus += 1
        assert torch.equal(X, torch.arange(6.0).reshape(2, 3)) and torch.equal(again, X + 1)


def test_results_get_the_strides_of_the_graph() -> None:
    turned = call(lambda values: (values[0] * 2,), ((2, 3), (1, 2), torch.float32))
    repeated = call(lambda values: (values[0] * 0,), ((2, 3), (0, 1), torch.float32))
    for _ in range(2):
        assert turned([X]).stride() == (1, 2) and torch.equal(turned([X]), X * 2)
        assert repeated([X]).stride() == (0, 1) and torch.equal(repeated([X]), X * 0)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda values: (values[0].double(),), r"\(2, 3\), torch.float64 as result 0, where the graph says \(2, 3\)"),
        (lambda values: (values[0].sum(),), r"\(\), torch.float32 as result 0"),
        (lambda values: (values[0], values[0]), "2 results, where the graph says 1"),
        (lambda values: (3,), "as result 0"),
    ],
)
def test_other_result_than_the_graph_says_is_an_error(function, text: str) -> None:
    with pytest.raises(DcompileError, match=text):
        call(function)([X])
