"""The table of all rules: ATen op to loops or views. An op without a rule is a library call."""

from __future__ import annotations

from dcompile.codegen.lower.rule import Rule
from dcompile.codegen.lower.rules import (
    avg_pool,
    concat,
    creation,
    embedding_backward,
    index_put,
    indexing,
    max_pool,
    padding,
    pointwise,
    random,
    reductions,
    scans,
    scatter,
    small_matmul,
    softmax_norms,
    special,
    views,
)

RULES: dict[str, Rule] = {
    **pointwise.RULES,
    **reductions.RULES,
    **softmax_norms.RULES,
    **scans.RULES,
    **views.RULES,
    **concat.RULES,
    **padding.RULES,
    **indexing.RULES,
    **scatter.RULES,
    **index_put.RULES,
    **embedding_backward.RULES,
    **avg_pool.RULES,
    **small_matmul.RULES,
    **max_pool.RULES,
    **special.RULES,
    **creation.RULES,
    **random.RULES,
}
PRODUCTS = small_matmul.RULES
"""Rules of matmuls, of which the library computes most."""
