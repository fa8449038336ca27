"""Compile computation between collectives with another compiler: split the graph there, and insert calls."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcompile import compat
from dcompile.codegen.lower import all_aten
from dcompile.codegen.lower.regions import Region, RegionPlan, can_compile_in_region, with_calls
from dcompile.codegen.schedule.order.cost_model import fused_seconds
from dcompile.collectives.contract import Request
from dcompile.collectives.region_cuts import region_cuts
from dcompile.compat.process_state import precision_settings
from dcompile.compat.sizes import guard_count
from dcompile.config import Config
from dcompile.device_traits import HOST, traits_of
from dcompile.kernel_backends.compile_region import Compiled, Layout, RegionCall, compile_region, region_name
from dcompile.kernel_backends.names import KernelBackend
from dcompile.logs import log
from dcompile.runtime.cache.key import NotCacheable, environment, graph_text
from dcompile.runtime.measure.calibration import device_name
from dcompile.runtime.measure.region_times import RegionTimes, measure_us


@dataclass(frozen=True, slots=True)
class RegionResult:
    """Graph with calls in place of its regions, and refusals of other regions."""

    gm: Any
    calls: Mapping[int, RegionCall]
    refused: Mapping[str, int]
    """Reason -> number of regions."""

    @property
    def names(self) -> tuple[str, ...]:
        """Nodes that represent regions; the program gets them as constants."""
        return tuple(call.__name__ for call in self.calls.values())


class RegionCompiler:
    """Splits graphs into regions and compiles them. Equal regions, as those of equal layers, share one result."""

    def __init__(self, config: Config, backend: KernelBackend) -> None:
        self.config, self.backend = config, backend
        self._made: dict[str, Compiled | str] = {}
        self.guards = 0
        """Total number of guards on sizes that the compiler has added. A program from the cache makes it add them
        again.
        """

    def compile(self, gm: Any, request: Request) -> RegionResult:
        """Replace the graph's regions by calls of compiled code."""
        plan, regions = self._cut(gm, request)
        calls: dict[int, RegionCall] = {}
        refused: Counter[str] = Counter()
        for region in regions:
            cost_us = self._cost_us(region, request)  # first: a compiler may change the graph that it gets
            found = self._made_of(region, request)
            if isinstance(found, str):
                refused[found] += 1
                what = f"{request.name}: region {region.number}, {len(region.nodes)} operations, left: {found}"
                log(self.config, "kernels", logging.INFO, what)
            else:
                calls[region.number] = self._call(region, request, found, cost_us)
        text = f"{request.name}: {len(calls)} of {len(regions)} regions by {self.backend}"
        text += f", with {len(request.region_us)} measured times" if request.region_us else ""
        log(self.config, "kernels", logging.INFO, text)
        return RegionResult(with_calls(plan, regions, calls), calls, refused)

    def measure(self, gm: Any, request: Request, times: RegionTimes) -> tuple[tuple[str, float], ...]:
        """Return (key, microseconds of a call) of each region that can be measured, for `Request.region_us`.

        Regions with symbolic sizes or refused ones have none. Equal regions have one key.
        """
        found: dict[str, float | None] = {}
        for region in self._cut(gm, request)[1]:
            key = self._time_key(region, request)
            if key is not None and key not in found:
                found[key] = times.time_us(key, functools.partial(self._measured_us, region, request))
        return tuple(sorted((key, us) for key, us in found.items() if us is not None))

    def load(self, gm: Any, request: Request, names: Collection[str]) -> dict[str, RegionCall] | None:
        """Compile the regions of a program from the cache again. None if the compiler refuses one now."""
        _, regions = self._cut(gm, request)
        found: dict[str, RegionCall] = {}
        for region in regions:
            if region_name(region.number) in names:
                made = self._made_of(region, request)
                if isinstance(made, str):
                    return None
                found[region_name(region.number)] = self._call(region, request, made)
        return found if found.keys() == set(names) else None

    def _cut(self, gm: Any, request: Request) -> tuple[RegionPlan, list[Region]]:
        row = self.backend.row
        plan = RegionPlan(gm, lambda node: can_compile_in_region(node, row.custom_ops))
        places = plan.places()
        cuts = region_cuts(request, places.first_use, places.ready)
        return plan, [region for region in plan.regions((cuts.gathers, cuts.reductions)) if region.outputs]

    def _cost_us(self, region: Region, request: Request) -> float:
        """Time of a region in microseconds: measured if it was, else estimated by the cost model."""
        measured = dict(request.region_us).get(self._time_key(region, request) or "") if request.region_us else None
        return _estimate_us(region, request) if measured is None else measured

    def _time_key(self, region: Region, request: Request) -> str | None:
        """Name of a region's measured time, the same on all ranks of a kind; None if there is none."""
        text = _text_of(region.graph)
        if text is None:
            return None
        around = (*(f"{what} {value}" for what, value in environment().items()), device_name(_device(region.graph)))
        lines = ("time of a region", f"{self.backend}", f"{request.kind != 'inference'}", *around, text)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _measured_us(self, region: Region, request: Request) -> float | None:
        layouts = [_layout(node.meta["val"]) for node in region.graph.graph.find_nodes(op="placeholder")]
        results = sum(node.meta["val"].nbytes for node in region.outputs)
        device = _device(region.graph)
        made = self._made_of(region, request)
        if isinstance(made, str):
            return None
        return measure_us(made, [layout for layout in layouts if layout is not None], results, device)

    def _made_of(self, region: Region, request: Request) -> Compiled | str:
        """Compiled code of a region, or the reason for a refusal; compiled once for all equal regions."""
        text = _text_of(region.graph)
        if text is None:
            return self._ask(region, request)
        text = f"{_device(region.graph)}\n{text}"  # code may be for one of several GPUs
        key = hashlib.sha256(f"{request.kind != 'inference'}\n{text}".encode()).hexdigest()
        if key not in self._made:
            self._made[key] = self._ask(region, request)
        return self._made[key]

    def _ask(self, region: Region, request: Request) -> Compiled | str:
        before = guard_count(region.graph)
        made = compile_region(self.backend, region.graph, request.kind != "inference")
        added = guard_count(region.graph) - before
        self.guards += added
        if added and request.kind == "backward":  # its forward has run already, so nothing would check them
            return "it asks for guards on symbolic sizes"
        return made

    def _call(self, region: Region, request: Request, made: Compiled, cost_us: float = 0.0) -> RegionCall:
        what = f"region {region.number} of {request.name}, {len(region.nodes)} operations, by {self.backend.name}"
        layouts = [_layout(node.meta["val"]) for node in region.outputs]
        return RegionCall(region.number, self.backend.name, made, layouts, what, cost_us)


def _estimate_us(region: Region, request: Request) -> float:
    """Estimated time of a region by the cost model, in microseconds."""
    program, _ = all_aten.lower(region.graph, f"region{region.number}")
    return round(fused_seconds(program, request.figures) * 1e6, 3)


def _device(gm: Any) -> torch.device:
    """Device that a region computes on: that of its first tensor which is not on the host, if there is one."""
    values = (node.meta.get("val") for node in gm.graph.nodes)
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return min(devices, key=lambda device: traits_of(device.type).is_host, default=torch.device(HOST))


def _layout(value: torch.Tensor) -> Layout | None:
    """Required layout of a result; None if it depends on the call."""
    if not compat.sizes.is_fixed(value):
        return None
    return tuple(value.shape), tuple(value.stride()), value.dtype


def _text_of(gm: Any) -> str | None:
    """Text that equal regions share; None if some part of a region has no text.

    None with symbolic sizes, too: guards that a compiler adds for those belong to one graph only.
    """
    if compat.sizes.symbols_of(node.meta.get("val") for node in gm.graph.nodes):
        return None
    settings = (
        torch.get_num_threads(),
        precision_settings(),
        torch.are_deterministic_algorithms_enabled(),
    )
    values = (node.meta.get("val") for node in gm.graph.nodes)
    devices = [value.device.type for value in values if isinstance(value, torch.Tensor)]
    try:
        return "\n".join((*map(str, settings), *devices, *graph_text(gm)))
    except NotCacheable:
        return None
