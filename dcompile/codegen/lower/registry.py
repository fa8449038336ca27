"""The table of all rules: ATen op to loops or views. An op without a rule is a library call.

What AOTAutograd and its partitioner need to know of an op follows from its row.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from dcompile.codegen.lower.rule import Rule
from dcompile.codegen.lower.rules import (
    concat,
    creation,
    indexing,
    pointwise,
    pooling,
    reductions,
    scatter,
    small_matmul,
    special,
    views,
)
from dcompile.ir.gemm import MATMUL_OPS
from dcompile.ir.library_ops import LIBRARY_OPS

MODULES = (concat, creation, indexing, pointwise, pooling, reductions, scatter, small_matmul, special, views)
RULES: dict[str, Rule] = {name: rule for module in MODULES for name, rule in module.RULES.items()}
PRODUCTS = small_matmul.RULES
"""Rules of matmuls, of which the library computes most."""


@lru_cache(maxsize=1)
def fusible_ops() -> tuple[frozenset[Any], frozenset[Any]]:
    """Return (ops that become part of a loop, those of them that may be recomputed), as overload packets.

    They are for the partitioner. torch's own list describes its own compiler. Ops missing there count as library calls,
    so the values that they read in the backward are saved, since they "must be in memory anyway".
    """
    loops = {name: rule for name, rule in RULES.items() if rule.kind != "memory"}
    return _packets(loops), _packets(name for name, rule in loops.items() if rule.recompute)


def whole_ops() -> frozenset[Any]:
    """Return the ops that torch's decompositions must leave whole, as overload packets.

    A rule makes one loop of them, out of fewer nodes, or they are the library's.
    """
    ruled = (name for name, rule in RULES.items() if not rule.decomposed)
    return _packets((*ruled, *LIBRARY_OPS, *MATMUL_OPS))


def _packets(names: Iterable[str]) -> frozenset[Any]:
    """Return the overload packets that this torch has; those of `prims` come from decompositions."""
    found = (name.split(".") for name in names if not name.startswith("prims."))
    packets = (getattr(getattr(torch.ops, namespace), op, None) for namespace, op, *_ in found)
    return frozenset(packet for packet in packets if packet is not None)
