"""Matrix products that end in loops, as programs for a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.codegen.lower.decompositions.table import table
from dcompile.codegen.lower.lower import lower
from dcompile.codegen.schedule.fusion.fuse import fuse
from dcompile.codegen.schedule.fusion.matmul_epilogue import epilogues, fuse_matmul_epilogues
from dcompile.codegen.schedule.order.dependences import remove_dead_steps
from dcompile.ir.nodes import Program, Tile


def multiplied(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float32) @ b.astype(np.float32)


MEANINGS = {"aten.mm.default": multiplied, "aten.addmm.default": lambda c, a, b: c + multiplied(a, b)}
"""What the library does, with numbers of NumPy's; results are rounded where they are written."""


def program(
    function: Callable[..., Any],
    *shapes: tuple[int, ...],
    dtype: torch.dtype | Sequence[torch.dtype] = torch.bfloat16,
    device: str = "cuda",
) -> Program:
    """A function of tensors on a GPU, as it is after fusion."""
    dtypes = [dtype] * len(shapes) if isinstance(dtype, torch.dtype) else dtype
    with FakeTensorMode():
        given = [torch.empty(*s, device=device, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
        graph = make_fx(function, decomposition_table=table(fallback_random=False))(*given)
    return fuse(remove_dead_steps(lower(graph, "forward").program))


def ended(before: Program, tile: Tile) -> Program:
    """The program with all products that can end in loops."""
    after = fuse_matmul_epilogues(before, {ending.kind: tile for ending in epilogues(before)})
    assert after is not before, "no product can end in a loop"
    return after


def residual(x, w, r):
    return r + x @ w


def linear_relu(x, w, b):
    return torch.addmm(b, x, w.t()).relu()


def linear_gelu(x, w, b):
    """In training: what comes before the GELU is saved."""
    hidden = torch.addmm(b, x, w.t())
    return F.gelu(hidden, approximate="tanh"), hidden


def swiglu(x, gate, w):
    up = x @ w.t()
    return F.silu(gate) * up, up


def weight(g, x):
    """Of a layer in mixed precision, the gradient."""
    return (g.t() @ x).float()


def heads(x, w, r):
    """A residual that lies by heads, with rows and columns of several variables each."""
    y = (x @ w).view(2, x.shape[0] // 2, 4, w.shape[1] // 4)
    return y + r.view(2, 4, x.shape[0] // 2, w.shape[1] // 4).transpose(1, 2)


SMALL = Tile(16, 32, 16, 4, 2)
HALVED = Tile(32, 32, 16, 4, 2, parts=2, programs=3)
DESCRIBED = Tile(32, 32, 16, 4, 2, parts=2, programs=3, flat=True, descriptors=True)
bf16, f16 = torch.bfloat16, torch.float16
CASES: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]], torch.dtype, Tile]] = {
    "residual": (residual, ((64, 48), (48, 96), (64, 96)), bf16, SMALL),
    "residual of uneven sizes": (residual, ((56, 40), (40, 72), (56, 72)), f16, SMALL),
    "residual of uneven sizes, halved": (residual, ((56, 40), (40, 72), (56, 72)), bf16, HALVED),
    "residual of uneven sizes, described": (residual, ((56, 40), (40, 72), (56, 72)), f16, DESCRIBED),
    "residual of a tile and a half": (residual, ((48, 40), (40, 48), (48, 48)), bf16, HALVED),
    "residual of a tile and a half, described": (residual, ((48, 40), (40, 48), (48, 48)), f16, DESCRIBED),
    "bias and relu": (linear_relu, ((48, 32), (64, 32), (64,)), f16, HALVED),
    "bias and relu, described": (linear_relu, ((48, 32), (64, 32), (64,)), bf16, DESCRIBED),
    "bias and gelu": (linear_gelu, ((48, 32), (64, 32), (64,)), bf16, SMALL),
    "swiglu": (swiglu, ((48, 32), (48, 64), (64, 32)), bf16, HALVED),
    "gradient of a weight": (weight, ((48, 32), (48, 64)), bf16, SMALL),
    "gradient of a weight, described": (weight, ((48, 32), (48, 64)), bf16, DESCRIBED),
    "heads": (heads, ((32, 32), (32, 64), (32, 64)), bf16, HALVED),
}


@cache
def case(name: str) -> Program:
    function, shapes, dtype, tile = CASES[name]
    return ended(program(function, *shapes, dtype=dtype), tile)


def inputs(of: Program) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    given: dict[str, np.ndarray] = {}
    for name in of.inputs:
        shape, dtype = of.table[name].shape, of.table[name].dtype
        if dtype == "int8":
            given[name] = rng.integers(-128, 128, shape, np.int8)
        else:
            given[name] = rng.standard_normal(shape).astype(np.float32)
    return given


def random_case(seed: int) -> Program:
    """A product that ends in something pointwise, of sizes, layouts and by a tile at random."""
    rng = random.Random(seed)
    batch, length = rng.choice([(1, 32), (2, 16), (3, 24), (4, 10)])
    count, width = rng.choice([(1, 32), (2, 16), (4, 8), (3, 16), (5, 8)])
    rows, columns, depth = batch * length, count * width, rng.choice([16, 24, 40])
    left_turned, right_turned, biased, saved = (rng.random() < share for share in (0.2, 0.5, 0.4, 0.4))

    def by_heads(y):
        return y.view(batch, length, count, width)

    ends = (
        lambda y, r, c, s: y + r,
        lambda y, r, c, s: by_heads(y).transpose(1, 2) * s.view(batch, 1, length, 1),
        lambda y, r, c, s: F.relu(y.view(batch, length, columns) + c.view(1, 1, columns)),
        lambda y, r, c, s: by_heads(y * c) + by_heads(r).flip(1),
        lambda y, r, c, s: torch.where(r > 0, y, -y).float(),
    )
    end = rng.choice(ends)

    def function(x, w, b, r, c, s):
        x, w = x.t() if left_turned else x, w.t() if right_turned else w
        y = torch.addmm(b, x, w) if biased else x @ w
        return (end(y, r, c, s), y) if saved else end(y, r, c, s)

    left, right = (
        (depth, rows) if left_turned else (rows, depth),
        (columns, depth) if right_turned else (depth, columns),
    )
    shapes = (left, right, (columns,), (rows, columns), (columns,), (rows,))
    before = program(function, *shapes, dtype=rng.choice([bf16, f16]))
    sizes = rng.choice([16, 32]), rng.choice([16, 32, 64]), 16, 4, 2, rng.choice([1, 2]), rng.choice([0, 2])
    tile = Tile(*sizes, flat=rng.random() < 0.5, descriptors=rng.random() < 0.5)
    return ended(before, tile)
