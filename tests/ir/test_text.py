import subprocess
import sys

import dcompile.ir.buffers
import dcompile.ir.index
import dcompile.ir.nodes
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import flatten, var
from dcompile.ir.nodes import (
    Apply,
    Collective,
    Const,
    Extern,
    IndexOf,
    Load,
    Loop,
    Program,
    Reduce,
    Scan,
    Store,
    Verbatim,
    View,
    Wait,
)
from dcompile.ir.text import digest, show, show_loop
from tests.ir.fuzz import random_program

I0, J0 = var("i0"), var("j0")
AT = flatten((I0, J0), (768, 1))
NAMES = {**vars(dcompile.ir.index), **vars(dcompile.ir.buffers), **vars(dcompile.ir.nodes)}


def test_a_pointwise_loop_is_one_line_per_value():
    body = (Load("h", AT, "float32"), Load("w", J0, "float32"), Apply("mul", (0, 1), "float32"))
    loop = Loop("k0", (32,), (768,), body, (Store("y", AT, 2),), ("layers.0.mlp",))
    assert show_loop(loop) == "loop k0 [32] x [768]  # layers.0.mlp\n  y[j0 + 768*i0] = mul(h[j0 + 768*i0], w[j0])"


def test_a_scan():
    body = (Load("h", AT, "float32"), Scan("sum", 0, "float32"))
    assert show_loop(Loop("k0", (32,), (768,), body, (Store("y", AT, 1),))).endswith(
        "y[j0 + 768*i0] = scan_sum(h[j0 + 768*i0])"
    )


def test_everything_a_loop_can_hold():
    body = (
        Load("n", I0, "int64"),
        IndexOf(J0 - 1),
        Const(0, "int64"),
        Apply("ge", (1, 2), "bool"),
        Load("h", 768 * var("v0") + J0 - 1, "bfloat16", mask=3),
        Apply("cast", (4,), "float32"),
        Reduce("sum", 5, "float32"),
        Const(2.0, "float64"),
        Apply("cast", (6,), "float64"),
        Apply("mul", (8, 7), "float64"),
    )
    loop = Loop("k0", (32,), (768,), body, (Store("r", I0, 9), Store("c", J0, 5, "sum")))
    assert show_loop(loop) == "\n".join(
        [
            "loop k0 [32] x [768]",
            "  v0 = n[i0]",
            "  v3 = ge(index(j0 + -1), 0)",
            "  v5 = cast(h[768*v0 + j0 + -1] if v3 else 0, float32)",
            "  v6 = row_sum(v5)",
            "  v7 = 2.0:float64",
            "  v8 = cast(v6, float64)",
            "  r[i0] = mul(v8, v7)",
            "  c[j0] sum= v5",
        ]
    )


def small_program():
    view = View("x", (4, 8), (8, 1))
    turned = View("x", (8, 4), (1, 8), 2)
    steps = (
        Extern(
            "aten.mm.default",
            (view, turned),
            (("out_dtype", Verbatim("torch.float32")),),
            ("g",),
            "out",
            origin=("head",),
        ),
        Collective("all_reduce", "bucket0", "ddp", ("g",)),
        Extern("aten.sort.default", (view, (1, None), var("s0")), (), (None, "t"), "alloc", fallback=True),
        Wait("bucket0", ("g",)),
    )
    buffers = (
        Buffer("x", "float32", (4, 8), (8, 1), storage="input"),
        Buffer("g", "float32", (4, 4), (4, 1), storage="bucket:bucket0", offset=64),
        Buffer("t", "int64", (4, 8), (1, 4), device="cuda"),
    )
    return Program("backward0", ("x", "s0"), (View("g", (4, 4), (4, 1)), None, 3), buffers, steps)


def test_a_program():
    assert show(small_program()) == "\n".join(
        [
            "program backward0(x, s0)",
            "  x: float32[4, 8] @ input+0",
            "  g: float32[4, 4] @ bucket:bucket0+64",
            "  t: int64[4, 8] strides [1, 4] on cuda",
            "  0 g <- aten.mm.default(x[4, 8], x[8, 4] strides [1, 8] from 2, out_dtype=torch.float32) [out]  # head",
            "  1 start all_reduce bucket0 over ddp: g",
            "  2 _, t <- aten.sort.default(x[4, 8], (1, None), s0) [alloc] (fallback)",
            "  3 wait bucket0: g",
            "return (g[4, 4], None, 3)",
        ]
    )


def test_repr_rebuilds_the_program():
    programs = [small_program(), *(random_program(seed)[0] for seed in range(20))]
    for program in programs:
        assert eval(repr(program), NAMES) == program


def test_digest_tells_programs_apart():
    programs = [random_program(seed)[0] for seed in range(20)]
    assert len({digest(program) for program in programs}) == 20
    assert digest(programs[0]) == digest(random_program(0)[0])


def test_digest_does_not_depend_on_the_process():
    """Ranks compare digests: no set order, hash seed or address may get into it."""
    imports = "from tests.ir.fuzz import random_program; from dcompile.ir.text import digest"
    code = f"{imports}; print(digest(random_program(5)[0]))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {digest(random_program(5)[0])}
