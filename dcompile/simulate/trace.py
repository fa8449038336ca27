"""Plan the forward and backward of a model without data, distributed over ranks that do not exist.

The pipeline is that of a real run: TorchDynamo, AOTAutograd, lowering, fusion, insertion of collectives, scheduling,
memory planning. Parameters and inputs are fake CPU tensors without memory. The cost model then prices the programs as
if they ran on the requested machine. So attention is the CPU's operator, which does the same work as the GPU's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch

from dcompile import compat
from dcompile.capture.adapters.gradient_sync import GradientSync
from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.capture.compiled_model import Settings
from dcompile.capture.dynamo_backend import DynamoGraph
from dcompile.capture.entry import Entry
from dcompile.capture.passes.joint.absent_gradients import tangents, without
from dcompile.capture.program_request import describe_shards
from dcompile.collectives.contract import BucketRule, Foreseen, ParamInfo, Request, Shard
from dcompile.config import Config
from dcompile.driver import ProgramPlan
from dcompile.dry_run import PlanningCompiler
from dcompile.errors import OptionError
from dcompile.ir.nodes import Program
from dcompile.machine_model import GroupSize

DDP_RULE = BucketRule(1 << 20, 25 << 20)
"""DDP's default limits."""


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Distribution of a model: `ddp`, or `fsdp` (fully_shard on each layer and on the root) over `shard` ranks.

    If a shard group is smaller than the world, groups are replicas of one another (HSDP).
    """

    kind: Literal["plain", "ddp", "fsdp"]
    world: int
    shard: int = 1
    reduce_dtype: str = "bfloat16"
    reshard: bool = True

    @property
    def group(self) -> GroupSize:
        """Size of the group that runs the programs' collectives."""
        if self.kind == "fsdp":
            return GroupSize(self.shard, replicas=self.world // self.shard)
        return GroupSize(self.world)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Programs of one step before memory planning, and the parameters."""

    forward: Program
    backward: Program
    parameters: tuple[ParamInfo, ...]
    held: frozenset[str]
    """Inputs of the programs that are parameters, which always exist."""
    results: int
    """Number of the forward's outputs that the user sees."""


def trace(
    config: Any,
    layout: ParallelLayout,
    *,
    batch: int,
    length: int,
    dtype: str = "bfloat16",
    recompute: str = "registers",
) -> TracedStep:
    """Trace one training step of a causal language model. Return its programs before collectives are scheduled.

    `recompute` is the option of that name. Raises OptionError if the model is not captured as one graph.
    """
    import transformers

    models: Any = transformers.AutoModelForCausalLM
    options = {"receipt": False, "skip": "overlap_collectives", "matmul": "aten", "recompute": recompute}
    planner = _SimulatingCompiler(Config.make(options=options))
    with compat.tensors.fake_mode(), _default_dtype(getattr(torch, dtype)):
        model = models.from_config(config).train()
        tokens = torch.zeros((batch, length), dtype=torch.int64, device="cpu")
        entry = Entry(model._call_impl, None, Settings(planner.config), planner.services(), _SimulatedGraph)
        adapter = _SimulatedAdapter(model, layout)
        planner.parameters = adapter.parameters
        entry.model.adopt(GradientSync(adapter))
        with compat.aot.backward_at_once():
            entry(input_ids=tokens, labels=tokens)
    names = sorted(planner.programs)
    if names != ["backward0", "forward0"]:
        raise OptionError(f"dcompile: the model was captured as {', '.join(names) or 'nothing'}, not as one graph")
    graph = entry.model.graphs[0]
    assert isinstance(graph, _SimulatedGraph), "the entry makes graphs of the class that it was given"
    held = frozenset(graph.placeholders)
    return TracedStep(planner.programs["forward0"], planner.programs["backward0"], adapter.infos, held, graph.results)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _SimulatedAdapter(PlainAdapter):
    """Adapter of parameters sharded as by DDP or fully_shard: numbered, grouped by layer, padded to whole shards."""

    synchronizes = True

    def __init__(self, model: torch.nn.Module, layout: ParallelLayout) -> None:
        self.layout = layout
        named = list(model.named_parameters())
        groups = _groups(model)
        self._numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
        self.parameters = [parameter for _, parameter in named]  # kept alive, so that no id is reused
        self.infos = tuple(self._info(n, name, p, groups.get(id(p), 0)) for n, (name, p) in enumerate(named))

    def _info(self, number: int, name: str, parameter: Any, together: int) -> ParamInfo:
        shape, dtype = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
        if self.layout.kind != "fsdp":
            return ParamInfo(number, name, shape, dtype, "cpu", group="group")
        rows = -(-shape[0] // self.layout.shard) * self.layout.shard
        shard = Shard(
            unit=number,
            together=together,
            offset=0,
            numel=rows * prod(shape[1:]),
            reduce_dtype=self.layout.reduce_dtype,
            reshard=self.layout.reshard and together > 0,  # as fully_shard: the root's stay gathered
        )
        return ParamInfo(number, name, shape, dtype, "cpu", "sharded", "group", shard)

    def number_of(self, parameter: Any) -> int | None:
        return self._numbers.get(id(parameter))

    def param_infos(self) -> tuple[ParamInfo, ...]:
        return self.infos


def _groups(model: torch.nn.Module) -> dict[int, int]:
    """Parameter -> its layer, counted from 1; all others belong to the root."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1]
    longest = max(lists, key=len, default=torch.nn.ModuleList())
    return {id(p): number for number, layer in enumerate(longest, 1) for p in layer.parameters()}


class _SimulatedGraph(DynamoGraph):
    """A graph whose backward is planned with its forward, for the adapter's simulated ranks."""

    planned_for = "cuda"
    needs_data = False

    placeholders: dict[str, int]
    results = 0

    def _find_shards(self, module: Any) -> list[Any]:
        inputs = [(node, compat.aot_metadata.input_index(node)) for node in module.graph.find_nodes(op="placeholder")]
        found = {node: self.params[index] for node, index in inputs if index in self.params}
        self.placeholders = {node.name: number for node, number in found.items()}
        return list(found) if self._layout.kind == "fsdp" else []

    @property
    def _layout(self) -> ParallelLayout:
        adapter: Any = self.adapter  # simulated graphs have simulated parameters
        layout: ParallelLayout = adapter.layout
        return layout

    def _build(self, gm: Any, kind: Any, whole: bool = False, foreseen: Foreseen | None = None, **more: Any) -> Any:
        del whole, foreseen
        if self._layout.kind == "fsdp":
            self._sharded = self.placeholders
            more |= describe_shards(self.infos, gm, kind, self._sharded, self.grads)
        elif self._layout.kind == "ddp" and kind == "backward":
            more |= {"grads": self.grads, "params": self.adapter.param_infos(), "rule": DDP_RULE}
        compiler = self.model.services.compiler
        return compiler.compile_graph(gm, Request(name=f"{kind}{self.number}", kind=kind, **more))

    def _gathering(self, run: Any) -> Any:
        return run

    def _forward(self, gm: Any) -> Any:
        self.results = self._cut.results
        return super()._forward(gm)

    def _backward(self, gm: Any) -> Any:
        # a step's gradients are those of its loss, the first of the results
        absent = tangents(gm)[1:] if self._may_lack else ()
        return self._build(without(gm, absent, self._exchanged), "backward")


class _SimulatingCompiler(PlanningCompiler):
    """Compiler that keeps the program of each graph that it plans; fake tensors run it by shapes alone."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.programs: dict[str, Program] = {}
        self.parameters: Sequence[torch.Tensor] = ()

    def record(self, gm: Any, request: Request, plan: ProgramPlan) -> None:
        del gm
        self.programs[request.name] = _without_placement(plan.program)

    def gathered(self, number: int) -> torch.Tensor:
        """The parameter itself: simulated ranks have no shards."""
        return self.parameters[number]


def _without_placement(program: Program) -> Program:
    """Undo memory planning, so that the program can be scheduled again. Buffers in a bucket or a unit stay there."""
    planned = {"arena", "out", "input", "library"}
    buffers = tuple(
        replace(buffer, storage=None, offset=0) if buffer.storage in planned else buffer for buffer in program.buffers
    )
    return replace(program, buffers=buffers, arena_bytes=0)
