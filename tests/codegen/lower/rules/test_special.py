"""Special functions against eager: on both sides of every seam, at poles, at infinities, and outside their domain."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.lower.test_ops import BF16, F32, F64, I64, Cases, in_one_graph

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")
LINE = torch.linspace(-12, 12, 97)
EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, 7.9999, 8.0, 8.0001, 10.0, 0.5, 0.7, 0.7001, 30.0, INF, -INF, NAN, -3.0])


@pytest.mark.parametrize("name", ["i0", "special_i0e", "special_i1", "special_i1e", "digamma"])
@in_one_graph
def test_on_the_whole_line(name: str) -> Cases:
    op = getattr(aten, name).default
    for x in (LINE, EDGES, LINE.to(BF16), LINE.double(), EDGES.double(), torch.arange(5, dtype=I64)):
        yield op, x


BESSEL = ("modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1",
          "modified_bessel_i0", "spherical_bessel_j0")  # fmt: skip


@pytest.mark.parametrize("name", BESSEL)
@in_one_graph
def test_bessel_functions(name: str) -> Cases:
    op = getattr(aten, f"special_{name}").default
    for x in (LINE, EDGES, LINE.double(), EDGES.double(), torch.tensor([1e-8, 1.9999, 2.0, 2.0001])):
        yield op, x


@in_one_graph
def test_scaled_erfc() -> Cases:
    for dtype in (F32, F64):
        yield aten.special_erfcx.default, torch.linspace(-9, 60, 200).to(dtype)
        yield aten.special_erfcx.default, torch.cat([EDGES, torch.tensor([1e-30, 1e8, 1e30, -1e30])]).to(dtype)
    yield aten.special_erfcx.default, torch.arange(-3, 5)


@pytest.mark.parametrize("name", ["erfinv", "special_ndtri"])
@in_one_graph
def test_between_bounds(name: str) -> Cases:
    op = getattr(aten, name).default
    for dtype in (F32, F64) if name == "special_ndtri" else (F32, F64, BF16):
        yield op, torch.linspace(0.01, 0.99, 50).to(dtype)
        yield op, EDGES.to(dtype)
    yield op, torch.tensor([1e-6, 1e-20, 1e-35, 0.135, 0.136, 0.864, 0.865])


@pytest.mark.parametrize("order", [0, 1, 2, 5])
@in_one_graph
def test_polygamma(order: int) -> Cases:
    for x in (LINE[49:] + 0.1, LINE[:48] - 0.1, LINE.double() + 0.05, torch.tensor([1.0, 30.0, 1e6])):
        yield lambda x: aten.polygamma(order, x), x


@in_one_graph
def test_zeta() -> Cases:
    for dtype in (F32, F64):
        x, q = torch.linspace(1.1, 12, 40).to(dtype), torch.linspace(0.2, 20, 40).to(dtype)
        yield aten.special_zeta.default, x, q
        yield aten.special_zeta.default, EDGES.to(dtype)[:, None], EDGES.to(dtype)[None]
    yield lambda q: aten.special_zeta.self_scalar(3.0, q), torch.linspace(-5.3, 5, 40)
