"""Streaming stores: large results bypass the caches, which spares reading what is overwritten."""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.emit.cpp.ops import FLOATS
from dcompile.codegen.emit.cpp.plan import NestPlan
from dcompile.codegen.emit.host.buffer_uses import known_bytes
from dcompile.ir.nodes import Buffer, Load, Reduce, Scan

MIN_STREAM_BYTES = 12 << 20
"""Size from which a result is streamed. With 32 MB of L3, writing it and reading it again was 1.09 times as fast then,
32 MB 1.18 times, 8 MB about as fast as without, 4 MB 0.7 times (one core of an AMD EPYC; writing alone 1.7 times)."""
TILES_SOONER = 2 / 3
"""The same of a result that is written tile by tile, of that size: 8 MB of a transposed tensor took 0.64 (int64) to 0.8
(bfloat16) of the time (AVX2)."""


def may_stream(buffer: Buffer) -> bool:
    """Is a buffer so large that what is written to it may be streamed?"""
    return known_bytes(buffer) >= MIN_STREAM_BYTES * TILES_SOONER


def stream_stores(plan: NestPlan) -> NestPlan:
    """Stream stores too large for caches, of what the kernel does not read, and of what is only copied."""
    if plan.shared_columns:  # threads there share rows, and none of them ends a row
        return plan
    copies = _copies(plan)
    read = {value.buffer for value in plan.nest.body if isinstance(value, Load)}
    least = MIN_STREAM_BYTES * (TILES_SOONER if plan.tile else 1)
    streamed = frozenset(
        n
        for n, store in enumerate(plan.nest.stores)
        if store.mode == "set" and store.buffer not in read
        if not plan.nest.row_stores[n] and not plan.is_transposed(n)
        if plan.table[store.buffer].dtype in FLOATS or copies
        if plan.has_bytes(store.buffer, least)
    )
    return replace(plan, copies=copies, streamed=streamed) if streamed else plan


def _copies(plan: NestPlan) -> bool:
    """Is all that the kernel does to write what it reads, in the same order, once tiles are transposed?"""
    if plan.nest.lane or any(isinstance(value, Reduce | Scan) for value in plan.nest.body):
        return False
    return all(_is_copied(plan, number) for number in range(len(plan.nest.stores)))


def _is_copied(plan: NestPlan, number: int) -> bool:
    """Does a store write elements as they are read, with neighbours side by side in both?"""
    store, last = plan.nest.stores[number], plan.nest.elements[-1].name
    value = plan.nest.body[store.value]
    if not isinstance(value, Load) or value.mask is not None or value.dtype != plan.table[store.buffer].dtype:
        return False
    transposed = plan.tile is not None and store.value in plan.tile.loads
    in_order = transposed or plan.constant_stride(value.index, last) == 1
    return store.mode == "set" and in_order and plan.constant_stride(store.index, last) == 1


def cached_condition(plan: NestPlan, number: int) -> str:
    """The condition on which a result that would be streamed is left to the caches, if there is one.

    Four linear layers with norms and residuals, tensors of 16 and 64 MB, train in 0.97 to 1.0 of the time so in
    float32 and in 0.94 to 0.96 in bfloat16, a Llama's layer in 0.99 (Intel with 480 MB of L3, one and two threads).
    """
    store = plan.nest.stores[number]
    return f"stays<{plan.bytes_of(store.buffer)}>" if store.buffer in plan.read_again else ""
