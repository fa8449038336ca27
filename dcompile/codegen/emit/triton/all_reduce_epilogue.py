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
from dcompile.codegen.emit.triton.library import AFTER
from dcompile.codegen.emit.triton.printer import TritonText
from dcompile.codegen.emit.triton.row_passes import RowPassWriter
from dcompile.codegen.schedule.fusion.all_reduce_epilogue import AllReduceEpilogue
from dcompile.ir.analysis import runtime_refs
from dcompile.ir.nodes import ITEMSIZE, Buffer, Load, Ref

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
    AllReduceWriter(text, found, buffer).run()
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


class AllReduceWriter(RowPassWriter):
    """Writes the body of a kernel to `text`: the exchange, and the statements of the loop around it."""

    def __init__(self, text: TritonText, found: AllReduceEpilogue, operand: Buffer) -> None:
        super().__init__(text)
        self.found, self.dtype = found, operand.dtype
        per_word = 4 // ITEMSIZE[operand.dtype]
        self.words, self.block = found.elements // per_word, found.plan.dims[-1].block // per_word
        extent = operand.extent
        assert isinstance(extent, int), "sums of known size"
        self.inside = "" if self.words == self.block and extent // per_word % self.words == 0 else "inside"

    def _straight(self) -> None:
        """Write each value once, the loads that do not depend on the sum before those that do, then the stores."""
        live = sorted(self.levels.live)
        early = [ref for ref in live if self._may_be_early(ref)]
        for ref in early:
            self._value(ref)
        self._lines(exchange.own_inbox())
        self.line(AFTER)
        self._send()
        waiting = [ref for ref in live if ref not in early and self._is_independent(ref)]
        for ref in waiting:
            self._value(ref)
        self._lines(exchange.receive(self.dtype, self.block, self.inside))
        self.line(f"{TILE} = {exchange.element_sums(self.dtype, self.found.plan.dims[-1].block)}")
        for ref in live:
            if ref not in early and ref not in waiting:
                self._value(ref)
        self.line("tl.debug_barrier()")  # results may be in the memory of the operand, or of what others read
        if self.found.keeps_sum:
            self._lines(exchange.store_sum(self.dtype, self.inside))
        for number in range(len(self.nest.stores)):
            self.text.store(number)
        self._lines(exchange.finish())

    def _send(self) -> None:
        self.line(f"word = tl.arange(0, {self.block})")
        self.line(f"place = tl.program_id(0) * {self.words} + word")
        if self.inside:
            self.line(f"{self.inside} = (word < {self.words}) & (place < count)")
        self._lines(exchange.send(self.inside))

    def _is_independent(self, ref: Ref) -> bool:
        value = self.nest.body[ref]
        return (
            isinstance(value, Load)
            and value.buffer != self.found.operand
            and value.mask is None
            and not runtime_refs(value.index)
        )

    def _lines(self, lines: list[str]) -> None:
        for line in lines:
            self.line(line)
