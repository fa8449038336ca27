"""Programs that sum rows over ranks and go on with them: residual and norm, LayerNorm, an addition alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.ir.nodes import Collective, Extern, Program, View, Wait
from dcompile.ir.parse import parse

REDUCE = "_c10d_functional.all_reduce.default"
RMS_NORM = """\
v = cast(add(cast(r[i0, j0], float32), cast(p[i0, j0], float32)), {dtype})
a = cast(v, float32)
s = rsqrt(add(div(row_sum(mul(a, a)), {depth}.0), 1e-05))
h[i0, j0] = v
y[i0, j0] = cast(mul(cast(w[j0], float32), cast(cast(mul(a, s), {dtype}), float32)), {dtype})"""
LAYER_NORM = """\
v = cast(add(cast(r[i0, j0], float32), cast(p[i0, j0], float32)), {dtype})
a = cast(v, float32)
c = sub(a, div(row_sum(a), {depth}.0))
s = rsqrt(add(div(row_sum(mul(c, c)), {depth}.0), 1e-05))
h[i0, j0] = v
y[i0, j0] = cast(add(mul(mul(c, s), cast(w[j0], float32)), 0.5), {dtype})"""
ADDITION = """\
h[i0, i1] = cast(add(cast(r[i0, i1], float32), cast(p[i0, i1], float32)), {dtype})
y[i0, i1] = cast(mul(cast(p[i0, i1], float32), cast(w[i1], float32)), {dtype})"""
LINES = {"rms": RMS_NORM, "layer": LAYER_NORM, "add": ADDITION}


def program(kind: str, rows: int, depth: int, dtype: str = "bfloat16", *, keeps_sum: bool = False) -> Program:
    """`p`, twice `q`, is summed over the ranks in place; `h` and `y` follow from the sum, `r` and `w`."""
    matrices = ("q", "p", "r", "h", "y")
    lines = ["program rows(q, r, w)", f"w: {dtype}[{depth}] on cuda"]
    lines += [f"{name}: {dtype}[{rows}, {depth}] on cuda" for name in matrices]
    lines += [f"loop p [{rows}, {depth}] x []", f"p[i0, i1] = cast(mul(cast(q[i0, i1], float32), 2.0), {dtype})"]
    lines += ["loop h " + (f"[{rows}, {depth}] x []" if kind == "add" else f"[{rows}] x [{depth}]")]
    lines += [*LINES[kind].format(dtype=dtype, depth=depth).splitlines(), f"return (h, y{', p' if keeps_sum else ''})"]
    made = parse("\n".join(lines))
    operand = View("p", (rows, depth), (depth, 1))
    call = Extern(REDUCE, (operand, "sum", "group"), (), ("p",), "alloc")
    first, *rest = made.steps
    steps = (first, Collective("all_reduce", "p", "own0", ("p",), call), Wait("p", ("p",), ()), *rest)
    return plan_memory(replace(made, steps=steps))


def expected(kind: str, p: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`h` and `y` as eager computes them, `p` being the sum."""
    h = r + p
    if kind == "add":
        return h, p * w
    a = h.float()
    if kind == "rms":
        return h, w * (a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-5)).to(h.dtype)
    c = a - a.mean(-1, keepdim=True)
    return h, (c * torch.rsqrt(c.square().mean(-1, keepdim=True) + 1e-5) * w.float() + 0.5).to(h.dtype)
