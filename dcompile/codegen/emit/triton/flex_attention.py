"""FlexAttention on GPUs: blocks that a mask leaves, with functions of scores and positions in registers.

forward: a program has a block of queries. It goes through the key blocks that the tables name, with a softmax whose
sums are corrected as larger scores come (FlashAttention-2: Dao, 2023). Exponentials have base 2.
queries, keys: gradients of queries, and of keys and values. Scores are computed again. With weights w, the gradient of
a score is w * (grad @ value - level). A query's level is the sum of its result times the result's gradient, less what
the gradient of its logarithm adds. The kernel of queries comes first, and leaves these levels for the other.

The place of the next block is read one step ahead, so that its keys are asked for while those before are multiplied.
Sums are in float32 and in a fixed order.

Gradients of tensors that a score function reads are values of pairs, added at the elements that were read, in any
order. What all pairs of a program's rows share is summed first. ALiBi's slopes get one addition from each program, a
bias of each pair one from each pair. Learned slopes, 2 x 16 heads and 4096 positions: forward and backward take 1.1 ms
on an H200. With an addition for each pair they take 468.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dcompile.codegen.emit.target import Kernels, KernelSource, Launch, LibraryReplacement, kernel_name
from dcompile.codegen.emit.triton.flex_text import JOINT, LOG2_E, MASK, SCORES, FlexText, FlexTile, room, tiles_of
from dcompile.codegen.emit.triton.kernel import FILL, fill, function_text, types_of
from dcompile.codegen.emit.triton.library import HEADER, used_functions
from dcompile.codegen.emit.triton.pair_tile import HEAD, KEY, QUERY
from dcompile.codegen.nest.tile_plan import ceil_div
from dcompile.ir.attention import FLEX, FLEX_BACKWARD, CapturedTerm, FlexArguments, flex_arguments
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import ZERO, contiguous_strides
from dcompile.ir.nodes import Extern, Program, Store, View
from dcompile.ir.pair_function import PairFunction


def emit_flex_attention(kernels: Kernels, program: Program, arch: int | None = None) -> Kernels:
    """Emit the kernels of FlexAttention. `arch`: compute capability, if it is known."""
    calls = ((n, step) for n, step in enumerate(program.steps) if isinstance(step, Extern))
    found = {n: step for n, step in calls if step.op in (FLEX, FLEX_BACKWARD)}
    return kernels.with_products({n: LibraryReplacement(source(s, program.table, arch)) for n, s in found.items()})


def source(step: Extern, table: Mapping[str, Buffer], arch: int | None = None) -> KernelSource:
    """Return the kernels of one call."""
    call = flex_arguments(step)
    forward, queries, keys = tiles_of(max(int(call.query.shape[3]), int(call.value.shape[3])), arch)  # type: ignore[arg-type]
    if step.op == FLEX:
        return emit_forward(step, call, table, forward)
    return emit_backward(step, call, table, queries, keys)


def emit_forward(step: Extern, call: FlexArguments, table: Mapping[str, Buffer], tile: FlexTile) -> KernelSource:
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


def emit_backward(
    step: Extern, call: FlexArguments, table: Mapping[str, Buffer], queries: FlexTile, keys: FlexTile
) -> KernelSource:
    """Return the kernels of a call of the backward, each with a tile of its own. `call`: the arguments of `step`."""
    assert call.joint is not None, "the backward has a function of a score's gradient"
    functions = {SCORES: call.score, MASK: call.mask, JOINT: call.joint}
    captured = captured_functions(call.terms)
    by_queries = FlexText(step, call, table, queries, functions | captured)
    by_keys = FlexText(step, call, table, keys, functions, KEY)
    QueriesWriter(by_queries).run()
    KeysWriter(by_keys).run()
    return kernel_of("flex_backward", {"queries": by_queries, "keys": by_keys}, step, by_queries.outs[4:])


def _given(call: FlexArguments) -> tuple[View, View, View]:
    """Return the forward's result, its logarithm, and the result's gradient."""
    assert call.out and call.logsumexp and call.grad, "the backward has all arguments"
    return call.out, call.logsumexp, call.grad


def _write_gradients(flex: FlexText, scores: str, products: str, level: str, base: str, partial: bool) -> str:
    """Write a tile's `weight` and `found`, the gradient of its products of queries and keys.

    Return which pairs are allowed, if not all.
    """
    line, joint = flex.line, flex.call.joint
    assert joint is not None, "the backward has a function of a score's gradient"
    flex.scores(scores)
    flex.weights(base)
    test = flex.allowed(partial)
    if test:
        line(f"test = {test}")
        line("weight = tl.where(test, weight, 0.0)")
    line(f"grad = weight * ({products} - {level})")
    line("found = grad")
    if joint.is_argument("grad"):
        return test
    if flex.is_plain and "score" in joint.reads:
        line(f"score = value * {flex.call.scale!r}")
    flex.pairs.write([JOINT])
    line(f"found = {flex.pairs.value(JOINT)}")
    if test:
        line("found = tl.where(test, found, 0.0)")
    return test


class QueriesWriter:
    """Writes the kernel for gradients of queries."""

    def __init__(self, flex: FlexText) -> None:
        self.flex, self.line, self.call = flex, flex.line, flex.call
        self.captured = CapturedGradients(flex)

    def run(self) -> None:
        """Write all statements."""
        call, flex, line = self.call, self.flex, self.line
        out, logsumexp, grad = _given(call)
        flex.begin()
        line(f"{HEAD} = head")
        for name, view in (("query", call.query), ("out", out), ("given", grad), ("lse", logsumexp)):
            flex.base(name, view, HEAD)
        flex.base_of_keys()
        flex.read_rows("query", call.query, QUERY, "d")
        flex.read_rows("given", grad, QUERY, "e")
        self._levels(out, logsumexp)
        flex.text.position(flex.pairs.outer, "m0")
        flex.pairs.write_outer(flex.pairs.results)
        self.captured.begin()
        line(f"total = tl.zeros([{flex.tile.queries}, {room(flex.widths['d'])}], tl.float32)")
        for partial in flex.through_blocks(call.partial, call.whole):
            self._step(partial)
        line(f"total = total * {call.scale!r}")
        flex.write_rows("total", flex.outs[0], HEAD, QUERY, "d")
        self.captured.end()

    def _step(self, partial: bool) -> None:
        """Write what a program does for a tile of keys."""
        self.flex.read_rows("key", self.call.key, KEY, "d", turned=True)
        self.flex.read_rows("values", self.call.value, KEY, "e", turned=True)
        products = "tl.dot(given, values)"
        test = _write_gradients(self.flex, "tl.dot(query, key)", products, "level[:, None]", "lse[:, None]", partial)
        self.captured.step(test)
        self.line(f"total = tl.dot(found.to(tl.{self.flex.dtype}), tl.trans(key), total)")

    def _levels(self, out: View, logsumexp: View) -> None:
        """Compute the level of each query, and its logarithm as 0 where it has no key."""
        flex, line = self.flex, self.line
        flex.read_rows("out", out, QUERY, "e")
        line("level = tl.sum(out.to(tl.float32) * given.to(tl.float32), 1)")
        if self.call.grad_logsumexp is not None:
            flex.base("change", self.call.grad_logsumexp, HEAD)
            flex.read_numbers("change", self.call.grad_logsumexp)
            line(f"level = level - change * {LOG2_E!r}")
        flex.write_numbers("level", flex.outs[3])
        flex.read_numbers("lse", logsumexp)
        line('lse = tl.where(lse == float("-inf"), 0.0, lse)')


class KeysWriter:
    """Writes the kernel for gradients of keys and values. A program has a block of keys, for all heads with it."""

    def __init__(self, flex: FlexText) -> None:
        self.flex, self.line, self.call = flex, flex.line, flex.call

    def run(self) -> None:
        """Write all statements."""
        call, flex, line = self.call, self.flex, self.line
        flex.begin()
        for name, view, width in (("key", call.key, "d"), ("values", call.value, "e")):
            flex.base(name, view, "head")
            flex.read_rows(name, view, KEY, width)
        flex.text.position(flex.pairs.outer, "n0")
        for name, width in (("keys", "d"), ("mixed", "e")):
            line(f"{name} = tl.zeros([{flex.tile.keys}, {room(flex.widths[width])}], tl.float32)")
        if call.group > 1:
            line(f"for member in range({call.group}):")
            flex.text.depth += 1
        line(f"{HEAD} = head * {call.group} + member" if call.group > 1 else f"{HEAD} = head")
        self._member()
        if call.group > 1:
            flex.text.depth -= 1
        flex.write_rows(f"(keys * {call.scale!r})", flex.outs[1], "head", KEY, "d")
        flex.write_rows("mixed", flex.outs[2], "head", KEY, "e")

    def _member(self) -> None:
        """Write the loops over the queries of a head."""
        call, flex = self.call, self.flex
        _, logsumexp, grad = _given(call)
        levels = flex.whole(flex.outs[3])
        for name, view in (("query", call.query), ("given", grad), ("lse", logsumexp), ("level", levels)):
            flex.base(name, view, HEAD)
        flex.pairs.write_outer([SCORES, MASK, JOINT])
        assert call.partial_of_keys is not None, "the backward has tables for keys"
        for partial in flex.through_blocks(call.partial_of_keys, call.whole_of_keys):
            self._step(logsumexp, grad, levels, partial)

    def _step(self, logsumexp: View, grad: View, levels: View, partial: bool) -> None:
        """Write what a program does for a tile of queries."""
        flex, line = self.flex, self.line
        flex.read_rows("query", self.call.query, QUERY, "d", turned=True)
        flex.read_numbers("lse", logsumexp)
        line('lse = tl.where(lse == float("-inf"), 0.0, lse)')
        flex.read_rows("given", grad, QUERY, "e")
        flex.read_numbers("level", levels)
        products = "tl.dot(values, tl.trans(given))"
        _write_gradients(flex, "tl.dot(key, query)", products, "level[None, :]", "lse[None, :]", partial)
        line(f"mixed = tl.dot(weight.to(tl.{flex.dtype}), given, mixed)")
        line(f"keys = tl.dot(found.to(tl.{flex.dtype}), tl.trans(query), keys)")


def captured_functions(terms: Sequence[CapturedTerm]) -> dict[str, PairFunction]:
    """Return the functions of all terms by name."""
    found: dict[str, PairFunction] = {}
    for number, term in enumerate(terms):
        found[f"value{number}"] = term.value
        found |= {f"index{number}_{dim}": function for dim, function in enumerate(term.indices)}
    return found


class CapturedGradients:
    """Writes the statements of all terms of a kernel whose programs have a block of queries."""

    def __init__(self, flex: FlexText) -> None:
        self.flex, self.line, self.pairs = flex, flex.line, flex.pairs
        self.terms: Mapping[int, CapturedTerm] = dict(enumerate(flex.call.terms))

    def begin(self) -> None:
        """Name the sums of terms whose indices the loop over keys does not change."""
        for number in self.terms:
            if "x" not in self._varying(number):
                self.line(f"sum{number} = tl.zeros([{self.flex.tile.queries}], tl.float32)")

    def step(self, test: str) -> None:
        """Add the values of a tile. `test`: which pairs are allowed, if not all."""
        for number in self.terms:
            self.pairs.write([f"value{number}"])
            value = self.pairs.value(f"value{number}")
            self.line(f"part{number} = {f'tl.where(test, {value}, 0.0)' if test else value}")
            varying = self._varying(number)
            if "x" not in varying:
                self.line(f"sum{number} += tl.sum(part{number}, 1)")
                continue
            self.pairs.write(self._indices(number))
            self._add(number, f"part{number}" if "y" in varying else f"tl.sum(part{number}, 0)[None, :]")

    def end(self) -> None:
        """Add the sums."""
        for number in self.terms:
            varying = self._varying(number)
            if "x" not in varying:
                self._add(number, f"sum{number}[:, None]" if "y" in varying else f"tl.sum(sum{number})")

    def _indices(self, number: int) -> list[str]:
        return [f"index{number}_{dim}" for dim in range(len(self.terms[number].indices))]

    def _varying(self, number: int) -> frozenset[str]:
        """Return the dimensions of a tile along which a term's indices vary."""
        classes = self.pairs.text.classes
        return frozenset().union(*(classes[self.pairs.results[name]] for name in self._indices(number)))

    def _add(self, number: int, value: str) -> None:
        """Add values to the elements that the indices name."""
        text, varying = self.pairs.text, self._varying(number)
        buffer = self.flex.outs[4 + self.terms[number].total]
        pointer, (place, mask) = text.argument(buffer), self._place(number, buffer)
        if varying != text.everything:
            shape = text.shape(varying) if varying else ""
            self._add_at(f"{pointer} + ({place})", value, mask, shape)
            return
        # with clamped distances, all pairs of most tiles have one element, where additions would wait for each other
        self.line(f"place = tl.broadcast_to({place}, {text.shape(varying)})")
        self.line(f"inside = tl.broadcast_to({mask}, {text.shape(varying)})")
        self.line("first = tl.min(place)")
        self.line("if (first == tl.max(place)) & (tl.min(inside.to(tl.int32)) > 0):")
        text.depth += 1
        self._add_at(f"{pointer} + first", f"tl.sum({value})", "", "")
        text.depth -= 1
        self.line("else:")
        text.depth += 1
        self._add_at(f"{pointer} + place", value, "inside", text.shape(varying))
        text.depth -= 1

    def _place(self, number: int, buffer: str) -> tuple[str, str]:
        """Write a term's indices. Return the element that they name, and whether there is one: negative ones count from
        the end.
        """
        text, shape = self.pairs.text, self.flex.table[buffer].shape
        dims = {"y": self.pairs.outer, "x": self.pairs.inner}
        masks = [f"{name}m" for name in sorted(self._varying(number)) if self.pairs.is_ragged(dims[name])]
        places = []
        for name, size, stride in zip(self._indices(number), shape, contiguous_strides(shape), strict=True):
            have, at, index = text.size(size), f"at_{name}", text.name(self.pairs.results[name])
            self.line(f"{at} = tl.where({index} < 0, {index} + {have}, {index}).to(tl.int64)")
            masks.append(f"({at} >= 0) & ({at} < {have})")
            places.append(f"{at} * {text.size(stride)}")
        return " + ".join(places) or "0", " & ".join(masks)

    def _add_at(self, pointer: str, value: str, mask: str, shape: str) -> None:
        """Write additions at addresses, broadcast to a shape; without one, a single addition."""
        pointer, value, mask = (f"tl.broadcast_to({part}, {shape})" if shape and part else part
                                for part in (pointer, value, mask))  # fmt: skip
        self.line(f'tl.atomic_add({pointer}, {value}{f", mask={mask}" if mask else ""}, sem="relaxed")')
