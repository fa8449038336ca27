"""Grouped-query attention on a key-value cache, without copies of keys and values.

If there is a mask, as with a cache of fixed size, transformers repeats keys and values for each head of the queries. In
every layer of every step, these copies are written and read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "grouped_queries"


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with queries [batch, heads, n, size] to keys and values [batch, groups, slots, size].

    `mask` is [batch, 1, n, slots]. The queries of a group become queries of one head. Returns [batch, n, heads, size],
    and no weights.
    """
    batch, heads, count, size = query.shape
    groups, slots = key.shape[1:3]
    repeats = heads // groups
    folded = query.reshape(batch, groups, repeats * count, size)
    if count > 1:
        attention_mask = attention_mask[:, :, None].expand(batch, 1, repeats, count, slots).flatten(2, 3)
    result = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return result.reshape(batch, heads, count, value.shape[-1]).transpose(1, 2), None


def register() -> str:
    """Register this attention with transformers; return its name for `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, grouped_attention)
    return NAME
