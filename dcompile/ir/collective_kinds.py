"""The table of collective kinds: every fact about a kind that passes, emitters, run time and reports ask for.

Copies between a device and host memory are kinds, too. One rank does them alone, but they are scheduled alike: each has
a start, a duration on a link of its own, and a wait.

Code that differs for each kind (calls of the run time, advice of a report) matches on the kind without a catch-all.
mypy then names the places that a new kind lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

PlannedKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter"]
"""Kinds that dcompile plans itself, on buckets. The model's code may use them, too."""
HostCopyKind: TypeAlias = Literal["offload", "load"]
"""offload: to host memory; load: from there."""
CollectiveKind: TypeAlias = PlannedKind | Literal["all_to_all", "broadcast"] | HostCopyKind
ResultSize: TypeAlias = Literal["same", "gathered", "part", "splits", "copy"]
"""Size of a result relative to the operand: equal, in its place; times the ranks; divided by the ranks; by its split
sizes; equal, in other memory."""
HOST_LINK = "host_link"
"""Stands for a process group in copies to and from host memory. Its lane is one stream, so they run in their order."""


@dataclass(frozen=True, slots=True)
class BucketTraits:
    """Traits of dcompile's own collectives of a kind, which work on buckets.

    The host program calls methods of `BucketSource` or `ShardSource` (collectives/contract.py) by these names.
    """

    start: str
    wait: str
    carries: Literal["gradients", "units"]
    """gradients: in the bucket's own storage; units: whole sharded parameters, or their gradients."""
    gathers: bool = False
    """Whether buffers are filled from shards; otherwise their content is reduced."""
    bucket_prefix: str = "bucket"
    holder_prefix: str = ""
    """Prefix of the name of a unit's buffer, before its number."""
    among_replicas: CollectiveKind | None = None
    """Collective that the wait runs among ranks with the same shards."""


@dataclass(frozen=True, slots=True)
class CollectiveTraits:
    """Traits of one kind. `ops`: torch's functional collectives that start it, without namespace and overload."""

    kind: CollectiveKind
    ops: tuple[str, ...]
    result: ResultSize
    ring_passes: int
    """Number of times that a ring of n ranks moves (n-1)/n of the buffer past each rank: Thakur, Rabenseifner, Gropp,
    "Optimization of Collective Communication Operations in MPICH", IJHPCA 19 (2005)."""
    has_tree: bool = False
    """Whether a tree over the nodes may have a lower latency than the ring."""
    bucket: BucketTraits | None = None
    """None if dcompile plans no collectives of this kind."""

    @property
    def in_place(self) -> bool:
        """Whether a result has the operand's size, so that a program runs it in place."""
        return self.result == "same"


COLLECTIVES: Mapping[CollectiveKind, CollectiveTraits] = {
    row.kind: row
    for row in (
        CollectiveTraits(
            "all_reduce",
            ("all_reduce", "all_reduce_coalesced"),
            "same",
            ring_passes=2,  # a reduce-scatter and an all-gather
            has_tree=True,
            bucket=BucketTraits("start", "wait", "gradients"),
        ),
        CollectiveTraits(
            "all_gather",
            ("all_gather_into_tensor", "all_gather_into_tensor_coalesced"),
            "gathered",
            ring_passes=1,
            bucket=BucketTraits("start_gather", "wait_gather", "units", True, "gather", "full"),
        ),
        CollectiveTraits(
            "reduce_scatter",
            ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
            "part",
            ring_passes=1,
            bucket=BucketTraits(
                "start_scatter", "wait_scatter", "units", False, "scatter", "grads", among_replicas="all_reduce"
            ),
        ),
        CollectiveTraits("all_to_all", ("all_to_all_single",), "splits", ring_passes=1),
        CollectiveTraits("broadcast", ("broadcast",), "same", ring_passes=1),
        # not between ranks: `operators/host_copies.py` has their operators
        CollectiveTraits("offload", (), "copy", ring_passes=0),
        CollectiveTraits("load", (), "copy", ring_passes=0),
    )
}


def bucket_traits(kind: CollectiveKind) -> BucketTraits:
    """Return a kind's traits on buckets. Fails for a kind that dcompile does not plan."""
    found = COLLECTIVES[kind].bucket
    assert found is not None, f"dcompile plans no {kind} of its own"
    return found


KINDS: Mapping[str, CollectiveKind] = {op: row.kind for row in COLLECTIVES.values() for op in row.ops}
"""Name of a functional collective of torch -> its kind."""
