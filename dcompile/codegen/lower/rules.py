"""The table of all rules: ATen op to loops or views. An op that is not here is a library call."""

from __future__ import annotations

from dcompile.codegen.lower import (
    bessel,
    creation,
    embedding,
    indexing,
    pads,
    pointwise,
    pooling,
    products,
    randoms,
    reductions,
    rows,
    scans,
    scatter,
    shapes,
    special,
    views,
    windows,
)
from dcompile.codegen.lower.rule import Rule

RULES: dict[str, Rule] = {
    **pointwise.RULES,
    **reductions.RULES,
    **rows.RULES,
    **scans.RULES,
    **views.RULES,
    **shapes.RULES,
    **pads.RULES,
    **indexing.RULES,
    **scatter.RULES,
    **embedding.RULES,
    **pooling.RULES,
    **products.RULES,
    **windows.RULES,
    **special.RULES,
    **bessel.RULES,
    **creation.RULES,
    **randoms.RULES,
}
