"""Compiled graph as data: everything that a process needs to run it, and its JSON form for the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcompile.collectives.contract import ProgramReport
from dcompile.ir.buffers import Bucket


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """Compiled graph. It does not depend on the rank, on parameter values, or on the graph's name within its model."""

    source: str
    """Host program: Python text that defines `make`."""
    constants: tuple[str, ...]
    """Names of the graph's nodes whose tensors the graph's module holds. They are inputs after the caller's."""
    buckets: tuple[Bucket, ...]
    arena_bytes: int
    kernels: Mapping[str, str]
    """Name of each kernel -> its key in the kernel cache."""
    report: ProgramReport
    """Counts that do not depend on the content of the cache."""
    mutated: tuple[int, ...] = ()
    """Positions of the inputs that the program writes."""
    device: str = "cpu"
    """Type of its devices: the arena is allocated there, and it selects the way of launching kernels."""
    late_sizes: int = 0
    """Number of sizes that depend on elements of tensors. A recording would freeze those of one call."""
    regions: tuple[str, ...] = ()
    """Members of `constants` that are calls of another compiler's code. Each process makes these anew."""


@dataclass(frozen=True, slots=True)
class Loadable:
    """Compiled graph with data of this process: libraries on disk, and tensors of the graph's own module."""

    graph: CompiledGraph
    libraries: Mapping[str, Path]
    constants: Mapping[str, Any]


def to_record(graph: CompiledGraph) -> dict[str, Any]:
    """Convert to JSON types."""
    return dataclasses.asdict(graph)


def from_record(record: Mapping[str, Any]) -> CompiledGraph:
    """Inverse of `to_record`."""
    return CompiledGraph(
        source=record["source"],
        constants=tuple(record["constants"]),
        buckets=tuple(Bucket(**{name: _frozen(value) for name, value in b.items()}) for b in record["buckets"]),
        arena_bytes=record["arena_bytes"],
        kernels=record["kernels"],
        report=ProgramReport(**{**record["report"], "schedule": [tuple(row) for row in record["report"]["schedule"]]}),
        mutated=tuple(record["mutated"]),
        device=record["device"],
        late_sizes=record["late_sizes"],
        regions=tuple(record["regions"]),
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
