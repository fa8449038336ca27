"""Streaming stores: large results bypass the caches, which avoids reading the overwritten memory."""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.emit.cpp.ops import FLOATS
from dcompile.codegen.emit.cpp.plan import NestPlan
from dcompile.codegen.emit.host.batch_launches import known_bytes
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Load, Reduce, Scan

MIN_STREAM_BYTES = 12 << 20
"""Size from which a result is streamed. Writing it and reading it again was then 1.09 times as fast with 32 MB of L3
(docs/lab/constants.md, K10)."""
TILES_SOONER = 2 / 3
"""Factor of that size for results written tile by tile. 8 MB of a transposed tensor took 0.64 (int64) to 0.8 (bfloat16)
of the time (AVX2)."""


def may_stream(buffer: Buffer) -> bool:
    """Is a buffer so large that its stores may be streamed?"""
    return known_bytes(buffer) >= MIN_STREAM_BYTES * TILES_SOONER


def stream_stores(plan: NestPlan) -> NestPlan:
    """Stream stores of large results that the kernel does not read, of float dtypes or pure copies."""
    if plan.shared_columns:  # threads share rows there, and none of them ends a row
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
    """Does the kernel only write the elements that it reads, in the same order after transposing tiles?"""
    if plan.nest.lane or any(isinstance(value, Reduce | Scan) for value in plan.nest.body):
        return False
    return all(_is_copied(plan, number) for number in range(len(plan.nest.stores)))


def _is_copied(plan: NestPlan, number: int) -> bool:
    """Does a store write loaded elements unchanged, contiguous in both?"""
    store, last = plan.nest.stores[number], plan.nest.elements[-1].name
    value = plan.nest.body[store.value]
    if not isinstance(value, Load) or value.mask is not None or value.dtype != plan.table[store.buffer].dtype:
        return False
    transposed = plan.tile is not None and store.value in plan.tile.loads
    in_order = transposed or plan.constant_stride(value.index, last) == 1
    return store.mode == "set" and in_order and plan.constant_stride(store.index, last) == 1


def cached_condition(plan: NestPlan, number: int) -> str:
    """Return the condition on which a streamed result goes through the caches instead, if there is one.

    It keeps results that later steps read again, if the caches are large enough: a Llama's layer trains in 0.99 of the
    time (docs/lab/constants.md, K11).
    """
    store = plan.nest.stores[number]
    return f"stays<{plan.bytes_of(store.buffer)}>" if store.buffer in plan.read_again else ""
