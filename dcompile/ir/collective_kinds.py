"""The table of collective kinds: every fact about a kind that passes, emitters, run time and reports ask for.

Code that differs for each kind (calls of the run time, advice of a report) matches on the kind without a catch-all.
mypy then names the places that a new kind lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

PlannedKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter"]
"""Kinds that dcompile puts into a program itself, on buckets. The model's own code may ask for them, too."""
CollectiveKind: TypeAlias = PlannedKind | Literal["all_to_all", "broadcast"]
ResultSize: TypeAlias = Literal["same", "gathered", "part", "splits"]
"""Size of a result, by what a rank sends: the same; times the ranks; divided by the ranks; as its split sizes say."""


@dataclass(frozen=True, slots=True)
class BucketTraits:
    """How dcompile's own collectives of a kind work on a bucket.

    The host program calls methods of `BucketSource` or `ShardSource` (collectives/contract.py) by these names.
    """

    start: str
    wait: str
    carries: Literal["gradients", "units"]
    """gradients: in a storage of the bucket's own; units: whole sharded parameters, or their gradients."""
    gathers: bool = False
    """Whether buffers are filled from shards that are there from the start; otherwise what they hold is reduced."""
    bucket_prefix: str = "bucket"
    holder_prefix: str = ""
    """Before the number of a unit: name of the buffer that holds it."""
    among_replicas: CollectiveKind | None = None
    """What its wait does with the result among ranks that hold the same shards."""


@dataclass(frozen=True, slots=True)
class CollectiveTraits:
    """One kind: `ops` are the functional collectives of torch that start one, without namespace and overload."""

    kind: CollectiveKind
    ops: tuple[str, ...]
    result: ResultSize
    ring_passes: int
    """How often a ring of n ranks moves (n-1)/n of the whole buffer past each rank: Thakur, Rabenseifner, Gropp,
    "Optimization of Collective Communication Operations in MPICH", IJHPCA 19 (2005)."""
    has_tree: bool = False
    """Whether a tree over the nodes may have less latency than the ring."""
    bucket: BucketTraits | None = None
    """None: dcompile plans none of its own."""

    @property
    def in_place(self) -> bool:
        """Whether a result has the place and the size of what is sent, so that a program works on one buffer."""
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
    )
}


def bucket_traits(kind: CollectiveKind) -> BucketTraits:
    """How a kind works on buckets. Fails for one that dcompile plans none of."""
    found = COLLECTIVES[kind].bucket
    assert found is not None, f"dcompile plans no {kind} of its own"
    return found


KINDS: Mapping[str, CollectiveKind] = {op: row.kind for row in COLLECTIVES.values() for op in row.ops}
"""Name of a functional collective of torch -> its kind."""
