"""Products that write into a bucket take averaging's factor with them: which do, and which are left as they are."""

from dataclasses import replace

import pytest

from dcompile.collectives.contract import BucketRule, ParamInfo
from dcompile.collectives.ddp_all_reduce import insert_all_reduces
from dcompile.collectives.fold_average import fold_average
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import contiguous_strides, var
from dcompile.ir.nodes import SCALE, Apply, Extern, Load, Loop, Program, Store, View
from dcompile.ir.verify import verify


def whole(name, shape=(4, 4)):
    return View(name, shape, contiguous_strides(shape))


def backward(dtype="bfloat16", device="cuda", inner=4, wire="", op="aten.mm.default"):
    """Gradients of a weight, by a product, and of a vector, by a loop."""
    shapes = {"x": (inner, 4), "v": (4,), "weight": (4, 4), "vector": (4,)}
    buffers = tuple(Buffer(n, dtype, shape, contiguous_strides(shape), device) for n, shape in shapes.items())
    added = (whole("x", (4, 4)),) if "add" in op else ()
    product = Extern(op, (*added, View("x", (4, inner), (1, 4)), whole("x", (inner, 4))), (), ("weight",), "out")
    body = (Load("v", var("i0"), dtype), Apply("cast", (0,), "float32"), Apply("cast", (1,), dtype))
    loop = Loop("copy", (4,), (), body, (Store("vector", var("i0"), 2),))
    outputs = (whole("weight"), whole("vector", (4,)))
    program = Program("backward", ("x", "v"), outputs, buffers, (product, loop), ((0, 0), (1, 1)))
    params = tuple(ParamInfo(n, f"p{n}", shapes[name], dtype, device) for n, name in enumerate(("weight", "vector")))
    return insert_all_reduces(program, params, BucketRule(1 << 20, 1 << 20, (), wire))


def test_a_product_is_multiplied_as_it_is_written_and_the_bucket_says_so():
    before = backward()
    after = fold_average(before)
    verify(after)
    (bucket,) = after.buckets
    (product,) = (step for step in after.steps if isinstance(step, Extern) and "mm" in step.op)
    assert bucket.scaled == (0,) and product.op == "aten.addmm.default"
    assert dict(product.kwargs) == {"beta": 0, "alpha": SCALE} and product.args[0].shape == (1, 1)
    assert replace(after, steps=(), buckets=()) == replace(before, steps=(), buckets=())
    assert fold_average(after) == after


@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "float16"},  # what overflows does so before the division under DDP
        {"device": "cpu"},
        {"wire": "bfloat16"},
        {"inner": 0},  # no element to point to
        {"inner": var("s0")},
        {"op": "aten.addmm.default"},
    ],
    ids=str,
)
def test_what_is_left_to_a_pass_over_the_bucket(how):
    before = backward(**how)
    assert fold_average(before) is before
