"""Attention kernels by their private names, and which one the user has chosen for FlashAttention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.attention
from torch._higher_order_ops.flex_attention import flex_attention

BLOCK = 128
"""Queries and keys of a block, as the kernels have it by default."""
TABLES = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip
"""Tables of a block mask: numbers of blocks that are computed in part and in whole, and which ones, both ways."""


def chosen_flash_attention() -> str | None:
    """Name of the implementation, "FA3" say, that `activate_flash_attention_impl` has put in place of torch's own."""
    current: Any = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    return None if (name := current()) is None else str(name)


def attend_on_cpu(query: Any, key: Any, value: Any, mask: Any, scale: float) -> tuple[Any, Any]:
    """Attention and the logarithm of each row's sum, by ATen's kernel for CPUs. `mask` is added to scores."""
    found: tuple[Any, Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=mask, scale=scale
    )
    return found


def attend_backward_on_cpu(
    grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, mask: Any, scale: float
) -> tuple[Any, Any, Any]:
    """Gradients of queries, keys and values, by the same kernel."""
    found: tuple[Any, Any, Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, logsumexp, 0.0, False, attn_mask=mask, scale=scale
    )
    return found


def attend_by_flex(
    query: Any,
    key: Any,
    value: Any,
    mask_mod: Callable[..., Any],
    tables: Mapping[str, Any],
    buffers: Sequence[Any],
    scale: float,
) -> Any:
    """Attention of (batch, heads, queries, width) to keys and values where `mask_mod(b, h, q, k, *buffers)` is true.

    `tables` has the tensors of `TABLES`. Heads of keys may be fewer, and are then shared.
    """
    from torch.nn.attention.flex_attention import BlockMask, _apply_kernel_options

    mask = BlockMask(seq_lengths=(query.shape[2], key.shape[2]), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask_mod, **tables)
    options: Any = _apply_kernel_options(query, key, value, False, None)
    found: Any = flex_attention(query, key, value, _same_score, mask.as_tuple(), scale, options, (), tuple(buffers))
    return found[0]


def _same_score(score: Any, *_places: Any) -> Any:
    return score
