"""Programs for the rows of `LAUNCH_PASSES`, whose kernels each row changes."""

from __future__ import annotations

from dcompile.ir.buffers import Buffer
from dcompile.ir.index import contiguous_strides
from dcompile.ir.nodes import Extern, Program, View
from tests.codegen.emit import groups, loops, reduced_rows


def attention() -> Program:
    """Causal attention of four heads."""
    shape = (2, 4, 64, 32)
    q, k, v, y = (Buffer(name, "float32", shape, contiguous_strides(shape)) for name in "qkvy")
    sums = Buffer("sums", "float32", shape[:3], contiguous_strides(shape[:3]))
    views = tuple(View(b.name, b.shape, b.strides) for b in (q, k, v))
    op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    step = Extern(op, (*views, 0.0, True), (), ("y", "sums"), "alloc")
    return Program("attention", ("q", "k", "v"), (View("y", y.shape, y.strides),), (q, k, v, y, sums), (step,))


def product() -> Program:
    """A matmul."""
    shapes = {"a": (20, 30), "b": (30, 40), "y": (20, 40)}
    buffers = tuple(Buffer(name, "float32", shape, contiguous_strides(shape)) for name, shape in shapes.items())
    left, right, out = (View(b.name, b.shape, b.strides) for b in buffers)
    step = Extern("aten.mm.default", (left, right), (), ("y",), "out")
    return Program("product", ("a", "b"), (out,), buffers, (step,))


def flex_attention() -> Program:
    """Attention under a mask, forward and backward."""
    from tests.codegen.emit import flex

    return flex.Case().lowered()[0].program


SUMMED = reduced_rows.program("rms", 1, 4096)
BESIDE = loops.on_a_gpu(loops.side_by_side())
LAUNCH_INPUTS = {
    "replace_matmuls": product,
    "replace_attentions": attention,
    "sum_groups": lambda: groups.gradient((4, 128), 32000, 64),
    "emit_flex_attention": flex_attention,
    "sum_in_one_kernel": lambda: SUMMED,
    "emit_loops": lambda: SUMMED,
    "end_all_reduces_with_loops": lambda: SUMMED,
    "read_inputs_early": lambda: SUMMED,
    "fuse_launches": lambda: BESIDE,
    "start_next_first": lambda: BESIDE,
}
"""Pass -> makes a program of inference."""
