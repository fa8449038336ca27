"""Adapter of DistributedDataParallel: the compiled backward reduces gradients in place of DDP's reducer.

DDP's forward stays as it is (buffer broadcast, device moves, no_sync, hooks). Only the reducer's hooks on parameters
are removed, at the first compiled backward. By then all objections are known, so the first step is correct either way.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from dcompile import compat
from dcompile.capture.adapters.ddp_reducer import (
    PriorReduction,
    ReductionLog,
    UsedParameterMap,
    counted_names,
    counted_reasons,
)
from dcompile.capture.adapters.grad_field import outside_parts, present_gradients
from dcompile.capture.adapters.plain import PlainAdapter, known_number, new_subject
from dcompile.collectives.contract import BucketRule, ParamInfo
from dcompile.errors import DcompileError

PARAMETERS_ANEW = (
    "DDP with device_mesh makes new parameters for tensor parallelism in each forward, which cannot be traced; "
    "fully_shard(model, mesh=mesh['dp']) on the same mesh is taken over"
)


def _check_unchanged(info: ParamInfo, parameter: torch.Tensor) -> None:
    """Raise if a parameter is not as its place in the buckets was planned, as after `ddp.module.double()`."""
    now = replace(
        info,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=parameter.device.type,
    )
    if now != info:
        raise DcompileError(
            f"dcompile: parameter {info.fqn} was {info.dtype} of shape {info.shape} on {info.device} when its model "
            f"was compiled, and is {now.dtype} of shape {now.shape} on {now.device} now; its gradients are reduced in "
            "memory that was planned before. Change parameters first, then wrap the model in "
            "DistributedDataParallel (or replicate it), and compile that"
        )


class DdpAdapter(PlainAdapter):
    """State of the takeover of one DDP module."""

    name = "ddp"
    serves_wrapper = True
    way_to_differ = (
        "A model that is meant to differ by its rank needs static_graph=True or find_unused_parameters=True in "
        "DistributedDataParallel, or options={'distributed': 'stock'}."
    )
    carries_sync = True
    synchronizes = True

    def __init__(self, ddp: Any, stock: bool, module: torch.nn.Module | None = None) -> None:
        """Start undecided. `module`: the module whose gradients DDP reduces, if it wraps another one (`replicate`)."""
        self._ddp = weakref.ref(ddp)
        kept: Any = ddp.module if module is None else module
        self._module: Callable[[], Any] = weakref.ref(kept)
        if module is not None:
            self.name = "replicate"
        self.state: Literal["undecided", "taken", "stock"] = "undecided"
        self.reasons = ()
        self.notes = ()
        self._stock = stock
        self._held_static_graph = False
        self._compared: set[tuple[str, ...]] = set()
        self._watched: dict[int, Any] = {}
        """Parameter number -> handle of the hook that records its gradients."""
        self._reached: dict[int, int] = {}
        """Parameter number -> the last backward that added to its .grad, of parameters that are watched."""
        self.arrived: Callable[[int, str], None] | None = None
        """Callback of a backward for each gradient that autograd adds, with the parameter's number and name."""
        self.unreduced: set[int] = set()
        """Parameters whose .grad holds gradients of this rank only, from backwards under no_sync."""
        self.prepared = False
        """Whether the user prepared the reducer after a forward under no_sync; then the next backward reduces."""
        missing = compat.ddp.missing_names(ddp)
        self._missing = f"this torch lacks {', '.join(missing)}" if missing else ""
        parameters = [] if missing else compat.ddp.parameters(ddp, kept)
        self.refs = {number: weakref.ref(parameter) for number, (_, parameter) in enumerate(parameters)}
        self._numbers = {id(parameter): number for number, (_, parameter) in enumerate(parameters)}
        self._hooks = compat.hooks.GradientHooks(self.refs)
        self._infos = tuple(
            ParamInfo(number, name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.device.type)
            for number, (name, p) in enumerate(parameters)
        )
        self._group: Any = None
        self._allows_unused = self._joins = self._static = False
        self._rule: tuple[tuple[int, ...], str] = (), ""
        """Bucket sizes in bytes, and the dtype that gradients are cast to for all-reduces."""
        self._objections: list[str] = []
        self._read_settings(ddp)
        self.eager = not missing and compat.ddp.makes_parameters_anew(kept)
        if self.eager:
            self.state, self.reasons = "stock", (PARAMETERS_ANEW,)
        self.covers_all_params = self.uneven
        """Whether each graph's program reduces all trainable parameters, also those that it does not use."""
        self._trainable = self._trainable_now(self.refs)
        """Parameters with a place in each program's buckets if `every`; as under DDP, frozen ones have none."""
        places = {number: place for place, number in enumerate(sorted(self._trainable))}  # in DDP's reducer
        self._prior = PriorReduction(places, lambda number: bool(self._trainable_now((number,))))
        self.log = ReductionLog(self._infos, places)
        self.used = UsedParameterMap(places, self.refs)
        self._arrived_outside: set[int] = set()
        """Parameters to whose .grad autograd has added since the last reduction, of those with a hook of ours."""

    @property
    def eligible(self) -> bool:  # type: ignore[override]
        return self.state == "taken"

    @property
    def decided(self) -> bool:  # type: ignore[override]
        return self.state != "undecided"

    def _read_settings(self, ddp: Any) -> None:
        """Record the wrapper's settings.

        The wrapper may be collected before a backward runs, at different times on different ranks. Whether gradients
        are reduced must not depend on that.
        """
        self._group = ddp.process_group
        if self._missing:
            return
        self._allows_unused, self._joins = compat.ddp.allows_unused(ddp), compat.ddp.is_joining(ddp)
        self._static = bool(ddp.static_graph)
        if self.state == "undecided":
            self._objections = compat.ddp.objections(ddp, self._module())
            self._rule = compat.ddp.bucket_bytes(ddp), compat.ddp.wire(ddp) or ""

    @property
    def ddp(self) -> Any:
        """The wrapper, or None once it is collected; never None while its forward runs."""
        return self._ddp()

    @property
    def group(self) -> Any:
        return self._group

    def process_groups(self) -> list[Any]:
        """Return the process group of the gradient reductions."""
        return [self.group]

    def number_of(self, parameter: Any) -> int | None:
        return known_number(self._numbers, self.refs, parameter)

    def param_infos(self) -> tuple[ParamInfo, ...]:
        return self._infos

    def exchanged(self, used: Collection[int]) -> tuple[ParamInfo, ...]:
        """Return the parameters with a place in the buckets of a program that computes gradients of `used`."""
        wanted = self._trainable.union(used) if self.covers_all_params else used
        found = tuple(info for info in self._infos if info.number in wanted)
        for info in found:
            if (parameter := self.refs[info.number]()) is not None:
                _check_unchanged(info, parameter)
        return found

    def has_new_parameters(self) -> bool:
        """Have parameters become trainable that have no place in earlier programs' buckets? Each is reported once.

        Parameters that are frozen later keep their places, as in the buckets of DDP's reducer.
        """
        if self.state == "stock" or not self.covers_all_params or len(self._trainable) == len(self.refs):
            return False
        grown = self._trainable_now(self.refs.keys() - self._trainable)
        self._trainable |= grown
        return bool(grown)

    def has_moved(self) -> bool:
        """Does the wrapper have another process group than before (_update_process_group)?"""
        ddp = self.ddp
        return ddp is not None and ddp.process_group is not self._group

    def replicated(self) -> list[tuple[str, torch.Tensor]]:
        """Return name and value of each parameter that is there: all ranks hold the same."""
        found = ((info.fqn, self.refs[info.number]()) for info in self._infos)
        return [(name, parameter) for name, parameter in found if parameter is not None]

    def trainable(self) -> frozenset[int]:
        """Return the parameters that are to be trained now; frozen ones have a number, too."""
        return self._trainable_now(self.refs)

    def _trainable_now(self, numbers: Iterable[int]) -> frozenset[int]:
        found = ((number, self.refs[number]()) for number in numbers)
        return frozenset(number for number, parameter in found if parameter is not None and parameter.requires_grad)

    def communicators(self) -> dict[str, Any]:
        return {"ddp": self.group}

    def bucket_rule(self) -> BucketRule | None:
        if self.state == "stock":
            return None
        (first, second, *more), wire = self._rule
        return BucketRule(first, second, tuple(more), wire, self.covers_all_params)

    @property
    def uneven(self) -> bool:
        """Whether ranks may use different parameters in a step; then each step reduces every parameter."""
        return self._allows_unused

    @property
    def is_static(self) -> bool:
        """Whether each step of a rank uses the same parameters (static_graph)."""
        return self._static

    @property
    def varies(self) -> bool:
        """Whether a rank may use other parameters in each step (find_unused_parameters without static_graph)."""
        return self._allows_unused and not self._static

    @property
    def may_be_alone(self) -> bool:
        """Whether other ranks may skip this step (Join), so that no rank may wait for them; the same on all ranks."""
        return self._joins

    def hooked(self) -> list[str]:
        """Describe parameters with gradient hooks; as under DDP, these get this rank's gradients, not the average."""
        found = self._hooks.numbers(self._watched)
        return [f"parameter {self._infos[number].fqn} has a hook" for number in found]

    def wants_sync(self) -> bool:
        """Is the backward of the forward that runs now to reduce gradients? Under no_sync it is not."""
        return bool(self.ddp.require_backward_grad_sync)

    def before_forward(self) -> None:
        """Inside DDP.forward, before the module runs: record settings, and hold back DDP's own reduction."""
        ddp = self.ddp
        self._read_settings(ddp)
        if torch.is_grad_enabled() and self.wants_sync():
            self._prior.prepare()
        if self.state == "undecided" and not self._missing and torch.is_grad_enabled():
            self._held_static_graph |= compat.ddp.hold_static_graph(ddp)
            compat.ddp.watch_reducer(ddp, self._wanted, self._was_prepared)
            if not self.uneven:  # otherwise DDP's reducer raises an error about parameters used outside the module
                self.watch()

    def decide(self, objections: list[str], several: bool = False) -> None:
        """Inside the first compiled backward: take over reduction, or leave it to DDP and record the reasons.

        `several`: the forward was captured in several graphs, and each reduces only its own parameters. With all
        parameters in the buckets of each graph, every graph would reduce all of them. So all ranks must use the same
        parameters in this case.
        """
        if self.state != "undecided":
            return
        ddp = self.ddp
        if ddp is not None:
            self._read_settings(ddp)
        reasons = self.standing_objections() + objections or self._used_behind()
        if reasons:
            self.state, self.reasons = "stock", tuple(dict.fromkeys(reasons))
            if ddp is not None:
                compat.ddp.leave_reducer(ddp)
                if self._held_static_graph:
                    compat.ddp.release_static_graph(ddp)
            return
        # No hook has fired yet: autograd reaches a parameter only after every compiled backward that uses it, and
        # others have not been reached
        if ddp is not None:  # its reducer is gone with it
            compat.ddp.watch_reducer(ddp, self._wanted, self._was_prepared)
            compat.ddp.silence_reducer(ddp, self.check_prior_reduction, self.log.logged, self.used.tensor)
        self.state, self.covers_all_params = "taken", self.covers_all_params and not several

    def only_plan(self) -> None:
        self.carries_sync = False
        self.reasons = tuple(self.standing_objections())
        self.state = "stock" if self.reasons else "taken"

    def _used_behind(self) -> list[str]:
        """Return why DDP's reducer has begun with this backward: parameters used after the module, as by a loss."""
        task = compat.autograd.backward_task()
        names = [self._infos[number].fqn for number, last in self._reached.items() if last == task]
        return [f"outside of the module's forward, its result is used with {counted_names(names)}"] if names else []

    def standing_objections(self) -> list[str]:
        """Return the objections to taking over that do not depend on what the model computes."""
        reasons = [self._missing] if self._missing else self._objections
        return [*reasons, "option distributed='stock'"] if self._stock else reasons

    def let_go_of_static_graph(self) -> None:
        """Inside DDP.forward, after a call without compiled graphs: let DDP queue its own reduction after all."""
        if self._held_static_graph and self.state == "undecided":
            self._held_static_graph = False
            compat.ddp.let_go_static_graph(self.ddp)

    def restore(self, reason: str, inside_forward: bool) -> None:
        """Fall back to DDP's reducer: from this step on if DDP's forward is running, else from the next."""
        compat.ddp.rebuild_reducer(self.ddp, inside_forward)
        self.state, self.reasons = "stock", (reason,)
        self.note(f"DDP reduces the gradients again: {reason}")

    def leave(self, reason: str) -> None:
        """Inside DDP.forward, before the module runs: give back all, so that another adapter can take over."""
        if self.state == "taken":
            self.restore(reason, inside_forward=True)
        compat.ddp.leave_reducer(self.ddp)

    def _wanted(self, reason: str) -> None:
        """Fall back to DDP before something that needs its reducer, on every rank."""
        if self.state == "taken":
            self.restore(f"{reason} after the first step", inside_forward=False)
        elif self.ddp is not None:
            compat.ddp.leave_reducer(self.ddp)

    def _was_prepared(self) -> None:
        self.prepared = True
        self._prior.prepare()

    def has_synced(self, numbers: Collection[int] = ()) -> None:
        """Record that a backward has reduced gradients, with a note if stock DDP would not have.

        `numbers`: the parameters that the programs of this backward use, and that got a gradient if the loss needs one.
        """
        if not self._prior.expects:
            self.note(
                "several backwards of forwards that synchronise: each one's gradients are averaged, where stock DDP "
                "averages the first one's alone, and ranks drift apart"
            )
        self.prepared = False
        if self.uneven:
            self._prior.expects = False
        else:
            self._prior.mark(self._arrived_outside.union(numbers) if self._arrived_outside else numbers)
        self._arrived_outside.clear()

    def check_prior_reduction(self) -> None:
        """Inside DDP.forward, where the reducer does so: raise its RuntimeError if a parameter got no gradient.

        Not with find_unused_parameters or static_graph, where other ranks say so, or none needs to.
        """
        text = "" if self.uneven else self._prior.error(lambda number: self._infos[number].fqn, self._group.rank())
        if text:
            compat.ddp.log_error(self.ddp, text)
            raise RuntimeError(text)

    def name_of(self, tensor: Any) -> str | None:
        """Return the name of a parameter that DDP synchronizes; None for any other tensor."""
        number = self.number_of(tensor)
        return None if number is None else self._infos[number].fqn

    def rebind(self, number: int, parameter: Any) -> None:
        """Use another parameter object for a number, as the module does now."""
        if isinstance(parameter, torch.nn.Parameter):
            self.refs[number] = weakref.ref(parameter)
            self._numbers[id(parameter)] = number
            self._hooks = compat.hooks.GradientHooks(self.refs)
            if self._watched.pop(number, None) is not None:
                self._watch(number, parameter)

    def subject_of(self, plan: tuple[str, ...]) -> str | None:
        """See `new_subject`."""
        return new_subject(self._compared, plan, "collectives of a model,")

    def watch(self) -> None:
        """Record each gradient that autograd adds from now on, for calls with eager parts or several graphs."""
        for number, ref in self.refs.items():
            parameter = ref()
            if number not in self._watched and parameter is not None and parameter.requires_grad:
                self._watch(number, parameter)

    def unwatch(self, numbers: Iterable[int]) -> None:
        """Stop recording gradients of these parameters, as programs reduce them."""
        for number in numbers:
            if number in self._watched:
                self._watched.pop(number).remove()
                self._reached.pop(number, None)

    def note_arriving(self, reasons: Iterable[str]) -> None:
        """Note why gradients are reduced as autograd adds them. That costs a copy of each, unlike one program."""
        self.note(f"some calls copy their gradients into buckets as they arrive: {counted_reasons(reasons)}")

    def note_behind(self, reasons: Iterable[str]) -> None:
        """Note why gradients are reduced after the backward, where no computation overlaps with it."""
        self.note(f"some calls reduce their gradients at the end of the backward: {counted_reasons(reasons)}")

    def _watch(self, number: int, parameter: Any) -> None:
        added = functools.partial(self._gradient_added, number)
        self._watched[number] = parameter.register_post_accumulate_grad_hook(added)

    def _gradient_added(self, number: int, parameter: Any) -> None:
        if parameter.grad is not None:  # autograd calls hooks also where a gradient is absent
            self.unreduced.add(number)
        self._reached[number] = compat.autograd.backward_task()
        self._arrived_outside.add(number)
        if self.arrived is not None:
            self.arrived(number, self._infos[number].fqn)

    # --- inside a backward ---

    def accumulates(self, numbers: Iterable[int]) -> bool:
        """Does this backward add to .grad of any of these? torch.autograd.grad does not; DDP then reduces nothing."""
        return any(p is not None and compat.autograd.will_accumulate(p) for p in (self.refs[n]() for n in numbers))

    def accumulating(self, numbers: Iterable[int]) -> frozenset[int]:
        """Return those of these parameters to whose .grad this backward adds. It takes 1 us each."""
        params = ((number, self.refs[number]()) for number in numbers)
        return frozenset(n for n, p in params if p is not None and compat.autograd.will_accumulate(p))

    def reduce_rest(
        self,
        elsewhere: Mapping[int, torch.Tensor],
        covered: Collection[int],
        average: Callable[[Any, list[Any], str], None],
    ) -> None:
        """At the end of a synced backward: average what reached .grad from outside the compiled graphs.

        `elsewhere`: the reduced gradient of each parameter whose .grad differs from it. `covered`: all parameters that
        were reduced. Such remainders are rare. A program that is correct under DDP has the same ones on every rank.
        """
        if not elsewhere and not self.unreduced:
            return
        outside = outside_parts(self.refs, elsewhere)
        left = present_gradients(self.refs, self.unreduced.difference(covered))
        self.unreduced.clear()
        if not outside and not left:
            return
        average(self.group, [*(part.rest for part in outside), *left.values()], self._rule[1])
        for part in outside:
            part.add_rest()
        self._note_own_average("gradients from outside the module", [part.number for part in outside])
        only_other_code = [number for number in left if number in self._watched]
        self._note_own_average("gradients of parameters that only other code uses", only_other_code)
        earlier = [number for number in left if number not in self._watched]
        self._note_own_average("gradients of earlier no_sync steps", earlier)

    def _note_own_average(self, which: str, numbers: list[int]) -> None:
        if numbers:
            names = ", ".join(self._infos[number].fqn for number in numbers)
            self.note(f"{which} are averaged on their own: {names}")
