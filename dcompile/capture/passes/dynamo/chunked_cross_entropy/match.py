"""Find cross-entropies of a linear layer's result, and compute them in chunks where that gains memory.

A loss is computed whole, in chunks of rows, or in chunks of classes. The choice is a function of the graph alone, so
that ranks agree: figures are the table's for the kind of device.

Slices and reshapes of the logits' rows move to the layer's input, which has as many rows, and mostly shorter ones. If
anything else reads the logits, they must be stored, and the call stays. torch's `linear_cross_entropy` asks for chunks
by its `options`. Without them it is a linear layer and a cross-entropy.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.dynamo.captured_nodes import is_call, shape_of, value_of
from dcompile.capture.passes.dynamo.chunked_cross_entropy.head import (
    LOSS,
    NotChunked,
    OutputLayer,
    given_to,
    head_of,
    insertion_point,
    logit_step,
    row_steps,
)
from dcompile.capture.passes.dynamo.chunked_cross_entropy.op import chunked_cross_entropy, row_spans, spans
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs, is_checkpointed
from dcompile.compat.aot_metadata import user_line
from dcompile.device_traits import traits_of
from dcompile.ir.buffers import ITEMSIZE
from dcompile.machine_model import Figures, table_figures
from dcompile.passes import PassReport

MIN_SAVED_BYTES = 256 << 20
"""Bytes that chunks must save: less is a small part of a step's memory."""
MAX_MEMORY_SHARE = 0.75
"""Part of the whole logits' memory that chunks may take."""
MIN_SAVED_BYTES_PER_FLOP = 3e-4
"""Bytes that chunks of classes must save for each FLOP that they add. Checkpointing a layer of an 8B Llama with 4096
tokens saves 0.57 GB for 1.8 TFLOP."""
MAX_TIME_RATIO = 1.15
"""Time of chunks of rows, relative to that of the whole loss and its GEMMs: about a hundredth of a step."""
TILE_ROWS, TILE_COLUMNS, MULTIPROCESSORS = 128, 256, 132
"""Tile of cuBLAS's GEMMs, and number of tiles that an H100 computes at the same time."""
MIN_CHUNK_ROWS = 512
"""Rows of a chunk: GEMMs with fewer do not fill a GPU's tiles with 2048 columns."""
MAX_CHUNKS = 16
"""Chunks of a loss: each is traced and launched."""
SMALL_CHUNK_BYTES = 256 << 20
"""Bytes of a chunk that need not become smaller."""


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a linear layer and its loss, and what has a gradient."""

    rows: int
    classes: int
    width: int
    dtype: str
    """Dtype of the logits."""
    device: str
    """Type of the device."""
    hidden_learns: bool
    weight_learns: bool
    is_one_sum: bool
    """Whether a row's gradient is known once its logits are, up to a common factor."""

    @property
    def logits_bytes(self) -> int:
        """Bytes of all logits."""
        return self.rows * self.classes * ITEMSIZE[self.dtype]

    @property
    def learns(self) -> bool:
        """Whether the logits have a gradient."""
        return self.hidden_learns or self.weight_learns

    @property
    def sum_bytes(self) -> int:
        """Bytes of an element of a sum."""
        return max(ITEMSIZE[self.dtype], 4)


@dataclass(frozen=True)
class LossPlan:
    """How a loss is computed, with its estimated cost."""

    kind: Literal["whole", "rows", "classes"]
    chunks: int
    peak_bytes: int
    """Memory above the layer's operands and their gradients."""
    seconds: float
    """Time of the loss and its GEMMs, forward and backward."""
    reason: str = ""


def choose_plan(shape: HeadShape, saves_memory: bool, asked: bool = False) -> LossPlan:
    """Choose the plan of a loss by the cost model.

    Chunks of rows, where they take little more time; chunks of classes, where they take none because nothing has a
    gradient, or where the program recomputes activations for as little memory anyway (`saves_memory`). Where the user
    has asked for chunks, the fastest ones that gain memory.
    """
    figures = table_figures("cpu" if traits_of(shape.device).is_host else "h100")
    whole = _whole(shape, figures)
    if asked:
        limits = (MAX_TIME_RATIO * whole.seconds, math.inf)
        plans = [_by_classes(shape, figures), *filter(None, (_by_rows(shape, figures, limit) for limit in limits))]
        small = [plan for plan in plans if plan.peak_bytes <= MAX_MEMORY_SHARE * whole.peak_bytes]
        found = min(small, key=lambda plan: plan.seconds) if small else min(plans, key=lambda plan: plan.peak_bytes)
        return replace(found, reason=_compared(found, whole))
    if shape.logits_bytes < MIN_SAVED_BYTES:
        return whole
    by_rows = _by_rows(shape, figures, MAX_TIME_RATIO * whole.seconds)
    by_classes = _by_classes(shape, figures)
    if shape.learns and by_rows is not None and _gains(by_rows, whole):
        return replace(by_rows, reason=_compared(by_rows, whole))
    saved, more_flops = whole.peak_bytes - by_classes.peak_bytes, 2 * shape.rows * shape.classes * shape.width
    is_worth = saves_memory and saved >= MIN_SAVED_BYTES_PER_FLOP * more_flops
    if _gains(by_classes, whole) and (is_worth or not shape.learns):
        return replace(by_classes, reason=_compared(by_classes, whole))
    return replace(whole, reason=_why_whole(shape, whole, by_rows, by_classes))


def _gains(plan: LossPlan, whole: LossPlan) -> bool:
    saved = whole.peak_bytes - plan.peak_bytes
    return saved >= MIN_SAVED_BYTES and plan.peak_bytes <= MAX_MEMORY_SHARE * whole.peak_bytes


def _gemm_seconds(shape: HeadShape, figures: Figures) -> float:
    """Return the time of one GEMM of the layer."""
    return 2 * shape.rows * shape.classes * shape.width / figures.rate(shape.dtype)


def _whole(shape: HeadShape, figures: Figures) -> LossPlan:
    """The logits are saved, and their gradient overwrites them."""
    gemms = 1 + shape.hidden_learns + shape.weight_learns
    passes = 3 if shape.learns else 1  # read; read and written
    seconds = gemms * _gemm_seconds(shape, figures) + passes * shape.logits_bytes / (figures.memory_gbs * 1e9)
    return LossPlan("whole", 1, shape.logits_bytes, seconds)


def _by_rows(shape: HeadShape, figures: Figures, limit_s: float) -> LossPlan | None:
    """Return the plan of the least memory that stays within a time; None if there is none."""
    in_16_bits_on_host = traits_of(shape.device).is_host and shape.sum_bytes != ITEMSIZE[shape.dtype]
    if not shape.is_one_sum or (in_16_bits_on_host and limit_s < math.inf):
        return None
    whole = _whole(shape, figures)
    sums = shape.weight_learns * shape.classes * shape.width * shape.sum_bytes
    held = sums + shape.hidden_learns * shape.rows * shape.width * shape.sum_bytes
    found = None
    for chunks in range(2, min(MAX_CHUNKS, shape.rows // MIN_CHUNK_ROWS) + 1):
        spans = list(row_spans(shape.rows, chunks))
        # each chunk reads and writes the sums once more
        seconds = whole.seconds + len(spans) * 2 * sums / (figures.memory_gbs * 1e9)
        seconds += _unfilled_seconds(shape, figures, [last - first for first, last in spans])
        plan = LossPlan("rows", len(spans), held + spans[0][1] * shape.logits_bytes // shape.rows, seconds)
        if seconds <= limit_s and (found is None or plan.peak_bytes < found.peak_bytes):
            found = plan
            if spans[0][1] * shape.logits_bytes // shape.rows <= SMALL_CHUNK_BYTES:
                break
    return found


def _unfilled_seconds(shape: HeadShape, figures: Figures, heights: list[int]) -> float:
    """Return what the GEMMs of the input's gradient take longer in chunks: theirs has few tiles, and long ones."""
    if not shape.hidden_learns or not traits_of(shape.device).many_threads:
        return 0.0

    def waves(rows: int) -> int:
        return -(-(-(-rows // TILE_ROWS) * -(-shape.width // TILE_COLUMNS)) // MULTIPROCESSORS)

    of_wave = 2 * TILE_ROWS * TILE_COLUMNS * MULTIPROCESSORS * shape.classes / figures.rate(shape.dtype)
    return (sum(map(waves, heights)) - waves(shape.rows)) * of_wave


def _by_classes(shape: HeadShape, figures: Figures) -> LossPlan:
    """One more GEMM where there is a gradient, and a pass over the logits."""
    whole = _whole(shape, figures)
    chunks = min(max(2, -(-shape.logits_bytes // SMALL_CHUNK_BYTES)), MAX_CHUNKS)
    sums = shape.hidden_learns * shape.rows * shape.width * shape.sum_bytes
    more = shape.learns * _gemm_seconds(shape, figures) + chunks * 2 * sums / (figures.memory_gbs * 1e9)
    return LossPlan("classes", chunks, shape.logits_bytes // chunks + sums, whole.seconds + more)


def _compared(plan: LossPlan, whole: LossPlan) -> str:
    return (
        f"{plan.peak_bytes / 1e9:.2f} GB for {whole.peak_bytes / 1e9:.2f}, "
        f"{plan.seconds * 1e3:.1f} ms for {whole.seconds * 1e3:.1f} by the cost model"
    )


def _why_whole(shape: HeadShape, whole: LossPlan, by_rows: LossPlan | None, by_classes: LossPlan) -> str:
    if by_rows is not None:
        rows = f"chunks of rows would take {_compared(by_rows, whole)}"
    elif not shape.is_one_sum:
        rows = "the loss is not one sum, so chunks of rows would not know their gradients"
    elif shape.rows < 2 * MIN_CHUNK_ROWS:
        rows = "there are too few rows for chunks of rows"
    elif traits_of(shape.device).is_host:
        rows = "there is no matmul on CPUs with 16-bit factors and float32 sums"
    else:
        rows = f"the weight's sums would take more than {MAX_TIME_RATIO} times as long in chunks of rows"
    how = f"chunked_loss={by_classes.chunks} would take {_compared(by_classes, whole)}"
    return f"{rows}; {how}"


_ASKED = "dcompile_asks_for_chunks"
"""Key of a loss whose user has asked for chunks, by torch's own function for them."""
LEFT_WHOLE = "loss that chunked_loss leaves whole"

ChunkOption: TypeAlias = 'int | Literal["auto"]'
"""Value of the option `chunked_loss`."""


def chunk_losses(
    gm: GraphModule, chunks: ChunkOption, planned_for: str | None = None, saves_memory: bool = False
) -> PassReport:
    """Compute cross-entropies of a linear layer's result in chunks, in subgraphs, too.

    The graph is changed in place. `chunks` is a number of chunks of classes for each loss, or "auto": the cost model
    chooses for each. It counts on `planned_for`, the type of the device, if that is not the graph's own, and on whether
    the program recomputes activations (`saves_memory`). The report counts losses that are not chunked as fallbacks if a
    number is given. It has notes on losses with large logits alone if none is.
    """
    nest = NestedGraphs(gm)
    asked = chunks != "auto"
    if not asked and any(map(differentiates, nest.nodes())):
        return PassReport()
    for node in [*nest.nodes()]:
        if nest.is_inlined(nest.owner(node)):
            _spell_out(node)
    losses = [loss for graph in nest.graphs for loss in graph.graph.find_nodes(op="call_function", target=LOSS)]
    saves_memory = saves_memory or is_checkpointed(gm)
    notes, begun, done, whole = list[str](), 0, 0, 0
    for loss in losses:
        try:
            if not nest.is_inlined(nest.owner(loss)):
                raise NotChunked("they are in a part of the model that may run several times (a loop, a condition)")
            head = head_of(loss)
            rows, classes = row_steps(head, loss)
            plan = _plan(head, classes, loss, chunks, planned_for, saves_memory)
            at = insertion_point(head, loss)
        except NotChunked as reason:
            if asked or _is_large(given_to(loss)["input"]):
                notes.append(f"chunked_loss: the logits of {_place(loss)} are computed whole: {reason}")
            whole += asked
            continue
        if plan.kind == "whole":
            continue
        notes.append(_note(head, loss, plan))
        device = planned_for or head.layer.meta["example_value"].device.type
        settings = {"chunks": plan.chunks, "by_rows": plan.kind == "rows", "begun": begun}
        settings |= {"keeps_powers": traits_of(device).computes_loss_gradient_early}
        _replace(loss, head, at, rows, classes, settings)
        begun += plan.chunks
        done += 1
    if done:
        nest.recompile()
    if losses or not asked:
        return PassReport(done, tuple(notes), {LEFT_WHOLE: whole} if whole else {})
    return PassReport(
        notes=("chunked_loss: a graph computes no cross_entropy; where the loss is outside, its logits are results",)
    )


def _spell_out(node: Node) -> None:
    """Write torch's own operator for chunks as a linear layer and its loss, which asks for chunks."""
    given = compat.tensors.chunked_arguments(node)
    if given is None or not traits_of(value_of(given["input"]).device.type).is_compiled:
        return
    hidden, weight, graph = value_of(given["input"]), value_of(given["linear_weight"]), node.graph
    results = [user for user in node.users if given["reduction"] != "none"] or [node]
    operands = given["input"], given["linear_weight"], given["linear_bias"]
    settings = {name: given[name] for name in ("ignore_index", "reduction", "label_smoothing")}
    with graph.inserting_before(node):
        layer = graph.call_function(torch.nn.functional.linear, operands)
        loss = graph.call_function(LOSS, (layer, given["target"], given["weight"]), settings)
    loss.meta = dict(node.meta) | {"example_value": value_of(results[0]), _ASKED: True}
    layer.meta = dict(node.meta)
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])
    layer.meta["example_value"] = logits.requires_grad_(value_of(loss).requires_grad)
    for result in results:
        result.replace_all_uses_with(loss)
    for done in dict.fromkeys((*results, node)):
        graph.erase_node(done)


def differentiates(node: Node) -> bool:
    """Is a node a functorch transform, for which autograd functions here have no rules, or a call of autograd?"""
    return node.target is torch.autograd.grad or "functorch" in str(getattr(node.target, "__module__", ""))


def _place(loss: Node) -> str:
    return user_line(loss) or loss.name


def _is_large(logits: Any) -> bool:
    value = logits.meta.get("example_value") if isinstance(logits, Node) else None
    fixed = isinstance(value, torch.Tensor) and compat.sizes.is_fixed(value)
    return fixed and value.numel() * value.itemsize >= MIN_SAVED_BYTES  # type: ignore[union-attr]


def _plan(
    head: OutputLayer, classes: int, loss: Node, chunks: ChunkOption, planned_for: str | None, saves_memory: bool
) -> LossPlan:
    """Return the plan of a loss. Raises NotChunked for one that stays whole although its logits are large."""
    width = shape_of(head.weight)[1]
    if chunks != "auto":
        return LossPlan("classes", len(list(spans(classes, chunks))), 0, 0.0)
    logits, given, asked = head.layer.meta["example_value"], given_to(loss), _ASKED in loss.meta
    target = given["target"].meta["example_value"]
    if not traits_of(planned_for or logits.device.type).is_compiled:
        return LossPlan("whole", 1, 0, 0.0)
    if not compat.sizes.is_fixed(logits) or not compat.sizes.is_fixed(target) or not isinstance(width, int):
        if asked:
            return LossPlan("classes", len(list(spans(classes, MAX_CHUNKS))), 0, 0.0)
        if _hint_bytes(logits) < MIN_SAVED_BYTES:
            return LossPlan("whole", 1, 0, 0.0)
        raise NotChunked("the number of rows is symbolic, and the cost model needs it; chunked_loss=8 needs none")
    hidden, weight = (node.meta["example_value"] for node in (head.hidden, head.weight))
    shape = HeadShape(
        rows=target.numel(),
        classes=classes,
        width=width,
        dtype=str(logits.dtype).removeprefix("torch."),
        device=planned_for or logits.device.type,
        hidden_learns=logits.requires_grad and hidden.requires_grad,
        weight_learns=logits.requires_grad and weight.requires_grad,
        is_one_sum=given["reduction"] != "none" and not head.learns_by_rows,
    )
    plan = choose_plan(shape, saves_memory, asked)
    if plan.kind == "whole" and plan.reason:
        raise NotChunked(plan.reason)
    count = len(list(row_spans(shape.rows, plan.chunks) if plan.kind == "rows" else spans(classes, plan.chunks)))
    return replace(plan, chunks=count)


def _hint_bytes(logits: torch.Tensor) -> int:
    """Return the bytes of logits if each symbolic size is one: a lower bound."""
    sizes = [size for size in logits.shape if isinstance(size, int)]
    count = 1
    for size in sizes:
        count *= size
    return count * logits.itemsize


def _note(head: OutputLayer, loss: Node, plan: LossPlan) -> str:
    """Describe the logits: `4 parts of at most 0.3 MB are there ... in place of the logits (float32[5, 32], 1 MB)`."""
    value, where = head.layer.meta["example_value"], _place(loss)
    size, most = "", ""
    if compat.sizes.is_fixed(value):
        nbytes = value.numel() * value.itemsize
        classes, rows = shape_of(head.weight)[0], given_to(loss)["target"].meta["example_value"].numel()
        by_rows = plan.kind == "rows"
        first = next(row_spans(rows, plan.chunks) if by_rows else spans(classes, plan.chunks))[1]
        part = first * classes * value.itemsize if by_rows else nbytes // classes * first
        size, most = f", {nbytes / 1e6:.1f} MB", f" of at most {part / 1e6:.1f} MB"
    kind = f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]{size}"
    parts = f"{plan.chunks} parts{most} are there one after another in place of the logits ({kind}) of {where}"
    if plan.kind == "rows":
        return f"chunked_loss: {parts}, with their gradients: {plan.reason}"
    then = "the backward recomputes them" if value.requires_grad else "nothing has a gradient"
    return f"chunked_loss: {parts}; {then}{plan.reason and f': {plan.reason}'}"


def _replace(
    loss: Node, head: OutputLayer, at: Node, rows: list[tuple[str, Any]], classes: int, settings: dict[str, Any]
) -> None:
    given, graph = given_to(loss), loss.graph
    hidden, weight, bias, (padded, width) = head.hidden, head.weight, head.bias, shape_of(head.weight)
    logits = head.layer.meta["example_value"]
    settings |= {name: given[name] for name in ("ignore_index", "reduction", "label_smoothing")}
    settings |= {"dtype": logits.dtype, "result": loss.meta["example_value"].dtype, "grad": logits.requires_grad}
    settings |= {"steps": tuple(filter(None, map(logit_step, head.steps))), "wants_rows": bool(head.row_results)}
    if _ASKED in loss.meta and logits.itemsize < 4:
        settings["wide"] = True
    with graph.inserting_before(at):
        for kind, how in rows:
            if kind == "slice":
                hidden = graph.call_function(operator.getitem, (hidden, how))
            else:
                hidden = graph.call_method("reshape", (hidden, *how, width))
        if classes < padded:
            weight = graph.call_function(operator.getitem, (weight, slice(None, classes)))
            bias = bias and graph.call_function(operator.getitem, (bias, slice(None, classes)))
        arguments = (hidden, weight, bias, given["target"], given["weight"])
        parts = graph.call_function(chunked_cross_entropy, arguments, settings)
        parts.meta = dict(loss.meta)
        found = parts
        if head.row_results:
            parts.meta["example_value"] = None
            found = graph.call_function(operator.getitem, (parts, 0))
            found.meta = dict(loss.meta)
        for node in head.row_results:
            node.replace_all_uses_with(_row_result(parts, node))
    loss.replace_all_uses_with(found)
    for node in (loss, *head.row_results, *reversed(head.others), *reversed(head.steps), head.layer):
        if not node.users:
            graph.erase_node(node)


def _row_result(parts: Node, node: Node) -> Node:
    """Insert a reduction of the logits' rows, from what the chunks compute for each row, in its shape and dtype."""
    graph, value = parts.graph, node.meta["example_value"]
    flat = graph.call_function(operator.getitem, (parts, 1 if is_call(node, "logsumexp") else 2))
    sizes = tuple(value.shape) if all(isinstance(size, int) for size in value.shape) else (-1,)
    shaped = graph.call_method("reshape", (flat, *sizes))
    made = graph.call_method("to", (shaped, value.dtype))
    for one in (flat, shaped, made):
        one.meta = dict(node.meta)
    return made
