"""The memory budget of a compiled model: what its plans may allocate, and whether the first ones were right.

A plan is made when a graph is captured, often before the optimizer has its state. So the peak of the first whole step
is measured, between the ends of two optimizer steps, and the plan is made once more where it missed. Ranks agree on the
least budget of all, both times.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dcompile import compat
from dcompile.capture.passes.joint.memory_plan import (
    MemoryPlan,
    MemoryRequest,
    Partition,
    mebibytes,
    plan_saved_values,
)
from dcompile.capture.services import Services, figures_by_type
from dcompile.config import AUTO, memory_budget_bytes

MARGIN = 0.05
"""Part of a device that `auto` leaves free: memory that is split too finely to be used, and libraries' own."""
MARGIN_BYTES = 1 << 30
"""The least that it leaves."""
TOLERANCE = 0.02
"""Part of the budget that a step may leave unused before its plan is made again."""
STATES_PER_PARAMETER = 2
"""Tensors as large as a parameter that an optimizer is expected to keep, before it has run: AdamW's."""
ROUNDING = 256
"""What a step may allocate is rounded down to such parts: a later start of the job then finds the same trace."""


Peaks: TypeAlias = tuple[int, int]
"""Bytes above what exists before a step: (predicted peak of the plan, that of the plan which saves the most)."""


class BudgetedModel(Protocol):
    """What a budget asks of its model."""

    services: Services
    adapter: Any

    def plan_again(self) -> None:
        """Drop all graphs; the next call captures them for the new plan."""


@dataclass(frozen=True, slots=True)
class _Resident:
    """Memory in bytes of this rank: what is allocated, what the device has, and what a first step will add."""

    allocated: int
    available: int
    total: int
    added: int


class MemoryBudget:
    """The budget of one model, as the user gave it in the option `memory_budget`."""

    def __init__(self, model: BudgetedModel, given: str) -> None:
        self._model = weakref.ref(model)
        self.given = given
        self.budget_bytes = 0
        """Peak that the model's plans may reach, on the device; 0 until the first plan."""
        self.allowed_bytes: int | None = None
        """What a step may allocate beyond what exists before it, by all ranks; None before the first plan."""
        self.plans: list[Peaks] = []
        """Predictions for the graphs that were captured since the last agreement."""
        self.measured_bytes = 0
        """Peak of the first whole step; 0 until it was measured."""
        self.missed = ""
        """Why the plan was made again; empty if it was not."""
        self._before_bytes = 0
        """This rank's memory before a step, with what the first one adds for good."""
        self._steps = 0
        self._hook: Any = None
        self._group: Any = None

    # --- planning ---

    def chooser(
        self, device: torch.device, took: Callable[[MemoryPlan, str], None], **sharding: Any
    ) -> Callable[..., tuple[Any, ...]]:
        """Return the function that chooses a joint graph's saved values, for `compat.aot.min_cut_partition`.

        `took` gets the plan and a note. `sharding`: fields of `MemoryRequest` about sharded parameters.
        """

        def choose(
            nodes: Sequence[Any],
            forward: frozenset[Any],
            backward: frozenset[Any],
            saved: tuple[Any, ...],
            checkpointed: tuple[Any, ...],
            is_fused: Callable[[Any], bool],
            may_rerun: Callable[[Any], bool],
        ) -> tuple[Any, ...]:
            assert self.allowed_bytes is not None, "ranks agree before a graph is traced"
            request = MemoryRequest(self.allowed_bytes, figures_by_type(device.type), **sharding)
            partition = Partition(forward, backward, saved, checkpointed, is_fused, may_rerun)
            plan = plan_saved_values(partition, nodes, request)
            took(plan, plan.note(self.given, self._before_bytes + plan.peak_bytes, self.budget_bytes))
            return plan.saved

        return choose

    def agree(self, device: torch.device, trained_bytes: int, sharded: bool, group: Any) -> int:
        """Return what a step may allocate, the least of all ranks of `group`; every rank calls this before it traces.

        `trained_bytes`: this rank's trained parameters, or its shards of them if they are `sharded`.
        """
        if self.allowed_bytes is None:
            found = _resident(device, trained_bytes, sharded)
            self.budget_bytes = memory_budget_bytes(self.given, found.total)
            if self.given == AUTO:
                margin = max(MARGIN_BYTES, int(MARGIN * found.total))
                self.budget_bytes = found.allocated + found.available - margin
            self._before_bytes = found.allocated + found.added
            mine = self.budget_bytes - self._before_bytes
            self._group = group
            self.allowed_bytes = self._least("memory budget", mine)
            if device.type == "cuda":
                hook = compat.hooks.mark_own(_StepCounter(self))
                self._hook = register_optimizer_step_post_hook(hook)
        return self.allowed_bytes

    def _least(self, subject: str, mine: int) -> int:
        model = self._model()
        assert model is not None, "its graphs are being captured"
        unit = 1 << max(0, max(0, mine) // ROUNDING).bit_length()
        return int(model.services.least(self._group, subject, max(0, mine) // unit * unit))

    # --- the first steps ---

    def count_step(self) -> None:
        """Note that an optimizer has stepped: the peak of the second step is compared with the plan's."""
        if not self.plans:
            return
        self._steps += 1
        if self._steps == 1:
            torch.cuda.reset_peak_memory_stats()
        elif self._steps == 2:
            self._hook.remove()
            self._compare(torch.cuda.max_memory_allocated())

    def _compare(self, measured: int) -> None:
        """Plan again if the step's peak was not near the budget, on all ranks alike."""
        model, allowed = self._model(), self.allowed_bytes
        if model is None or allowed is None:
            return
        self.measured_bytes = measured
        predicted = max(peak for peak, _ in self.plans)
        self._before_bytes = measured - predicted
        agreed = self._least("memory budget after the first steps", self.budget_bytes - measured + predicted)
        slack = TOLERANCE * self.budget_bytes
        fuller = max(most for _, most in self.plans)
        if predicted > agreed:
            why = "more"
        elif fuller > predicted and agreed - predicted > slack:
            why = "less"
        else:
            return
        miss = mebibytes(abs(agreed - predicted))
        self.missed = f"the first whole step took {mebibytes(measured)}, {miss} {why} than it may; planned again"
        self.allowed_bytes, self.plans = agreed, []
        model.adapter.note(f"memory_budget={self.given}: {self.missed}")
        model.plan_again()


class _StepCounter:
    """A hook after optimizer steps, which keeps no budget alive."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = weakref.ref(budget)

    def __call__(self, *_: Any) -> None:
        budget = self._budget()
        if budget is not None:
            budget.count_step()


def _resident(device: torch.device, trained_bytes: int, sharded: bool) -> _Resident:
    """Return what a rank's memory holds when its first forward begins."""
    added = STATES_PER_PARAMETER * trained_bytes
    added += trained_bytes if sharded else 0  # gradients of whole parameters are results of the backward
    if device.type != "cuda":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return _Resident(trained_bytes, total - trained_bytes, total, added)
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    return _Resident(allocated, free + unused, total, added)
