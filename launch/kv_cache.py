"""A key-value cache of fixed size: prompts of any length and all new tokens use the same graphs.

All sequences of a batch use the same slots. Each slot has its token's position in each sequence. So no token attends to
padding, at the left of short prompts, or to slots that an earlier conversation has left.
"""

from __future__ import annotations

from typing import Any

import torch
from errors import UserError
from transformers.cache_utils import Cache, StaticLayer

FREE = 2**31 - 1
"""Position of a slot without a token: later than all tokens, so no query attends to it."""


class FixedCache(Cache):
    """Keys and values [batch, heads of this rank, slots, head size] of each layer, allocated once.

    Positions of tokens are [batch, n], -1 where there is padding.
    """

    def __init__(
        self, config: Any, batch: int, slots: int, heads: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers = config.num_hidden_layers
        super().__init__(layers=[StaticLayer(max_cache_len=slots) for _ in range(layers)])
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (batch, heads, slots, head_size)
        self.slots, self.filled = slots, 0
        self.stored_keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.stored_values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.slot_positions = torch.full((batch, slots), FREE, device=device)
        self.next_slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.next_positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.all_slots = torch.arange(slots, device=device)
        for tensor in (*self.stored_keys, *self.stored_values, self.slot_positions, self.next_slot,
                       self.next_positions, self.all_slots):  # fmt: skip
            torch._dynamo.mark_static_address(tensor)  # CUDA graphs need not copy it

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys and values of all layers on this rank."""
        return sum(tensor.nbytes for tensor in (*self.stored_keys, *self.stored_values))

    def reserve(self, count: int, what: str) -> None:
        """Reserve `count` slots for `what`, in the host's count. Raises UserError if fewer are free."""
        if self.filled + count > self.slots:
            raise UserError(
                f"the key-value cache is full: {what} needs {count} slots, "
                f"{self.slots - self.filled} of {self.slots} are free; raise --cache-len"
            )
        self.filled += count

    def clear(self) -> None:
        """Clear all positions. Keys and values stay in memory, but no query attends to them."""
        self.filled = 0
        self.slot_positions.fill_(FREE)
        self.next_slot.zero_()
        self.next_positions.zero_()

    def place(self, positions: torch.Tensor) -> torch.Tensor:
        """Assign the next n slots to tokens with these positions; return the slots [n]."""
        slots = self.next_slot + self.all_slots[: positions.shape[1]]
        self.slot_positions.index_copy_(1, slots, torch.where(positions < 0, FREE, positions))
        return slots

    def mask(self, positions: torch.Tensor, slots: torch.Tensor, window: int | None) -> torch.Tensor:
        """Return the attention mask [batch, 1, n, slots]: a query's past, at most `window` positions, and itself.

        Padding attends only to itself: a row without any slot would be NaN.
        """
        past = self.slot_positions[:, None, :] <= positions[:, :, None]
        if window is not None:
            past = past & (self.slot_positions[:, None, :] > positions[:, :, None] - window)
        itself = self.all_slots[None, :] == slots[:, None]
        return (past | itself)[:, None]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Store an attention layer's new keys and values, and return all of the layer's."""
        slots = self.next_slot + self.all_slots[: keys.shape[2]]
        self.stored_keys[layer_idx].index_copy_(2, slots, keys)
        self.stored_values[layer_idx].index_copy_(2, slots, values)
        return self.stored_keys[layer_idx], self.stored_values[layer_idx]

    def advance(self, count: int) -> None:
        """Advance to the next free slot after `count` new ones; called last in a step."""
        self.next_slot.add_(count)
