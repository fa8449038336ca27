"""Skip what masks of attention forbid: windows, prefixes, padding and documents, beside the causal mask.

A kernel with a mask as a tensor reads it, and computes all pairs of queries and keys. `mask_predicates` finds the pairs
that a mask allows, as a function of positions. On CPUs, attention then takes blocks of queries with the keys in their
reach (`attention_ops.py`). On GPUs, FlexAttention's kernel gets the same function (`flex_masks.py`). Both are chosen
where the cost model says that they gain. Other masks stay tensors, and the receipt names their price.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import attention_ops, compat, flex_masks
from dcompile.capture.passes.dynamo.captured_nodes import Changed, argument
from dcompile.capture.passes.dynamo.causal_mask import is_constant, mask_of
from dcompile.capture.passes.dynamo.grouped_query_attention import erase_repeated, unrepeated
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
from dcompile.capture.passes.dynamo.mask_predicates import (
    MaskPredicate,
    UnknownMask,
    predicate_of,
    scores_shape,
    size_dims,
)
from dcompile.capture.passes.dynamo.symbolic_elements.analysis import ElementsOf
from dcompile.capture.passes.dynamo.symbolic_elements.elements import sizes_of, value_of
from dcompile.device_traits import traits_of
from dcompile.ir.index import Size
from dcompile.ir.predicate import DOCUMENTS, QUERIES_AT_ONCE, WINDOW, allowed_pairs
from dcompile.machine_model import Figures, table_figures
from dcompile.passes import GAIN, PassReport

NOMINAL_LENGTH = 2048
"""Queries and keys that a symbol counts as in costs: a plan must not depend on the batch that came first."""
DOCUMENTS_PART = 0.5
"""Assumed part of the pairs that documents allow, of those without them."""
BACKWARD_FLOPS = 2.5
"""FLOPs of the backward for one of the forward: five matmuls for two."""
MAX_PART = 0.8
"""Maximum time of attention in blocks, of that with a mask, for which it is chosen: the cost model is rough."""
CALL_US = 100.0
"""Time of one block on a CPU beside its scores: its part of the mask and ATen's call."""
MIN_FLEX_GAIN_US = 200.0
"""Minimum gain of a step on a GPU: TorchInductor takes seconds to compile the kernels."""
MIN_FLEX_QUERIES = 128
"""Minimum number of queries for FlexAttention's kernels for training; it has others for decoding."""
FLEX_WIDTHS = range(16, 257, 8)
"""Widths of heads that FlexAttention's kernels support."""
MIN_NOTED_US = 10.0
"""Minimum price of a mask that the receipt names."""
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class _Costs:
    """Seconds of a call of attention in one step."""

    with_mask: float
    in_blocks: float
    mask_bytes: int


@dataclass(frozen=True)
class _MaskedCall:
    """An attention call whose mask is a predicate."""

    node: Node
    mask: MaskPredicate
    kind: str
    costs: _Costs
    times: int
    """How often a step makes this call: once for each call of its body."""


def skip_masked_attention(
    gm: GraphModule, planned_for: str | None = None, figures: Callable[[str], Figures] = table_figures
) -> PassReport:
    """Rewrite attention calls with a mask that allows few pairs, in a Dynamo graph and all its subgraphs, in place.

    `planned_for`: type of the device that the graph is planned for; nothing is rewritten if it is not the graph's own.
    `figures`: type of a device -> its figures. Relies on: causal masks have been recognized. Rows without an allowed
    key stay 0, as in eager mode.
    """
    nest = NestedGraphs(gm)
    masked = [(node, mask) for node in nest.nodes() if (mask := mask_of(node)) is not None]
    masked = [(node, mask) for node, mask in masked if planned_for in (None, value_of(mask).device.type)]
    if not masked:
        return PassReport()
    elements = ElementsOf(nest, Changed(nest))
    calls, left = list[_MaskedCall](), _LeftMasks()
    for node, mask in masked:
        kind = value_of(mask).device.type
        times = max(len(nest.calls_of(nest.owner(node))), 1)
        scores = scores_shape(argument(node, 0, "query"), argument(node, 1, "key"))
        if not scores or scores[2] == 1:
            continue  # one query: `decompose_decode_attention`
        try:
            found = predicate_of(elements(mask), elements.reads, scores)
            costs = _costs(node, mask, found, scores, figures(kind))
            if costs.in_blocks > MAX_PART * costs.with_mask:
                continue
            _check_kernel(node, kind, found, scores)
        except UnknownMask as why:
            left.add(str(why), _costs(node, mask, None, scores, figures(kind)), times)
            continue
        calls.append(_MaskedCall(node, found, traits_of(kind).masked_attention, costs, times))
    flex = [call for call in calls if call.kind == "flex"]
    if sum((call.costs.with_mask - call.costs.in_blocks) * call.times for call in flex) < MIN_FLEX_GAIN_US * 1e-6:
        calls = [call for call in calls if call.kind != "flex"]
    notes = _Rewriting(nest).rewrite(calls)
    return PassReport(len(calls), (*notes, *left.notes()))


def _given(node: Node) -> dict[str, Any]:
    return dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)


def _check_kernel(node: Node, kind: str, mask: MaskPredicate, scores: Sequence[Size]) -> None:
    """Raise UnknownMask if no kernel computes this call under a predicate."""
    given = _given(node)
    size_dims(node, mask.sizes)
    operands = [value_of(given[name]) for name in ("query", "key", "value")]
    if any(map(compat.tensors.is_wrapper, operands)):
        raise UnknownMask("queries and keys are distributed tensors")
    if given.get("dropout_p", 0.0) != 0.0:
        raise UnknownMask("attention has dropout")
    if given.get("is_causal") or not isinstance(given.get("scale") or 1.0, float):
        raise UnknownMask("its scale is not a number")
    widths = [sizes_of(given[name])[3] for name in ("query", "key", "value")]
    if len({*widths}) > 1 or not isinstance(widths[0], int):
        raise UnknownMask("keys and values have heads of other widths")
    way = traits_of(kind).masked_attention
    if not way or (way == "blocks" and given.get("enable_gqa")):
        raise UnknownMask("no kernel of this device skips what it forbids")
    if way == "blocks" and any(not isinstance(size, int) for size in scores[2:]) and WINDOW not in mask.predicate.kinds:
        raise UnknownMask("lengths are symbols, and it has no window")
    if way == "flex":
        _check_flex(operands, scores, kind)


def _check_flex(operands: Sequence[torch.Tensor], scores: Sequence[Size], kind: str) -> None:
    short = (torch.float16, torch.bfloat16)
    casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) in short
    if not casts and any(operand.dtype not in short for operand in operands):
        raise UnknownMask("attention is not in 16 bits")
    if operands[0].shape[3] not in FLEX_WIDTHS:
        raise UnknownMask(f"its heads have {operands[0].shape[3]} elements")
    if any(not isinstance(size, int) for size in scores):
        raise UnknownMask("sizes are symbols")  # TorchInductor's kernels for these have failed a test on a GPU
    if isinstance(scores[2], int) and scores[2] < MIN_FLEX_QUERIES:
        raise UnknownMask(f"there are only {scores[2]} queries")


# --- costs ------------------------------------------------------------------------------------------------------------


def _costs(node: Node, mask: Node, found: MaskPredicate | None, scores: Sequence[Size], figures: Figures) -> _Costs:
    """Return the costs of a call with its mask, and in blocks if its predicate is known."""
    batch, heads, queries, keys = (
        size if isinstance(size, int) else usual for size, usual in zip(scores, _USUAL, strict=True)
    )
    operands = [value_of(argument(node, place, name)) for place, name in enumerate(_NAMES[:3])]
    trains = any(operand.requires_grad for operand in operands)
    widths = [width if isinstance(width := operand.shape[3], int) else 64 for operand in operands[1:]]
    flops = 2 * sum(widths) * (1 + BACKWARD_FLOPS * trains)
    rate = figures.rate(str(operands[0].dtype).removeprefix("torch.")) * figures.attention
    value = value_of(mask)
    dims = (1,) * (4 - value.dim()) + tuple(value.shape)
    numbers = [n if isinstance(n, int) else usual for n, usual in zip(dims, _USUAL, strict=True)]
    nbytes = value.element_size() * numbers[0] * numbers[1] * numbers[2] * numbers[3]
    read = nbytes * (1 + trains) / (figures.memory_gbs * 1e9)
    whole = batch * heads * queries * keys * flops / rate + read
    if found is None:
        return _Costs(whole, whole, nbytes)
    is_host = traits_of(figures.name).is_host
    block = QUERIES_AT_ONCE if is_host else flex_masks.BLOCK
    named = dict.fromkeys(found.predicate.sizes, NOMINAL_LENGTH)
    pairs = allowed_pairs(found.predicate, queries, keys, block, named)
    part = DOCUMENTS_PART if DOCUMENTS in found.predicate.kinds else 1.0
    calls = -(-queries // block) * (batch if found.predicate.by_batch else 1) * (1 + trains) if is_host else 0
    return _Costs(whole, batch * heads * pairs * part * flops / rate + calls * CALL_US * 1e-6, nbytes)


_USUAL = (1, 1, NOMINAL_LENGTH, NOMINAL_LENGTH)
"""What symbols of batch, heads, queries and keys count as."""


class _LeftMasks:
    """Attention calls that keep their mask as a tensor, with its price, by the reason."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, float, int]] = {}

    def add(self, reason: str, costs: _Costs, times: int) -> None:
        """Count a call."""
        count, seconds, nbytes = self._found.get(reason, (0, 0.0, 0))
        found = count + times, seconds + costs.with_mask * times, max(nbytes, costs.mask_bytes)
        self._found[reason] = found

    def notes(self) -> Iterable[str]:
        """Yield a line for each reason whose calls take a noticeable time."""
        for reason, (count, seconds, nbytes) in self._found.items():
            if seconds * 1e6 >= MIN_NOTED_US:
                yield (
                    f"{count} attention calls keep their mask as a tensor of {nbytes / 2**20:.1f} MiB, since {reason}; "
                    f"they compute all pairs, for {seconds * 1e6:.0f} us of a step by the cost model"
                )


# --- rewriting --------------------------------------------------------------------------------------------------------


class _Rewriting:
    """Replace attention calls by those under a predicate."""

    def __init__(self, nest: NestedGraphs) -> None:
        self._nest = nest
        self._tables: dict[Any, tuple[Node, ...]] = {}
        """Tables of blocks that calls in one graph share."""

    def rewrite(self, calls: Sequence[_MaskedCall]) -> list[str]:
        """Rewrite calls, and return lines for the receipt."""
        counts: dict[tuple[str, str], int] = {}
        masks, repeated = list[Node](), list[Node]()
        for call in calls:
            operands = [argument(call.node, place, name) for place, name in ((1, "key"), (2, "value"))]
            mask = mask_of(call.node)
            shared = unrepeated(call.node, self._nest) if call.kind == "flex" else None
            self._replace(call, *(operands if shared is None else shared))
            masks += [] if mask is None else [mask]
            repeated += [] if shared is None else operands
            name = ", ".join(call.mask.predicate.kinds) or "general"
            counts[name, call.kind] = counts.get((name, call.kind), 0) + 1
        if calls:
            self._nest.erase_unused(masks, is_constant)
            erase_repeated(repeated, self._nest)
            self._nest.recompile()
        return [
            f"{GAIN}{n} attention calls skip what their mask ({name}) forbids: {_HOW[how]}"
            for (name, how), n in counts.items()
        ]

    def _replace(self, call: _MaskedCall, key: Node, value: Node) -> None:
        node = call.node
        graph = node.graph
        given = _given(node)
        query, scale = given["query"], given.get("scale")
        width = value_of(query).shape[3]
        scale = width**-0.5 if scale is None else scale
        reads = tuple(self._brought(read, node) for read in call.mask.reads)
        dims = size_dims(node, call.mask.sizes)
        text = str(call.mask.predicate)
        with graph.inserting_before(node):
            sizes = tuple(_size(graph, *place) for place in dims.values())
            if call.kind == "flex":
                tables = self._shared_tables(node, (query, key, reads, sizes, text))
                made = graph.call_function(
                    flex_masks.attend_in_blocks, (query, key, value, reads, sizes, tables, text, scale)
                )
            else:
                made = graph.call_function(attention_ops.attend, (query, key, value, reads, sizes, text, scale))
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)

    def _shared_tables(self, node: Node, arguments: Any) -> tuple[Node, ...]:
        """Return the tables of blocks for a call: those of an earlier call with the same predicate, or new ones."""
        query, key, reads, sizes, text = arguments
        lengths = tuple(map(str, (*value_of(query).shape[:3], value_of(key).shape[2])))
        shared = (node.graph, text, lengths, reads, tuple(size.args for size in sizes))
        if shared not in self._tables:
            values = torch.fx.map_arg(arguments, value_of)
            with torch.no_grad(), getattr(value_of(query), "fake_mode", nullcontext()):
                found = flex_masks.block_tables(*values)
            made = node.graph.call_function(flex_masks.block_tables, arguments)
            made.meta["example_value"] = found
            self._tables[shared] = tuple(_item(made, number, value) for number, value in enumerate(found))
        return self._tables[shared]

    def _brought(self, read: Node, node: Node) -> Node:
        """Return a read's tensor in the graph of an attention call; pass it into bodies."""
        graph = self._nest.owner(node)
        return read if read.graph is graph.graph else self._into(read, graph)

    def _into(self, read: Node, body: GraphModule) -> Node:
        calls = self._nest.calls_of(body)
        operands = [read if call.graph.graph is read.graph else self._into(read, call.graph) for call in calls]
        return self._nest.give(body, operands)


_HOW = {
    "blocks": "blocks of queries read the keys in their reach",
    "flex": "FlexAttention's kernel computes them",
}
"""Kind of a call -> text for the receipt."""


def _size(graph: torch.fx.Graph, tensor: Node, dim: int) -> Node:
    made = graph.call_method("size", (tensor, dim))
    made.meta["example_value"] = value_of(tensor).shape[dim]
    return made


def _item(tables: Node, number: int, value: torch.Tensor) -> Node:
    made = tables.graph.call_function(operator.getitem, (tables, number))
    made.meta["example_value"] = value
    return made
