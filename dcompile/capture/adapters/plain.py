"""A module or function on its own: no gradient is kept in step with other ranks by dcompile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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


def known_number(numbers: Mapping[int, int], refs: Mapping[int, Callable[[], Any]], parameter: Any) -> int | None:
    """The number of a parameter, by its identity, of those behind `refs`; None of another one in a lost one's place."""
    number = numbers.get(id(parameter))
    return number if number is not None and refs[number]() is parameter else None


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
    synchronizes = False
    """Whether parameters are kept in step with other ranks."""
    compares_in_forward = False
    """Whether ranks compare a graph before its first program, and not before a backward that reduces."""
    keeps_gathered = False
    """Whether what runs eagerly keeps what it has gathered."""
    every = False
    """Whether each graph reduces all trainable parameters."""

    def leave_to_others(self, reason: str) -> None:
        """Others keep the parameters in step, around graphs of this model: say so, and why."""
        self.eligible = False
        self.reasons = tuple(dict.fromkeys((*self.reasons, reason)))

    def number_of(self, parameter: Any) -> int | None:
        """This parameter's number in the plan, or None if it is not kept in step."""
        del parameter
        return None

    def param_infos(self) -> tuple[ParamInfo, ...]:
        """Every parameter that is kept in step, by number."""
        return ()

    def exchanged(self, used: Collection[int]) -> tuple[ParamInfo, ...]:
        """Parameters with a place in the buckets of a program that has gradients of those `used`."""
        del used
        return ()

    def has_moved(self) -> bool:
        """Whether gradients are to be reduced over other ranks from now on."""
        return False

    def leave(self, reason: str) -> None:
        """Give everything back, for another adapter to start anew."""

    def has_new_parameters(self) -> bool:
        """Whether parameters have become trainable that earlier programs have no places for."""
        return False

    def made_of(self, number: int) -> Callable[[Any], Any] | None:
        """What makes the parameter that modules show out of a virtual one; None where that is itself."""
        del number
        return None

    def virtual(self, number: int) -> Any:
        """What stands for a sharded parameter while it is traced."""
        raise AssertionError(f"parameter {number} is not sharded")

    def subject_of(self, plan: tuple[str, ...]) -> str | None:
        """See `new_subject`."""
        del plan
        return None

    def process_groups(self) -> list[Any]:
        """All process groups that programs communicate over, each once."""
        return []

    def communicators(self) -> dict[str, Any]:
        """The process group behind each group of the plan."""
        return {}

    def replicas(self) -> dict[str, int]:
        """Among how many of its like a group's reductions are summed up again, where there are any."""
        return {}

    def bucket_rule(self) -> BucketRule | None:
        """Where buckets end; None: no buckets."""
        return None
