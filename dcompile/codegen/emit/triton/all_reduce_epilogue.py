"""Print the kernel of an all-reduce that ends with the loop behind it (`schedule.fusion.all_reduce_epilogue`).

A program sends its words of the sum to all ranks. While they arrive, it loads what else the loop reads. The loop's
loads of the sum are the tile of sums in registers, rounded as they would be in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from dcompile.codegen.emit.kernel_name import describe_loop
from dcompile.codegen.emit.target import AllReduceKernel
from dcompile.codegen.emit.triton import one_shot_all_reduce as exchange
from dcompile.codegen.emit.triton.kernel import types_of
from dcompile.codegen.emit.triton.printer import TritonText
from dcompile.codegen.emit.triton.received_tile import ReceivedTile
from dcompile.codegen.emit.triton.row_passes import RowPassWriter
from dcompile.codegen.schedule.fusion.all_reduce_epilogue import AllReduceEpilogue
from dcompile.ir.buffers import ITEMSIZE, Buffer

MAX_WARPS = 16
TILE = "summed"
"""Name of the tile of sums."""


def emit(found: AllReduceEpilogue, table: Mapping[str, Buffer], constant: frozenset[str]) -> AllReduceKernel | None:
    """Return the kernel; None if the loop takes more than addresses, or a program's part is not of whole words.

    Buffers in `constant` are written by no kernel that may still run when this one starts.
    """
    buffer = table[found.operand]
    per_word = 4 // ITEMSIZE[buffer.dtype]
    if found.elements % per_word or found.plan.dims[-1].block < per_word:
        return None
    text = TritonText(found.plan, table, constant, registers={found.operand: TILE})
    RowPassWriter(text, _exchange(found, buffer)).run()
    if text.symbols or text.draws:
        return None
    arguments = tuple(text.arguments)
    types = types_of(arguments, len(arguments), table)
    described = f"all_reduce_{describe_loop(found.loop)}"
    lines = [line.removeprefix("    ") for line in text.lines]
    cost = sum(map(bool, text.classes)) + 20
    source = exchange.finished(described, lines, arguments, types, _warps(found, per_word), cost)
    return AllReduceKernel(source, found.elements // per_word, found.number)


def _warps(found: AllReduceEpilogue, per_word: int) -> int:
    """Return the warps of a program: few words for each thread, since nothing else hides the way to the peers."""
    return min(max(found.plan.dims[-1].block // per_word // exchange.BLOCK, 1), MAX_WARPS)


def _exchange(found: AllReduceEpilogue, operand: Buffer) -> ReceivedTile:
    """Return the statements of the exchange. Results may be in the operand's memory, so stores follow a barrier."""
    dtype, extent = operand.dtype, operand.extent
    assert isinstance(extent, int), "sums of known size"
    per_word = 4 // ITEMSIZE[dtype]
    tile = found.plan.dims[-1].block
    words, block = found.elements // per_word, tile // per_word
    inside = "" if words == block and extent // per_word % words == 0 else "inside"
    place = [f"word = tl.arange(0, {block})", f"place = tl.program_id(0) * {words} + word"]
    place += [f"{inside} = (word < {words}) & (place < count)"] if inside else []
    return ReceivedTile(
        found.operand,
        before_wait=exchange.own_inbox(),
        send=[*place, *exchange.send(inside)],
        receive=[*exchange.receive(dtype, block, inside), f"{TILE} = {exchange.element_sums(dtype, tile)}"],
        store=exchange.store_sum(dtype, inside) if found.keeps_sum else [],
        finish=exchange.finish(),
    )
