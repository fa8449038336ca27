"""The gradients of FlexAttention on GPUs: of queries first, which also leaves a number a query for the other kernel.

With weights w, the gradient of a score is w * (grad @ value - level). A query's level is the sum of its result times
the result's gradient, less what the gradient of its logarithm adds (FlashAttention-2: Dao, 2023).
"""

from __future__ import annotations

from collections.abc import Mapping

from dcompile.codegen.emit.target import KernelSource
from dcompile.codegen.emit.triton.flex_attention import kernel_of
from dcompile.codegen.emit.triton.flex_captured import CapturedGradients, captured_functions
from dcompile.codegen.emit.triton.flex_text import JOINT, LOG2_E, MASK, SCORES, FlexText, room
from dcompile.codegen.emit.triton.flex_tiles import FlexTile
from dcompile.codegen.emit.triton.pair_tile import HEAD, KEY, QUERY
from dcompile.ir.attention import FlexArguments
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Extern, View


def emit(
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
