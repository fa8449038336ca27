"""Check each program at its calls: its results against ATen's evaluation of the graph that it was compiled from.

A program is checked on its own inputs, copied before the call, rather than by running the model once more with ATen in
its place. So one wrong program does not make those after it look wrong, random numbers are the same, and inputs that a
program changes, or whose memory it reuses, are compared, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dcompile.collectives.contract import AnySource, Executable, Foreseen, ParamInfo, Request
from dcompile.compat.dispatch_watch import random_states
from dcompile.compiler.caching import CachingCompiler
from dcompile.compiler.driver import Pipeline
from dcompile.config import Config
from dcompile.runtime.coordination.heartbeat import SingleProcess
from dcompile.verify.compare import Miss, compare
from dcompile.verify.reference import copied, evaluate


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
    group: Any = None
    """Process group that the model's gradients are averaged over; None without one."""


class CheckingCompiler(CachingCompiler):
    """Compiler whose programs check themselves in each call. Nothing comes from the cache of graphs."""

    def __init__(self, config: Config, log: CallLog) -> None:
        super().__init__(config)
        self.log = log

    def ignores_cache(self) -> bool:
        """Always True: a graph of the cache may be older than what is at fault."""
        return True

    def connect_peers(self, group: Any) -> SingleProcess:
        """See `CachingCompiler`; averages are checked over this group."""
        self.log.group = self.log.group if group is None else group
        return super().connect_peers(group)

    def compile_graph(self, gm: Any, request: Request, foreseen: Foreseen | None = None) -> Executable:
        """See `CachingCompiler`."""
        return CheckedProgram(super().compile_graph(gm, request, foreseen), gm, request, self)

    def pipeline(self) -> Pipeline:
        """The stages that compile single graphs."""
        return self._pipeline()


class CheckedProgram:
    """A program that compares its results in each call, until one is wrong on this rank."""

    def __init__(self, run: Executable, gm: Any, request: Request, compiler: CheckingCompiler) -> None:
        self.report, self.buckets, self.source = run.report, run.buckets, run.source
        self._run, self._gm, self._request, self._compiler = run, gm, request, compiler
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def __call__(self, args: list[Any], *, buckets: AnySource | None = None, sync: bool = False) -> list[Any]:
        log, name = self._compiler.log, self._request.name
        reduces, known = sync and buckets is not None, any(wrong.request.name == name for wrong in log.wrong)
        self._calls += 1
        if log.calls is not None and self._calls > log.calls:
            return self._run(args, buckets=buckets, sync=sync)
        if known and not reduces:  # other ranks, which may have found nothing, average with this one
            return self._run(args, buckets=buckets, sync=sync)
        if self._request.gathers:
            log.unchecked[name] = "it gathers sharded parameters, which only it has whole"
            return self._run(args, buckets=buckets, sync=sync)
        inputs = copied(args)
        # tensors that a program may reuse are not held here: it asks whether anybody else does
        kept = {place: value for place, value in enumerate(args) if place not in self._request.donated}
        device = next((value.device for value in inputs if isinstance(value, torch.Tensor)), torch.device("cpu"))
        restore = random_states(device)
        results = self._run(args, buckets=buckets, sync=sync)
        after = random_states(device)
        restore()
        found = self._compare(inputs, copied(results), kept, restore, reduces)
        after()
        if found is not None and not known:
            log.wrong.append(WrongCall(self._gm, self._request, self._compiler.pipeline(), inputs, restore, *found))
        return results

    def _compare(
        self, inputs: list[Any], results: list[Any], kept: dict[int, Any], restore: Callable[[], None], reduces: bool
    ) -> tuple[str, Miss, ParamInfo | None] | None:
        same, same_inputs, _ = evaluate(self._gm, inputs, exact=False)
        restore()
        exact, exact_inputs, _ = evaluate(self._gm, inputs, exact=True)
        names = [str(node) for node in self._gm.graph.output_node().args[0]]
        given = [node.name for node in self._gm.graph.find_nodes(op="placeholder")]
        numbers, infos = (
            dict(self._request.grads) if reduces else {},
            {info.number: info for info in self._request.params},
        )
        scattered = sharded_results(self._request)
        averaged = {place: infos.get(number) for place, number in numbers.items()}
        rows = [
            (
                name,
                result,
                self._averaged(one) if place in averaged else one,
                self._averaged(other) if place in averaged else other,
                averaged.get(place),
            )
            for place, (name, result, one, other) in enumerate(zip(names, results, same, exact, strict=True))
        ]
        rows += [(given[place], value, same_inputs[place], exact_inputs[place], None) for place, value in kept.items()]
        # shards of a gradient go to their parameters, and the program returns nothing
        rows = [
            row for place, row in enumerate(rows)
            if (isinstance(row[1], torch.Tensor) or isinstance(row[2], torch.Tensor)) and place not in scattered
        ]  # fmt: skip
        self._compiler.log.checked[self._request.name] = len(rows)
        for name, result, one, other, parameter in rows:
            if (miss := compare(result, one, other)) is not None:
                return name, miss, parameter
        return None

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
