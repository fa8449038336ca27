"""Bessel's and Airy's functions against eager: on both sides of every seam, at 0, at infinities, beyond the domain."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.lower.rules.test_special import EDGES, LINE
from tests.codegen.lower.test_ops import F32, F64, I64, Cases, in_one_graph, layouts

NAMES = ("bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "airy_ai")
SEAMS = torch.tensor([5.0, 5.0001, -5.0, 1e-5, 9e-6, 1e-30, 2.09, 2.0899, -2.09, -2.0901, 8.32, 8.33, 103.89, 104.0])
FAR = torch.tensor([1e3, -1e3, 12345.0, -30.0, 400.0])


@pytest.mark.parametrize("name", NAMES)
@in_one_graph
def test_on_the_whole_line(name: str) -> Cases:
    op = getattr(torch.ops.aten, f"special_{name}").default
    for x in (LINE, EDGES, SEAMS, FAR):
        yield op, x
        yield op, x.double()
    yield op, torch.arange(-3, 7, dtype=I64)
    for dtype in (F32, F64):
        for x in layouts(dtype):
            yield op, x
