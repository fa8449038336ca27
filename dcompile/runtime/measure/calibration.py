"""Machine figures: measured on request, stored in the cache directory, and taken from rank 0 on every rank."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcompile.compat.groups import group_store
from dcompile.config import Config
from dcompile.errors import OptionError
from dcompile.machine_model import Figures, Link, from_record, round_figures, table_figures, to_record
from dcompile.runtime.cache.disk import KernelCache

TIMEOUT_S = 60
COMMAND = "torchrun --nproc-per-node N -m dcompile.calibrate"


def device_name(device: torch.device) -> str:
    """Name of a device in the table and in files."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def figures_for(config: Config) -> Callable[[Any, Any], Figures]:
    """Make the function (device, process group or None) -> figures for `config.figures`; equal on all its ranks.

    It measures nothing. It raises OptionError on all ranks if measured figures are requested and rank 0 has none.
    """
    known: dict[tuple[str, int], Figures] = {}

    def figures(device: torch.device, group: Any) -> Figures:
        name = device_name(device)
        if config.figures == "table":
            return table_figures(name)
        if (name, id(group)) not in known:
            store, rank = (None, 0) if group is None else (group_store(group), dist.get_rank(group))
            known[name, id(group)] = agree_on_figures(store, rank, name, KernelCache.open(config).directory)
        return known[name, id(group)]

    return figures


def agree_on_figures(store: Any, rank: int, name: str, directory: Path) -> Figures:
    """Figures that rank 0 has stored for this device. Raises OptionError on every rank if it has none."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps one store over restarts
    key = f"dcompile/{attempt}/figures/{name}"
    if rank == 0:
        said = _read_figures(directory, name)
        if store is not None:
            store.set(key, json.dumps(said))
    else:
        try:
            store.wait([key], timedelta(seconds=TIMEOUT_S))
        except RuntimeError as error:  # the store's timeout is a DistStoreError
            raise OptionError(
                f"dcompile: rank {rank} waited {TIMEOUT_S} s for rank 0 to say what this machine can do "
                "(figures='measured'); rank 0 does not run this step"
            ) from error
        said = json.loads(store.get(key))
    if "error" in said:
        raise OptionError(said["error"])
    return from_record(said)


def _read_figures(directory: Path, name: str) -> Mapping[str, Any]:
    """Stored record of a device's figures, or {"error": reason}."""
    path = _path(directory, name)
    try:
        record: Mapping[str, Any] = json.loads(path.read_text())
        from_record(record)
    except FileNotFoundError:
        return {"error": f"dcompile: figures='measured', but {path} is not there; run {COMMAND}"}
    except (OSError, ValueError, TypeError) as error:
        return {"error": f"dcompile: {path} cannot be used: {error}; run {COMMAND} again"}
    return record


def _path(directory: Path, name: str) -> Path:
    return directory / f"figures-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"


def keep(figures: Figures, name: str, directory: Path) -> Path:
    """Write figures to the cache directory by rename, readable by their owner only."""
    handle, temporary = tempfile.mkstemp(prefix="tmp-", dir=directory)  # of mode 0600
    with os.fdopen(handle, "w") as file:
        json.dump(to_record(figures), file)
    return Path(temporary).rename(_path(directory, name))


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(device: torch.device, group: Any = None) -> Figures:
    """Measure memory, GEMMs, copies to and from host memory and, in a group, all-reduces.

    All ranks of the group call this together. Takes a fifth of a second. Figures that are not measured come from the
    table; all are rounded to steps of 19 %.
    """
    table = table_figures(device_name(device))
    gpu = device.type == "cuda"
    source = torch.ones((256 if gpu else 16) << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source), device)
    size = 4096 if gpu else 512
    tflops = []
    for dtype, rate in table.tflops:
        if dtype in ("float32", "bfloat16"):
            matrix = torch.ones((size, size), dtype=getattr(torch, dtype), device=device)
            rate = 2 * size**3 / _seconds(partial(torch.mm, matrix, matrix), device) / 1e12
        tflops.append((dtype, rate))
    pinned = torch.empty_like(source, device="cpu", pin_memory=gpu)
    out, back = (_seconds(run, device) for run in (lambda: pinned.copy_(source), lambda: target.copy_(pinned)))
    found = replace(
        table,
        name="measured",
        memory_gbs=2 * source.nbytes / copy / 1e9,
        tflops=tuple(tflops),
        host_gbs=source.nbytes / max(out, back) / 1e9,
    )
    if group is not None and dist.get_world_size(group) > 1:
        found = replace(found, links=(_link(device, group),), network=None)
    return round_figures(found)


def _link(device: torch.device, group: Any) -> Link:
    """Link speed and latency from a small and a large all-reduce over the whole group."""
    ranks = dist.get_world_size(group)
    small = torch.zeros(256, device=device)
    large = torch.zeros((16 if device.type == "cuda" else 1) << 20, device=device)
    latency, whole = (_seconds(partial(dist.all_reduce, t, group=group), device) for t in (small, large))
    traffic = 2 * (ranks - 1) / ranks * large.nbytes
    return Link(1 << 20, gbs=traffic / max(whole - latency, 1e-6) / 1e9, latency_us=latency * 1e6)


def _seconds(run: Callable[[], object], device: torch.device, times: int = 4) -> float:
    """Seconds of the fastest of a few runs, without the first."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])
