"""Adapter of a module or function without a data-parallel wrapper: dcompile reduces no gradients across ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from dcompile.collectives.contract import BucketRule, ParamInfo


def new_subject(compared: set[tuple[str, ...]], plan: tuple[str, ...], what: str) -> str | None:
    """Return the name under which ranks compare a plan, and add the plan to `compared`; None if it is there already.

    The name counts the comparisons, so all ranks must compare the same plans in the same order.
    """
    if plan in compared:
        return None
    compared.add(plan)
    return f"{what} plan {len(compared)}"


def known_number(numbers: Mapping[int, int], refs: Mapping[int, Callable[[], Any]], parameter: Any) -> int | None:
    """Return the number of a parameter by its identity, or None.

    `refs` confirms it: another object may have the id of a parameter that is gone.
    """
    number = numbers.get(id(parameter))
    return number if number is not None and refs[number]() is parameter else None


WATCHED = "a mode that observes operations is on, such as CommDebugMode"
"""Why a call ran eagerly where TorchDynamo compiles nothing."""


class PlainAdapter:
    """Interface and base class of the adapters: it takes nothing over."""

    name = "plain"
    serves_wrapper = False
    """Whether it stands for a wrapper of the model, or for an engine around it."""
    breaks_at_hooks = False
    """Whether hooks of the wrapper break graphs where it stays stock."""
    eligible = True
    decided = True
    """Whether it is known who synchronizes: compiled programs, or others."""
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    eager_reason = ""
    """Why the adapter had the newest eager call run eagerly; empty if none did for a reason of its own."""
    group: Any = None
    """The process group whose ranks run this model together, or None."""
    eager = False
    """Whether calls run eagerly, because a wrapper that was not taken over cannot be traced either."""
    way_to_differ = ""
    """Advice in the error for models that run different code on each rank: how to allow that."""
    carries_sync = False
    """Whether a forward saves a token that tells its backward whether to reduce gradients, or for which module."""
    reductions = 1
    """Maximum number of reductions of sharded gradients in flight."""
    prepared = False
    """Whether the next backward reduces gradients whatever token its forward saved."""
    synchronizes = False
    """Whether compiled programs synchronize parameters or gradients with other ranks."""
    compares_in_forward = False
    """Whether ranks compare a graph before its first program runs, rather than before a backward that reduces."""
    keeps_gathered = False
    """Whether parameters that eager code gathers stay gathered after the call."""
    covers_all_params = False
    """Whether each graph's program reduces all trainable parameters, also those that it does not use."""

    def only_plan(self) -> None:
        """Decide at once what could be taken over, and change nothing: programs are planned, and no backward runs."""

    def note(self, text: str) -> None:
        """Add a line to the receipt, once."""
        if text not in self.notes:
            self.notes = (*self.notes, text)

    def leave_to_others(self, reason: str) -> None:
        """Mark the model as not taken over, and add the reason: code around its graphs synchronizes parameters."""
        self.eligible = False
        self.reasons = tuple(dict.fromkeys((*self.reasons, reason)))

    def number_of(self, parameter: Any) -> int | None:
        """Return a parameter's number in the plan, or None if dcompile does not synchronize it."""
        return None

    def param_infos(self) -> tuple[ParamInfo, ...]:
        """Return every synchronized parameter, by number."""
        return ()

    def units_of(self, numbers: Iterable[int]) -> set[int]:
        """Return the units of these parameters; those that are not sharded have none."""
        infos = self.param_infos()
        return {shard.unit for number in numbers if (shard := infos[number].shard) is not None}

    def exchanged(self, used: Collection[int]) -> tuple[ParamInfo, ...]:
        """Return the parameters with a place in the buckets of a program that computes gradients of `used`."""
        return ()

    def likeness(self) -> tuple[Any, ...] | None:
        """Return what is equal among modules that may run programs of one another; None if programs serve one only."""
        return None if self.synchronizes or self.reasons else ()

    def has_moved(self) -> bool:
        """Is another process group to reduce gradients from now on?"""
        return False

    def leave(self, reason: str) -> None:
        """Give back all that was taken over, so that another adapter can take over."""

    def has_new_parameters(self) -> bool:
        """Have parameters become trainable that have no place in earlier programs' buckets?"""
        return False

    def made_of(self, number: int) -> Callable[..., Any] | None:
        """Return the function from a virtual parameter to the one that modules show; None if they are the same."""
        return None

    def sent_of(self, number: int) -> tuple[Any, ...]:
        """Return what `made_of` takes besides the virtual parameter."""
        return ()

    def virtual(self, number: int) -> Any:
        """Return the virtual parameter that replaces a sharded one while graphs are traced."""
        raise AssertionError(f"parameter {number} is not sharded")

    def subject_of(self, plan: tuple[str, ...]) -> str | None:
        """See `new_subject`."""
        return None

    def process_groups(self) -> list[Any]:
        """Return all process groups of the programs' collectives, each once."""
        return []

    def communicators(self) -> dict[str, Any]:
        """Return the process group of each group name in plans."""
        return {}

    def replicas(self) -> dict[str, int]:
        """Return group name -> number of replicas that all-reduce its reduced shards, for groups with replicas."""
        return {}

    def bucket_rule(self) -> BucketRule | None:
        """Return the sizes at which buckets close, or None for a model without buckets."""
        return None
