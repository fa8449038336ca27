"""Products of few rows and a matrix, and what follows them, as programs for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from dcompile.codegen.nest.contraction import find_contraction
from dcompile.codegen.nest.loop_nest import flatten_loop
from dcompile.ir.nodes import Loop, Program, Tile
from tests.codegen.emit import products

linear = F.linear
bf16, f16 = torch.bfloat16, torch.float16
Shapes = Sequence[tuple[int, ...]]
Case = tuple[Callable[..., Any], Shapes, torch.dtype | Sequence[torch.dtype], Tile | None]


def plain(x, w):
    return linear(x, w)


def biased_gelu(x, w, b):
    return F.gelu(linear(x, w, b), approximate="tanh")


def residual(x, w, r):
    return r + linear(x, w) * 0.5


def gated(x, gate, up):
    """Gate, up and their product."""
    return F.silu(linear(x, gate)) * linear(x, up)


def two_inputs(x, v, a, b):
    """Products of two inputs, which are added up."""
    return linear(x, a) + linear(v, b)


def by_heads(x, w):
    """A result that is stored by heads: [batch, length, heads, width] as [batch, heads, length, width]."""
    batch, length, depth = x.shape
    y = linear(x.view(batch * length, depth), w).view(batch, length, 4, w.shape[0] // 4)
    return (y * 2).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def sliced(x, w):
    """Rows that are a part of a wider matrix."""
    return linear(x.narrow(1, 64, w.shape[1]), w)


def of_integers(x, w, s):
    """A product with 8-bit weights, as torchao's, and their scales."""
    return torch.mm(x, w.t().to(x.dtype)) * s


def scores(q, k, mask):
    """Scores of several queries a head, as attention of one token has them: `mask` is added."""
    return (q.unsqueeze(2) * k.unsqueeze(1).float()).sum(-1) * 0.3 + mask.unsqueeze(1)


THIN = Tile(16, 16, 64, 4, 3)
CASES: dict[str, Case] = {
    "two rows": (plain, ((2, 256), (256, 256)), bf16, None),
    "five rows of uneven sizes": (plain, ((5, 328), (280, 328)), f16, None),
    "nine rows": (plain, ((9, 256), (272, 256)), bf16, None),
    "sixteen rows of uneven sizes": (plain, ((16, 264), (328, 264)), bf16, THIN),
    "bias and gelu": (biased_gelu, ((8, 256), (256, 256), (256,)), f16, None),
    "residual": (residual, ((4, 256), (256, 256), (4, 256)), bf16, THIN),
    "gate and up": (gated, ((3, 256), (288, 256), (288, 256)), bf16, None),
    "two inputs": (two_inputs, ((2, 256), (2, 256), (272, 256), (272, 256)), bf16, None),
    "by heads": (by_heads, ((2, 4, 256), (256, 256)), bf16, None),
    "a part of wider rows": (sliced, ((4, 384), (256, 320)), bf16, None),
    "scores of a batch": (scores, ((3, 4, 64), (3, 80, 64), (3, 80)), bf16, None),
    "scores of a batch of uneven sizes": (scores, ((2, 3, 72), (2, 33, 72), (2, 33)), f16, None),
    "integers": (of_integers, ((6, 256), (280, 256), (280,)), (bf16, torch.int8, bf16), None),
}


@cache
def case(name: str) -> Program:
    """The program of a case, after fusion: one loop of products, with the case's tile."""
    function, shapes, dtype, tile = CASES[name]
    before = products.program(function, *shapes, dtype=dtype)
    assert any(is_skinny(step) for step in before.steps), f"{name} has no loop of products"
    steps = tuple(replace(step, tile=tile) if is_skinny(step) else step for step in before.steps)
    return replace(before, steps=steps)


def is_skinny(step: Any) -> bool:
    """Whether a step sums products of few rows."""
    return isinstance(step, Loop) and find_contraction(flatten_loop(step)) is not None
