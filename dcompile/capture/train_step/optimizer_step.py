"""A backward that waits for `optimizer.step()`, and then runs as one program with the update.

`loss.backward()` only keeps what its backward needs, and shows pending gradients in `.grad`. Whatever needs a gradient
earlier runs the backward as it always ran: reading one, another backward or forward, a clipped norm. If nothing has,
when the optimizer's step begins, backward and update run as one program. The step itself then finds no gradients, so
that the optimizer's own hooks, its scheduler and its state stay the user's.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dcompile import compat
from dcompile.capture.train_step.pending_gradient import PendingGradient
from dcompile.capture.train_step.step_graph import ParameterUpdate, StepGraph, join_update
from dcompile.capture.train_step.update_rules import RULES, UpdateRule, settings_of
from dcompile.collectives.contract import Executable
from dcompile.errors import DcompileError

FIRST = "the optimizer's state did not exist yet"
NOTHING = "no backward of the compiled model was waiting"
IMMEDIATE = "the backward could not wait: hooks on gradients, autograd.grad, or no reduction"
CONSUMED = (
    "dcompile: this gradient was consumed by the optimizer's update, which ran in one program with the backward; "
    "call zero_grad() after step(), and read gradients before step()"
)


class LateBackward(Protocol):
    """A graph's backward that can run later, with or without an update."""

    gm: Any
    """The backward's graph."""
    leaves: Sequence[tuple[int, Callable[[], torch.nn.Parameter | None]]]
    """(position among the results, weak reference to the parameter) of each gradient."""
    numbers: Mapping[int, int]
    """Position among the results -> number in the plan of each gradient that ranks reduce."""

    def waits(self, args: Sequence[Any]) -> bool:
        """Can the backward wait for an update, with these arguments?"""

    def why_alone(self) -> str:
        """Return why it cannot run with an update; empty if it can."""

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """Return the program's inputs."""

    def run(self, args: list[Any]) -> list[Any]:
        """Run the backward by itself, inside a backward of autograd."""

    def build(self, gm: Any) -> Executable:
        """Compile the backward with an update."""

    def run_joined(self, program: Executable, args: Sequence[Any], inputs: list[Any]) -> None:
        """Run the backward with an update. `args`: those of the backward. Inside a backward if ranks reduce."""


@dataclass(eq=False)
class JoinedProgram:
    """One compiled backward with update, and what it expects."""

    run: Executable
    graph: StepGraph


@dataclass(eq=False)
class _Waiting:
    """One backward that waits."""

    backward: LateBackward
    args: list[Any]
    parameters: list[torch.nn.Parameter]
    gradients: list[PendingGradient]
    before: list[torch.Tensor | None]
    """What `.grad` held when the backward began."""


class _Replay(torch.autograd.Function):
    """A node of autograd that runs a backward which has waited: hooks and reductions then see an ordinary one."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Sequence[Any]], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:  # type: ignore[override]
        return None, *ctx.run()


class OptimizerStep:
    """The steps of one optimizer for one compiled model."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Add hooks to the optimizer, which keep this object."""
        self._optimizer = weakref.ref(optimizer)
        self._waiting: _Waiting | None = None
        self._programs: dict[Any, JoinedProgram] = {}
        self._counter = StepCounter()
        self._numbers: torch.Tensor | None = None
        self._rows: list[float] = []
        self._consumed: list[tuple[torch.nn.Parameter, PendingGradient]] = []
        self._nodes: dict[int, Any] = {}
        self._reason = NOTHING
        """Why the newest backward has not waited for the step."""
        self.joined = 0
        """Steps that ran in the backward's program."""
        self.apart: Counter[str] = Counter()
        """Why others did not -> number of steps."""
        self._hook = optimizer.register_step_pre_hook(lambda _, args, keywords: self._before_step(args, keywords))
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    # --- the backward ---

    def defer(self, backward: LateBackward, args: list[Any]) -> bool:
        """Inside a backward: keep it for later if it can wait. It then has no results yet."""
        self.settle("a second backward ran before the step")
        parameters = [reference() for _, reference in backward.leaves]
        if backward.why_alone() or not backward.waits(args) or not self._can_wait(parameters, args):
            self._reason = backward.why_alone() or IMMEDIATE
            return False
        found: list[Any] = parameters
        before = [parameter.grad for parameter in found]
        if any(type(gradient) is PendingGradient for gradient in before):
            raise DcompileError(CONSUMED)
        gradients = [PendingGradient(parameter, self._compute) for parameter in found]
        waiting = _Waiting(backward, list(args), found, gradients, before)
        args.clear()
        self._waiting = waiting
        compat.autograd.at_end_of_backward(lambda: self._show(waiting))
        return True

    def _can_wait(self, parameters: Sequence[Any], args: Sequence[Any]) -> bool:
        """Will this backward add to `.grad` of just these parameters, and may nobody look at it while it runs?"""
        optimizer = self._optimizer()
        if optimizer is None or torch.is_grad_enabled() or any(arg is None for arg in args):
            return False
        if any(p is None or p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters):
            return False
        return all(compat.autograd.will_accumulate(parameter) for parameter in parameters)

    def _show(self, waiting: _Waiting) -> None:
        """At the end of a backward, show pending gradients, unless code outside the graph has added gradients."""
        if any(p.grad is not old for p, old in zip(waiting.parameters, waiting.before, strict=True)):
            self.settle("a parameter has a gradient from outside the compiled graph")
            return
        for parameter, gradient in zip(waiting.parameters, waiting.gradients, strict=True):
            parameter.grad = gradient

    def _compute(self, gradient: PendingGradient) -> torch.Tensor:
        """Return the value of a pending gradient."""
        waiting = self._waiting
        if waiting is not None and any(gradient is other for other in waiting.gradients):
            self.settle("a gradient was read or changed before the step")
        real = gradient.__dict__.get("computed")
        if real is None:
            raise DcompileError(CONSUMED)
        return real  # type: ignore[no-any-return]

    def settle(self, reason: str) -> None:
        """Run a backward that waits by itself."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        self._reason = reason
        kept = []
        for parameter, gradient, old in zip(waiting.parameters, waiting.gradients, waiting.before, strict=True):
            replaced = parameter.grad is not gradient and parameter.grad is not old
            kept.append((parameter.grad,) if replaced else None)
            parameter.grad = old
        places = [place for place, _ in waiting.backward.leaves]

        def run() -> tuple[Any, ...]:
            results = waiting.backward.run(waiting.args)
            return tuple(results[place] for place in places)

        with compat.autograd.record_autograd():
            _Replay.apply(run, *waiting.parameters).backward()  # type: ignore[no-untyped-call]
        for parameter, gradient, replaced_by in zip(waiting.parameters, waiting.gradients, kept, strict=True):
            gradient.computed = parameter.grad
            if replaced_by is not None:
                parameter.grad = replaced_by[0]

    # --- the step ---

    def _before_step(self, args: Any, keywords: Any) -> None:
        """Run a backward that waits, with the update if nothing speaks against it."""
        waiting, optimizer = self._waiting, self._optimizer()
        if waiting is not None and optimizer is not None:
            reason = self._why_apart(optimizer, waiting, args, keywords)
            if not reason:
                self._join(optimizer, waiting)
                return
            self.settle(reason)
        self.apart[self._reason] += 1
        self._reason = NOTHING

    def _join(self, optimizer: torch.optim.Optimizer, waiting: _Waiting) -> None:
        """Run a backward with the update, and hide its gradients from the optimizer."""
        self._waiting = None
        self._run_joined(optimizer, waiting)
        for parameter in waiting.parameters:
            parameter.grad = None
        self._consumed = list(zip(waiting.parameters, waiting.gradients, strict=True))
        self.joined += 1

    def _after_step(self) -> None:
        """Leave consumed gradients, so that reading one raises an error and zero_grad clears them."""
        for parameter, gradient in self._consumed:
            parameter.grad = gradient
        self._consumed = []

    def _why_apart(self, optimizer: torch.optim.Optimizer, waiting: _Waiting, args: Any, keywords: Any) -> str:
        """Return why backward and update cannot run as one this time; empty if they can."""
        rule = RULES.get(type(optimizer))
        if rule is None:
            return f"{type(optimizer).__name__} has no update rule"
        if any(value is not None for value in (*args[1:], *keywords.values())):
            return "the step has a closure"
        if compat.fused_optimizers.step_hooks(optimizer) > 1:
            return "the optimizer has a hook before its step"
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return "GradScaler unscales gradients in the step"
        pending = {id(p): g for p, g in zip(waiting.parameters, waiting.gradients, strict=True)}
        held = 0
        for group in optimizer.param_groups:
            if not _is_plain(group):
                return "a setting of a param group is a tensor on another device, or differentiable"
            for parameter in group["params"]:
                gradient = pending.get(id(parameter))
                if gradient is None and parameter.grad is None:
                    continue
                if gradient is None or parameter.grad is not gradient:
                    return "a gradient was set, or comes from elsewhere"
                held += 1
                if not _has_state(rule, group, optimizer.state.get(parameter)):
                    return FIRST
        return "" if held == len(pending) else "the optimizer does not have all parameters of the graph"

    def _run_joined(self, optimizer: torch.optim.Optimizer, waiting: _Waiting) -> None:
        rule = RULES[type(optimizer)]
        members = _members(optimizer, {id(p) for p in waiting.parameters})
        tensors = [(p, *(optimizer.state[p][name] for name in rule.state(group))) for p, group in members]
        steps = [optimizer.state[p]["step"] for p, _ in members] if rule.counts else []
        counts = self._counter.count(steps) if rule.counts else [1] * len(members)
        rows: dict[tuple[int, int], int] = {}
        numbers: list[float] = []
        firsts = []
        for (_, group), count in zip(members, counts, strict=True):
            key = (id(group), count)
            if key not in rows:
                rows[key] = len(numbers)
                numbers += rule.numbers(group, count)
            firsts.append(rows[key])
        vector = self._vector(numbers, [p for p, _ in members])
        program = self._program(rule, waiting, members, tensors, firsts, vector)
        flat = [tensor for held in tensors for tensor in held]
        parameters = [tensors[at][0] for at in program.graph.parameters]
        states = [state for _, *held in tensors for state in held]
        earlier = self._earlier(waiting, members)
        backward, inputs = waiting.backward, waiting.backward.inputs(waiting.args)
        inputs += [*parameters, *states, *earlier, vector]

        def run() -> tuple[Any, ...]:
            backward.run_joined(program.run, waiting.args, inputs)
            return (None,) * len(waiting.parameters)

        if backward.numbers:
            for parameter, old in zip(waiting.parameters, waiting.before, strict=True):
                parameter.grad = old
            with torch.enable_grad():
                _Replay.apply(run, *waiting.parameters).backward()  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                run()
        with torch.no_grad():
            self._counter.advance(steps)
        torch.autograd.graph.increment_version(flat)

    def _earlier(self, waiting: _Waiting, members: Sequence[tuple[Any, Any]]) -> list[torch.Tensor]:
        """Return the gradients of earlier micro-batches, in the order of updates."""
        if waiting.backward.numbers:  # the reduction adds them
            return []
        held = {id(p): old for p, old in zip(waiting.parameters, waiting.before, strict=True)}
        return [old for p, _ in members if (old := held[id(p)]) is not None]

    def _vector(self, numbers: list[float], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the step's numbers in memory of the parameters' device."""
        first = parameters[0]
        wide = any(parameter.dtype is torch.float64 for parameter in parameters)
        dtype = torch.float64 if wide else torch.float32
        known = self._numbers
        if known is None or (known.shape, known.dtype, known.device) != ((len(numbers),), dtype, first.device):
            known = self._numbers = torch.zeros(len(numbers), dtype=dtype, device=first.device)
            self._rows = []
        if numbers != self._rows:
            # pageable memory is read before the call returns, and the copy is in order on the stream
            known.copy_(torch.tensor(numbers, dtype=dtype), non_blocking=True)
            self._rows = numbers
        return known

    def _program(
        self,
        rule: UpdateRule,
        waiting: _Waiting,
        members: Sequence[tuple[Any, Any]],
        tensors: Sequence[Sequence[torch.Tensor]],
        firsts: Sequence[int],
        vector: torch.Tensor,
    ) -> JoinedProgram:
        """Return the program for a backward and these settings, compiled if need be."""
        backward = waiting.backward
        places = {id(p): place for p, (place, _) in zip(waiting.parameters, backward.leaves, strict=True)}
        saved, views = _saved_places(backward.inputs(waiting.args), [p for p, _ in members])
        added = not backward.numbers
        held = {id(p): added and old is not None for p, old in zip(waiting.parameters, waiting.before, strict=True)}
        settings = {id(group): settings_of(rule, group) for _, group in members}
        key = (
            id(backward),
            tuple((id(p), settings[id(group)], held[id(p)]) for p, group in members),
            tuple(saved),
            tuple(views),
            tuple(firsts),
            tuple((x.dtype, x.shape, x.stride(), x.device) for x in (*(t for each in tensors for t in each), vector)),
        )
        if key not in self._programs:
            numbers = backward.numbers
            updates = [
                ParameterUpdate(places[id(p)], at, own[0], tuple(own[1:]), rule, group, first, held[id(p)], numbers.get(places[id(p)]), looks)
                for (p, group), own, at, first, looks in zip(members, tensors, saved, firsts, views, strict=True)
            ]
            graph = join_update(backward.gm, updates, vector)
            self._programs[key] = JoinedProgram(backward.build(graph.gm), graph)
        return self._programs[key]


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
            torch._foreach_add_(list(steps), 1)
            self.known = [(step, step._version) for step in steps]


def _members(optimizer: torch.optim.Optimizer, wanted: set[int]) -> list[tuple[Any, dict[str, Any]]]:
    """Return (parameter, group) of these parameters, in the optimizer's order."""
    return [(p, group) for group in optimizer.param_groups for p in group["params"] if id(p) in wanted]


def _has_state(rule: UpdateRule, group: Any, state: Any) -> bool:
    names = (*rule.state(group), *(("step",) if rule.counts else ()))
    return state is not None and all(isinstance(state.get(name), torch.Tensor) for name in names) or not names


def _is_plain(group: Any) -> bool:
    """Are a group's settings numbers that the host knows?"""
    rate = group["lr"]
    known = not isinstance(rate, torch.Tensor) or rate.device.type == "cpu"
    betas = group.get("betas", ())
    return known and not group.get("differentiable") and not any(isinstance(b, torch.Tensor) for b in betas)


def _saved_places(
    args: Sequence[Any], parameters: Sequence[torch.Tensor]
) -> tuple[list[int | None], list[tuple[int, ...]]]:
    """Return the position of each parameter among a backward's inputs, or None, and those of other views of it."""
    known = {p.untyped_storage().data_ptr(): number for number, p in enumerate(parameters) if p.numel()}
    saved: list[int | None] = [None] * len(parameters)
    views: list[tuple[int, ...]] = [()] * len(parameters)
    for place, arg in enumerate(args):
        number = known.get(arg.untyped_storage().data_ptr()) if isinstance(arg, torch.Tensor) else None
        if number is None:
            continue
        p = parameters[number]
        same = (arg.shape, arg.stride(), arg.dtype, arg.storage_offset())
        if saved[number] is None and same == (p.shape, p.stride(), p.dtype, p.storage_offset()):
            saved[number] = place
        else:
            views[number] += (place,)
    return saved, views
