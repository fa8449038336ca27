"""Gradients of embeddings as programs for a GPU, and what summing rows by group means."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.codegen.lower.decompositions.table import table
from dcompile.codegen.lower.lower import lower
from dcompile.codegen.lower.rules import scatter
from dcompile.codegen.schedule.fusion.fuse import fuse
from dcompile.ir.nodes import Program

aten = torch.ops.aten


def gradient(count, rows, width, dtype=torch.float32, index=torch.int64, padding=-1, deterministic=False) -> Program:
    """The program of `embedding_dense_backward` on a GPU, with the gradient and the indices as inputs."""
    with FakeTensorMode():
        given = torch.empty(*count, width, device="cuda", dtype=dtype)
        found = torch.empty(*count, device="cuda", dtype=index)
        graph = make_fx(
            lambda g, i: aten.embedding_dense_backward(g, i, rows, padding, False),
            decomposition_table=table(fallback_random=False),
        )(given, found)
    return fuse(lower(graph, "backward", deterministic=deterministic).program)


def indices(kind: str, count: int, rows: int, dtype=np.int64) -> np.ndarray:
    rng = np.random.default_rng(count)
    if kind == "outside":  # every third names no row, some by their upper bits alone
        inside = rng.integers(0, rows, count).astype(dtype)
        return np.where(
            np.arange(count) % 3 == 2, rng.choice([2**32 + rows - 1, -1, -2, rows, 2**31 - 1], count), inside
        )
    if kind == "equal":
        return np.full(count, rows - 1, dtype)
    if kind == "few":
        return np.minimum(rng.zipf(1.3, count) - 1, rows - 1).astype(dtype)
    return rng.integers(0, rows, count).astype(dtype)


def sum_groups(values: np.ndarray, index: np.ndarray, chunk: int) -> tuple[np.ndarray, ...]:
    """Row p: the sum of the rows with the index of p, if it is the last of those."""
    sums = np.zeros_like(values)
    for row in np.unique(index):  # those outside of the table are fetched by nobody
        (places,) = np.nonzero(index == row)
        sums[places[-1]] = values[places].astype(np.float64).sum(0)
    room = np.zeros(len(index), np.int32)
    return sums, room, room, np.zeros((2, -(-len(index) // chunk), values.shape[1]), np.float32)


MEANINGS = {scatter.GROUPED: sum_groups}

CASES = {
    f"{dtype} {kind} {'x'.join(map(str, count))} of {rows}": (count, rows, width, dtype, kind, padding)
    for count, rows, width, dtype, padding in (
        ((5, 8), 11, 24, "float32", -1), ((64,), 50, 32, "bfloat16", 2), ((90,), 7, 33, "float16", 0),
        ((7,), 5, 8, "float64", -1), ((1,), 3, 4, "float32", -1), ((3, 43), 100, 136, "bfloat16", -1),
        ((100,), 9, 8, "float32", -1),
    )
    for kind in ("different", "few", "equal", "outside")
    if kind != "outside" or padding < 0
}  # fmt: skip
"""Name -> shape of the indices, rows and width of the table, dtype, which indices, and the row that gets nothing."""


@cache
def small_gradient(count, rows, width, dtype, padding) -> Program:
    """As of a table with more rows; indices have 32 bits where a row is for padding."""
    few, scatter.few_rows = scatter.few_rows, lambda *_: False
    try:
        return gradient(count, rows, width, dtype, torch.int64 if padding < 0 else torch.int32, padding)
    finally:
        scatter.few_rows = few


def case(name: str) -> tuple[Program, dict[str, np.ndarray]]:
    """A program and its inputs."""
    count, rows, width, dtype, kind, padding = CASES[name]
    wide, program = padding < 0, small_gradient(count, rows, width, getattr(torch, dtype), padding)
    places = indices(kind, int(np.prod(count)), rows, np.int64 if wide else np.int32).reshape(count)
    rng = np.random.default_rng(rows)
    values = torch.from_numpy(rng.normal(size=(*count, width))).to(getattr(torch, dtype))
    given = values.float().numpy() if dtype == "bfloat16" else values.numpy()
    return program, dict(zip(program.inputs, (given, places), strict=True))
