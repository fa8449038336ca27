"""What an update reads of an optimizer: its parameters, groups and state, its step counts, and the step's numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.train_step.update_rules import RULES, Group, UpdateRule, settings_of


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
    if compat.fused_optimizers.step_hooks(optimizer) > 1:
        return "the optimizer has a hook before its step"
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return "GradScaler unscales gradients in the step"
    if not all(map(_is_known, optimizer.param_groups)):
        return "a setting of a param group is a tensor on another device, or differentiable"
    return ""


def _is_known(group: Group) -> bool:
    """Are a group's settings numbers that the host knows?"""
    rate = group["lr"]
    known = not isinstance(rate, torch.Tensor) or rate.device.type == "cpu"
    return known and not group.get("differentiable") and not any(isinstance(b, torch.Tensor) for b in group.get("betas", ()))


def has_state(rule: UpdateRule, group: Group, state: Any) -> bool:
    """Does a parameter's state exist? torch's optimizers make it in the first step."""
    names = (*rule.state(group), *(("step",) if rule.counts else ()))
    return all(isinstance((state or {}).get(name), torch.Tensor) for name in names)


def members_of(optimizer: torch.optim.Optimizer, wanted: Collection[int]) -> list[Member]:
    """Return the parameters with these ids, in the optimizer's order."""
    rule, local = RULES[type(optimizer)], compat.tensors.local_part
    found = []
    for group in optimizer.param_groups:
        names = rule.state(group)
        for parameter in group["params"]:
            if id(parameter) in wanted:
                state = optimizer.state[parameter]
                found.append(Member(parameter, group, (local(parameter.data), *(local(state[n]) for n in names))))
    return found


@dataclass(eq=False)
class StepCounter:
    """The numbers of steps in an optimizer's state, read only where something else has changed them."""

    known: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def count(self, steps: Sequence[torch.Tensor]) -> list[int]:
        """Return the number of the step that is made now, for each tensor. On a GPU, the first call waits for it."""
        same = len(steps) == len(self.known) and all(
            step is tensor and step._version == version
            for step, (tensor, version) in zip(steps, self.known, strict=True)
        )
        if not same:
            self.counts = [int(step.item()) for step in steps]
        self.counts = [count + 1 for count in self.counts]
        return self.counts

    def advance(self, steps: Sequence[torch.Tensor]) -> None:
        """Add 1 to all of them."""
        if steps:
            with torch.no_grad():
                torch._foreach_add_(list(steps), 1)
            self.known = [(step, step._version) for step in steps]


@dataclass(eq=False)
class StepNumbers:
    """The numbers of one step in memory of a device."""

    vector: torch.Tensor | None = None
    values: list[float] = field(default_factory=list)

    def written(self, values: list[float], parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the vector with these values: float64 if a parameter is, else float32."""
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        dtype = torch.float64 if any(kind is torch.float64 for kind, _ in kinds) else torch.float32
        device = next(iter(kinds))[1]
        known = self.vector
        if known is None or (known.shape, known.dtype, known.device) != ((len(values),), dtype, device):
            known = self.vector = torch.zeros(len(values), dtype=dtype, device=device)
            self.values = []
        if values != self.values:
            # pageable memory is read before the call returns, and the copy is in order on the stream
            known.copy_(torch.tensor(values, dtype=dtype), non_blocking=True)
            self.values = values
        return known


@dataclass(frozen=True)
class UpdateCall:
    """One step's inputs: members, where each finds its numbers, and the numbers."""

    rule: UpdateRule
    members: list[Member]
    firsts: list[int]
    vector: torch.Tensor

    @property
    def key(self) -> Any:
        """What a program of this update depends on."""
        settings = {id(member.group): settings_of(self.rule, member.group) for member in self.members}
        tensors = (x for member in self.members for x in member.held)
        layouts = tuple((x.dtype, x.shape, x.stride(), x.device) for x in (*tensors, self.vector))
        return tuple(settings[id(member.group)] for member in self.members), tuple(self.firsts), layouts

    def states(self) -> list[torch.Tensor]:
        """Return the states of all members."""
        return [state for member in self.members for state in member.held[1:]]


@dataclass(eq=False)
class OptimizerState:
    """Reads the inputs of a step."""

    counter: StepCounter = field(default_factory=StepCounter)
    numbers: StepNumbers = field(default_factory=StepNumbers)
    steps: list[torch.Tensor] = field(default_factory=list)

    def prepare(self, optimizer: torch.optim.Optimizer, wanted: Collection[int]) -> UpdateCall:
        """Return the inputs of the step that is made now, of the parameters with these ids."""
        rule = RULES[type(optimizer)]
        members = members_of(optimizer, wanted)
        self.steps = [optimizer.state[member.parameter]["step"] for member in members] if rule.counts else []
        counts = self.counter.count(self.steps) if rule.counts else [1] * len(members)
        places: dict[tuple[int, int], int] = {}
        values: list[float] = []
        firsts = []
        for member, count in zip(members, counts, strict=True):
            key = (id(member.group), count)
            if key not in places:
                places[key] = len(values)
                values += rule.numbers(member.group, count)
            firsts.append(places[key])
        return UpdateCall(rule, members, firsts, self.numbers.written(values, [m.held[0] for m in members]))

    def advance(self, call: UpdateCall) -> None:
        """Count the step, and tell autograd that parameters and state have changed."""
        self.counter.advance(self.steps)
        torch.autograd.graph.increment_version([x for member in call.members for x in (member.parameter, *member.held[1:])])
