"""Measured times of regions that another compiler has compiled: once for each, kept on disk, the same on all ranks.

The first rank to name a time in the group's store decides. So ranks schedule by the same numbers, whatever their own
measurements or disks say.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch

from dcompile import compat
from dcompile.collectives.contract import TraceStore
from dcompile.ir.index import element_span
from dcompile.runtime.coordination.heartbeat import PeerCoordinator, SingleProcess

MAX_RUNS, MAX_SECONDS = 5, 0.05
"""Runs after the first one, and seconds after which no further one begins."""
MAX_MEMORY_SHARE = 0.5
"""Share of the free memory that inputs and results of a run may take twice over: what lies between takes some, too."""
NOT_MEASURED = "not measured"
"""What ranks agree on and disks keep where a region was not measured; its time is estimated."""

Layout: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], torch.dtype]"
"""(shape, strides, dtype) of an input."""


class RegionTimes:
    """Times of regions by key. `kept`: where they are kept, if anywhere. `measures`: whether new ones may be run."""

    def __init__(self, kept: TraceStore | None, peers: SingleProcess, measures: bool = True) -> None:
        self._kept, self._peers, self._measures = kept, peers, measures

    def time_us(self, key: str, measure: Callable[[], float | None]) -> float | None:
        """Return a region's time in microseconds, which `measure` finds out if nobody knows it; None to estimate it.

        All ranks of the group get the same answer.
        """
        agreed = self._published(key) or self._publish(key, self._own(key, measure))
        if self._kept is not None and self._kept.find_trace(key) != agreed:
            self._kept.put_trace(key, agreed)
        return _number(agreed)

    def _own(self, key: str, measure: Callable[[], float | None]) -> str:
        found = None if self._kept is None else self._kept.find_trace(key)
        if found is not None:
            return found
        measured = measure() if self._measures else None
        return NOT_MEASURED if measured is None else f"{measured:.2f}"

    def _published(self, key: str) -> str:
        """Text that a rank has put into the store; empty if none has."""
        if not isinstance(self._peers, PeerCoordinator) or not self._peers.store.check([_place(key)]):
            return ""
        text: str = self._peers.store.get(_place(key)).decode()
        return text

    def _publish(self, key: str, text: str) -> str:
        """Put a text into the store, unless another rank has; return what is there."""
        if not isinstance(self._peers, PeerCoordinator):
            return text
        return self._peers.store.compare_set(_place(key), "", text).decode() or text


def _place(key: str) -> str:
    return f"region_time/{key}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def measure_us(
    run: Callable[[list[Any]], Any], inputs: Sequence[Layout], result_bytes: int, device: torch.device
) -> float | None:
    """Return the median time of a call in microseconds, with random inputs; None if it fails or has no room."""
    with ExitStack() as stack:
        for context in (compat.inductor.outside_tracing(), compat.tensors.real_tensors(), torch.no_grad()):
            stack.enter_context(context)
        stack.enter_context(torch.autocast(device.type, enabled=False))
        nbytes = sum(element_span(shape, strides) * dtype.itemsize for shape, strides, dtype in inputs) + result_bytes
        if 2 * nbytes > MAX_MEMORY_SHARE * free_bytes(device):
            return None
        try:
            draw = torch.Generator(device).manual_seed(0)  # not the user's generator
            given = [random_tensor(layout, draw) for layout in inputs]
            run([*given])  # compilers finish their work in the first call
            return statistics.median(_seconds(run, given, device)) * 1e6
        except Exception:  # the call itself will report it
            return None
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _seconds(run: Callable[[list[Any]], Any], given: Sequence[Any], device: torch.device) -> list[float]:
    taken: list[float] = []
    while len(taken) < MAX_RUNS and sum(taken) < MAX_SECONDS:
        _synchronize(device)
        began = time.perf_counter()
        run([*given])
        _synchronize(device)
        taken.append(time.perf_counter() - began)
    return taken


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_tensor(layout: Layout, draw: torch.Generator) -> torch.Tensor:
    """Return a tensor of this layout: random numbers, or zeros where they are no floating point numbers."""
    shape, strides, dtype = layout
    extent, device = element_span(shape, strides), draw.device
    if dtype.is_floating_point:
        memory = torch.randn(extent, device=device, generator=draw).to(dtype)
    else:
        memory = torch.zeros(extent, dtype=dtype, device=device)
    return memory.as_strided(shape, strides)


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory that are free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
