"""Choose how a linear layer's cross-entropy is computed: whole, in chunks of rows, or in chunks of classes.

The choice is a function of the graph alone, so that ranks agree: figures are the table's for the kind of device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from dcompile.capture.passes.dynamo.chunked_cross_entropy.by_rows import row_spans
from dcompile.device_traits import traits_of
from dcompile.ir.buffers import ITEMSIZE
from dcompile.machine_model import Figures, table_figures

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
