"""Names of kernels: the names of their main ops, and a digest of their text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from dcompile.ir.nodes import Apply, Loop, Reduce, Scan
from dcompile.ir.ops import OPS

MAX_WORDS = 4
"""Ops in a name: those that characterize the kernel best."""


def describe_loop(loop: Loop) -> str:
    """Return a loop's reductions and costliest ops, in order of computation: `exp_sum_div`.

    A loop that computes nothing is a `copy`. Equal loops have equal names, whatever modules they came from.
    """
    words: dict[str, float] = {}
    for value in loop.body:
        match value:
            case Reduce(op=op) | Scan(op=op):
                words[op] = math.inf
            case Apply(op=op) if op != "cast":
                words.setdefault(op, OPS[op].cost)
            case _:
                pass
    for store in loop.stores:
        if store.mode != "set":
            words[store.mode] = math.inf
    kept = sorted(words, key=lambda word: -words[word])[:MAX_WORDS]
    return _joined([word for word in words if word in kept]) or "copy"


def _joined(words: Sequence[str]) -> str:
    return "_".join(re.sub(r"\W+", "", word) for word in words)


def kernel_name(described: str, digest: str) -> str:
    """Return the name of a kernel. `digest`: hexadecimal digits of its text, so that equal names have equal texts."""
    return f"fused_{described}_{digest[:16]}"
