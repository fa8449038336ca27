"""A compiler that runs each graph as it is and copies gradients into buckets at the end: for tests of capture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dcompile import pipeline
from dcompile.collectives.contract import BucketSource, Foreseen, ProgramReport, Request
from dcompile.collectives.ddp_all_reduce import assign_to_buckets, lay_out
from dcompile.ir.buffers import Bucket
from dcompile.passes import GraphPasses
from dcompile.runtime.coordination.heartbeat import SingleProcess, peers_of


class InterpreterExecutable:
    """Runs an FX graph with torch.fx.Interpreter."""

    source = ""

    def __init__(self, gm: Any, request: Request) -> None:
        self.gm = gm
        self.grads = {number: position for position, number in request.grads}
        self.buckets: tuple[Bucket, ...] = ()
        if request.rule is not None:
            self.buckets = tuple(
                lay_out(members, f"bucket{i}", [p.fqn for p in members])
                for i, members in enumerate(assign_to_buckets(request.params, request.rule))
            )
        self.report = ProgramReport(kernels=1, kernel_calls=1, collectives=len(self.buckets))

    def __call__(self, args: list[Any], *, buckets: BucketSource | None = None, sync: bool = False) -> list[Any]:
        values = list(args)
        args.clear()
        with torch.no_grad():
            results = list(torch.fx.Interpreter(self.gm).boxed_run(values))
            if buckets is not None:
                self._reduce(results, buckets, sync)
        return results

    def _reduce(self, results: list[Any], source: BucketSource, sync: bool) -> None:
        memories = {bucket.name: source.acquire(bucket.name) for bucket in self.buckets}
        for bucket in self.buckets:
            flat = memories[bucket.name].flat
            for number, offset in zip(bucket.params, bucket.offsets, strict=True):
                gradient = results[self.grads[number]]
                view = flat[offset : offset + gradient.numel()].view(gradient.shape)
                view.copy_(gradient)
                results[self.grads[number]] = view
            if sync:
                source.start(bucket.name, memories[bucket.name])
        for bucket in self.buckets:
            if sync:
                source.wait(bucket.name, memories[bucket.name])


class InterpreterCompiler:
    """Remembers what it was asked to compile."""

    def __init__(self, config: Any = None) -> None:
        self.config = config
        self.requests: list[Request] = []
        self.modules: list[Any] = []

    def connect_peers(self, group: Any) -> Any:
        peers = peers_of(group)
        return SingleProcess() if peers is None else peers

    def decompositions(self, trains: bool = True) -> dict[Any, Any]:
        return {}

    def fusible(self) -> tuple[frozenset[Any], frozenset[Any]] | None:
        return frozenset(), frozenset()

    def graph_passes(self) -> GraphPasses:
        return GraphPasses(
            pipeline.DYNAMO_PASSES, pipeline.JOINT_PASSES, pipeline.OUTPUT_STEPS, pipeline.GRAPH_WRAPPERS
        )

    def expect_products(self) -> None:
        pass

    def traces(self) -> None:
        pass

    def compile_graph(self, gm: Any, request: Request, foreseen: Foreseen | None = None) -> InterpreterExecutable:
        del foreseen
        self.requests.append(request)
        self.modules.append(gm)
        return InterpreterExecutable(gm, request)


def kinds(compilers: Sequence[InterpreterCompiler]) -> list[str]:
    """Kinds of all graphs compiled, in order."""
    return [request.kind for compiler in compilers for request in compiler.requests]


def install() -> None:
    """Make dcompile compile with this instead of its own stages, in this process."""
    import sys
    import types

    module = types.ModuleType("dcompile.compiler.caching")
    module.CachingCompiler = InterpreterCompiler
    sys.modules["dcompile.compiler.caching"] = module
