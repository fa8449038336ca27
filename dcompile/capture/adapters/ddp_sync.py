"""DDP's gradients: reduced in the backward programs, behind the backward, or by DDP's own reducer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.adapters.arriving_gradients import SEVERAL, GradientArrivals
from dcompile.capture.adapters.ddp import DdpAdapter
from dcompile.capture.adapters.gradient_sync import BackwardCall, GradientSync
from dcompile.capture.agreement.capture_digest import compare_surroundings
from dcompile.capture.agreement.collective_plan import plan_of
from dcompile.capture.agreement.parameter_use import outside_use, tensors_in
from dcompile.capture.call_state import CapturedGraph, Invocation, Variant
from dcompile.capture.services import GradientBuckets
from dcompile.ir.nodes import Bucket

GRADIENTS = "gradients of a model"
"""What ranks disagree on if some leave reducing to DDP."""
ARRIVING = 2
"""What a call leaves for its backwards (`Invocation.token`) whose gradients are reduced as they arrive."""
EAGER = "a forward ran without any compiled graph"


@dataclass(eq=False)
class SynchronizedBackward:
    """One backward that reduces gradients."""

    behind: bool
    """Whether it does so when it is through, not in its programs."""
    buckets: list[GradientBuckets] = field(default_factory=list)
    """Of each program, in the order in which they ran."""
    numbers: list[frozenset[int]] = field(default_factory=list)
    """If `behind`: the parameters that each of them has a gradient of."""


class DdpSync(GradientSync):
    """Ranks decide in the first backward that reduces; each forward tells its backward whether to reduce."""

    def __init__(self, adapter: DdpAdapter) -> None:
        super().__init__(adapter)
        self._adapter = adapter
        self._tokens = make_token(reduces=False), make_token(reduces=True)
        self._synced: dict[int, SynchronizedBackward] = {}
        self._arrivals = GradientArrivals(adapter, self._buckets_of_all, self._finish_sync)
        self._beside: dict[tuple[int, ...], tuple[str, ...]] = {}
        """Graphs of a call -> the parameters that it uses outside of them, where such gradients arrive by autograd."""
        self._compared = False
        """Whether ranks have compared what they captured, and who reduces gradients."""

    # --- forward ---

    def begin_call(self, call: Invocation) -> None:
        """Note what no_sync says; where ranks may differ, the call has a token of its own."""
        if not call.inside_ddp:
            return
        adapter = self._adapter
        adapter.before_forward()
        call.sync = adapter.wants_sync()
        if adapter.uneven:  # it may turn out that another way is taken
            call.token = make_token(call.sync)
        elif call.sync:
            call.token = self._tokens[1]

    def token(self, call: Invocation | None) -> torch.Tensor | None:
        """The call's own, or that its backward is not to reduce."""
        return self._tokens[0] if call is None or call.token is None else call.token

    def compares_captures(self) -> bool:
        """A rank may call the model as often as it likes, alone, before the first backward that reduces."""
        return not (self._compared or self._adapter.uneven)

    # --- after a call ---

    def objections_to(self, key: tuple[int, ...], result: Any) -> tuple[str, ...]:
        """Parameters that are used outside the graphs, where gradients cannot be reduced as they arrive."""
        found = tuple(outside_use(result, self._adapter.name_of))
        if not self._adapter.varies or not _with_gradients(result):
            return found
        self._beside[key] = found
        return ()

    def after_call(self, variant: Variant, call: Invocation, result: Any) -> None:
        """Have gradients reduced as they arrive, or by DDP, if the call has used parameters outside one graph."""
        adapter = self._adapter
        if not call.inside_ddp or not torch.is_grad_enabled() or adapter.state == "stock":
            return
        hooked = tuple(adapter.hooked()) if adapter.uneven else ()
        if adapter.varies:
            self._choose_way(variant, call, result, hooked)
        elif adapter.eligible and (reasons := (*variant.objections, *hooked)):
            adapter.restore("; ".join(reasons), call.inside_ddp)

    def _choose_way(self, variant: Variant, call: Invocation, result: Any, hooked: tuple[str, ...]) -> None:
        """Ranks may use other parameters: whether a program of this call reduces gradients, or autograd adds them."""
        beside = self._beside.get(variant.graphs, ())
        scattered = self._arrivals.scatter(call.graphs, alone=not beside)
        if not variant.training or not (scattered or hooked):
            return
        several = (SEVERAL,) if len(call.graphs) > 1 else ()
        if reasons := (*several, *beside):
            self._adapter.note_arriving(reasons)
        self._let_arrive(call, result)

    def no_graph_ran(self, call: Invocation, result: Any) -> None:
        """Fall back to DDP, or let it queue what it has held back."""
        adapter = self._adapter
        if not call.inside_ddp or not torch.is_grad_enabled():
            return
        if not adapter.eligible:
            adapter.let_go_of_static_graph()
        elif adapter.varies and _with_gradients(result):
            adapter.note_arriving((EAGER,))
            self._let_arrive(call, result)
        else:
            adapter.restore(EAGER, call.inside_ddp)

    def _let_arrive(self, call: Invocation, result: Any) -> None:
        """Another rank may go on with one graph: the backward of this call reduces what that would."""
        if call.token is not None:
            # .data: the graphs have saved it, and nothing is to notice
            call.token.data.fill_(ARRIVING if call.sync else -ARRIVING)
        for tensor in _with_gradients(result):
            compat.tensors.on_gradient(tensor, functools.partial(self._has_reached_result, call.sync))

    def _has_reached_result(self, sync: bool) -> None:
        """Inside a backward, before it comes to parameters."""
        adapter = self._adapter
        if not (sync or adapter.prepared) or not adapter.accumulates(adapter.refs):
            return
        if adapter.state == "undecided":
            self._decide()
        if adapter.eligible:
            self._arrivals.begin()

    def _buckets_of_all(self) -> tuple[tuple[Bucket, ...], GradientBuckets]:
        """Those of a program that has no gradient itself. All ranks agree on them, or raise."""
        infos, rule = self._adapter.exchanged(()), self._adapter.bucket_rule()
        assert rule is not None, "what was taken over has buckets"
        layout = self.model.services.all_idle(infos, rule)
        self.model.agree_on(plan_of(layout, infos))
        return layout, self.make_buckets(layout)

    # --- backward ---

    def before_backward(self, graph: CapturedGraph, sync: bool) -> bool:
        """`sync`: whether every rank runs this backward, if it adds to gradients. Others may be one rank's alone."""
        adapter = self._adapter
        reduces = sync and (adapter.state == "undecided" or not self._compared) and graph.accumulates()
        # where ranks decide together, one may run backwards that reduce nothing alone
        if adapter.state == "undecided" and (reduces or not (adapter.uneven and self._asks_others())):
            self._decide()
        if reduces and not self._compared:
            self._compare_before_reducing(graph)
        return adapter.state != "undecided"

    def _decide(self) -> None:
        adapter, objections = self._adapter, self.model.objections()
        if not self._asks_others() or not adapter.uneven:
            adapter.decide(objections)
            return
        self._compared = True  # ranks may have run other graphs: if one leaves it to DDP, all do
        compare_surroundings(self.model)
        objections += [] if adapter.varies else adapter.hooked()
        mine = "; ".join(dict.fromkeys([*adapter.standing_objections(), *objections]))
        said = self.model.services.said_by_any(adapter.group, GRADIENTS, mine)
        several = any(len(variant.graphs) > 1 for variant in self.model.variants.values())
        adapter.decide(objections if mine or not said else [said], several and adapter.is_static)

    def _asks_others(self) -> bool:
        return self.model.settings.config.distributed != "stock" and not self._adapter.may_be_alone

    def _compare_before_reducing(self, graph: CapturedGraph) -> None:
        """The first backward that every rank runs: see that all have captured the same, and do the same with gradients.

        Ranks that leave it to DDP would wait in other collectives than those that do not.
        """
        self._compared = True
        adapter = self._adapter
        if self._asks_others():
            self.model.compare_captures(self.model.graphs_of_call(graph))
            who = "dcompile reduces them" if adapter.state == "taken" else f"DDP does: {'; '.join(adapter.reasons)}"
            self.model.services.agree(adapter.group, GRADIENTS, [who])
        for other in self.model.graphs:
            other.captured = []

    def run_backward(self, call: BackwardCall) -> list[Any]:
        """Reduce in the program, as gradients arrive, behind the backward, or not at all."""
        adapter, arrivals, graph, buckets = self._adapter, self._arrivals, call.graph, call.buckets
        accumulates = bool(graph.grads) and adapter.state != "stock" and graph.accumulates()
        sync, reduces = call.sync if adapter.eligible else 0, False
        if accumulates and sync and (sync == ARRIVING or buckets is None or arrivals.is_running()):
            if graph.has_own_collectives("backward"):
                graph.agree("backward")
            arrivals.begin()
        elif accumulates and sync and buckets is not None:
            graph.agree("backward")
            reduces = self._begin_sync(buckets, graph.grads, call.absent())
        elif accumulates:
            adapter.unreduced.update(number for place, number in graph.grads if place not in call.gone)
        return call.run(call.args) if buckets is None else call.run(call.args, buckets=buckets, sync=reduces)

    def reduces_in_program(self, graph: CapturedGraph) -> bool:
        """Not where a call has run it beside other graphs, and another rank may run others."""
        return not self._arrivals.has(graph.number)

    def arriving(self, graphs: Iterable[int]) -> tuple[Bucket, ...]:
        """The buckets of all parameters, where the call has several graphs."""
        return self._arrivals.layout(graphs) if self._adapter.eligible else ()

    def _begin_sync(self, buckets: GradientBuckets, grads: Iterable[tuple[int, int]], absent: Collection[int]) -> bool:
        """A graph's backward is going to reduce gradients: look at the whole backward's result when it is through.

        Returns whether its program is to do it. If a parameter has a hook, that is to get the gradient of this rank:
        then all buckets, of this graph with the gradients `grads`, are reduced behind the backward, in the order in
        which other ranks, which may have no hooks, reduce them in their programs. `absent`: parameters that it has no
        gradient of in this call.
        """
        adapter, task = self._adapter, compat.tensors.backward_task()
        first = task not in self._synced
        if first:
            hooked = [] if adapter.uneven else adapter.hooked()
            self._synced[task] = SynchronizedBackward(behind=bool(hooked))
            if hooked:
                adapter.note_behind(hooked)
            compat.tensors.at_end_of_backward(lambda: self._end_sync(self._synced.pop(task)))
        synced = self._synced[task]
        buckets.begin(adapter.unreduced if first and adapter.every else (), task, first, absent)
        synced.buckets.append(buckets)
        if synced.behind:
            synced.numbers.append(adapter.accumulating(number for _, number in grads if number not in absent))
        return not synced.behind

    def _end_sync(self, synced: SynchronizedBackward) -> None:
        self._adapter.has_synced()
        if synced.behind:
            done: set[int] = set()
            for buckets, numbers in zip(synced.buckets, synced.numbers, strict=True):
                buckets.reduce_behind(numbers, done)
                done |= numbers
        self._finish_sync(synced.buckets)

    def _finish_sync(self, reduced: list[GradientBuckets]) -> None:
        adapter = self._adapter
        if not adapter.eligible:
            return
        for buckets in reduced:
            others = (other.reduced() for other in reduced if other is not buckets)
            buckets.settle_idle(frozenset().union(*others))
        sources: dict[int, GradientBuckets | None] = {}
        addresses: dict[int, int] = {}
        for buckets in reduced:
            found = buckets.reduced()
            # a parameter of several graphs: autograd has added their reduced gradients up, nothing is missing
            sources |= {number: None if number in sources else buckets for number in found}
            addresses |= found
        elsewhere = {
            number: source.reduced_gradient(number)
            for number, source in sources.items()
            if source is not None and adapter.differs(number, addresses[number])
        }
        adapter.reduce_rest(elsewhere, sources.keys(), self.model.services.average)
        for buckets in reduced:
            buckets.forget()

    def accumulates(self, numbers: Iterable[int]) -> bool:
        """Whether this backward adds to .grad at all; torch.autograd.grad does not, and then DDP reduces nothing."""
        return self._adapter.accumulates(numbers)

    def awaited(self, grads: Iterable[tuple[int, int]], unsure: Collection[int]) -> frozenset[int]:
        """DDP's own reducer, unless told otherwise, waits for all; ranks can say of some that they have none."""
        adapter = self._adapter
        if adapter.every or (adapter.uneven and not adapter.eligible):
            return frozenset()
        return frozenset(place for place, number in grads if not adapter.eligible or number not in unsure)

    # --- parameters ---

    def make_buckets(self, buckets: tuple[Bucket, ...]) -> GradientBuckets:
        """Bucket memory that all graphs of the model share."""
        adapter = self._adapter
        return self.model.services.make_buckets(buckets, adapter.refs, adapter.group, self.model.pool)

    def forget_buckets(self) -> None:
        """What calls beside the compiled graphs reduce through is laid out anew."""
        self._arrivals.forget()

    def watch_parameters(self, compiled: Callable[..., Any], params: Mapping[int, int]) -> Callable[..., Any]:
        """Gradients go to the parameter that the module has now."""
        adapter = self._adapter
        if not params:
            return compiled
        slots, refs = list(params.items()), adapter.refs

        def checked(*args: Any) -> Any:
            for position, number in slots:
                if refs[number]() is not args[position]:
                    adapter.rebind(number, args[position])
            return compiled(*args)

        return checked


def _with_gradients(result: Any) -> list[torch.Tensor]:
    """Tensors of a result that a backward may begin at."""
    return [tensor for tensor in tensors_in(result) if tensor.grad_fn is not None]


def make_token(reduces: bool) -> torch.Tensor:
    """Whether a backward is to reduce, for forwards to save: the call that it is made in may run in inference mode."""
    with torch.inference_mode(False):
        return torch.tensor(int(reduces), device="cpu")
