"""Special functions against eager: on both sides of every seam, at poles, at infinities, and outside their domain."""

from __future__ import annotations

import torch

import dcompile
from tests.codegen.lower.test_ops import BF16, F32, F64, I64, Cases, check, in_one_graph

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")
LINE = torch.linspace(-12, 12, 97)
EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, 7.9999, 8.0, 8.0001, 10.0, 0.5, 0.7, 0.7001, 30.0, INF, -INF, NAN, -3.0])


@in_one_graph
def test_digamma_on_the_whole_line() -> Cases:
    for x in (LINE, EDGES, LINE.to(BF16), LINE.double(), EDGES.double(), torch.arange(5, dtype=I64)):
        yield aten.digamma.default, x


@in_one_graph
def test_erfinv_between_its_bounds() -> Cases:
    for dtype in (F32, F64, BF16):
        yield aten.erfinv.default, torch.linspace(0.01, 0.99, 50).to(dtype)
        yield aten.erfinv.default, EDGES.to(dtype)
    yield aten.erfinv.default, torch.tensor([1e-6, 1e-20, 1e-35, 0.135, 0.136, 0.864, 0.865])


def rare(x: torch.Tensor) -> torch.Tensor:
    return torch.special.bessel_j0(x * 2) + torch.polygamma(1, x.abs() + 1) + torch.special.zeta(x.abs() + 2, 0.5)


def test_rare_functions_are_left_to_aten() -> None:
    check(rare, LINE, library=3)


def test_rare_functions_are_counted_as_fallbacks() -> None:
    compiled = dcompile.compile(rare)
    torch.testing.assert_close(compiled(LINE), rare(LINE))
    assert dcompile.receipt(compiled).fallbacks == {
        "aten.special_bessel_j0.default": 1, "aten.polygamma.default": 1, "aten.special_zeta.other_scalar": 1
    }  # fmt: skip
