"""A module or function on its own: no gradient is kept in step with other ranks by dcompile."""

from __future__ import annotations

from typing import Any

from dcompile.collectives.contract import BucketRule, ParamInfo


def new_subject(compared: set[tuple[str, ...]], plan: tuple[str, ...], what: str) -> str | None:
    """Name of the comparison of a plan between ranks, which all make the same ones in the same order.

    None if it is among those that were compared; otherwise it is from now on.
    """
    if plan in compared:
        return None
    compared.add(plan)
    return f"{what} plan {len(compared)}"


class PlainAdapter:
    """Nothing to take over. The base of the other adapters, and their interface."""

    name = "plain"
    eligible = True
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    group: Any = None
    """The process group whose ranks run this model together, if there is one."""
    eager = False
    """Whether calls are to run eagerly, because what was not taken over cannot be traced either."""
    way_to_differ = ""
    """What to tell a user whose model runs other code on each rank, and is meant to, where that is refused."""
    carries_sync = False
    """Whether a forward carries over to its backward if gradients are to be reduced."""
    reductions = 1
    """How many reductions of sharded gradients may be in flight at once."""
    prepared = False
    """Whether the next backward is to reduce gradients whatever its forward has carried over."""

    def number_of(self, parameter: Any) -> int | None:
        """This parameter's number in the plan, or None if it is not kept in step."""
        del parameter
        return None

    def param_infos(self) -> tuple[ParamInfo, ...]:
        """Every parameter that is kept in step, by number."""
        return ()

    def communicators(self) -> dict[str, Any]:
        """The process group behind each group of the plan."""
        return {}

    def replicas(self) -> dict[str, int]:
        """Among how many of its like a group's reductions are summed up again, where there are any."""
        return {}

    def bucket_rule(self) -> BucketRule | None:
        """Where buckets end; None: no buckets."""
        return None
