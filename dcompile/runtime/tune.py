"""Measures which algorithm of cuBLASLt's multiplies fastest, on a GPU that is as warm as a training step makes it."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Mapping

import torch

from dcompile.compat.tensors import real_tensors
from dcompile.ir.geometry import Algorithm, Geometry
from dcompile.runtime.blas import Product, Products

GLANCE_S, LOOK_S = 0.02, 0.06
"""How long an algorithm runs at a time: first all of them, then the best."""
GLANCES, LOOKS = 2, 5
BEST = 4
GAIN = 0.98
"""Part of ATen's time that an algorithm must not exceed to take its place: less is chance."""


def choose(geometries: Iterable[Geometry], device: torch.device) -> dict[Geometry, Algorithm]:
    """The algorithm for each geometry for which one is faster than ATen's. Takes some two seconds for each."""
    with real_tensors(), torch.cuda.device(device), torch.no_grad(), torch.autocast("cuda", enabled=False):
        found = {geometry: fastest(geometry, device) for geometry in geometries}
    torch.cuda.empty_cache()
    return {geometry: algorithm for geometry, algorithm in found.items() if algorithm is not None}


def fastest(geometry: Geometry, device: torch.device) -> Algorithm | None:
    """The fastest algorithm, or None where ATen's own is as fast."""
    products = Products(geometry, torch.cuda.current_device())
    left, right, out = operands(geometry, device)
    calls: dict[Algorithm, Callable[[], object]] = {(): functools.partial(torch.mm, left, right, out=out)}
    for algorithm in products.algorithms():
        calls[algorithm] = functools.partial(Product(products, algorithm), left, right, out)
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    glance = medians(calls, GLANCES, GLANCE_S)
    best = sorted(calls, key=lambda algorithm: glance[algorithm])[:BEST]
    look = medians({algorithm: calls[algorithm] for algorithm in dict.fromkeys(((), *best))}, LOOKS, LOOK_S)
    chosen = min(look, key=lambda algorithm: look[algorithm])
    return chosen if chosen and look[chosen] <= GAIN * look[()] else None


def operands(geometry: Geometry, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """left, right and out of a geometry. Numbers are random: zeros take less power, and so less time."""
    g, draw = geometry, torch.Generator(device).manual_seed(0)  # not the user's
    left = _matrix(g.dtype, g.n, g.k, g.turned_b, g.lead_b, draw)
    right = _matrix(g.dtype, g.k, g.m, g.turned_a, g.lead_a, draw)
    return left, right, _matrix(g.dtype, g.n, g.m, False, g.lead_out, draw)


def _matrix(dtype: str, rows: int, columns: int, turned: bool, lead: int, draw: torch.Generator) -> torch.Tensor:
    size = (columns if turned else rows, lead)
    memory = torch.randn(size, device=draw.device, generator=draw).to(getattr(torch, dtype))
    return memory[:, :rows].t() if turned else memory[:, :columns]


def medians(calls: Mapping[Algorithm, Callable[[], object]], rounds: int, seconds: float) -> dict[Algorithm, float]:
    """Milliseconds of each, from runs in turn."""
    taken: dict[Algorithm, list[float]] = {algorithm: [] for algorithm in calls}
    order = [*calls]
    for turn in range(rounds):
        for place in range(len(order)):
            algorithm = order[(turn + place) % len(order)]
            taken[algorithm].append(_time(calls[algorithm], seconds))
    return {algorithm: statistics.median(times) for algorithm, times in taken.items()}


def _time(call: Callable[[], object], seconds: float) -> float:
    """Milliseconds of one call, over as many as fill so many seconds."""
    count = max(3, round(seconds * 1e3 / max(_run(call, 3), 1e-3)))
    return _run(call, count)


def _run(call: Callable[[], object], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count
