"""What capture/ and the rest of the compiler say to each other: parameters, requests and reports. No torch in here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from dcompile.ir.nodes import Bucket, Loop, Tile
from dcompile.machine_model import CPU, Figures, GroupSize
from dcompile.passes import GraphPasses


@dataclass(frozen=True, slots=True)
class Shard:
    """How a parameter is spread over ranks: as a part of a unit, which is gathered and reduced as a whole.

    A unit is one parameter, padded at its end to a multiple of the number of shards, or several of them in a row.
    `together` is the number of the units that share collectives.
    """

    unit: int
    together: int
    offset: int
    """Where the parameter begins in its unit, in elements."""
    numel: int
    """Elements of the whole unit, padding included."""
    reduce_dtype: str
    """What gradients are summed in over the ranks."""
    flat: bool = field(default=False, kw_only=True)
    """Whether the unit is several parameters in a row: then a program may know gradients of some of them only."""
    reshard: bool
    """Whether the backward gathers anew; otherwise the forward's gathered values are kept for it."""


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """What the compiler knows of one parameter that is kept in step across ranks.

    `number` is its position in the adapter's parameter order, the same on every rank. `group` names the process group
    within the plan ("ddp"); the run time maps it to the real one, so plans hold nothing rank-specific.
    """

    number: int
    fqn: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    kind: Literal["replicated", "sharded"] = "replicated"
    group: str = "ddp"
    shard: Shard | None = None
    """Of a sharded parameter; `shape` and `dtype` are then those of the gathered one, which computing uses."""


@dataclass(frozen=True, slots=True)
class BucketRule:
    """DDP's bucket boundaries, in bytes: the first bucket is small, so that communication starts early."""

    first_bytes: int
    cap_bytes: int
    more_bytes: tuple[int, ...] = ()
    """Limits of the third bucket and those behind it, if each has its own; the last one holds for all that follow."""
    wire: str = ""
    """dtype that gradients are cast to for the exchange, as a compression hook asks for; "own" is their own. Then they
    are divided by the world size there, as DDP's hooks do; where this is empty, they are multiplied by its inverse."""
    every: bool = False
    """Whether every parameter has a place in each program, used or not: ranks may use different ones."""
    unsure: tuple[int, ...] = ()
    """Parameters that a backward may have no gradient of: what they lead to is not used by every loss. Ranks then say
    in the bucket which of them have one.
    """

    @property
    def limits(self) -> tuple[int, ...]:
        """Size at which each bucket closes, in the order of reduction; the last one holds for all that follow."""
        return (self.first_bytes, self.cap_bytes, *self.more_bytes)


@dataclass(frozen=True, slots=True)
class Request:
    """One graph to be compiled. `name` is unique within a compiled model ("forward0", "backward0", "inference1")."""

    name: str
    kind: Literal["forward", "backward", "inference"]
    grads: tuple[tuple[int, int], ...] = ()
    """Backward of a model that was taken over: (position among the outputs, parameter number)."""
    params: tuple[ParamInfo, ...] = ()
    rule: BucketRule | None = None
    """Bucket boundaries; None puts no all-reduces into the graph."""
    gathers: tuple[tuple[int, int], ...] = ()
    """(position among the inputs, parameter number) of each sharded parameter that the graph gathers."""
    reductions: int = 1
    """How many reductions of sharded gradients may be in flight at once, each of which holds memory."""
    results: int = 0
    """How many of the first outputs the user sees; the others are saved for the backward, or gradients."""
    donated: tuple[int, ...] = ()
    """Positions of the inputs that are the graph's own: saved tensors that nobody outside can see."""
    saved: tuple[int, ...] = ()
    """Positions of the inputs of a backward that come from its forward, by way of autograd."""
    figures: Figures = CPU
    """What the machine can do: the same on every rank."""
    groups: tuple[tuple[str, GroupSize], ...] = ()
    """(group within the plan, its size and communicator)."""
    endings: tuple[tuple[Loop, Tile], ...] = ()
    """Kinds of loops that products shall end in, by which tile: measured on the rank that compiles."""
    early_bytes: int | None = None
    """What overlapping collectives may add to the graph's peak memory; None: one unit on its way in, one out."""


Predicted: TypeAlias = "tuple[str, str, float, float, float]"
"""(name, resource, start_us, duration_us, exposed_us) of one step: a kernel or library call on "compute", or a
collective, named as its bucket, on its communicator; the last is how long its wait holds up what comes after it."""


@dataclass(slots=True)
class ProgramReport:
    """What compiling one graph came to; counts for the receipt."""

    kernels: int = 0
    kernel_calls: int = 0
    library_calls: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    collectives: int = 0
    regions: int = 0
    """Calls of what another compiler made of the graph, by option `kernels`."""
    bytes_copied: int = 0
    """Bytes that a call copies only to bring gradients to where they are reduced."""
    built: int = 0
    cache_hits: int = 0
    graphs_cached: int = 0
    """1 if the graph itself was in the cache: then nothing was lowered, scheduled or emitted."""
    graphs_received: int = 0
    """1 if another rank compiled it for this one."""
    kernels_received: int = 0
    """Kernels that came with it; the others were in the cache."""
    graphs_uncacheable: int = 0
    """1 if it never can be; a note says why."""
    compile_seconds: float = 0.0
    recordings: int = 0
    """CUDA graphs that were made of it."""
    replays: int = 0
    """Calls that were replays of one of them."""
    notes: list[str] = field(default_factory=list)
    """Lines for the receipt: what was given up and why."""
    schedule: list[Predicted] = field(default_factory=list)
    """When each step runs, by the cost model, in order; empty where the graph has no collectives."""
    predicted_us: float = 0.0
    """How long the graph takes by the cost model, its last wait included."""
    exposed_us: float = 0.0
    """Of that, how long nothing is computed because a collective is waited for."""

    def __str__(self) -> str:
        """A line for people; notes are the receipt's."""
        got = {"built": self.built, "in the cache": self.cache_hits, "received": self.kernels_received}
        came = ", ".join(f"{count} {how}" for how, count in got.items() if count)
        origin = "loaded from the cache" if self.graphs_cached else ""
        origin = "received from another rank" if self.graphs_received else origin
        left = ", ".join(f"{op} x{count}" for op, count in sorted(self.fallbacks.items()))
        parts = (
            origin,
            f"{self.kernel_calls} kernel calls of {self.kernels} kernels{f' ({came})' if came else ''}",
            f"{self.library_calls} library calls",
            f"{self.regions} regions" if self.regions else "",
            f"fallbacks: {left}" if left else "",
            f"{self.collectives} collectives" if self.collectives else "",
            f"{self.compile_seconds:.2f} s",
        )
        return "; ".join(filter(None, parts))


class BucketSource(Protocol):
    """Gives a backward program the memory of its buckets, and carries out its collectives."""

    def acquire(self, bucket: str) -> Any:
        """A `runtime.buckets.BucketMemory` that nobody outside refers to."""

    def scale(self, sync: bool) -> float:
        """What gradients of `Bucket.scaled` are multiplied by as they are written; 1 where nothing is reduced."""

    def start(self, bucket: str, memory: Any) -> None:
        """Add what p.grad holds already, scale the rest by one over the world size, and start the all-reduce."""

    def wait(self, bucket: str, memory: Any) -> None:
        """Wait for the all-reduce that `start` began."""

    def accumulated(self) -> bool:
        """Whether a p.grad holds something that `start` would add: what it does then is not the same each time."""

    def replayed(self, bucket: str, memory: Any) -> None:
        """The all-reduce of this memory has happened by a replay, without `start` and `wait`."""


Phase: TypeAlias = Literal["forward", "backward", "inference"]
"""What a program is part of: a forward has a backward behind it."""


class ShardSource(Protocol):
    """Carries out the collectives of a program with sharded parameters. Tensors are flat, one for each unit."""

    def start_gather(self, bucket: str, full: list[Any]) -> None:
        """Start filling `full` with the units that the ranks hold shards of."""

    def wait_gather(self, bucket: str) -> None:
        """Wait for what `start_gather` began."""

    def start_scatter(self, bucket: str, full: list[Any]) -> None:
        """Start summing up `full` over the ranks, each of which gets its own shard."""

    def wait_scatter(self, bucket: str) -> None:
        """Wait for what `start_scatter` began, and hand the shards on as gradients."""

    def pending(self, bucket: str) -> Any:
        """The torch.distributed.Work that is in flight for a bucket, or None."""

    def same_each_time(self) -> tuple[int, ...] | str:
        """Addresses of the shards that this call reads; or why another call at these may do something else."""

    def recorded(self) -> RecordedShards:
        """A source that exchanges as this one does, but hands no gradient on."""

    def hand_on(self, reduced: list[Any], collectives: Iterable[tuple[Any, str]]) -> None:
        """Hand on the reduced shards of a replay, in the order of `RecordedShards.reduced`; count its collectives."""

    def hand_on_count(self) -> int:
        """How many there are."""


class RecordedShards(ShardSource, Protocol):
    """A `ShardSource` to record a call with."""

    collectives: list[tuple[Any, str]]
    """(process group, label) of each that was started."""

    def reduced(self) -> list[Any]:
        """After the call: of each reduced bucket this rank's shards as one flat tensor, in the program's order."""


class ShardUnit(Protocol):
    """One unit of sharded parameters, at run time."""

    name: str
    group: str
    """Name of its `ShardGroup`."""
    offloaded: bool
    """Whether the shard lies in CPU memory, and is copied for each gather."""
    parts: tuple[int, ...]
    """Elements of each rank's shard, in order of ranks, where they differ; empty: all are equal."""

    @property
    def dtype(self) -> Any:
        """What computing uses, and gradients come in."""

    def data(self) -> Any:
        """This rank's shard, padded, as a flat tensor of the dtype that computing uses."""

    def stored(self) -> Any:
        """The same as it is kept, where it is kept: in the parameter's own dtype."""

    def address(self) -> int:
        """Where this rank's shard lies."""

    def commit(self, gradient: Any) -> None:
        """Add this rank's reduced shard, a flat tensor of the reduce dtype with its padding, to the gradient."""

    def take_back(self, gradient: Any) -> None:
        """Leave FSDP this rank's whole gradient, flat, of backwards that were not to reduce it."""

    def settle(self) -> None:
        """A backward ends: wait until the gradient is where it belongs."""


AnySource: TypeAlias = BucketSource | ShardSource
"""What a program's collectives go through."""


@dataclass(frozen=True, slots=True)
class GradientReduction:
    """How gradients are averaged. Operations are torch.distributed.ReduceOp; None divides by nothing."""

    divide_before: float | None
    divide_after: float | None
    scatter: Any
    reduce: Any
    """Of the all-reduce among replicas."""


class ShardGroup(Protocol):
    """Units that share collectives, at run time."""

    name: str

    def gather_group(self) -> Any:
        """The process group to gather over."""

    def part_group(self) -> Any:
        """The process group of fewer ranks that a forward leaves its units spread over for the backward, or None."""

    def scatter_group(self) -> Any:
        """The process group to reduce over."""

    def replica_group(self) -> Any:
        """The process group of ranks with the same shards; None if there is one replica."""

    def wants(self) -> Literal["nothing", "shards", "all"]:
        """What a backward that runs now is to reduce over: nothing, the shards alone, or replicas too."""

    def reduction(self, dtype: Any) -> GradientReduction:
        """How gradients of this dtype are averaged."""


class Executable(Protocol):
    """A compiled graph. Calling it empties `args` (AOTAutograd's boxed convention)."""

    report: ProgramReport
    buckets: tuple[Bucket, ...]
    source: str

    def __call__(self, args: list[Any], *, buckets: AnySource | None = None, sync: bool = False) -> list[Any]:
        """Run; `sync` says whether all-reduces happen in this call. Of sharded parameters the source decides it."""


Foreseen: TypeAlias = Callable[[], "tuple[Any, Request] | None"]
"""The graph that will most likely be compiled next, if one can be told."""


class TraceStore(Protocol):
    """Keeps traces of AOTAutograd from one start to the next, by name."""

    def find_trace(self, key: str) -> str | None:
        """What was kept under this name; None if there is nothing, or nothing that is whole."""

    def put_trace(self, key: str, text: str) -> None:
        """Keep a trace. It works without: where that cannot be, a line says so."""


class Compiler(Protocol):
    """The compiler as capture/ sees it; `compiler` implements it, so that capture/ need not import upwards."""

    def decompositions(self, trains: bool = True) -> dict[Any, Any]:
        """The table AOTAutograd is to decompose with; `trains` where the graph may need gradients."""

    def fusible(self) -> tuple[frozenset[Any], frozenset[Any]]:
        """(ops that become part of a loop, those of them that may be computed again), beside what torch knows."""

    def graph_passes(self) -> GraphPasses:
        """The passes over FX graphs and the steps on results, as the settings leave them."""

    def expect_products(self) -> None:
        """A graph that multiplies matrices on the CPU is about to be traced."""

    def traces(self) -> TraceStore | None:
        """Where traces are kept; None where each is made anew, to be looked at or because nothing comes of it."""

    def compile_graph(self, gm: Any, request: Request, foreseen: Foreseen | None = None) -> Executable:
        """Compile one torch.fx.GraphModule with fake tensors in meta["val"].

        While others build its kernels, the compiler may plan what is `foreseen`.
        """
