"""Loops that multiply a tensor by one number: nothing is done where that is 1 and the result lies over the tensor."""

import numpy as np
import pytest

from dcompile.codegen.emit.cpp.loop_conditions import find_scaling
from dcompile.codegen.nest.loop_nest import make_nest
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import ZERO, var
from dcompile.ir.interpret import from_bfloat16, to_bfloat16
from dcompile.ir.nodes import Apply, Load, Loop, Program, Store, View
from tests.codegen.emit import cpp_kernel
from tests.codegen.emit.harness import call, compiled, placed, read

N = 5000


def scaled(dtype="float32", index=None, places=None, op="mul"):
    """y[i] = x[i] * s[0], computed in float32."""
    index, places = var("i0") if index is None else index, ZERO if places is None else places
    body = [Load("x", index, dtype), Load("s", places, "float32")]
    if dtype != "float32":
        body.append(Apply("cast", (0,), "float32"))
    wide = len(body) - 1 if dtype != "float32" else 0
    body.append(Apply(op, (wide, 1), "float32"))
    if dtype != "float32":
        body.append(Apply("cast", (len(body) - 1,), dtype))
    loop = Loop("k", (N,), (), tuple(body), (Store("y", var("i0"), len(body) - 1),))
    buffers = Buffer("x", dtype, (N,), (1,)), Buffer("s", "float32", (N,), (1,)), Buffer("y", dtype, (N,), (1,))
    return Program("p", ("x", "s"), (View("y", (N,), (1,)),), buffers, (loop,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [1.0, 0.75, np.nan, 0.0])
@pytest.mark.parametrize("in_place", [False, True])
def test_in_place_and_elsewhere_by_one_and_by_others(dtype, factor, in_place):
    program = scaled(dtype)
    functions = compiled([program])
    values = np.random.default_rng(0).standard_normal(N).astype(np.float32)
    values[:3] = -0.0, np.inf, np.nan
    values = values if dtype == "float32" else from_bfloat16(to_bfloat16(values))
    given = {"x": values, "s": np.full(N, factor, np.float32), "y": None}
    memory = {name: placed(program.table[name], given[name]) for name in given}
    if in_place:
        memory["y"] = memory["x"]
    assert call(cpp_kernel.emit(program.steps[0], program.table), functions, memory) == 0
    with np.errstate(invalid="ignore"):
        wanted = values * np.float32(factor)
    wanted = wanted if dtype == "float32" else from_bfloat16(to_bfloat16(wanted))
    np.testing.assert_array_equal(read(program.table["y"], program.outputs[0], memory["y"]), wanted)


def rounded(through, dtype="float32", result=None):
    """y[i] = x[i] by way of another dtype, times s[0]."""
    result = result or dtype
    body = (Load("x", var("i0"), dtype), Apply("cast", (0,), through), Load("s", ZERO, "float32"))
    body += (Apply("cast", (2,), through), Apply("mul", (1, 3), through), Apply("cast", (4,), result))
    loop = Loop("k", (N,), (), body, (Store("y", var("i0"), 5),))
    buffers = Buffer("x", dtype, (N,), (1,)), Buffer("s", "float32", (N,), (1,)), Buffer("y", result, (N,), (1,))
    return Program("p", ("x", "s"), (View("y", (N,), (1,)),), buffers, (loop,))


def test_what_is_recognised():
    def found(program):
        return find_scaling(make_nest(program.steps[0])) is not None

    assert found(scaled()) and found(scaled("bfloat16"))
    assert not found(rounded("int32")) and not found(rounded("bfloat16")), "a cast there and back is a rounding"
    assert found(rounded("float64")) and not found(rounded("float16", "bfloat16"))
    assert not found(rounded("float32", "bfloat16", result="float32")), "the result has another size"
    assert not found(scaled(op="add")), "adding 1 is something"
    assert not found(scaled(index=var("i0") * -1 + (N - 1))), "elements change places"
    assert not found(scaled(places=var("i0"))), "each element has a number of its own"
    assert "return 0;\n" in cpp_kernel.emit(scaled().steps[0], scaled().table).text.split("for (", 1)[0]
