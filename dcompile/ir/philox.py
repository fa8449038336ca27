"""Philox4x32-10: 32 random bits as a function of a key and a counter, without state between calls.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011. An element's numbers depend on three
things. They are the call's key, the draw (which random operation of the graph), and the element's row-major position.
They do not depend on threads, vector width or fusion, and a backward can recompute them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)


def philox(key: Any, position: Any, draw: Any) -> Any:
    """Word `draw % 4` of the block for counter (position, draw // 4) under `key`. int64 arrays; the bits as int32.

    The counter's four words are position's low and high half, and the two halves of draw // 4.
    """
    key, position, draw = (np.asarray(x, np.int64) for x in (key, position, draw))
    block, word = (draw >> 2).astype(np.uint64), draw & 3
    position, key = position.astype(np.uint64), key.astype(np.uint64)
    shift = np.uint64(32)
    counter = [position & LOW, position >> shift, block & LOW, block >> shift]
    words = rounds(counter, [key & LOW, key >> shift])
    chosen = np.choose(
        np.broadcast_to(word, np.broadcast_shapes(*(w.shape for w in words))), np.broadcast_arrays(*words)
    )
    return chosen.astype(np.uint32).view(np.int32)


def rounds(counter: list[Any], key: list[Any]) -> list[Any]:
    """Four words of a block, as 32-bit words in uint64 arrays."""
    a, b, c, d = counter
    k0, k1 = key
    shift = np.uint64(32)
    for _ in range(ROUNDS):
        first, second = np.uint64(MULTIPLIERS[0]) * a, np.uint64(MULTIPLIERS[1]) * c
        a, b, c, d = (second >> shift) ^ b ^ k0, second & LOW, (first >> shift) ^ d ^ k1, first & LOW
        k0, k1 = (k0 + np.uint64(INCREMENTS[0])) & LOW, (k1 + np.uint64(INCREMENTS[1])) & LOW
    return [a, b, c, d]
