"""Traces of an optimizer's own step, for the program of a backward: torch's optimizers, and classes of the user.

The step runs over fake tensors, on a stand-in for the optimizer: a param group's settings are numbers of the host
(`host_numbers.py`), or constants if they are no floats. torch's optimizers update each parameter by itself, so that one
trace serves all parameters of equal shapes. For another class, one trace updates all parameters.
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from dcompile import compat
from dcompile.capture.train_step.host_numbers import FollowedFunctions, NumbersOnDevice, Read, StateNumber, Tape
from dcompile.operators import step_ops

Group: TypeAlias = Mapping[str, Any]
State: TypeAlias = Mapping[str, Any]

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Dtype in which torch's optimizers update 16-bit parameters, and round once, as their fused forms do. Others may
depend on the dtype, or on each rounding (Kahan's sum keeps what it lost), and round as they do eagerly."""
COUNTERS = frozenset(("step", "mu_product", "mu", "eta"))
"""Names of tensors of one number in the state of torch's optimizers that the host computes."""
LARGEST = 1 << 16
"""Length of the vector of numbers in a trace; programs read from the part that is used."""
_WAYS = {"foreach": False, "fused": False, "capturable": False}
"""Settings that say how torch's optimizers update, but not what to."""
_MOVES = frozenset(("clone", "_to_copy", "alias", "detach", "copy", "full", "fma"))
"""Further operations that keep each element's place."""


class NoState(Exception):
    """The optimizer would make its state in this step."""


@dataclass(eq=False)
class UpdateTrace:
    """The update of some parameters, for steps whose numbers pass the tape's tests."""

    gm: Any
    """(gradients..., parameter and its state, ..., vector) -> new values of parameters and states."""
    tape: Tape
    counters: list[tuple[int, str, int]]
    """(parameter, name, entry of the tape) of each number in the state after the step."""
    is_elementwise: bool
    """Whether parts of a parameter can be updated by themselves."""
    is_joint: bool
    """Whether it updates all parameters, rather than any one of equal shape."""

    def replayed(self, groups: Sequence[Group], states: Sequence[State]) -> list[Any] | None:
        """Return the numbers of a step; None if the trace is not for it. `states` may have counters alone."""
        return self.tape.replayed(_reader(groups, states))


def is_independent(optimizer: torch.optim.Optimizer) -> bool:
    """Does the optimizer update each parameter by itself? torch's own classes do, except LBFGS."""
    own = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    return own and not isinstance(optimizer, torch.optim.LBFGS)


def is_counter(name: str, value: Any) -> bool:
    """Is an entry of the state a number of the host?"""
    if isinstance(value, torch.Tensor):
        return name in COUNTERS and value.ndim == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def constants(group: Group) -> tuple[Any, ...]:
    """Return what a trace contains of a group: names of settings, and values of those that are no floats."""
    names = (name for name in group if name not in ("params", *_WAYS))
    return tuple((name, _form(group[name])) for name in names)


def _form(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_form, value))
    return float if isinstance(value, (float, torch.Tensor)) else value


def _reader(groups: Sequence[Group], states: Sequence[State]) -> Read:
    def read(source: Any) -> Any:
        kind, index, name, position = source
        value = groups[index][name] if kind == "setting" else states[index][name]
        value = value[position] if position >= 0 else value
        return float(value) if isinstance(value, torch.Tensor) else value

    return read


@dataclass
class _StepInputs:
    """What a trace is made of: parameters with gradients, by their groups."""

    optimizer: torch.optim.Optimizer
    groups: Sequence[Group]
    states: Sequence[State]
    """Of each parameter."""
    counts: Sequence[State]
    """The numbers in its counters. They are read before the trace, in which a read would be an operation of it."""
    members: Sequence[int]
    """Position of each parameter's group."""
    tape: Tape = field(default_factory=Tape)
    counters: list[tuple[int, str, int]] = field(default_factory=list)
    functions: FollowedFunctions | None = field(init=False)
    """Those of a user's class."""

    def __post_init__(self) -> None:
        self.functions = None if is_independent(self.optimizer) else FollowedFunctions(type(self.optimizer))

    def run(self, made: Any) -> None:
        """Make the step of a stand-in. Raises ValueError if it sets global variables, as one trace would only once."""
        step = STEPS.get(type(self.optimizer), compat.hooks.own_step(self.optimizer))
        (step if self.functions is None else self.functions.of(step))(made)
        if self.functions is not None and (names := self.functions.set_names()):
            raise ValueError(f"it sets global variables, such as {names[0]}")

    def stand_in(self, parameters: Sequence[torch.Tensor], tensors: Sequence[Mapping[str, torch.Tensor]]) -> Any:
        """Return an optimizer of these parameters, whose state are these tensors, and numbers."""
        made = compat.hooks.stand_in(self.optimizer)
        if self.functions is not None:
            self.functions.give_to(made)
        made.param_groups = [
            {name: self._setting(at, name, value) for name, value in group.items() if name != "params"}
            | {name: value for name, value in _WAYS.items() if name in group}
            | {"params": [p for p, own in zip(parameters, self.members, strict=True) if own == at]}
            for at, group in enumerate(self.groups)
        ]
        made.state = defaultdict(dict)
        for at, (parameter, state) in enumerate(zip(parameters, self.states, strict=True)):
            if state:
                made.state[parameter] = {name: self._entry(at, name, x, tensors[at]) for name, x in state.items()}
        return made

    def _setting(self, group: int, name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            each = [self._number(("setting", group, name, at), x) for at, x in enumerate(value)]
            return type(value)(each)
        return self._number(("setting", group, name, -1), value)

    def _number(self, source: Any, value: Any) -> Any:
        if not isinstance(value, (float, torch.Tensor)):
            return value
        return self.tape.source(source, float(value))

    def _entry(self, at: int, name: str, value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
        if name in tensors:
            return tensors[name]
        if not is_counter(name, value):
            return value
        number = self.tape.source(("state", at, name, -1), self.counts[at][name])
        return StateNumber(number, value.dtype) if isinstance(value, torch.Tensor) else number

    def rests(self, memories: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Does the step do nothing where there are no gradients, as after the program's update?"""
        tensors = [dict(zip(tensors_of(s), m[1:], strict=True)) for s, m in zip(self.states, memories, strict=True)]
        made = self.stand_in([each[0] for each in memories], tensors)
        before = _snapshot(made)
        with torch.no_grad():
            self.run(made)
        return _snapshot(made) == before and all(x._version == 0 for each in memories for x in each)

    def makes_state(self, made: Any, parameters: Sequence[torch.Tensor]) -> bool:
        """Has the step made tensors or numbers that were not there before?"""
        return any(
            value is not None and old.get(name) is None
            for parameter, old in zip(parameters, self.states, strict=True)
            for name, value in made.state.get(parameter, {}).items()
        )

    def results(self, made: Any, parameters: Sequence[torch.Tensor], names: Sequence[Sequence[str]]) -> list[Any]:
        """Return parameters and states after the step, and note its counters."""
        if self.makes_state(made, parameters):
            raise NoState
        found = []
        for at, (parameter, old) in enumerate(zip(parameters, self.states, strict=True)):
            new = made.state.get(parameter, {})
            found += [parameter, *(new[name] for name in names[at])]
            for name, value in new.items():
                if is_counter(name, old.get(name)):
                    self.counters.append((at, name, self.tape.apply(operator.pos, value).at))
        return found


def _adafactor(optimizer: Any) -> None:
    """Make the step of torch.optim.Adafactor (Shazeer and Stern, 2018), with norms that stay on the device."""
    for group in optimizer.param_groups:
        rate, (eps, smallest), each = group["lr"], group["eps"], [p for p in group["params"] if p.grad is not None]
        for p in each:
            state, gradient = optimizer.state[p], -p.grad if group["maximize"] else p.grad
            if not state:
                raise NoState
            least = torch.finfo(p.dtype).eps if eps is None else eps
            state["step"] += 1
            step, root = state["step"].item(), p.numel() ** 0.5
            size = torch.clamp(p.norm(2) / root, min=smallest) * min(rate, 1 / step**0.5)
            if group["weight_decay"] != 0:
                p.mul_(1 - rate * group["weight_decay"])
            weight = step ** group["beta2_decay"]
            if gradient.dim() > 1:
                row, column = state["row_var"], state["col_var"]
                row.lerp_(torch.norm(gradient, dim=-1, keepdim=True).square().div(gradient.size(-1)), weight)
                column.lerp_(torch.norm(gradient, dim=-2, keepdim=True).square().div(gradient.size(-2)), weight)
                variance = (row @ column) / torch.clamp(row.mean(dim=-2, keepdim=True), min=least)
            else:
                variance = state["variance"].lerp_(gradient * gradient, weight)
            update = torch.clamp(variance, min=least * least).rsqrt() * gradient
            p.sub_(update * (size / torch.clamp(update.norm(2) / (root * group["d"]), min=1.0)))


STEPS: Mapping[type[torch.optim.Optimizer], Callable[[Any], None]] = {torch.optim.Adafactor: _adafactor}
"""Steps in place of torch's own, which wait for values of tensors."""


def _snapshot(made: Any) -> list[Any]:
    """Return the identity of all that an optimizer holds; a number that changes is another object, or entry."""
    parts = [made.__dict__, *made.param_groups, *made.state.values()]
    return [(name, id(value), getattr(value, "at", None)) for part in parts for name, value in part.items()]


def trace(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Group],
    members: Sequence[int],
    states: Sequence[State],
    counts: Sequence[State],
    memories: Sequence[Sequence[torch.Tensor]],
    dtype: torch.dtype,
) -> UpdateTrace:
    """Trace the step of some parameters.

    `members`: each parameter's group, as a position in `groups`. `states`: the entries of its state; `counts`: the
    numbers in counters among them; `memories`: shapes and dtypes of the parameter and of the other tensors. `dtype`:
    that of numbers on the device. Raises NoState if the step makes state, and other errors where a step cannot be
    traced, for example if it waits for a value.
    """
    given = _StepInputs(optimizer, groups, states, counts, members)
    names = [tensors_of(state) for state in states]
    wider = WIDER if is_independent(optimizer) and not isinstance(optimizer, torch.optim.Adafactor) else {}

    def step(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients, old, vector = values[: len(members)], values[len(members) : -1], values[-1]
        own = [x.to(wider.get(x.dtype, x.dtype)).clone() for x in old]
        parameters, tensors, rest = [], [], iter(own)
        for gradient, each in zip(gradients, names, strict=True):
            parameters.append(next(rest))
            parameters[-1].grad = gradient.to(parameters[-1].dtype)
            tensors.append({name: next(rest) for name in each})
        made = given.stand_in(parameters, tensors)
        before = dict(made.__dict__)
        # what the user has compiled is traced as it was written
        stance = contextlib.nullcontext() if is_independent(optimizer) else torch.compiler.set_stance("force_eager")
        try:
            with torch.no_grad(), NumbersOnDevice(given.tape, vector), stance:
                given.run(made)
        except Exception as error:
            if given.makes_state(made, parameters):
                raise NoState from error
            raise
        if made.__dict__.keys() != before.keys() or any(made.__dict__[name] is not x for name, x in before.items()):
            raise ValueError("it changes attributes of the optimizer")
        return tuple(x.to(y.dtype) for x, y in zip(given.results(made, parameters, names), old, strict=True))

    def fake(x: torch.Tensor) -> torch.Tensor:  # by its layout: torch would convert a parameter's gradient, too
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    with compat.tensors.fake_mode():
        old, gradients = [fake(x) for each in memories for x in each], [fake(each[0]) for each in memories]
        vector = torch.empty(LARGEST, dtype=dtype, device=old[0].device)
        another = [[fake(x) for x in each] for each in memories]
    if not is_independent(optimizer) and not _StepInputs(optimizer, groups, states, counts, members).rests(another):
        raise ValueError("it does something without gradients")
    gm = compat.aot.traced_again(torch.func.functionalize(step), [*gradients, *old, vector], {})
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    for node in calls:
        if (
            node.target.namespace not in ("aten", "prims", step_ops.NAMESPACE)
            or torch.Tag.nondeterministic_seeded in node.target.tags
        ):
            raise ValueError(f"it calls {node.target}")
    numbers = [*gm.graph.find_nodes(op="placeholder")][-1]
    is_elementwise = all(
        torch.Tag.pointwise in node.target.tags
        or node.target.overloadpacket.__name__ in _MOVES
        or (node.target is torch.ops.aten.select.int and node.args[0] is numbers)
        for node in calls
    ) and all(x.shape == m[0].shape or not x.ndim for m in memories for x in m)
    return UpdateTrace(gm, given.tape, given.counters, is_elementwise, not is_independent(optimizer))


def tensors_of(state: State) -> list[str]:
    """Return the names of a state's tensors in memory of the parameter's device."""
    return [name for name, x in state.items() if isinstance(x, torch.Tensor) and not is_counter(name, x)]
