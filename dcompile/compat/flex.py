"""FlexAttention's operators: what their block masks and gradient graphs hold, and how their results are laid out."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

ARGUMENTS = {"flex_attention": 9, "flex_attention_backward": 14}
"""How many arguments each operator has in known versions of torch."""
_LENGTHS = (13, 17)
"""Lengths of a block mask in known versions of torch. All begin with the same six items and end with the same three."""
LOG_2 = math.log(2)
"""The operators' logarithms are those of base 2."""
SIDES = slice(-3, -1)
"""Positions of the sides of blocks in a block mask."""


class BlockTables(NamedTuple):
    """What of a block mask says which blocks are computed. Counts are tensors of (batch, heads, rows)."""

    partial_counts: Any
    partial: Any
    """Places of the key blocks that each row of query blocks has, as many as its count says."""
    whole_counts: Any
    whole: Any
    """The same for blocks that are computed without the mask's function; both may be None."""
    query_block: int
    key_block: int
    mask_mod: Any


def is_known_mask(block_mask: Sequence[Any]) -> bool:
    """Whether `tables` can read this argument of the operators."""
    return len(block_mask) in _LENGTHS


def is_on_cpu(node: Any) -> bool:
    """Whether all tensors of a call are on the CPU."""
    values = [item.meta.get("val") for item in node.all_input_nodes]
    return all(value.device.type == "cpu" for value in values if hasattr(value, "device"))


def tables(block_mask: Sequence[Any]) -> BlockTables:
    """Return the tables of the operators' argument `block_mask`."""
    query_block, key_block, mask_mod = block_mask[-3:]
    partial_counts, partial, whole_counts, whole = block_mask[2:6]
    return BlockTables(partial_counts, partial, whole_counts, whole, int(query_block), int(key_block), mask_mod)


def key_tables(block_mask: Sequence[Any]) -> tuple[Any, Any, Any, Any] | None:
    """Return the tables of query blocks for each row of key blocks, as those of `tables`; None if there are none."""
    partial_counts, partial, whole_counts, whole = block_mask[6:10]
    return None if partial_counts is None else (partial_counts, partial, whole_counts, whole)


_DEFAULTS: Mapping[str, Any] = {"BACKEND": "AUTO", "PRESCALE_QK": False, "BLOCKS_ARE_CONTIGUOUS": False}
"""Options that every call has, and their values where the user has chosen none."""
_HINTS = frozenset(("ROWS_GUARANTEED_SAFE", "WRITE_DQ", "OUTPUT_LOGSUMEXP", "OUTPUT_MAX"))
"""Options that change no result."""


def chosen_options(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of options by which a user asks for one of TorchInductor's kernels, or for its tiles."""
    return tuple(
        name for name, value in options.items() if name not in _HINTS and _DEFAULTS.get(name, _DEFAULTS) != value
    )


def options_of(node: Any, fixed: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return the options of a call's kernel, which may be among its constants."""
    options = [*node.args[6:7], *node.args[11:12]][-1:]
    found = next((fixed.get(held, held) if hasattr(held, "op") else held for held in options), None)
    return found if isinstance(found, Mapping) else {}


def without_kernel(call: Callable[..., Any], options: Mapping[str, Any], is_forward: bool) -> Callable[..., Any]:
    """Return a call with the results of the kernel that its options ask for: FlashAttention's logarithms are natural.

    All others have base 2, and the graph that TorchDynamo captured converts these alone.
    """
    if options.get("BACKEND") != "FLASH" or not _flash_is_natural():
        return call

    def forward(*args: Any) -> Any:
        out, *statistics = call(*args)
        return out, *(value * LOG_2 for value in statistics)

    def backward(*args: Any) -> Any:
        logsumexp, grad_out, grad = args[4:7]
        return call(*args[:4], logsumexp / LOG_2, grad_out, None if grad is None else grad * LOG_2, *args[7:])

    return forward if is_forward else backward


@functools.cache
def _flash_is_natural() -> bool:
    """Whether this torch takes the logarithms of FlashAttention's kernel as they are."""
    from torch.nn.attention import flex_attention

    return "stats_are_log2" in inspect.getsource(flex_attention)


def laid_out_as(tensor: Any, shape: Sequence[int], batch: int = 1) -> Any:
    """Return memory for a result of this shape, dense and in the order of a tensor's strides, as eager has it.

    With `batch` above the shape's own 1, eager sums that many results, which has a layout of its own.
    """
    strides, last = tensor.stride(), len(shape) - 1
    is_summed = shape[0] == 1 < batch
    whole = [batch, *shape[1:]] if is_summed else [*shape]
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (dim != last, strides[dim], -dim)):
        found[dim], step = step, step * whole[dim]
    if is_summed:
        found = [*torch.empty_strided(whole, found, device="meta").sum(0, keepdim=True).stride()]
    return torch.empty_strided(shape, found, dtype=tensor.dtype, device=tensor.device)


def scattered(node: Any) -> tuple[Sequence[Any], Any] | None:
    """Return the indices and values that a node of a gradient graph adds to zeros; None for other nodes."""
    if not is_scatter(node):
        return None
    _shape, indices, values = node.args
    return indices, values


def is_scatter(node: Any) -> bool:
    """Whether a node of a gradient graph adds values to zeros. Such a node's result is not one for each pair."""
    return str(node.target) == "flex_lib.zeros_and_scatter.default"


# --- the operators themselves -----------------------------------------------------------------------------------------


def eager(node: Any) -> Callable[..., Any]:
    """Return a call's operator, with the results that it has in the graph. Eager math alone differs in two ways.

    Of float64 it has float64 logarithms, which are float32 where it is traced. It has no gradient of a captured tensor
    that was itself computed, since such a tensor needs none while compiled code runs.
    """
    operator = node.target
    if node.kwargs or len(node.args) != ARGUMENTS[str(operator)]:
        return operator  # type: ignore[no-any-return]
    return _forward_of(operator) if str(operator) == "flex_attention" else _backward_of(operator)


def _forward_of(operator: Any) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        out, *statistics = operator(*args)
        return out, *(value.float() for value in statistics)

    return call


def _backward_of(operator: Any) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        *others, buffers, mask_buffers = args
        wanted = [gradient is not None for gradient in gradients_of_captured(args[8])]
        buffers = tuple(
            buffer.detach().requires_grad_(is_wanted) if isinstance(buffer, torch.Tensor) else buffer
            for buffer, is_wanted in zip(buffers, wanted, strict=True)
        )
        with torch.no_grad():
            return operator(*others, buffers, mask_buffers)

    return call


def gradients_of_captured(graph: Any) -> list[Any]:
    """Return what a gradient graph returns for each captured tensor: a node, or None if it has no gradient."""
    _score, _batch, _head, _query, _key, *captured = graph.graph.output_node().args[0]
    return [*captured]
