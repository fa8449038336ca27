"""Check each program at its calls: its results against ATen's evaluation of the graph that it was compiled from.

A program is checked on its own inputs, copied before the call, rather than by running the model once more with ATen in
its place. So one wrong program does not make those after it look wrong, random numbers are the same, and inputs that a
program changes, or whose memory it reuses, are compared, too.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dcompile.bisect.watched_shards import WatchedShards
from dcompile.collectives.contract import AnySource, Executable, Foreseen, ParamInfo, ProgramReport, Request
from dcompile.collectives.fsdp_units import shard_of
from dcompile.compat.dispatch_watch import random_states
from dcompile.compiler.caching import CachingCompiler
from dcompile.compiler.driver import Pipeline
from dcompile.config import Config
from dcompile.runtime.communication.ddp_buckets import BucketSet
from dcompile.runtime.communication.fsdp_shards import ShardCommunication
from dcompile.runtime.coordination.heartbeat import SingleProcess
from dcompile.verify.compare import Miss, compare, is_near
from dcompile.verify.reference import changed_inputs, copied, evaluate, with_roundings


@dataclass(frozen=True, slots=True)
class WrongCall:
    """The first call of a program with a wrong result."""

    gm: Any
    request: Request
    pipeline: Pipeline
    inputs: list[Any]
    """What the program was given, unchanged."""
    restore: Callable[[], None]
    """Put random generators into the state before the call."""
    result: str
    """Name of the result: that of its node in the graph, or of the input that was changed."""
    miss: Miss
    parameter: ParamInfo | None
    """Of a gradient that the program has averaged over ranks."""
    gathers: bool = False
    """Whether the program gathers parameters; `inputs` has them whole, and `request` is that of one process."""


@dataclass(eq=False)
class CallLog:
    """What was checked in a run."""

    wrong: list[WrongCall] = field(default_factory=list)
    """The first wrong call of each program, in order."""
    checked: dict[str, int] = field(default_factory=dict)
    """Program -> number of results that were compared."""
    unchecked: dict[str, str] = field(default_factory=dict)
    """Program -> why it was not checked."""
    calls: int | None = None
    """Calls of each program to check, the first ones; None: all."""
    seen: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """(program, whether it reduces gradients) -> calls so far. Those that reduce are as many on all ranks."""
    group: Any = None
    """Process group that the model's gradients are averaged over; None without one."""
    fresh = True
    """Whether no graph comes from the cache: it may be older than what is at fault."""

    def due(self, name: str, reduces: bool) -> bool:
        """Whether this call of a program is checked: each, until it was wrong; other ranks may have found nothing."""
        self.seen[name, reduces] += 1
        if self.calls is not None and self.seen[name, reduces] > self.calls:
            return False
        return reduces or not any(wrong.request.name == name for wrong in self.wrong)

    def leave(self, name: str, why: str, report: ProgramReport) -> None:
        """Check a program no more."""
        self.unchecked[name] = why

    def missed(
        self, name: str, wrong: WrongCall | None, run: Executable, on_aten: Callable[[], Executable]
    ) -> Executable:
        """Keep the first wrong call of a program, and return the program to run from now on.

        `wrong` is None if the call was wrong on another rank. `on_aten` compiles the program for ATen's kernels.
        """
        if wrong is not None and not any(known.request.name == name for known in self.wrong):
            self.wrong.append(wrong)
        return run


class CheckingCompiler(CachingCompiler):
    """Compiler whose programs check themselves, in the calls that its log wants."""

    def __init__(self, config: Config, log: CallLog) -> None:
        super().__init__(config)
        self.log = log

    def ignores_cache(self) -> bool:
        """See `CallLog.fresh`."""
        return self.log.fresh or super().ignores_cache()

    def connect_peers(self, group: Any) -> SingleProcess:
        """See `CachingCompiler`; averages are checked over this group."""
        self.log.group = self.log.group if group is None else group
        return super().connect_peers(group)

    def compile_graph(self, gm: Any, request: Request, foreseen: Foreseen | None = None) -> Executable:
        """See `CachingCompiler`."""
        return CheckedProgram(super().compile_graph(gm, request, foreseen), gm, request, self)

    def on_aten(self, gm: Any, request: Request) -> Executable:
        """Compile a graph for ATen's kernels, on this rank alone."""
        config = replace(self.config, kernels="aten", sentinel=0, triton_cudagraphs=False)
        return CachingCompiler(config).compile_graph(gm, request)

    def pipeline(self) -> Pipeline:
        """The stages that compile single graphs."""
        return Pipeline(replace(self.config, dump=""))


class CheckedProgram:
    """A program that compares its results in the calls that its log wants."""

    direct = None
    """No call goes around the check."""

    def __init__(self, run: Executable, gm: Any, request: Request, compiler: CheckingCompiler) -> None:
        self.report, self.buckets, self.source = run.report, run.buckets, run.source
        self._run, self._gm, self._request, self._compiler = run, gm, request, compiler
        self._written = changed_inputs(gm)
        """Positions of inputs that the graph may write, or hand out."""
        self._changed = self._written | {*request.donated}
        self._scattered = sharded_results(request)
        """Positions of results that are not there: shards go to their parameters."""
        self._device = torch.device("cpu")
        self._gathered = dict(request.gathers)
        """Positions of inputs that stand for sharded parameters, which hold nothing -> their numbers."""
        self._infos = {info.number: info for info in request.params}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def __call__(self, args: list[Any], *, buckets: AnySource | None = None, sync: bool = False) -> list[Any]:
        log, name = self._compiler.log, self._request.name
        # programs that gather or scatter are in the same call on all ranks, too
        reduces = buckets is not None and (sync or bool(self._gathered or self._scattered))
        if self.buckets is not self._run.buckets and isinstance(buckets, BucketSet):
            buckets.serve(self._run.buckets)
        if name in log.unchecked or not log.due(name, reduces):
            return self._run(args, buckets=buckets, sync=sync)
        copies = copied([value if place in self._changed else None for place, value in enumerate(args)])
        # tensors that a program may reuse are not held here: it asks whether anybody else does
        inputs = [copies[place] if place in self._changed else value for place, value in enumerate(args)]
        apart = {*self._request.donated, *self._gathered}
        kept = {place: value for place, value in enumerate(args) if place not in apart}
        watched = WatchedShards(buckets) if isinstance(buckets, ShardCommunication) else None
        if watched is not None and (missing := self._gather(watched, inputs)):
            log.leave(name, f"{missing} is sent in another form than it has", self.report)
            return self._run(args, buckets=buckets, sync=sync)
        self._device = next((value.device for value in inputs if isinstance(value, torch.Tensor)), self._device)
        restore = random_states(self._device)
        results = self._run(args, buckets=watched or buckets, sync=sync)
        after = random_states(self._device)
        found, is_wrong = self._compare(inputs, results, kept, restore, reduces, watched)
        after()
        if is_wrong:
            pipeline, on_aten = self._compiler.pipeline(), partial(self._compiler.on_aten, self._gm, self._request)
            alone = self._request if watched is None else replace(self._request, gathers=(), grads=(), params=())
            given = copied(inputs)
            wrong = found and WrongCall(self._gm, alone, pipeline, given, restore, *found, bool(self._gathered))
            self._run = log.missed(name, wrong, self._run, on_aten)
            # errors that the search has caught may hold results, and autograd then copies gradients, on this rank alone
            gc.collect()
        return results

    def _gather(self, watched: WatchedShards, inputs: list[Any]) -> str:
        """Put whole parameters among the inputs; return the name of one that cannot be gathered here, or empty."""
        infos = [self._infos[number] for number in self._gathered.values()]
        for place, info, whole in zip(self._gathered, infos, watched.gathered(infos), strict=True):
            if whole is None:
                return info.fqn
            inputs[place] = whole
        return ""

    def _compare(
        self,
        inputs: list[Any],
        results: list[Any],
        kept: dict[int, Any],
        restore: Callable[[], None],
        reduces: bool,
        watched: WatchedShards | None,
    ) -> tuple[tuple[str, Miss, ParamInfo | None] | None, bool]:
        """The first result that is wrong here, and whether one is on any rank that takes part.

        float64 is only taken where ATen's own dtypes leave a doubt on some rank, and inputs that differ by a rounding
        where float64 shows a miss.
        """
        restore()
        if (same := self._evaluated(inputs, reduces, watched, exact=False)) is None:
            return None, False
        got = [*results, *kept.values()]
        for place in self._scattered:
            got[place] = None if watched is None else watched.reduced.get(self._unit_of(place))
        self._compiler.log.checked[self._request.name] = sum(isinstance(value, torch.Tensor) for value in same)
        places = [*range(len(results)), *(len(results) + place for place in kept)]
        left_out = {place for place in self._scattered if got[place] is None or same[place] is None}
        doubt = [at for at, place in enumerate(places) if place not in left_out and not is_near(got[at], same[place])]
        if not self._anyone(bool(doubt), reduces):
            return None, False
        restore()
        if (exact := self._evaluated(inputs, reduces, watched, exact=True)) is None:
            return None, False
        doubt = [at for at in doubt if compare(got[at], same[places[at]], exact[places[at]]) is not None]
        if not self._anyone(bool(doubt), reduces):
            return None, False
        restore()
        roundings = with_roundings(inputs, self._written)
        if (rounded := self._evaluated(roundings, reduces, watched, exact=False)) is None:
            return None, False
        found = None
        for at in doubt:
            place = places[at]
            if found is None and (miss := compare(got[at], same[place], exact[place], rounded[place])) is not None:
                found = self._name_of(place), miss, self._averaged_parameter(place) if reduces else None
        return found, self._anyone(found is not None, reduces)

    def _name_of(self, place: int) -> str:
        """Name of a result, or of an input behind the results."""
        names = [str(node) for node in self._gm.graph.output_node().args[0]]
        names += [node.name for node in self._gm.graph.find_nodes(op="placeholder")]
        return names[place]

    def _averaged_parameter(self, place: int) -> ParamInfo | None:
        return next((self._infos.get(number) for at, number in self._request.grads if at == place), None)

    def _unit_of(self, place: int) -> int:
        """Unit of the sharded parameter whose gradient a result is."""
        info = self._averaged_parameter(place)
        assert info is not None, "the gradient of a parameter"
        return shard_of(info).unit

    def _evaluated(
        self, inputs: list[Any], reduces: bool, watched: WatchedShards | None, *, exact: bool
    ) -> list[Any] | None:
        """ATen's results, averaged over ranks where the program does that, and the inputs afterwards.

        None if ATen fails on some rank: the program is then not checked any more.
        """
        results, after, failed = list[Any](), list[Any](), ""
        try:
            results, after, _ = evaluate(self._gm, inputs, exact=exact, keep=False, changed=self._changed)
        except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
            failed = f"ATen does not evaluate it: {type(error).__name__}: {error}"
        if self._anyone(bool(failed), reduces):
            why = failed or "ATen does not evaluate it on another rank"
            self._compiler.log.leave(self._request.name, why, self.report)
            return None
        for place, _ in self._request.grads if reduces else ():
            if results[place] is not None and place not in self._scattered:
                results[place] = self._averaged(results[place])
        if watched is not None:
            gradients = [(self._infos[number], results[place]) for place, number in self._request.grads]
            shards = watched.averaged([pair for pair in gradients if pair[0].shard is not None])
            for place in self._scattered:
                results[place] = shards.get(self._unit_of(place))
        return [*results, *after]

    def _anyone(self, here: bool, reduces: bool) -> bool:
        """Whether something holds on this rank, or, of a program that all ranks are in, on any rank."""
        group = self._compiler.log.group
        if not reduces or group is None:
            return here
        flag = torch.tensor([float(here)], device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group)
        return bool(flag)

    def _averaged(self, gradient: torch.Tensor) -> torch.Tensor:
        """Average a gradient as DDP does, by torch.distributed."""
        rule, group = self._request.rule, self._compiler.log.group
        wire = rule.wire if rule is not None else ""
        sent = gradient.to(getattr(torch, wire)) if wire not in ("", "own") else gradient.clone()
        sent = sent.contiguous() / dist.get_world_size(group)
        dist.all_reduce(sent, group=group)
        return sent.to(gradient.dtype)


def sharded_results(request: Request) -> frozenset[int]:
    """Positions of gradients of sharded parameters, whose shards a program gives to the parameters."""
    sharded = {info.number for info in request.params if info.shard is not None}
    return frozenset(place for place, number in request.grads if number in sharded)
