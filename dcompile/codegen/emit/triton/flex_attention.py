"""FlexAttention on GPUs: blocks that a mask leaves, with functions of scores and positions in registers.

forward: a program has a block of queries. It goes through the key blocks that the tables name, with a softmax whose
sums are corrected as larger scores come (FlashAttention-2: Dao, 2023). Exponentials have base 2.
queries, keys (`flex_backward.py`): gradients of queries, and of keys and values. Scores are computed again.

The place of the next block is read one step ahead, so that its keys are asked for while those before are multiplied.
Sums are in float32 and in a fixed order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dcompile.codegen.emit.kernel_name import kernel_name
from dcompile.codegen.emit.target import KernelSource, Launch
from dcompile.codegen.emit.triton.flex_text import MASK, SCORES, FlexText, room
from dcompile.codegen.emit.triton.flex_tiles import FlexTile
from dcompile.codegen.emit.triton.kernel import FILL, fill, function_text, types_of
from dcompile.codegen.emit.triton.library import HEADER, used_functions
from dcompile.codegen.emit.triton.pair_tile import HEAD, KEY, QUERY
from dcompile.codegen.nest.tile_plan import ceil_div
from dcompile.ir.attention import FlexArguments
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import ZERO
from dcompile.ir.nodes import Extern, Store


def emit(step: Extern, call: FlexArguments, table: Mapping[str, Buffer], tile: FlexTile) -> KernelSource:
    """Return the kernel of a call of the forward. `call`: the arguments of `step`."""
    writer = ForwardWriter(FlexText(step, call, table, tile, {SCORES: call.score, MASK: call.mask}))
    writer.run()
    return kernel_of("flex_attention", {"forward": writer.flex}, step)


def kernel_of(name: str, written: Mapping[str, FlexText], step: Extern, zeros: Sequence[str] = ()) -> KernelSource:
    """Return kernels that are launched one after another as one source. Each takes all size symbols.

    `zeros`: buffers that they add to, which are 0 at first.
    """
    table = next(iter(written.values())).table
    sizes = tuple(dict.fromkeys(symbol for flex in written.values() for symbol in flex.text.symbols))
    buffers = tuple(dict.fromkeys(buffer for flex in written.values() for buffer in flex.text.arguments))
    first, symbols = next(iter(written.values())).text, range(len(buffers), len(buffers) + len(sizes))
    parts, launches = [], list[Launch]()
    for symbol in sizes:
        first.symbol(symbol)  # every function takes all
    for buffer, entry, text in (fill(first, Store(buffer, ZERO, 0, "sum")) for buffer in zeros):
        parts.append(text)
        places, types = (buffers.index(buffer), *symbols), types_of([buffer], 1 + len(sizes), table)
        launches.append(Launch(entry, ceil_div(table[buffer].extent, FILL), 4, places, types))
    for entry, flex in written.items():
        own = [*flex.text.arguments]
        named = [*flex.text.arguments.values(), *(flex.text.symbol(symbol) for symbol in sizes)]
        parts.append(function_text(entry, named, flex.text.lines))
        places = (*map(buffers.index, own), *symbols)
        launches.append(Launch(entry, flex.programs, flex.tile.warps, places, types_of(own, len(places), table)))
    whole = "\n\n".join(parts)
    whole = f"{HEADER}\n\n{used_functions(whole)}\n\n{whole}"
    shapes = [(launch.function, launch.warps, launch.types) for launch in launches]
    digest = hashlib.sha256(f"{whole}\n{shapes}".encode()).hexdigest()[:24]
    renamed = []
    for launch in launches:
        entry = f"dcompile_{name}_{launch.function}_{digest[:8]}"
        whole = whole.replace(f"def {launch.function}(", f"def {entry}(")
        renamed.append(replace(launch, function=entry))
    cost = 400 * len(written)  # Triton compiles each for seconds
    return KernelSource(
        kernel_name(name, digest), whole, buffers, cost, False, step.origin, sizes, launches=tuple(renamed)
    )


class ForwardWriter:
    """Writes the kernel of the forward."""

    def __init__(self, flex: FlexText) -> None:
        self.flex, self.line, self.call = flex, flex.line, flex.call

    def run(self) -> None:
        """Write all statements."""
        call, flex, line = self.call, self.flex, self.line
        flex.begin()
        line(f"{HEAD} = head")
        flex.base("query", call.query, HEAD)
        flex.base_of_keys()
        flex.read_rows("query", call.query, QUERY, "d")
        flex.text.position(flex.pairs.outer, "m0")
        flex.pairs.write_outer([SCORES, MASK])
        rows = flex.tile.queries
        line(f'top = tl.full([{rows}], float("-inf"), tl.float32)')
        line(f"total = tl.zeros([{rows}], tl.float32)")
        line(f"mixed = tl.zeros([{rows}, {room(flex.widths['e'])}], tl.float32)")
        for partial in flex.through_blocks(call.partial, call.whole):
            self._step(partial)
        self._end()

    def _step(self, partial: bool) -> None:
        """Write what a program does for a tile of keys."""
        flex, line = self.flex, self.line
        flex.read_rows("key", self.call.key, KEY, "d", turned=True)
        flex.scores("tl.dot(query, key)")
        if test := flex.allowed(partial):
            line(f'value = tl.where({test}, value, float("-inf"))')
        line(f"high = tl.maximum(top, tl.max(value, 1) * {flex.factor!r})")
        line('level = tl.where(high == float("-inf"), 0.0, high)')
        flex.weights("level[:, None]")
        line("shrunk = tl.math.exp2(top - level)")
        line("total = total * shrunk + tl.sum(weight, 1)")
        flex.read_rows("values", self.call.value, KEY, "e")
        line(f"mixed = tl.dot(weight.to(tl.{flex.dtype}), values, mixed * shrunk[:, None])")
        line("top = high")

    def _end(self) -> None:
        """Write the results."""
        flex, line = self.flex, self.line
        out, logsumexp, largest = flex.outs
        line("whole = tl.where(total == 0.0, 1.0, total)")
        line("mixed = mixed / whole[:, None]")
        flex.write_rows("mixed", out, HEAD, QUERY, "e")
        flex.write_numbers('tl.where(total == 0.0, float("-inf"), top + tl.math.log2(whole))', logsumexp)
        flex.write_numbers("top", largest)
