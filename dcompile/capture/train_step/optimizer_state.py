"""What an update reads of an optimizer: its parameters, groups and state, its step counts, and the step's numbers."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.train_step.update_rules import RULES, Group, UpdateRule
from dcompile.device_traits import HOST, traits_of


@dataclass(frozen=True)
class Member:
    """A parameter that a step updates."""

    parameter: torch.nn.Parameter
    group: Group
    held: tuple[torch.Tensor, ...]
    """The parameter's memory and that of its state, on this rank."""


def why_no_rule(optimizer: torch.optim.Optimizer) -> str:
    """Return why no update of this optimizer can be compiled now; empty if its settings allow it."""
    if type(optimizer) not in RULES:
        return f"{type(optimizer).__name__} has no update rule"
    if compat.hooks.has_step_hooks(optimizer):
        return "the optimizer has a hook before its step"
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return "GradScaler unscales gradients in the step"
    if not all(map(_is_known, optimizer.param_groups)):
        return "a setting of a param group is a tensor on another device, or differentiable"
    return ""


def _is_known(group: Group) -> bool:
    """Are a group's settings numbers that the host knows?"""
    rate, betas = group["lr"], group.get("betas", ())
    if isinstance(rate, torch.Tensor) and not traits_of(rate.device.type).is_host:
        return False
    return not group.get("differentiable") and not any(isinstance(beta, torch.Tensor) for beta in betas)


@dataclass(eq=False)
class Membership:
    """The parameters of a step with their memory, as long as nothing of it is replaced.

    Programs are for all memberships of one `number`, which differ in addresses alone.
    """

    rule: UpdateRule
    members: list[Member]
    sources: list[tuple[dict[str, torch.Tensor], str]]
    """(state of a parameter, name) of each of its tensors: step counts come last."""
    steps: list[torch.Tensor]
    settings: list[Any]
    tensors: list[torch.Tensor]
    """Memory of parameters and states on this rank, to notice that it moves."""
    addresses: list[int]
    number: int = -1
    obstacle: str = ""
    """Why no program can update them."""
    number_dtype: torch.dtype = torch.float32
    """Dtype of the step's numbers: float64 if a parameter is."""
    held: list[torch.Tensor] = field(default_factory=list)
    """The tensors of `sources`."""
    states: list[torch.Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    """Where each member's first number is in the vector of numbers."""
    kinds: list[tuple[Group, int]] = field(default_factory=list)
    """(group, a member of it) for each part of the vector."""

    def fits(self, settings: Sequence[Any]) -> bool:
        """Is it still what the optimizer holds?"""
        if settings != self.settings:
            return False
        found = [state.get(name) for state, name in self.sources]
        if not all(map(operator.is_, found, self.held)):
            return False
        return compat.tensors.addresses_are(self.tensors, self.addresses, list(range(len(self.tensors))))

    def read_counts(self) -> None:
        """Read how many steps were made, where something else has changed the counts; a GPU is waited for.

        Members of a group with equal counts share numbers.
        """
        versions = [step._version for step in self.steps]
        if versions != self.versions or not self.counts:
            self.counts = [int(step.item()) for step in self.steps] or [0] * len(self.members)
            places: dict[tuple[int, int], int] = {}
            self.firsts, self.kinds, end = [], [], 0
            for at, (member, count) in enumerate(zip(self.members, self.counts, strict=True)):
                if (kind := (id(member.group), count)) not in places:
                    places[kind] = end
                    end += len(self.rule.numbers(member.group, 1))
                    self.kinds.append((member.group, at))
                self.firsts.append(places[kind])
            self.number = -1
            self.versions = versions

    def numbers(self) -> list[float]:
        """Return the numbers of the step that is made now."""
        found: list[float] = []
        for group, at in self.kinds:
            found += self.rule.numbers(group, self.counts[at] + 1)
        return found

    def advance(self) -> None:
        """Count the step in the optimizer's state, and tell autograd that parameters and state have changed."""
        if self.steps:
            with torch.no_grad():
                compat.tensors.count_all(self.steps)
        torch.autograd.graph.increment_version(self.tensors)
        self.counts = [count + 1 for count in self.counts]
        self.versions = [step._version for step in self.steps]


@dataclass(eq=False)
class StepNumbers:
    """The numbers of one step in memory of a device."""

    vector: torch.Tensor
    values: list[float] = field(default_factory=list)

    @staticmethod
    def of(count: int, dtype: torch.dtype, device: torch.device) -> StepNumbers:
        """Allocate a vector of `count` numbers."""
        made = StepNumbers(torch.zeros(count, dtype=dtype, device=device))
        compat.tensors.mark_static(made.vector)
        return made

    def written(self, values: list[float]) -> torch.Tensor:
        """Return the vector with these values."""
        if values != self.values:
            # pageable memory is read before the call returns, and the copy is in order on the stream
            self.vector.copy_(torch.tensor(values, dtype=self.vector.dtype, device=HOST), non_blocking=True)
            self.values = values
        return self.vector


@dataclass(eq=False)
class OptimizerState:
    """Reads the inputs of a step."""

    known: dict[int, Membership] = field(default_factory=dict)
    """Number of parameters -> the newest membership."""
    numbers: dict[tuple[int, torch.dtype, torch.device], StepNumbers] = field(default_factory=dict)
    """(count, dtype, device) -> vector."""
    keys: dict[Any, int] = field(default_factory=dict)
    """What programs of updates depend on -> a number."""

    def prepare(self, optimizer: torch.optim.Optimizer, wanted: Sequence[Any]) -> Membership | None:
        """Return the members of the step that is made now: the `wanted` parameters. None if one has no state.

        torch's optimizers make the state in their first step.
        """
        rule = RULES[type(optimizer)]
        settings: list[Any] = [rule.constants(group) for group in optimizer.param_groups]
        settings += [list(map(id, wanted)), list(map(id, optimizer.state.values()))]
        settings += [list(map(id, group["params"])) for group in optimizer.param_groups]
        found = self.known.get(len(wanted))
        if found is None or not found.fits(settings):
            found = _membership(optimizer, rule, set(map(id, wanted)), settings)
            if found is None:
                return None
            self.known[len(wanted)] = found
        found.read_counts()
        if found.number < 0:
            layouts = tuple((x.dtype, x.shape, x.stride(), x.device) for m in found.members for x in m.held)
            own = tuple(rule.constants(member.group) for member in found.members)
            found.number = self.keys.setdefault((own, tuple(found.firsts), layouts), len(self.keys))
        return found

    def vector(self, members: Membership, more: Sequence[float] = ()) -> torch.Tensor:
        """Return the step's numbers, and `more`, in memory of the parameters' device."""
        values = [*members.numbers(), *more]
        kind = len(values), members.number_dtype, members.tensors[0].device
        if kind not in self.numbers:
            self.numbers[kind] = StepNumbers.of(*kind)
        return self.numbers[kind].written(values)


def _membership(
    optimizer: torch.optim.Optimizer, rule: UpdateRule, wanted: Collection[int], settings: list[Any]
) -> Membership | None:
    """Collect the members of a step; None if a parameter has no state."""
    members, sources, counts = list[Member](), list[tuple[dict[str, Any], str]](), list[tuple[dict[str, Any], str]]()
    for group in optimizer.param_groups:
        names = rule.state(group)
        for parameter in group["params"]:
            if id(parameter) not in wanted:
                continue
            state = optimizer.state.get(parameter) or {}
            if any(state.get(name) is None for name in (*names, *(("step",) if rule.counts else ()))):
                return None
            members.append(Member(parameter, group, tuple(map(_memory, (parameter, *map(state.get, names))))))
            sources += [(state, name) for name in names]
            counts += [(state, "step")] if rule.counts else []
    steps = [state[name] for state, name in counts]
    tensors = [tensor for member in members for tensor in member.held]
    made = Membership(
        rule, members, [*sources, *counts], steps, settings, tensors, list(map(torch.Tensor.data_ptr, tensors))
    )
    if any(member.parameter.dtype is torch.float64 for member in members):
        made.number_dtype = torch.float64
    if len({tensor.device for tensor in tensors}) > 1:
        made.obstacle = "parameters or their state are on several devices"
    elif any(tensor.is_complex() or tensor.layout is not torch.strided for tensor in tensors):
        made.obstacle = "parameters are complex or sparse"
    made.held = [state[name] for state, name in made.sources]
    made.states = [state for member in members for state in member.held[1:]]
    return made


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory, as a program reads and writes it: recordings expect it to stay."""
    if isinstance(tensor, torch.nn.Parameter) and not compat.tensors.is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        memory = compat.tensors.local_part(tensor).detach()
    compat.tensors.mark_static(memory)
    return memory
