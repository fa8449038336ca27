import pytest

from dcompile.codegen.schedule.order.cost_model import (
    collective_bytes,
    durations,
    extern_seconds,
    loop_bytes,
    loop_operations,
    step_seconds,
    timeline,
)
from dcompile.ir.buffers import Bucket, Buffer
from dcompile.ir.index import contiguous_strides, var
from dcompile.ir.library_ops import extern_flops
from dcompile.ir.nodes import Apply, Collective, Extern, IndexOf, Load, Loop, Program, Reduce, Store, View, Wait
from dcompile.machine_model import TABLE, GroupSize

H200 = TABLE["h200"]


def buffers(device="cuda", dtype="bfloat16", **shapes):
    return {n: Buffer(n, dtype, shape, contiguous_strides(shape), device) for n, shape in shapes.items()}


def view(name, *shape):
    return View(name, shape, contiguous_strides(shape))


def call(op, *args, outs=("y",), **kwargs):
    return Extern(f"aten.{op}", args, tuple(kwargs.items()), outs, "out")


def test_a_loop_moves_each_buffer_once_however_often_it_reads_it():
    i, j = var("i0"), var("j0")
    body = (
        Load("x", i * 64 + j, "float32"),
        Apply("mul", (0, 0), "float32"),
        Reduce("sum", 1, "float32"),
        Load("x", i * 64 + j, "float32"),
        Load("w", j, "float32"),
        Apply("mul", (3, 4), "float32"),
        Apply("mul", (5, 2), "float32"),
    )
    loop = Loop("k", (32,), (64,), body, (Store("y", i * 64 + j, 6),))
    table = buffers("cpu", "float32", x=(32, 64), w=(64,), y=(32, 64))
    assert loop_bytes(loop, table) == 4 * (32 * 64 * 2 + 64)
    assert loop_operations(loop) == 32 * 64 * 4  # a square, its sum, two products


def test_a_gather_through_an_index_moves_one_place_for_each_element():
    body = (Load("at", var("i0"), "int64"), Load("x", var("v0"), "float32"))
    loop = Loop("k", (8,), (), body, (Store("y", var("i0"), 1),))
    table = {**buffers("cpu", "float32", x=(1000,), y=(8,)), "at": Buffer("at", "int64", (8,), (1,))}
    assert loop_bytes(loop, table) == 8 * 8 + 8 * 4 + 8 * 4


def test_row_work_counts_once_a_row():
    body = (IndexOf(var("i0")), Apply("add", (0, 0), "int64"), IndexOf(var("j0")), Apply("add", (2, 2), "int64"))
    loop = Loop("k", (4,), (100,), body, (Store("y", var("i0") * 100 + var("j0"), 3),))
    assert loop_operations(loop) == 4 * (1 + 100)


@pytest.mark.parametrize(
    ("step", "flops"),
    [
        (call("mm.default", view("a", 32, 64), view("b", 64, 16)), 2 * 32 * 64 * 16),
        (call("bmm.default", view("a", 3, 32, 64), view("b", 3, 64, 16)), 3 * 2 * 32 * 64 * 16),
        (call("addmm.default", view("c", 16), view("a", 32, 64), view("b", 64, 16)), 2 * 32 * 64 * 16),
        (call("baddbmm.default", view("c", 3, 32, 16), view("a", 3, 32, 64), view("b", 3, 64, 16)), 6 * 32 * 64 * 16),
        (
            call("convolution.default", view("x", 2, 3, 8, 8), view("w", 4, 3, 3, 3), outs=("image",)),
            2 * (2 * 4 * 8 * 8) * 27,
        ),
        (
            call(
                "convolution_backward.default",
                *(view("g", 2, 4, 8, 8), view("x", 2, 3, 8, 8), view("w", 4, 3, 3, 3)),
                outs=("gx", "gw", None),
            ),
            2 * 2 * (2 * 4 * 8 * 8) * 27,
        ),
        (call("sort.default", view("a", 32, 64)), 0),
    ],
)
def test_operations_of_library_calls(step, flops):
    assert extern_flops(step, buffers(image=(2, 4, 8, 8))) == flops


def test_tiles_count_whole_on_gpus():
    step = call("mm.default", view("a", 1, 64), view("b", 64, 200))
    assert extern_flops(step, {}, tile=128) == 2 * 128 * 64 * 256


QKV = (view("q", 2, 8, 512, 64), view("k", 2, 8, 512, 64), view("v", 2, 8, 512, 64))
PAIRS = 2 * 8 * 512 * 512


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "flops"),
    [
        ("flash_attention", (*QKV, 0.0, False), {}, PAIRS * 4 * 64),
        ("flash_attention", (*QKV, 0.0, True), {}, PAIRS * 4 * 64 // 2),
        ("flash_attention_for_cpu", (*QKV,), {"is_causal": True}, PAIRS * 4 * 64 // 2),
        ("efficient_attention", (*QKV, None, True), {}, PAIRS * 4 * 64),  # that argument asks for the log-sum
        ("cudnn_attention", (*QKV, None, True, 0.0, True, False), {}, PAIRS * 4 * 64 // 2),
        ("flash_attention_backward", (view("g", 2, 8, 512, 64), *QKV, *[None] * 7, True), {}, PAIRS * 10 * 64 // 2),
    ],
)
def test_operations_of_attention(op, args, kwargs, flops):
    assert extern_flops(call(f"_scaled_dot_product_{op}.default", *args, **kwargs), {}) == flops


@pytest.mark.parametrize(
    ("predicate", "sizes"), [("{-1*q + k + 9 ? yes : no}", ()), ("s0 {-1*q + k + s0 ? yes : no}", (9,))]
)
def test_attention_in_blocks_counts_the_keys_in_reach(predicate, sizes):
    """The first of two blocks of 256 queries reaches all 512 keys, the second one whole blocks from key 246 on."""
    pairs = 2 * 8 * (256 * 512 + 256 * 512)
    forward = Extern("dcompile_attention.forward.default", (*QKV, (), sizes, predicate, 0.125), (), ("y", "l"), "out")
    assert extern_flops(forward, {}) == pairs * 4 * 64
    given = (view("g", 2, 8, 512, 64), view("o", 2, 8, 512, 64), view("l", 2, 8, 512))
    backward = Extern("dcompile_attention.backward.default", (*given, *forward.args), (), ("q", "k", "v"), "out")
    assert extern_flops(backward, {}) == pairs * 10 * 64
    short = Extern(forward.op, (*QKV, (), (), "{q + -1*k ? yes : no}", 0.125), (), ("y", "l"), "out")
    assert extern_flops(short, {}) == 2 * 8 * (256 * 256 + 256 * 512) * 4 * 64


def test_a_large_product_takes_its_operations_a_small_one_the_least_time():
    large = call("mm.default", view("a", 8192, 4096), view("b", 4096, 4096))
    table = buffers(a=(8192, 4096), b=(4096, 4096), y=(8192, 4096))
    assert extern_seconds(large, table, H200) == pytest.approx(2 * 8192 * 4096 * 4096 / H200.rate("bfloat16"), rel=0.02)
    small = call("mm.default", view("a", 8, 8), view("b", 8, 8))
    assert extern_seconds(small, table | buffers(y=(8, 8)), H200) == pytest.approx(H200.library_us * 1e-6, rel=0.1)
    skinny = call("mm.default", view("a", 1, 4096), view("b", 4096, 4096))
    assert extern_seconds(skinny, table | buffers(y=(1, 4096)), H200) >= 2 * 4096 * 4096 / (
        H200.memory_gbs * 1e9
    )  # the weight's bytes


def test_a_view_takes_no_time():
    assert extern_seconds(call("view.default", view("a", 8)), buffers(a=(8,), y=(8,)), H200) == 0


def test_a_programs_durations():
    table = buffers(x=(1 << 20,), g=(1 << 20,))
    body = (Load("x", var("i0"), "bfloat16"),)
    steps = (
        Loop("k", (1 << 20,), (), body, (Store("g", var("i0"), 0),)),
        Collective("all_reduce", "b", "ddp", ("g",)),
        Wait("b", ("g",)),
    )
    bucket = Bucket("b", "bfloat16", "cuda", "ddp", (0,), ("g",), (0,), 1 << 20)
    program = Program("p", ("x",), (view("g", 1 << 20),), tuple(table.values()), steps, buckets=(bucket,))
    kernel, reduction, wait = durations(program, H200, {"ddp": GroupSize(8)})
    assert kernel == pytest.approx((4 << 20) / (H200.memory_gbs * 1e9) + 2.5e-6)
    assert collective_bytes(steps[1], table) == 2 << 20
    assert reduction == pytest.approx((24 + 14 * 1.9) * 1e-6 + 2 * 7 / 8 * (2 << 20) / 340e9)
    assert wait == 0
    assert step_seconds(steps[1], table, H200, {}) == pytest.approx(
        (26 + 2 * 1.9) * 1e-6 + (2 << 20) / 260e9
    )  # two ranks


def test_the_models_own_collectives_take_what_others_take():
    table = buffers(x=(1 << 20,), y=(8 << 20,))
    gather = Extern(
        "_c10d_functional.all_gather_into_tensor.default", (view("x", 1 << 20), 8, "3"), (), ("y",), "alloc"
    )
    like = Collective("all_gather", "b", "tp", ("y",))
    assert step_seconds(gather, table, H200, {}) == step_seconds(like, table, H200, {"tp": GroupSize(8)})
    wait = Extern("_c10d_functional.wait_tensor.default", (view("y", 8 << 20),), (), ("y",), "alloc")
    assert step_seconds(wait, table, H200, {}) == 0
    found = timeline((gather, wait), [1e-3, 0.0], {})
    assert (found.total, found.exposed) == (1e-3, 1e-3), "its wait comes next"


def test_few_rows_times_a_matrix_take_as_long_as_reading_the_matrix():
    """Though a loop on vectors could not multiply so fast."""
    h100 = TABLE["h100"]
    for rows in (2, 16):
        m, n, k = var("i0"), var("i1"), var("j0")
        body = (
            Load("x", m * 4096 + k, "bfloat16"),
            Apply("cast", (0,), "float32"),
            Load("w", n * 4096 + k, "bfloat16"),
            Apply("cast", (2,), "float32"),
            Apply("mul", (1, 3), "float32"),
            Reduce("sum", 4, "float32"),
            Apply("cast", (5,), "bfloat16"),
        )
        loop = Loop("mm", (rows, 14336), (4096,), body, (Store("y", m * 14336 + n, 6),))
        table = buffers("cuda", "bfloat16", x=(rows, 4096), w=(14336, 4096), y=(rows, 14336))
        read = 2 * (14336 * 4096 + rows * (4096 + 14336)) / (h100.memory_gbs * 1e9)
        assert step_seconds(loop, table, h100, {}) == pytest.approx(read + h100.kernel_us * 1e-6)
