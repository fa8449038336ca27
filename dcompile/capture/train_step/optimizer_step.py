"""A backward that waits for `optimizer.step()`, and then runs as one program with the update.

`loss.backward()` only keeps what its backward needs, and shows pending gradients in `.grad`. Whatever needs a gradient
earlier runs the backward as it always ran, and the update then is a program of its own. If nothing does until the
optimizer's step begins, backward and update are one program. The step itself then finds no gradients, so that the
optimizer's hooks, its scheduler and its state stay the user's.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.train_step.deferred_backward import DeferredBackward, LateBackward
from dcompile.capture.train_step.optimizer_state import Member, OptimizerState, UpdateCall, has_state, why_no_rule
from dcompile.capture.train_step.pending_gradient import PendingGradient
from dcompile.capture.train_step.step_graph import ParameterUpdate, update_alone, with_updates
from dcompile.capture.train_step.update_rules import RULES
from dcompile.collectives.contract import Executable
from dcompile.errors import DcompileError

FIRST = "the optimizer's state did not exist yet"
NOTHING = "no backward of the compiled model was waiting"
IMMEDIATE = "the backward could not wait: hooks on gradients, autograd.grad, or no reduction"
CONSUMED = (
    "dcompile: this gradient was consumed by the optimizer's update, which ran in one program with the backward; "
    "call zero_grad() after step(), and read gradients before step()"
)
NORMS = "norms of gradients were taken before the step"


class OptimizerStep:
    """The steps of one optimizer for one compiled model. It is the source of pending gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Add hooks to the optimizer, which keep this object."""
        self._optimizer = weakref.ref(optimizer)
        self._state = OptimizerState()
        self._waiting: DeferredBackward | None = None
        self._newest: LateBackward | None = None
        self._programs: dict[Any, Executable] = {}
        self._norms: dict[Any, Executable] = {}
        self._hidden: list[tuple[torch.nn.Parameter, Any]] = []
        """Parameters of the step in progress, and what their `.grad` shows after it."""
        self._reason = NOTHING
        """Why the newest backward has not waited for the step."""
        self.joined = 0
        """Steps that ran in the backward's program."""
        self.updated = 0
        """Steps whose update was a program of its own."""
        self.apart: Counter[str] = Counter()
        """Why steps did not run in the backward's program -> their number."""
        self.eager: Counter[str] = Counter()
        """Why steps were the optimizer's own -> their number."""
        optimizer.register_step_pre_hook(lambda _, args, keywords: self._before_step(args, keywords))
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    # --- the backward ---

    def defer(self, backward: LateBackward, args: list[Any]) -> bool:
        """Inside a backward: keep it for later if it can wait. It then has no results yet."""
        self.settle("a second backward ran before the step")
        self._newest = backward
        parameters: list[Any] = [reference() for _, reference in backward.leaves]
        reason = backward.why_alone()
        if reason or not backward.waits(args) or not self._can_wait(parameters, args):
            self._reason = reason or IMMEDIATE
            return False
        before = [parameter.grad for parameter in parameters]
        if any(isinstance(gradient, PendingGradient) for gradient in before):
            before = [g if not isinstance(g, PendingGradient) else self.value(g) for g in before]
        gradients = [PendingGradient(parameter, self) for parameter in parameters]
        waiting = DeferredBackward(backward, list(args), parameters, gradients, before, self._norms)
        args.clear()
        self._waiting = waiting
        compat.autograd.at_end_of_backward(lambda: self._show(waiting))
        return True

    def _can_wait(self, parameters: Sequence[Any], args: Sequence[Any]) -> bool:
        """Will this backward add to `.grad` of just these parameters, and may nobody look at it while it runs?"""
        if self._optimizer() is None or torch.is_grad_enabled() or any(arg is None for arg in args):
            return False
        if any(p is None or compat.autograd.has_leaf_hooks(p) for p in parameters):
            return False
        return all(compat.autograd.will_accumulate(parameter) for parameter in parameters)

    def _show(self, waiting: DeferredBackward) -> None:
        """At the end of a backward, show pending gradients, unless code outside the graph has added gradients."""
        if waiting.is_undisturbed():
            waiting.show()
        else:
            self.settle("a parameter has a gradient from outside the compiled graph")

    def settle(self, reason: str) -> None:
        """Run a backward that waits by itself, and show its gradients."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._reason = reason
            waiting.run_alone()

    # --- what pending gradients ask ---

    def value(self, gradient: PendingGradient) -> torch.Tensor:
        """Return a gradient's value, with its factor, and show it."""
        if self._waits(gradient):
            self.settle("a gradient was read or changed before the step")
        real = gradient.computed
        if real is None:
            raise DcompileError(CONSUMED)
        if gradient.factor is not None:
            with torch.no_grad():
                real.mul_(gradient.factor)
            gradient.factor = None
        parameter = gradient.parameter()
        if parameter is not None and parameter.grad is gradient:
            parameter.grad = real
        return real

    def norm(self, gradient: PendingGradient) -> torch.Tensor:
        """Return a gradient's norm; the first one runs the backward, and computes all."""
        waiting = self._waiting
        if waiting is not None and self._waits(gradient):
            self._waiting, self._reason = None, NORMS
            waiting.run_with_norms()
            waiting.show()
        if gradient.computed_norm is None:
            return torch.linalg.vector_norm(self.value(gradient))
        return gradient.computed_norm

    def scales(self, gradient: PendingGradient) -> bool:
        """Can the update multiply this gradient? It must be computed, since the factor follows from it."""
        return gradient.computed is not None

    def _waits(self, gradient: PendingGradient) -> bool:
        return self._waiting is not None and any(gradient is other for other in self._waiting.gradients)

    # --- the step ---

    def _before_step(self, args: Any, keywords: Any) -> None:
        """Run the update as a program, with a backward that waits if nothing speaks against it."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        closure = any(value is not None for value in (*args[1:], *keywords.values()))
        reason = "the step has a closure" if closure else why_no_rule(optimizer)
        if not reason and self._waiting is not None:
            reason = self._why_apart(optimizer, self._waiting)
            if not reason:
                self._run_joined(optimizer, self._waiting)
                return
        self.settle(reason)
        self.apart[self._reason] += 1
        self._reason = NOTHING
        eager = reason or self._update(optimizer)
        if eager:
            self.eager[eager] += 1
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if isinstance(parameter.grad, PendingGradient):
                    self.value(parameter.grad)

    def _after_step(self) -> None:
        """Show gradients again: consumed ones raise an error when they are read, and zero_grad clears them."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def _why_apart(self, optimizer: torch.optim.Optimizer, waiting: DeferredBackward) -> str:
        """Return why backward and update cannot run as one this time; empty if they can."""
        pending = {id(p): g for p, g in zip(waiting.parameters, waiting.gradients, strict=True)}
        rule, held = RULES[type(optimizer)], 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = pending.get(id(parameter))
                if gradient is None and parameter.grad is None:
                    continue
                if gradient is None or parameter.grad is not gradient:
                    return "a gradient was set, or comes from elsewhere"
                held += 1
                if not has_state(rule, group, optimizer.state.get(parameter)):
                    return FIRST
        return "" if held == len(pending) else "the optimizer does not have all parameters of the graph"

    def _run_joined(self, optimizer: torch.optim.Optimizer, waiting: DeferredBackward) -> None:
        """Run a backward with the update, and hide its gradients from the optimizer."""
        self._waiting = None
        call = self._state.prepare(optimizer, {id(p) for p in waiting.parameters})
        backward = waiting.backward
        own = backward.inputs(waiting.args)
        saved, views = _saved_places(own, call.members)
        earlier = tuple(leaf.accumulated for leaf in waiting.leaf_gradients())
        key = id(backward), call.key, tuple(saved), tuple(views), earlier
        if key not in self._programs:
            place = {id(p): leaf for p, leaf in zip(waiting.parameters, waiting.leaf_gradients(), strict=True)}
            leaves = [place[id(member.parameter)] for member in call.members]
            graph = with_updates(backward.gm, leaves, _updates(call, saved, views), call.vector)
            self._programs[key] = backward.build(graph, "step")
        program = self._programs[key]
        parameters = [m.held[0] for m, place in zip(call.members, saved, strict=True) if place is None]
        held = {id(p): old for p, old in zip(waiting.parameters, waiting.before, strict=True)}
        added = [] if backward.numbers else [g for m in call.members if (g := held[id(m.parameter)]) is not None]
        inputs = [*own, *parameters, *call.states(), *added, call.vector]

        def run() -> tuple[Any, ...]:
            backward.run_joined(program, waiting.args, inputs)
            return (None,) * len(waiting.parameters)

        for parameter, old in zip(waiting.parameters, waiting.before, strict=True):
            parameter.grad = old
        if backward.numbers:
            waiting.run_inside(run)
        else:
            with torch.no_grad():
                run()
        self._state.advance(call)
        self._hide([(p, g) for p, g in zip(waiting.parameters, waiting.gradients, strict=True)])
        self.joined += 1

    def _update(self, optimizer: torch.optim.Optimizer) -> str:
        """Run the update of real gradients as a program of its own; return why that is not possible."""
        backward, rule = self._newest, RULES[type(optimizer)]
        if backward is None:
            return NOTHING
        shown: dict[int, Any] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shown[id(parameter)] = parameter.grad
                    if not has_state(rule, group, optimizer.state.get(parameter)):
                        return FIRST
        factors = {id(g.factor): g.factor for g in shown.values() if isinstance(g, PendingGradient)}
        if len(factors) > 1 or (factors and len(factors) + len([g for g in shown.values() if not isinstance(g, PendingGradient)]) > 1):
            for gradient in shown.values():
                if isinstance(gradient, PendingGradient):
                    self.value(gradient)
            return self._update(optimizer)
        factor = next(iter(factors.values()), None)
        call = self._state.prepare(optimizer, shown)
        local = compat.tensors.local_part
        gradients = [
            g.computed if isinstance(g := shown[id(m.parameter)], PendingGradient) else local(g.detach())
            for m in call.members
        ]
        kept = [at for at, m in enumerate(call.members) if m.held[0].numel()]
        if any(gradients[at].layout is not torch.strided for at in kept):
            return "gradients are sparse"
        layouts = tuple((gradients[at].dtype, gradients[at].shape, gradients[at].stride()) for at in kept)
        key = "alone", call.key, layouts, factor is not None
        if key not in self._programs:
            nothing: list[Any] = [None] * len(call.members), [()] * len(call.members)
            updates = _updates(call, *nothing)
            graph = update_alone(
                [gradients[at] for at in kept], [updates[at] for at in kept], call.vector, factor is not None
            )
            self._programs[key] = backward.build_update(graph)
        states = [state for at in kept for state in call.members[at].held[1:]]
        parameters = [call.members[at].held[0] for at in kept]
        more = [] if factor is None else [factor.to(torch.float32)]
        with torch.no_grad():
            self._programs[key]([*(gradients[at] for at in kept), *parameters, *states, call.vector, *more])
        self._state.advance(call)
        self._hide([(member.parameter, shown[id(member.parameter)]) for member in call.members])
        self.updated += 1
        return ""

    def _hide(self, gradients: list[tuple[torch.nn.Parameter, Any]]) -> None:
        """Let the optimizer's own step find no gradients."""
        for parameter, _ in gradients:
            parameter.grad = None
        self._hidden = gradients


def _updates(call: UpdateCall, saved: Sequence[int | None], views: Sequence[tuple[int, ...]]) -> list[ParameterUpdate]:
    each = zip(call.members, call.firsts, saved, views, strict=True)
    return [
        ParameterUpdate(member.held[0], member.held[1:], call.rule, member.group, first, at, looks)
        for member, first, at, looks in each
    ]


def _saved_places(
    args: Sequence[Any], members: Sequence[Member]
) -> tuple[list[int | None], list[tuple[int, ...]]]:
    """Return the position of each parameter among a backward's inputs, or None, and those of other views of it."""
    parameters = [member.held[0] for member in members]
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
