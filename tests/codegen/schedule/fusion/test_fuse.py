"""Fusion keeps every output bitwise, and makes one kernel of what one pass over memory can do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcompile.codegen.schedule.fusion.fuse import fuse
from dcompile.codegen.schedule.fusion.loop_order import interchange_reductions
from dcompile.codegen.schedule.fusion.merge import merge
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Loop, Reduce
from dcompile.ir.parse import parse
from dcompile.ir.verify import verify
from tests.ir.fuzz import random_program

F = "float32"
R, D = 6, 16


def run(program, seed=0):
    rng = np.random.default_rng(seed)
    table = program.table
    inputs = {name: rng.standard_normal(table[name].shape).astype(F) for name in program.inputs}
    verify(program)
    return interpret(program, {name: array.copy() for name, array in inputs.items()})


def loops(program):
    return [step for step in program.steps if isinstance(step, Loop)]


RMS_NORM = """
program rms_norm(x, w)
  x: float32[6, 16]
  w: float32[16]
  s: float32[6]
  r: float32[6]
  y: float32[6, 16]
loop square [2, 3] x [16]
  v = x[48*i0 + 16*i1 + j0]
  s[3*i0 + i1] = row_sum(mul(v, v))
loop scale [2, 3, 1]
  r[3*i0 + i1 + i2] = rsqrt(mul(s[3*i0 + i1 + i2], 0.0625))
loop apply [2, 3, 16]
  y[48*i0 + 16*i1 + i2] = mul(mul(x[48*i0 + 16*i1 + i2], r[3*i0 + i1]), w[i2])
return (y, r)
"""
"""y = x * rsqrt(mean(x*x)) * w, with the row scalar saved; as lowering writes it: three loops."""


def test_a_norm_becomes_one_kernel_and_its_row_sum_no_buffer():
    before = parse(RMS_NORM)
    after = fuse(before)
    verify(after)
    assert len(loops(after)) == 1
    assert "s" not in after.table
    assert loops(after)[0].outer == (R,) and loops(after)[0].inner == (D,)
    for a, b in zip(run(before), run(after), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_transposing_consumer_joins_by_splitting_the_row():
    transpose = """
loop transpose [4, 6, 4]
  z[i0, i1, i2] = neg(y[16*i1 + 4*i0 + i2])
return (z)
"""
    before = parse(RMS_NORM.replace("  w: f", "  z: float32[4, 6, 4]\n  w: f").replace("\nreturn (y, r)\n", transpose))
    after = fuse(before)
    assert len(loops(after)) == 1 and "y" not in after.table
    np.testing.assert_array_equal(run(before)[0], run(after)[0])


def test_what_a_masked_load_read_is_chosen_in_float32():
    program = parse("""
        program p(x)
          x: float32[8]
          y: bfloat16[8]
          z: float32[8]
        loop twice [8]
          v = x[i0]
          y[i0] = cast(add(v, v), bfloat16)
        loop masked [8]
          few = lt(index(i0), 4)
          z[i0] = cast(y[i0] if few else 0, float32)
        return (z)
    """)
    fused = fuse(program)
    assert len(fused.steps) == 1
    assert np.array_equal(run(fused)[0], run(program)[0])


def test_loops_that_touch_different_parts_of_a_whole_stay_apart():
    program = parse("""
        program p(a, b, w)
          a: float32[2048]
          b: float32[2048]
          w: float32[2048]
          x: float32[2048]
          y: float32[2048]
          z: float32[2048]
        loop x [2048]
          x[i0] = add(a[i0], w[i0])
        loop y [2048]
          y[i0] = add(b[i0], w[i0])
        loop z [2048]
          z[i0] = add(x[i0], w[i0])
        return (x, y, z)
    """)
    assert len(fuse(program).steps) == 1
    apart = fuse(replace(program, parts=(("a", 0), ("b", 1))))
    assert [sorted(step.reads & {"a", "b"}) for step in apart.steps] == [["a"], ["b"]]


def test_a_library_call_between_two_loops_keeps_them_apart():
    program = parse("""
        program p(x)
          x: float32[6, 16]
          y: float32[6, 16]
          z: float32[6, 16]
          out: float32[6, 16]
        loop y [6, 16]
          y[i0, i1] = neg(x[i0, i1])
        z <- aten.neg.default(y) [alloc]
        loop out [6, 16]
          out[i0, i1] = add(y[i0, i1], z[i0, i1])
        return (out)
    """)
    assert [type(s).__name__ for s in fuse(program).steps] == ["Loop", "Extern", "Loop"]


def test_a_reader_at_another_element_is_not_joined():
    """z[r, c] = y[r, 0]: the element is not the one just computed."""
    program = parse("""
        program p(x)
          x: float32[6, 16]
          y: float32[6, 16]
          z: float32[6, 16]
        loop y [6, 16]
          y[i0, i1] = exp(x[i0, i1])
        loop z [6, 16]
          z[i0, i1] = neg(y[i0, 0])
        return (z)
    """)
    after = fuse(program)
    assert len(loops(after)) == 2
    np.testing.assert_array_equal(run(program)[0], run(after)[0])


COLUMN_SUM = """
loop dw [16] x [6]
  total = row_sum(mul(dy[j0, i0], x[j0, i0]))
  dw[i0] = total
"""


@pytest.mark.parametrize("finish", [False, True])
def test_a_sum_over_rows_is_turned_to_read_rows_in_order(finish):
    column_sum = COLUMN_SUM.replace("= total", "= mul(total, 0.5)") if finish else COLUMN_SUM
    program = parse(f"""
        program p(dy, x)
          dy: float32[6, 16]
          x: float32[6, 16]
          dw: float32[16]
        {column_sum}
        return (dw)
    """)
    after = interchange_reductions(program)
    verify(after)
    first = loops(after)[0]
    assert first.outer == (R,) and first.inner == (D,) and first.stores[0].mode == "sum"
    assert len(loops(after)) == 1 + finish
    np.testing.assert_allclose(run(program)[0], run(after)[0], rtol=1e-6)


def test_both_gradients_of_a_norm_share_one_pass():
    """dx needs a row sum of dy*x, dw a column sum of it."""
    program = parse(f"""
        program p(dy, x)
          dy: float32[6, 16]
          x: float32[6, 16]
          dw: float32[16]
          s: float32[6]
          dx: float32[6, 16]
        {COLUMN_SUM}
        loop row [6] x [16]
          s[i0] = row_sum(mul(dy[i0, j0], x[i0, j0]))
        loop dx [6, 16]
          dx[i0, i1] = sub(dy[i0, i1], s[i0])
        return (dw, dx)
    """)
    import dcompile.codegen.schedule.fusion.fuse as module

    small, module.MIN_SHARED_BYTES = module.MIN_SHARED_BYTES, 0
    try:
        after = fuse(interchange_reductions(program))
    finally:
        module.MIN_SHARED_BYTES = small
    verify(after)
    assert len(loops(after)) == 1
    for a, b in zip(run(program), run(after), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_an_update_in_place_joins_its_own_readers():
    """p -= lr * m, m = 0.9 m + g: two in-place updates at the same elements are one kernel."""
    N = 4096
    program = parse("""
        program p(p, m, g)
          p: float32[4096]
          m: float32[4096]
          g: float32[4096]
        loop p [4096]
          p[i0] = sub(p[i0], m[i0])
        loop m [4096]
          m[i0] = add(m[i0], g[i0])
        return ()
    """)
    after = fuse(program)
    assert len(loops(after)) == 1
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal(N).astype(F) for n in ("p", "m", "g")}
    first, second = ({n: a.copy() for n, a in arrays.items()} for _ in range(2))
    interpret(program, first)
    interpret(after, second)
    for n in arrays:
        np.testing.assert_array_equal(first[n], second[n])


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_keep_their_outputs_bitwise(seed):
    program, inputs = random_program(seed)
    after = fuse(program)
    verify(after)
    one = interpret(program, {n: np.copy(a) for n, a in inputs.items()})
    two = interpret(after, {n: np.copy(a) for n, a in inputs.items()})
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("seed", range(60, 100))
def test_random_programs_after_reorientation_stay_close(seed):
    program, inputs = random_program(seed)
    after = fuse(interchange_reductions(program))
    verify(after)
    one = interpret(program, {n: np.copy(a) for n, a in inputs.items()})
    two = interpret(after, {n: np.copy(a) for n, a in inputs.items()})
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(np.asarray(a, dtype="float64"), np.asarray(b, dtype="float64"), rtol=2e-2, atol=1e-3)


def test_fusion_is_the_same_every_time():
    program, _ = random_program(7, size=16)
    assert repr(fuse(program)) == repr(fuse(program))


@pytest.mark.parametrize("op", ["sum", "argmax"])
def test_a_row_of_one_element_is_not_reduced_over_the_rows_it_joins(op):
    """The mean of a number is that number: fused into a loop over rows, it would be summed once for each column."""
    kind = "int64" if op == "argmax" else F
    program = parse(f"""
        program p(x, z)
          x: float32[6]
          m: {kind}[6]
          z: float32[6, 16]
          y: float32[6]
        loop alone [6]
          m[i0] = row_{op}(x[i0])
        loop rows [6] x [16]
          y[i0] = row_sum(mul(cast(m[i0], float32), z[i0, j0]))
        return (y)
    """)
    after = fuse(program)
    assert len(loops(after)) == 1 and sum(isinstance(v, Reduce) for v in loops(after)[0].body) == 1
    for a, b in zip(run(program), run(after), strict=True):
        np.testing.assert_array_equal(a, b)
    joined = merge(*program.steps)  # also where nobody has brought the loops into canonical form
    for a, b in zip(run(program), run(replace(program, steps=(joined,))), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("device", "count"), [("cuda", 1), ("cpu", 2)])
def test_brief_kernels_that_read_the_same_start_together_on_a_gpu(device, count):
    """A start takes longer than they run; on the CPU a call takes nothing."""
    program = parse(f"""
        program p(x, r, w)
          x: float32[16, 6] on {device}
          r: float32[16] on {device}
          w: float32[16] on {device}
          s: float32[16] on {device}
          y: float32[16] on {device}
        loop total [16] x [6]
          s[i0] = mul(row_sum(x[i0, j0]), r[i0])
        loop scale [16]
          y[i0] = mul(r[i0], w[i0])
        return (s, y)
    """)
    fused = fuse(program)
    assert len(loops(fused)) == count
    for want, got in zip(run(program), run(fused), strict=True):
        np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize(("donated", "later", "count"), [(("x",), False, 2), ((), False, 1), (("x",), True, 1)])
def test_memory_that_a_result_may_take_over_is_worth_more_than_a_start(donated, later, count):
    """As logits and their gradient: a sum added up beside would keep both alive. An input that stays is no loss."""
    reader, shown = ("z <- aten.clone.default(x) [alloc]", ", z") if later else ("", "")
    program = parse(f"""
        program p(x, r)
          x: float32[16, 6] on cuda
          r: float32[16] on cuda
          s: float32[] on cuda
          y: float32[16, 6] on cuda
          z: float32[16, 6] on cuda
        loop scale [16] x [6]
          y[i0, j0] = mul(x[i0, j0], r[i0])
        loop total [16]
          s[0] sum= r[i0]
        {reader}
        return (s, y{shown})
    """)
    program = replace(program, donated=donated)
    fused = fuse(program)
    assert len(loops(fused)) == count


def test_random_programs_as_on_a_gpu_keep_every_value():
    for seed in range(200, 240):
        program, inputs = random_program(seed, 10)
        there = replace(program, buffers=tuple(replace(b, device="cuda") for b in program.buffers))
        fused = fuse(there)
        verify(fused)
        for want, got in zip(interpret(there, inputs), interpret(fused, inputs), strict=True):
            np.testing.assert_array_equal(want, got)


def quantized(columns, device="cuda"):
    """Values of functions, stored with the largest of each row as their scale, and the largest of each column."""
    return parse(f"""
        program quantized(x, y, w)
          x: bfloat16[64, {columns}] on {device}
          y: bfloat16[64, {columns}] on {device}
          w: float32[{columns}] on {device}
          v: float32[64, {columns}] on {device}
          m: float32[64] on {device}
          q: float32[64, {columns}] on {device}
          c: float32[{columns}] on {device}
        loop values [64] x [{columns}]
          v1 = cast(x[j0 + {columns}*i0], float32)
          v2 = exp(cast(y[j0 + {columns}*i0], float32))
          v[j0 + {columns}*i0] = mul(div(v1, v2), w[j0])
        loop largest [64] x [{columns}]
          m[i0] = row_max(abs(v[j0 + {columns}*i0]))
        loop scaled [64] x [{columns}]
          q[j0 + {columns}*i0] = div(v[j0 + {columns}*i0], m[i0])
        loop columns [64] x [{columns}]
          c[j0] max= abs(v[j0 + {columns}*i0])
        return (q, c)
        """)


@pytest.mark.parametrize(("columns", "kernels"), [(4096, 1), (14336, 2), (28672, 2)])
def test_columns_of_long_rows_are_combined_apart(columns, kernels):
    """A thread would have 32 elements of each row, and keep three values of each beside those of its functions."""
    found = loops(fuse(quantized(columns)))
    assert len(found) == kernels
    for loop in found[: kernels - 1]:
        assert not any(store.mode != "set" for store in loop.stores)


def turned_bytes(device):
    """RMSNorm's backward beside the transposed float8 copy of its input, as float8 training has them."""
    return parse(f"""
        program turned(x, g)
          x: float32[64, 96] on {device}
          g: float32[64, 96] on {device}
          s: float32[64] on {device}
          y: float32[64, 96] on {device}
          t: float8_e4m3fn[96, 64] on {device}
        loop sums [64] x [96]
          s[i0] = row_sum(mul(x[j0 + 96*i0], g[j0 + 96*i0]))
        loop scaled [64] x [96]
          y[j0 + 96*i0] = mul(x[j0 + 96*i0], s[i0])
        loop bytes [96, 64] x []
          t[i1 + 64*i0] = cast(x[96*i1 + i0], float8_e4m3fn)
        return (y, t)
        """)


def test_no_program_of_rows_scatters_bytes_across_them():
    """Two rows in its registers are two bytes at a place; tiles of a loop of its own store whole words."""
    rows, turned = loops(fuse(turned_bytes("cuda")))
    assert rows.writes == {"y"} and turned.writes == {"t"}
    assert len(loops(fuse(turned_bytes("cpu")))) == 1


def test_programs_of_cpus_read_long_rows_once():
    assert len(loops(fuse(quantized(14336, "cpu")))) == 1
