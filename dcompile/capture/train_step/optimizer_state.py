"""What an update reads of an optimizer: its parameters, groups and state, its step counts, and the step's numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.train_step import update_trace
from dcompile.capture.train_step.pending_gradient import PendingFlag
from dcompile.capture.train_step.update_trace import Group, NoState, UpdateTrace, constants, is_counter, is_independent
from dcompile.device_traits import HOST, traits_of

TRACES = 8
"""Traces for parameters of one kind, which differ in outcomes of tests of numbers."""


@dataclass(frozen=True)
class Member:
    """A parameter that a step updates."""

    parameter: torch.nn.Parameter
    group: Group
    state: dict[str, Any]
    held: tuple[torch.Tensor, ...]
    """The parameter's memory and that of its state, on this rank."""
    layouts: tuple[Any, ...]

    @property
    def counters(self) -> Iterator[tuple[str, Any]]:
        """Entries of the state that the host computes."""
        return ((name, value) for name, value in self.state.items() if is_counter(name, value))

    def read_counts(self) -> dict[str, Any]:
        """Return the numbers in its counters. A GPU is waited for if they are there."""
        return {name: float(x) if isinstance(x, torch.Tensor) else x for name, x in self.counters}


def why_not_traced(optimizer: torch.optim.Optimizer) -> str:
    """Return why no update of this optimizer can be traced now; empty if its settings allow it."""
    if compat.hooks.has_step_hooks(optimizer):
        return "the optimizer has a hook before its step"
    found = getattr(optimizer, "found_inf", None)
    is_given = found is not None or getattr(optimizer, "grad_scale", None) is not None
    if is_given and not (type(found) is PendingFlag and is_independent(optimizer)):
        return "GradScaler unscales gradients in the step"
    if not all(map(_is_known, optimizer.param_groups)):
        return "a setting of a param group is a tensor on another device, or differentiable"
    return ""


def _is_known(group: Group) -> bool:
    """Are a group's settings numbers that the host knows?"""
    rate, betas = group.get("lr"), group.get("betas", ())
    if isinstance(rate, torch.Tensor) and not traits_of(rate.device.type).is_host:
        return False
    return not group.get("differentiable") and not any(isinstance(beta, torch.Tensor) for beta in betas)


@dataclass(eq=False)
class Kind:
    """Members that one trace updates with the same numbers; or all members, if their updates depend on each other."""

    trace: UpdateTrace
    groups: list[Group]
    counts: list[dict[str, Any]]
    """Counters before the step, of each parameter of the trace."""
    members: list[Member]
    values: list[Any]
    """Numbers of the step that is made now."""
    otherwise: list[Any]
    """The same in case that the step before, whose outcome is not known yet, was skipped."""

    def counters(self, values: Sequence[Any]) -> Iterator[tuple[dict[str, Any], str, Any, list[Member]]]:
        """Yield (counts, name, value after a step with these numbers, members) of each counter."""
        for at, name, place in self.trace.counters:
            yield self.counts[at], name, values[place], [self.members[at]] if self.trace.is_joint else self.members

    def replay(self, before: Sequence[Any] | None) -> bool:
        """Find the numbers of the step that is made now, after one with the numbers `before` that may be skipped."""
        known = self.trace.replayed(self.groups, self.counts)
        found = known
        if before is not None:
            counts = [dict(own) for own in self.counts]
            for at, name, place in self.trace.counters:
                counts[at][name] = before[place]
            found = self.trace.replayed(self.groups, counts)
        self.values, self.otherwise = found or [], known or []
        return known is not None and found is not None


@dataclass(eq=False)
class Membership:
    """The parameters of a step with their memory, as long as nothing of it is replaced.

    Programs are for all memberships of one `number`, which differ in addresses alone.
    """

    members: list[Member]
    settings: list[Any]
    tensors: list[torch.Tensor]
    """Memory of parameters and states on this rank, to notice that it moves."""
    addresses: list[int]
    sources: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """(state of a parameter, name) of each of its tensors."""
    held: list[torch.Tensor] = field(default_factory=list)
    """The tensors of `sources`."""
    steps: list[torch.Tensor] = field(default_factory=list)
    """Counters that are tensors."""
    numbers_held: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """(state of a parameter, name) of counters that are numbers of Python."""
    number: int = -1
    obstacle: str = ""
    """Why no program can update them."""
    number_dtype: torch.dtype = torch.float32
    """Dtype of the step's numbers: float64 if a parameter is."""
    states: list[torch.Tensor] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)
    """Versions and values of counters after the newest step."""
    traces: list[UpdateTrace] = field(default_factory=list)
    """Of each member."""
    firsts: list[int] = field(default_factory=list)
    """Where each member's first number is in the vector of numbers."""
    kinds: list[Kind] = field(default_factory=list)
    counters: compat.tensors.StepCounters | None = None
    """Counters that a step adds 1 to."""

    def fits(self, settings: Sequence[Any]) -> bool:
        """Is it still what the optimizer holds?"""
        if settings != self.settings:
            return False
        found = [state.get(name) for state, name in self.sources]
        if not all(map(operator.is_, found, self.held)):
            return False
        return compat.tensors.addresses_are(self.tensors, self.addresses, list(range(len(self.tensors))))

    def is_counted(self, before: Outcome | None = None) -> bool:
        """Are the numbers of the step that is made now found? Else something else has changed the counters."""
        if not self.kinds or self.marks != self._marks():
            return False
        steps = [None] * len(self.kinds) if before is None else before.values
        return all(kind.replay(numbers) for kind, numbers in zip(self.kinds, steps, strict=True))

    def _marks(self) -> list[Any]:
        return [step._version for step in self.steps] + [state.get(name) for state, name in self.numbers_held]

    def numbers(self, of: str = "values") -> list[float]:
        """Return the numbers of the step that is made now."""
        found = [(getattr(kind, of), kind.trace.tape.slots) for kind in self.kinds]
        return [float(values[place]) for values, slots in found for place in slots] or [0.0]

    def changed(self) -> None:
        """Tell autograd that parameters and state have changed."""
        torch.autograd.graph.increment_version(self.tensors)

    def count(self, steps: Sequence[Sequence[Any]] | None = None) -> None:
        """Count a step in the optimizer's state, by the numbers that each kind had in it: now, if there are none."""
        counted, is_known = list[torch.Tensor](), self.marks == self._marks()
        for kind, values in zip(self.kinds, steps or [kind.values for kind in self.kinds], strict=True):
            for counts, name, value, members in kind.counters(values):
                tensors = [x for m in members if isinstance(x := m.state[name], torch.Tensor)]
                if tensors and value == counts[name] + 1:
                    counted += tensors
                elif tensors:
                    new = torch.tensor(value, dtype=torch.float64, device=HOST)
                    with torch.no_grad():
                        compat.tensors.copy_all(tensors, [new] * len(tensors))
                else:
                    for member in members:
                        member.state[name] = value
                counts[name] = value
        if counted:
            if self.counters is None or not self.counters.are(counted):
                self.counters = compat.tensors.StepCounters(counted)
            with torch.no_grad():
                self.counters.count()
        if is_known:  # else the counters are read again
            self.marks = self._marks()


@dataclass(eq=False)
class Outcome:
    """A step of which the device finds out whether it is skipped, and the host later."""

    members: Membership
    found: torch.Tensor
    """1 if it is skipped, else 0, in memory of the device."""
    read: Callable[[], float]
    """Return the same; wait for it if need be."""
    values: list[list[Any]]
    """Numbers of the step for each kind, and those if the step before was skipped."""
    otherwise: list[list[Any]]

    @staticmethod
    def of(members: Membership, found: torch.Tensor) -> Outcome:
        """Return that of a step which was started now."""
        kinds = members.kinds
        return Outcome(members, found, _read_later(found), [k.values for k in kinds], [k.otherwise for k in kinds])


def _read_later(number: torch.Tensor) -> Callable[[], float]:
    """Start reading a number of a device; return the function that waits for it."""
    if number.is_cpu:
        return number.item
    copied, event = number.to(HOST, non_blocking=True), torch.Event(number.device)
    event.record()

    def read() -> float:
        event.synchronize()
        return float(copied)

    return read


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
    traces: dict[Any, list[UpdateTrace]] = field(default_factory=dict)
    """Constants of groups, and layouts -> traces."""
    late: list[Outcome] = field(default_factory=list)
    """Steps that are not counted yet: on a GPU, the newest two, so that the host does not wait for what it started."""

    def settle(self, but: int = 0) -> None:
        """Count the steps of which that is to be found out, without the newest `but`."""
        while len(self.late) > but:
            first = self.late.pop(0)
            if not first.read():
                first.members.count(first.values)
            elif self.late:
                self.late[0].values = self.late[0].otherwise

    def advance(self, members: Membership, found: torch.Tensor | None = None) -> None:
        """Count a step that was made now; later, if the device finds out whether it is skipped, 1 in `found`."""
        members.changed()
        if found is None:
            members.count()
        elif any(kind.trace.counters for kind in members.kinds):
            self.late.append(Outcome.of(members, found))
            if traits_of(found.device.type).is_host:
                self.settle()

    def prepare(
        self, optimizer: torch.optim.Optimizer, wanted: Sequence[Any], ahead: bool = False
    ) -> Membership | None:
        """Return the members of the step that is made now: the `wanted` parameters. None if one has no state.

        torch's optimizers make the state in their first step. `ahead`: the outcome of the step before may be unknown.
        """
        settings: list[Any] = [constants(group) for group in optimizer.param_groups]
        settings += [list(map(id, wanted)), list(map(id, optimizer.state.values()))]
        settings += [list(map(id, group["params"])) for group in optimizer.param_groups]
        found = self.known.get(len(wanted))
        fits = found is not None and found.fits(settings)
        self.settle(1 if fits and ahead and self.late and self.late[-1].members is found else 0)
        if found is None or not fits:
            found = self.known[len(wanted)] = _membership(optimizer, set(map(id, wanted)), settings)
        if found.obstacle or found.is_counted(self.late[-1] if self.late else None):
            return found
        if self.late:  # the step's numbers follow from that outcome in another way
            self.settle()
            if found.is_counted():
                return found
        try:
            self._trace(optimizer, found)
        except NoState:
            del self.known[len(wanted)]
            return None
        except Exception as error:
            line = str(error).strip().partition("\n")[0]
            found.obstacle = f"{type(optimizer).__name__} cannot be traced: {type(error).__name__}: {line}"
        return found

    def _trace(self, optimizer: torch.optim.Optimizer, found: Membership) -> None:
        """Find the trace and the numbers of each member."""
        is_joint = not is_independent(optimizer)
        parts: dict[Any, list[int]] = {}
        for at, member in enumerate(found.members):
            own = (id(member.group), member.layouts, tuple(member.read_counts().items()))
            parts.setdefault(() if is_joint else own, []).append(at)
        found.kinds, found.firsts, end = [], [0] * len(found.members), 0
        traces: dict[int, UpdateTrace] = {}
        for places in parts.values():
            kind = self._kind(optimizer, [found.members[at] for at in places], found.number_dtype, is_joint)
            found.kinds.append(kind)
            for at in places:
                traces[at], found.firsts[at] = kind.trace, end
            end += len(kind.trace.tape.slots)
        found.traces = [traces[at] for at in range(len(found.members))]
        found.marks = found._marks()
        layouts = tuple(member.layouts for member in found.members)
        found.number = self.keys.setdefault((tuple(found.traces), tuple(found.firsts), layouts), len(self.keys))

    def _kind(
        self, optimizer: torch.optim.Optimizer, members: list[Member], dtype: torch.dtype, is_joint: bool
    ) -> Kind:
        shown = members if is_joint else members[:1]
        groups: list[Group] = [group for group in optimizer.param_groups if any(m.group is group for m in shown)]
        owners = [next(at for at, group in enumerate(groups) if group is m.group) for m in shown]
        counts = [member.read_counts() for member in shown]
        key = tuple(map(constants, groups)), tuple(owners), tuple(m.layouts for m in shown), dtype
        traces = self.traces.setdefault(key, [])
        for known in traces:
            values = known.replayed(groups, counts)
            if values is not None:
                return Kind(known, groups, counts, members, values, values)
        if len(traces) == TRACES:
            raise ValueError(
                "its step reads numbers that change from step to step where they cannot be followed, as by float()"
            )
        states, memories = [m.state for m in shown], [m.held for m in shown]
        made = update_trace.trace(optimizer, groups, owners, states, counts, memories, dtype)
        if not made.is_elementwise and any(compat.tensors.is_dtensor(m.parameter) for m in shown):
            raise ValueError("it needs whole parameters, and each rank has a part")
        traces.append(made)
        return Kind(made, groups, counts, members, made.tape.values, made.tape.values)

    def vector(self, members: Membership, more: Sequence[float] = (), inverse: Any = None) -> torch.Tensor:
        """Return the step's numbers, and `more`, in memory of the parameters' device; see `with_updates`.

        `inverse`: what gradients are multiplied by, a number in memory, if the step unscales them.
        """
        values = [*members.numbers(), *more]
        if inverse is not None:
            values = [*members.numbers(), *members.numbers("otherwise"), *more, math.nan, math.nan]
        kind = len(values), members.number_dtype, members.tensors[0].device
        if kind not in self.numbers:
            self.numbers[kind] = StepNumbers.of(*kind)
        vector = self.numbers[kind].written(values)
        if inverse is not None:  # in place of the two that equal no other step's
            vector[-2].copy_(inverse)
            vector[-1].fill_(0) if not self.late else vector[-1].copy_(self.late[-1].found)
        return vector


def _membership(optimizer: torch.optim.Optimizer, wanted: Collection[int], settings: list[Any]) -> Membership:
    """Collect the members of a step."""
    members = list[Member]()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in wanted:
                state = optimizer.state.get(parameter) or {}
                held = tuple(map(_memory, (parameter, *map(state.get, update_trace.tensors_of(state)))))
                layouts = tuple((x.dtype, x.shape, x.stride(), x.device) for x in held)
                members.append(Member(parameter, group, state, held, (tuple(state), layouts)))
    tensors = [tensor for member in members for tensor in member.held]
    made = Membership(members, settings, tensors, list(map(torch.Tensor.data_ptr, tensors)))
    made.sources = [(m.state, name) for m in members for name, x in m.state.items() if isinstance(x, torch.Tensor)]
    made.held = [state[name] for state, name in made.sources]
    made.steps = [x for m in members for _, x in m.counters if isinstance(x, torch.Tensor)]
    made.numbers_held = [(m.state, name) for m in members for name, x in m.counters if not isinstance(x, torch.Tensor)]
    made.states = [state for member in members for state in member.held[1:]]
    if any(member.parameter.dtype is torch.float64 for member in members):
        made.number_dtype = torch.float64
    if len({tensor.device for tensor in tensors}) > 1:
        made.obstacle = "parameters or their state are on several devices"
    elif any(tensor.is_complex() or tensor.layout is not torch.strided for tensor in tensors):
        made.obstacle = "parameters are complex or sparse"
    return made


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory, as a program reads and writes it: recordings expect it to stay."""
    if isinstance(tensor, torch.nn.Parameter) and not compat.tensors.is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        memory = compat.tensors.local_part(tensor).detach()
    compat.tensors.mark_static(memory)
    return memory
