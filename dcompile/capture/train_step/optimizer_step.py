"""A backward that waits for `optimizer.step()`, and then runs as one program with the update.

`loss.backward()` only keeps what its backward needs, and shows pending gradients in `.grad`. Whatever needs a gradient
earlier runs the backward as it always ran, and the update then is a program of its own. If nothing does until the
optimizer's step begins, backward and update are one program. The step itself then finds no gradients, so that the
optimizer's hooks, its scheduler and its state stay the user's.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.train_step.deferred_backward import (
    NORM,
    UPDATE,
    DeferredBackward,
    LateBackward,
    Unscaling,
)
from dcompile.capture.train_step.deferred_forward import CHANGED, OTHER, LateForward, PendingResult, WaitingForwards
from dcompile.capture.train_step.optimizer_state import Member, Membership, OptimizerState, why_not_traced
from dcompile.capture.train_step.pending_gradient import PendingFlag, PendingGradient, PendingScalar, clipping
from dcompile.capture.train_step.step_graph import ParameterUpdate, agreed, update_alone, with_updates
from dcompile.capture.train_step.update_trace import is_independent
from dcompile.collectives.contract import Executable
from dcompile.device_traits import HOST
from dcompile.errors import DcompileError

FIRST = "the optimizer's state did not exist yet"
NOTHING = "no backward of the compiled model was waiting"
IMMEDIATE = "the backward could not wait: hooks on gradients, autograd.grad, a replaced parameter, or no reduction"
CONSUMED = (
    "dcompile: this gradient was consumed by the optimizer's update, which ran in one program with the backward; "
    "call zero_grad() after step(), and read gradients before step()"
)
LISTED = next(map(sys.getrefcount, [object()]))
"""References to an object that only a list holds, as counted for all of a list."""
NORMS = "norms of gradients were taken before the step"
READ = "a gradient was read or changed before the step"
FORWARD = "another forward ran before the step"


class OptimizerStep:
    """The steps of one optimizer for one compiled model. It is the source of pending gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Add hooks to the optimizer, which are there as long as this object."""
        self._optimizer = weakref.ref(optimizer)
        self._state = OptimizerState()
        self._waiting: DeferredBackward | None = None
        self._newest: LateBackward | None = None
        self._programs: dict[Any, Executable] = {}
        self._norms: dict[Any, Executable] = {}
        self._leaves: dict[LateBackward, tuple[list[Any], list[Any], list[Any]]] = {}
        """Backward -> parameters, leaves of autograd, and the nodes of autograd that add to their `.grad`."""
        self._made: dict[LateBackward, list[PendingGradient]] = {}
        """Backward -> its newest pending gradients, which are used again where nobody else holds them."""
        self._places: dict[Any, Any] = {}
        """(backward, number of the members) -> places of parameters, and of views of them, among its inputs."""
        self._hidden: list[tuple[torch.nn.Parameter, Any]] = []
        """Parameters of the step in progress, and what their `.grad` shows after it."""
        self._reason = NOTHING
        """Why the newest backward has not waited for the step."""
        self._open: Unscaling | None = None
        """Sharded gradients that this rank has unscaled, and whose infinities ranks have not told each other."""
        self.forwards = WaitingForwards()
        self.newest_norm: torch.Tensor | None = None
        """Norm of the gradients of the newest step that was one program, if it clipped them."""
        self._planned: DeferredBackward | None = None
        """Forward and backward that run in the optimizer's next step."""
        self.whole = 0
        """Steps that were one program with their forward."""
        self._measured: tuple[Membership, torch.Tensor, bool] | None = None
        """Of the newest step: its parameters, the norm of each gradient or its count of unsound numbers, and whether
        these are counts.
        """
        self.joined = 0
        """Steps that ran in the backward's program."""
        self.updated = 0
        """Steps whose update was a program of its own."""
        self.separate: Counter[str] = Counter()
        """Why steps did not run in the backward's program -> their number."""
        self.eager: Counter[str] = Counter()
        """Why steps were the optimizer's own -> their number."""
        known = weakref.ref(self)

        @compat.hooks.mark_own
        def before(_: Any, args: Any, keywords: Any) -> Any:
            return None if (step := known()) is None else step._before_step(args, keywords)

        @compat.hooks.mark_own
        def after(*_: Any) -> None:
            if (step := known()) is not None:
                step._after_step()

        hooks = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
        state = self._state

        def count(_: Any) -> None:
            state.settle()

        self.leave = weakref.finalize(self, _remove, (*hooks, optimizer.register_state_dict_pre_hook(count)), state)
        """Remove the hooks: another object takes over."""
        self.leave.atexit = False

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, as long as it lives."""
        return self._optimizer()

    # --- the backward ---

    def defer(self, backward: LateBackward, args: list[Any]) -> bool:
        """Inside a backward: keep it for later if it can wait. It then has no results yet."""
        self.settle("a second backward ran before the step")
        self._newest = backward
        reason = backward.why_alone()
        if reason or not backward.waits(args):
            self._reason = reason or IMMEDIATE
            return False
        parameters, leaves, nodes = self._leaves_of(backward)
        if not self._can_wait(parameters, nodes):
            self._reason = IMMEDIATE
            return False
        backward.begin_waiting()
        gradients = self._gradients_of(backward, parameters)
        before = [parameter.grad for parameter in parameters]
        if any(type(gradient) is PendingGradient for gradient in before):
            before = [gradient.value() if type(gradient) is PendingGradient else gradient for gradient in before]
        waiting = DeferredBackward(backward, list(args), leaves, parameters, gradients, before, self._norms)
        args.clear()
        self._waiting = waiting
        compat.autograd.at_end_of_backward(lambda: self._show(waiting))
        return True

    def _can_wait(self, parameters: Sequence[Any], nodes: Sequence[Any]) -> bool:
        """Will this backward add to `.grad` of just these parameters, and may nobody look at it while it runs?"""
        if self._optimizer() is None or torch.is_grad_enabled() or torch.is_anomaly_enabled():
            return False
        if not nodes:  # a parameter is gone: another has its place
            return False
        return not compat.autograd.have_leaf_hooks(parameters) and compat.autograd.will_run(nodes)

    def _leaves_of(self, backward: LateBackward) -> tuple[list[Any], list[Any], list[Any]]:
        """Return parameters and leaves of a backward, and the nodes of autograd that add to the leaves' `.grad`."""
        parameters: list[Any] = [reference() for reference in backward.owners]
        leaves: list[Any] = [reference() for _, reference in backward.leaves]
        known = self._leaves.get(backward)
        if known is None or any(map(operator.is_not, (*known[0], *known[1]), (*parameters, *leaves))):
            alive = all(parameter is not None for parameter in (*parameters, *leaves))
            nodes = [compat.autograd.accumulator(leaf) for leaf in leaves] if alive else []
            known = self._leaves[backward] = parameters, leaves, nodes
            self._made.pop(backward, None)
        return known

    def _gradients_of(self, backward: LateBackward, parameters: Sequence[Any]) -> list[PendingGradient]:
        """Return new pending gradients of a backward's parameters: the old ones again where nobody holds them."""
        made = self._made.pop(backward, None)
        if made is None:
            gradients = [PendingGradient(parameter, self) for parameter in parameters]
        else:
            counts = list(map(sys.getrefcount, made))
            gradients = [
                old if count == LISTED + old.own_references else PendingGradient(parameter, self)
                for parameter, old, count in zip(parameters, made, counts, strict=True)
            ]
        self._made[backward] = gradients
        return list(gradients)

    def _show(self, waiting: DeferredBackward) -> None:
        """At the end of a backward, show pending gradients, unless code outside the graph has added gradients."""
        if waiting is not self._waiting:
            return
        if waiting.is_undisturbed():
            waiting.show()
        else:
            self.settle("a parameter has a gradient from outside the compiled graph")

    @contextlib.contextmanager
    def hiding(self) -> Iterator[None]:
        """Show no pending gradients in this context: TorchDynamo looks at `.grad` as it compiles."""
        parameters = {p for parameters, *_ in self._leaves.values() for p in parameters if p is not None}
        hidden = [(p, p.grad) for p in parameters if type(p.grad) is PendingGradient]
        for parameter, _ in hidden:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    def drop(self) -> None:
        """Forget what waits and whose gradients nobody wants; ranks still reduce those of a backward."""
        self.forwards.drop()
        self._planned = None
        waiting = self._waiting
        if waiting is not None and not waiting.backward.numbers:
            self._forget(waiting)
            self._waiting = None
        self.settle("the step was given up")
        if waiting is not None:
            waiting.forget_unscaling()

    def settle(self, reason: str) -> None:
        """Run by itself a forward that waits, or a backward, and show its gradients."""
        self.forwards.settle(reason)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._reason = reason
            self._run_apart(waiting)

    def _run_apart(self, waiting: DeferredBackward) -> None:
        """Run a backward without the update. Gradients that a factor clips stay pending."""
        self._forget(waiting)
        if waiting.is_scaled or waiting.norms_are_held():
            waiting.run_with_norms()
        else:
            waiting.run_alone()
        self._unscaled(waiting)
        if waiting.is_sharded:  # another rank's program may have an all-reduce of numbers behind the reductions
            self._agree(waiting.gradients)

    def _forget(self, waiting: DeferredBackward) -> None:
        """Let go of gradients that get values: only `.grad` and the user may hold their memory."""
        self._made.pop(waiting.backward, None)

    # --- what pending gradients ask ---

    def value(self, gradient: PendingGradient) -> torch.Tensor:
        """Return a gradient's value, with its factor, and show it."""
        if self._waits(gradient):
            self.settle(READ)
        real = gradient.computed
        if real is None:
            raise DcompileError(CONSUMED)
        if gradient.factor is not None:
            factor = gradient.factor.value() if isinstance(gradient.factor, PendingScalar) else gradient.factor
            with torch.no_grad():
                compat.tensors.local_part(real).mul_(factor)
            gradient.factor = None
        parameter = gradient.parameter()
        if parameter is not None and parameter.grad is gradient:
            parameter.grad = real
        return real

    def is_consumed(self, gradient: PendingGradient) -> bool:
        """Has an update used the gradient, so that it has no value?"""
        return gradient.computed is None and not self._waits(gradient)

    def norm(self, gradient: PendingGradient) -> torch.Tensor:
        """Return a gradient's norm; the first one runs the backward, and computes all."""
        waiting = self._waiting
        if waiting is not None and self._waits(gradient):
            self._waiting, self._reason = None, NORMS
            self._forget(waiting)
            waiting.run_with_norms()
            self._unscaled(waiting)
        known = gradient.computed_norm
        norm: torch.Tensor = torch.linalg.vector_norm(self.value(gradient)) if known is None else known
        return norm

    def total(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of sharded gradients, from those of each; tell ranks of infinities, as the program does."""
        return self._tell(list(map(compat.tensors.local_part, norms)))[0]

    def _tell(self, norms: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return what all ranks know of their gradients: by a program, as its collective has a name."""
        assert self._newest is not None, "gradients come from a backward"
        backward, unscaling, self._open = self._newest, self._open, None
        found = None if unscaling is None else unscaling.found.known()
        key = backward, NORM, tuple(norm.dtype for norm in norms), found is None
        if key not in self._programs:
            self._programs[key] = backward.build_apart(agreed(norms, found, backward.ranks), NORM)
        with torch.no_grad():
            results = self._programs[key]([*norms, *([] if found is None else [found.clone()])])
            if found is not None:
                found.copy_(results[-1])
        return results

    # --- what GradScaler asks ---

    def unscale(self, gradients: Sequence[PendingGradient], found: torch.Tensor, inverse: torch.Tensor) -> bool:
        """Keep for later that a GradScaler unscales gradients; False if that is to be done now."""
        waiting, scaler, optimizer = self._waiting, compat.grad_scaler.unscaling(), self._optimizer()
        if waiting is None or not {*map(id, gradients)} <= {*map(id, waiting.gradients)}:
            return False
        known = waiting.unscaling
        reason = READ if scaler is None else compat.grad_scaler.why_not_deferred(scaler)
        if not reason and known is not None and known.found is not found:
            reason = "gradients are unscaled twice"
        elif not reason and (waiting.is_scaled or waiting.norms_are_held()):
            reason = NORMS
        if reason:
            self.settle(reason)
            return False
        if known is None:
            known = waiting.unscaling = Unscaling(PendingFlag.of(found, self), inverse, scaler, id(optimizer))
        known.gradients += gradients
        return True

    def may_step(self, flag: PendingFlag) -> bool:
        """Answer GradScaler, which asks whether to step: will the step's program look for infinities?"""
        given, waiting, optimizer = compat.grad_scaler.step_arguments(), self._waiting, self._optimizer()
        unscaling = None if waiting is None else waiting.unscaling
        if given is None or waiting is None or optimizer is None or unscaling is None or unscaling.found is not flag:
            return False
        unscaling.is_checked = True
        if any(value is not None for value in given):
            reason = "the step has a closure"
        elif compat.hooks.are_steps_watched(optimizer):
            reason = "the optimizer's step is wrapped, or has hooks, which GradScaler's skipped steps do not call"
        else:
            reason = why_not_traced(optimizer) or self._why_apart(optimizer, waiting)
        if reason:
            self.settle(reason)
        return not reason

    def check(self, flag: PendingFlag) -> None:
        """Find out whether gradients are finite, on all ranks."""
        waiting = self._waiting
        if waiting is not None and waiting.unscaling is not None and waiting.unscaling.found is flag:
            self.settle("GradScaler's check was read before the step")
        if self._open is not None and self._open.found is flag:
            self._agree(self._open.gradients)

    def _unscaled(self, waiting: DeferredBackward) -> None:
        """Show what a backward that has run by itself has found, or keep it for ranks to agree on."""
        if waiting.unscaling is not None and waiting.is_sharded:
            self._open = waiting.unscaling
        elif waiting.unscaling is not None:
            waiting.unscaling.found.known()

    def _agree(self, gradients: Sequence[PendingGradient]) -> None:
        """Compute what ranks tell each other: the norm that clips sharded gradients, and infinities."""
        for factor in {id(f): f for g in gradients if isinstance(f := g.factor, PendingScalar)}.values():
            factor.value()
        if self._open is not None:
            self._tell([])

    def clip(self, parameters: Sequence[torch.nn.Parameter], largest: float) -> torch.Tensor:
        """Do what clip_grad_norm_ does, and return the norm, which is computed later if gradients are."""
        waiting = self._waiting
        if waiting is None or {*map(id, parameters)} != {*map(id, waiting.parameters)}:
            return torch.nn.utils.clip_grad_norm_(parameters, largest)
        total, factor = clipping(waiting.gradients, largest)
        for gradient in waiting.gradients:
            gradient.factor = factor
        return total

    def known(self, norm: torch.Tensor) -> torch.Tensor:
        """Return a norm as a plain tensor, once the step has run."""
        plain: torch.Tensor = norm.value() if isinstance(norm, PendingScalar) else norm
        return compat.tensors.whole(plain)

    def remarks(self) -> list[str]:
        """Lines for the receipt: how many steps ran in which way, and why."""
        lines = []
        if self.whole:
            lines.append(f"optimizer: {self.whole} steps were one program of forward, backward and update")
        found = self.forwards.separate.items()
        lines += [f"optimizer: {count} steps not in one program with their forward: {why}" for why, count in found]
        if self.joined:
            lines.append(f"optimizer: the updates of {self.joined} steps ran in the backward's program")
        if self.updated:
            lines.append(f"optimizer: the updates of {self.updated} steps ran in a program of their own")
        lines += [
            f"optimizer: {count} steps not in the backward's program: {why}" for why, count in self.separate.items()
        ]
        lines += [f"optimizer: {count} steps by the optimizer itself: {why}" for why, count in self.eager.items()]
        return lines

    def _waits(self, gradient: PendingGradient) -> bool:
        return self._waiting is not None and any(gradient is other for other in self._waiting.gradients)

    # --- the step ---

    def _before_step(self, args: Any, keywords: Any) -> Any:
        """Run the update, after the step's closure if it has one, whose place another one takes."""
        optimizer = self._optimizer()
        if optimizer is None:
            return None
        given = [value for value in (*args[1:], *keywords.values()) if value is not None]
        if not given or not is_independent(optimizer):  # another class may call its closure repeatedly
            self._update_by_program(optimizer, "the step has a closure" if given else why_not_traced(optimizer))
            return None
        (closure,) = given

        def closure_with_update() -> Any:
            loss = closure()
            self._update_by_program(optimizer, why_not_traced(optimizer))
            return loss

        return (args[0], closure_with_update), {}

    def _update_by_program(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        """Run the update as a program, with a backward that waits if nothing speaks against it."""
        if self._planned is not None:
            planned, self._planned = self._planned, None
            self._run_whole(planned)
            return
        waiting = self._waiting
        if not reason and waiting is not None:
            reason = "" if waiting.plan is not None else self._why_apart(optimizer, waiting)
            if not reason:
                try:
                    self._run_joined(waiting)
                except BaseException:
                    waiting.forget_unscaling()
                    raise
                return
        self.settle(reason)
        self._state.settle()
        self._measured = None
        if type(flag := getattr(optimizer, "found_inf", None)) is PendingFlag:  # of shards whose norms were read
            flag.value()
            reason = why_not_traced(optimizer)
        self.separate[self._reason] += 1
        self._reason = NOTHING
        eager = reason or self._update(optimizer)
        if eager:
            self.eager[eager] += 1
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if type(parameter.grad) is PendingGradient:
                    parameter.grad.value()

    def _after_step(self) -> None:
        """Show gradients again: consumed ones raise an error when they are read, and zero_grad clears them."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def _why_apart(self, optimizer: torch.optim.Optimizer, waiting: DeferredBackward) -> str:
        """Return why backward and update cannot run as one this time; empty if they can, by the plan that is made."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        pending = dict(zip(map(id, waiting.parameters), waiting.gradients, strict=True))
        expected = list(map(pending.get, map(id, parameters)))
        if any(map(operator.is_not, map(operator.attrgetter("grad"), parameters), expected)):
            return "a gradient was set, or comes from elsewhere"
        if sum(gradient is not None for gradient in expected) != len(pending):
            return "the optimizer does not have all parameters of the graph"
        factor = waiting.clipping()
        if factor is None and waiting.norms_are_held():
            return NORMS
        unscaling = waiting.unscaling
        if unscaling is not None and {*map(id, unscaling.gradients)} != {*map(id, waiting.gradients)}:
            return "GradScaler unscales some of the gradients"
        if (
            unscaling is not None
            and not unscaling.is_checked
            and optimizer.__dict__.get("found_inf") is not unscaling.found
        ):
            return "gradients are unscaled, and the step is not GradScaler's"
        return factor if isinstance(factor, str) else self._plan(optimizer, waiting, factor)

    def _plan(self, optimizer: torch.optim.Optimizer, waiting: DeferredBackward, factor: PendingScalar | None) -> str:
        """Make ready what runs a backward with the update; return why that is not possible."""
        unscaling = waiting.unscaling
        members = self._state.prepare(optimizer, waiting.parameters, ahead=unscaling is not None)
        if members is None or members.obstacle:
            return FIRST if members is None else members.obstacle
        clips, inverse = waiting.clip if factor is None else factor.number, None
        if unscaling is not None:
            inverse, scale = unscaling.inverse, getattr(optimizer, "grad_scale", None)
            if scale is not None:  # by which a fused step divides, as `inverse` is 1
                inverse = inverse * scale.double().reciprocal().float()
        vector = self._state.vector(members, clips[1:], inverse)
        found = self._joined_program(waiting, members, vector, clips[0] if clips else None)
        if found is None:
            return "parameters share memory, or are read as another dtype"
        waiting.plan = members, vector, *found
        return ""

    def _run_joined(self, waiting: DeferredBackward) -> None:
        """Run a backward with the update, as planned, and hide its gradients from the optimizer."""
        members, results = waiting.plan[0], self._results_of(waiting)
        found = self._take_measured(waiting, results, members)
        self._state.advance(members, found)
        self._hide(waiting.parameters, waiting.gradients)
        self.joined += 1

    def _results_of(self, waiting: DeferredBackward) -> list[Any]:
        """Run the program of a backward with the update, as planned; return its results."""
        members, vector, program, saved = waiting.plan
        waiting.check_arguments()
        self._waiting, backward = None, waiting.backward
        each = members.members
        token, inputs = backward.take(waiting.args)  # nothing else may hold what the program frees as it runs
        inputs += [member.held[0] for member, at in zip(each, saved, strict=True) if at is None]
        inputs += members.states
        inputs += waiting.earlier([member.parameter for member in each])
        inputs.append(vector)
        for parameter, old in zip(waiting.parameters, waiting.before, strict=True):
            parameter.grad = old
        return self._run(waiting, functools.partial(backward.run_joined, program, token, inputs))

    # --- the whole step

    def defer_forward(self, forward: LateForward, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Return pending results of a forward that can wait for `train_step`'s update; None if it must run now."""
        self.settle(FORWARD)
        return self.forwards.defer(forward, compiled, args)

    def begin_whole(self, loss: torch.Tensor, largest: float | None, parts: int) -> bool:
        """Plan the optimizer's next step as one program with the forward and backward of a loss; False if it cannot be.

        Then the forward has run. `largest`: norm to which gradients are clipped; `parts`: number of micro-batches, by
        which the loss is divided.
        """
        forwards, optimizer = self.forwards, self._optimizer()
        forward = forwards.waiting
        if forward is not None and optimizer is not None:
            reason = OTHER
            if type(loss) is PendingResult and loss.source is forward and loss.place == forward.forward.loss:
                share = float(torch.ones((), dtype=loss.dtype, device=HOST) / parts)
                whole = forward.kept_as_one(share)
                waiting, reason = self._whole_step(optimizer, whole, forward, largest)
                if not reason:
                    self._planned = waiting
                    return True
            forwards.settle(reason)
        forwards.has_returned(loss)
        forwards.separate[forwards.reason] += 1
        return False

    def _whole_step(
        self, optimizer: torch.optim.Optimizer, whole: LateBackward, forward: Any, largest: float | None
    ) -> tuple[Any, str]:
        """Return a planned step with its forward, or why it cannot be one program."""
        parameters, leaves, nodes = self._leaves_of(whole)
        if not nodes or not whole.waits(forward.args) or compat.autograd.have_leaf_hooks(parameters):
            return None, IMMEDIATE
        if compat.hooks.has_step_hooks(optimizer) or compat.hooks.are_steps_watched(optimizer):
            return None, "the optimizer's step is wrapped, or has hooks"
        before = [parameter.grad for parameter in parameters]
        own = set(map(id, parameters))
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not own <= set(map(id, every)):
            return None, "the optimizer does not have all parameters of the graph"
        if any(p.grad is not None for p in every if id(p) not in own) or any(
            type(g) is PendingGradient for g in before
        ):
            return None, "a gradient was set, or comes from elsewhere"
        clip = () if largest is None else (1e-6, float(largest))
        waiting = DeferredBackward(
            whole, forward.args, leaves, parameters, [], before, self._norms, forward.marks, clip, CHANGED
        )
        why = why_not_traced(optimizer) or self._plan(optimizer, waiting, None)
        return waiting, why

    def _run_whole(self, waiting: DeferredBackward) -> None:
        """Run forward, backward and update as planned; give results to whoever has them."""
        forward, self.forwards.waiting = self.forwards.waiting, None
        assert forward is not None, "planned with it"
        results = self._results_of(waiting)
        measured = results.pop().clone() if waiting.clip else None
        self.newest_norm = None if measured is None else measured[-1]
        self._measured = None if measured is None else (waiting.plan[0], measured, False)
        forward.give(results)
        self._state.advance(waiting.plan[0])
        self._hide(waiting.parameters, [None] * len(waiting.parameters))
        self.whole += 1

    def _take_measured(self, waiting: DeferredBackward, results: list[Any], members: Membership) -> torch.Tensor | None:
        """Tell those who asked the norm of all gradients, and whether one was not finite, which is returned.

        The results' memory is a recording's, which is written again.
        """
        unscaling, factor, found = waiting.unscaling, waiting.clipping(), None
        measured = None if unscaling is None and factor is None else results.pop().clone()
        if unscaling is not None and measured is not None:
            found, measured = (measured, results.pop().clone()) if factor is not None else (measured[-1], measured)
            unscaling.found.known().copy_(found)
        if isinstance(factor, PendingScalar) and measured is not None:
            factor.give_total(measured[-1])
        self._measured = None if measured is None else (members, measured, factor is None)
        return found

    def unsound(self) -> list[torch.nn.Parameter]:
        """Parameters with a gradient of the newest step that was not finite on this rank, as far as it was measured.

        It is by updates in the backward's program that clip or unscale. A GPU is waited for.
        """
        if self._measured is None:
            return []
        members, measured, counts = self._measured
        own = [member.parameter for member in members.members if member.held[0].numel()]
        sound = (measured == 0) if counts else measured.isfinite()
        return [parameter for parameter, good in zip(own, sound.tolist(), strict=False) if not good]

    def _joined_program(
        self, waiting: DeferredBackward, members: Membership, vector: torch.Tensor, clips: float | None
    ) -> tuple[Executable, list[int | None]] | None:
        """Return the program of a backward with these updates, compiled if need be, and where it finds parameters.

        None if their memory cannot be told apart.
        """
        backward = waiting.backward
        places = self._places.get((backward, members.number))
        if places is None:
            own = backward.inputs(waiting.args)
            places = self._places[backward, members.number] = _saved_places(own, members.members)
        if not places:
            return None
        unscales = waiting.unscaling is not None
        key = backward, members.number, tuple(waiting.accumulated), clips, unscales
        if key not in self._programs:
            place = {id(p): leaf for p, leaf in zip(waiting.parameters, waiting.leaf_gradients(), strict=True)}
            ordered = [place[id(member.parameter)] for member in members.members]
            updates = _updates(members, *places)
            graph = with_updates(backward.gm, ordered, updates, vector, clips, backward.ranks, unscales)
            self._programs[key] = backward.build(graph, backward.name)
        return self._programs[key], places[0]

    def _run(self, waiting: DeferredBackward, run: Callable[[], list[Any]]) -> list[Any]:
        """Run a program, inside a backward of autograd if ranks reduce gradients there."""
        if not waiting.backward.numbers:
            with torch.no_grad():
                return run()
        results: list[Any] = []
        # each leaf costs some microseconds, and one tells that gradients are reduced where none is added to another
        alone = not waiting.is_sharded and all(gradient is None for gradient in waiting.before)
        count = 1 if alone else len(waiting.leaves)

        def inside() -> tuple[Any, ...]:
            results.extend(run())
            return (None,) * count

        waiting.run_inside(inside, count)
        return results

    def _update(self, optimizer: torch.optim.Optimizer) -> str:
        """Run the update of real gradients as a program of its own; return why that is not possible."""
        backward = self._newest
        if backward is None:
            return NOTHING
        shown = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not shown:
            return ""
        members = self._state.prepare(optimizer, shown)
        if members is None or members.obstacle:
            return FIRST if members is None else members.obstacle
        factor = self._common_factor(members.members)
        each = [member for member in members.members if member.held[0].numel()]
        gradients = [self._real(member.parameter.grad, factor is not None) for member in each]
        if any(gradient.layout is not torch.strided for gradient in gradients):
            return "gradients are sparse"
        layouts = tuple((gradient.dtype, gradient.stride()) for gradient in gradients)
        key, vector = ("alone", members.number, layouts, factor is not None), self._state.vector(members)
        program = self._programs.get(key)
        if program is None:
            nothing = [None] * len(members.members), [()] * len(members.members)
            updates = [u for u in _updates(members, *nothing) if u.parameter.numel()]
            graph = update_alone(gradients, updates, vector, factor is not None)
            program = self._programs[key] = backward.build_apart(graph, UPDATE)
        states = [state for member in each for state in member.held[1:]]
        more = [] if factor is None else [factor.to(torch.float32)]
        with torch.no_grad():
            program([*gradients, *(member.held[0] for member in each), *states, vector, *more])
        self._state.advance(members)
        self._hide([m.parameter for m in members.members], [m.parameter.grad for m in members.members])
        self.updated += 1
        return ""

    def _common_factor(self, members: Sequence[Member]) -> torch.Tensor | None:
        """Return the factor of all gradients; None if each has its own, which it is multiplied by now."""
        pending = [g for m in members if type(g := m.parameter.grad) is PendingGradient]
        factors = {id(gradient.factor): gradient.factor for gradient in pending}
        if len(factors) == 1 and len(pending) == len(members):
            factor = next(iter(factors.values()))
            return factor.value() if isinstance(factor, PendingScalar) else factor
        for gradient in pending:
            gradient.value()
        return None

    def _real(self, gradient: Any, is_scaled: bool) -> torch.Tensor:
        """Return a gradient's memory on this rank, without its factor if the update multiplies by it."""
        if type(gradient) is PendingGradient:
            gradient = gradient.computed if is_scaled and gradient.computed is not None else gradient.value()
        return compat.tensors.local_part(gradient.detach())

    def _hide(self, parameters: Sequence[torch.nn.Parameter], gradients: Sequence[Any]) -> None:
        """Let the optimizer's own step find no gradients."""
        for parameter in parameters:
            parameter.grad = None
        for gradient in gradients:
            if type(gradient) is PendingGradient:
                gradient.renewed()  # holds no memory of a program any more
        self._hidden = list(zip(parameters, gradients, strict=True))


def _remove(handles: Sequence[Any], state: OptimizerState) -> None:
    state.settle()
    for handle in handles:
        handle.remove()


def _updates(
    members: Membership, saved: Sequence[int | None], views: Sequence[tuple[int, ...]]
) -> list[ParameterUpdate]:
    each = zip(members.members, members.traces, members.firsts, saved, views, strict=True)
    return [
        ParameterUpdate(member.held[0], member.held[1:], trace, first, at, looks)
        for member, trace, first, at, looks in each
    ]


def _saved_places(
    args: Sequence[Any], members: Sequence[Member]
) -> tuple[list[int | None], list[tuple[int, ...]]] | tuple[()]:
    """Return the position of each parameter among a backward's inputs, or None, and those of other views of it.

    Empty if parameters share memory, or an input reads one as another dtype: no order of reads and writes is known.
    """
    parameters = [member.held[0] for member in members]
    known = {p.untyped_storage().data_ptr(): number for number, p in enumerate(parameters) if p.numel()}
    if len(known) < sum(p.numel() > 0 for p in parameters):
        return ()
    saved: list[int | None] = [None] * len(parameters)
    views: list[tuple[int, ...]] = [()] * len(parameters)
    for place, arg in enumerate(args):
        number = known.get(arg.untyped_storage().data_ptr()) if isinstance(arg, torch.Tensor) else None
        if number is None:
            continue
        p = parameters[number]
        if arg.dtype != p.dtype:
            return ()
        same = (arg.shape, arg.stride(), arg.dtype, arg.storage_offset())
        if saved[number] is None and same == (p.shape, p.stride(), p.dtype, p.storage_offset()):
            saved[number] = place
        else:
            views[number] += (place,)
    return saved, views
