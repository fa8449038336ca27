"""A compiled graph as data: all that a process needs to run it, and the same as JSON for the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcompile.collectives.contract import ProgramReport
from dcompile.ir.nodes import Bucket


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """Nothing in here depends on a rank, on parameter values, or on the graph's name within its model."""

    source: str
    """The host program: Python text that defines `make`."""
    constants: tuple[str, ...]
    """Nodes of the graph whose tensors, which its module holds, are inputs after the caller's."""
    buckets: tuple[Bucket, ...]
    arena_bytes: int
    kernels: Mapping[str, str]
    """Name of each kernel -> its key in the kernel cache."""
    report: ProgramReport
    """Counts, as far as they do not depend on what was in the cache."""
    mutated: tuple[int, ...] = ()
    """Positions of the inputs that the program writes."""
    device: str = "cpu"
    """The type of the devices that it runs on: where its arena lies, and what its kernels are launched by."""
    late_sizes: int = 0
    """How many sizes depend on elements of tensors. A recording would hold those of one call for ever."""
    regions: tuple[str, ...] = ()
    """Those of `constants` that are calls of what another compiler made: each process makes these anew."""


@dataclass(frozen=True, slots=True)
class Loadable:
    """A compiled graph with what belongs to this process: libraries on disk, tensors of the graph's own module."""

    graph: CompiledGraph
    libraries: Mapping[str, Path]
    constants: Mapping[str, Any]


def to_record(graph: CompiledGraph) -> dict[str, Any]:
    """As JSON can say it."""
    return dataclasses.asdict(graph)


def from_record(record: Mapping[str, Any]) -> CompiledGraph:
    """What `to_record` was given."""
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
