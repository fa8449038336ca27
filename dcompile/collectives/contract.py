"""Interface between capture/ and the rest of the compiler: parameters, requests and reports, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from dcompile.ir.buffers import Bucket
from dcompile.ir.nodes import Loop, Tile
from dcompile.machine_model import CPU, Figures, GroupSize
from dcompile.passes import GraphPasses


@dataclass(frozen=True, slots=True)
class Shard:
    """Sharding of a parameter: its place in a unit, which is gathered and reduced as a whole.

    A unit is one parameter, padded at its end to a multiple of the number of shards, or several consecutive parameters.
    Units with the same number `together` share collectives.
    """

    unit: int
    together: int
    offset: int
    """Offset of the parameter in its unit, in elements."""
    numel: int
    """Elements of the whole unit, padding included."""
    reduce_dtype: str
    """Dtype in which gradients are summed over the ranks."""
    flat: bool = field(default=False, kw_only=True)
    """Whether the unit is several consecutive parameters: a program may then have gradients of only some of them."""
    reshard: bool
    """Whether the backward gathers again; otherwise it uses the values that the forward gathered."""
    sent_dtype: str = ""
    """Dtype in which the unit is gathered where shards are cast to 8-bit floats (`ScaledCast`). The parameter is then
    computed from what arrives. If empty, it is what arrives, in its own dtype.
    """


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """Properties of one parameter that is synchronized across ranks.

    `number` is its position in the adapter's parameter order, the same on every rank. `group` names the process group
    within the plan ("ddp"). The run time maps it to the real group, so plans contain nothing rank-specific.
    """

    number: int
    fqn: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    kind: Literal["replicated", "sharded"] = "replicated"
    group: str = "ddp"
    shard: Shard | None = None
    """Of a sharded parameter; `shape` and `dtype` are then those of the gathered one, in which the program computes."""


@dataclass(eq=False)
class SharedBuckets:
    """What the backward programs of one model share."""

    storages: dict[Any, list[Any]] = field(default_factory=dict)
    """Layout of a bucket -> its storages, which programs share, for example those of several input shapes."""
    numbers: dict[Any, int] = field(default_factory=dict)
    """Process group -> the model's number in labels of its collectives."""


@dataclass(frozen=True, slots=True)
class BucketRule:
    """DDP's bucket limits in bytes. The first bucket is small, so that communication starts early."""

    first_bytes: int
    cap_bytes: int
    more_bytes: tuple[int, ...] = ()
    """Limits of the third and later buckets, if they have their own; the last one applies to all that follow."""
    wire: str = ""
    """Dtype to which gradients are cast for the all-reduce, as a compression hook requests; "own" is their own dtype.
    They are then divided by the world size, as DDP's hooks do. If empty, they are multiplied by its inverse.
    """
    covers_all_params: bool = False
    """Whether every parameter has a place in each program, used or not, since ranks may use different ones."""
    unsure: tuple[int, ...] = ()
    """Parameters that a backward may lack a gradient of, since not every loss uses the results that they lead to. The
    bucket then has presence flags.
    """

    @property
    def limits(self) -> tuple[int, ...]:
        """Bytes at which each bucket closes, in the order of reduction; the last limit applies to all that follow."""
        return (self.first_bytes, self.cap_bytes, *self.more_bytes)


@dataclass(frozen=True, slots=True)
class Request:
    """One graph to compile. `name` is unique within a compiled model ("forward0", "backward0", "inference1")."""

    name: str
    kind: Literal["forward", "backward", "inference"]
    grads: tuple[tuple[int, int], ...] = ()
    """Gradients of a taken-over model's backward: (position among the outputs, parameter number)."""
    params: tuple[ParamInfo, ...] = ()
    rule: BucketRule | None = None
    """Bucket limits; with None, the graph gets no all-reduces."""
    gathers: tuple[tuple[int, int], ...] = ()
    """(position among the inputs, parameter number) of each sharded parameter that the graph gathers."""
    reductions: int = 1
    """Number of reductions of sharded gradients that may be in flight at once. Each of them holds memory."""
    results: int = 0
    """Number of leading outputs that the user sees; the others are saved tensors or gradients."""
    donated: tuple[int, ...] = ()
    """Positions of the inputs that belong to the graph: saved tensors that nothing else can access."""
    saved: tuple[int, ...] = ()
    """Positions of a backward's inputs that autograd passes from its forward."""
    figures: Figures = CPU
    """Machine figures, the same on every rank."""
    groups: tuple[tuple[str, GroupSize], ...] = ()
    """(group within the plan, its size and communicator)."""
    epilogues: tuple[tuple[Loop, Tile], ...] = ()
    """Loops to fuse as GEMM epilogues, and products of few rows, each with the tile measured as best on the rank that
    compiles.
    """
    region_us: tuple[tuple[str, float], ...] = ()
    """Regions that another compiler compiles, by key, with the measured microseconds of a call; the same on all ranks.
    Others are estimated.
    """
    early_bytes: int | None = None
    """Bytes that overlapping collectives may add to the graph's peak memory; None: one incoming and one
    outgoing unit.
    """


Predicted: TypeAlias = "tuple[str, str, float, float, float]"
"""(name, resource, start_us, duration_us, exposed_us) of one step. A kernel or library call is on "compute". A
collective, named like its bucket, is on its communicator. `exposed_us`: how long its wait delays the next steps.
"""


APART, TOGETHER = "#: not recorded: ", "#: recorded again"
"""Lines of a host program around steps that no CUDA graph can record; the first ends with the reason."""
REGION_LEFT = "region left by"
"""What `ProgramReport.fallbacks` calls a region that another compiler refused, before its name and the reason."""


@dataclass(slots=True)
class ProgramReport:
    """Results of compiling one graph: counts for the receipt."""

    kernels: int = 0
    kernel_calls: int = 0
    library_calls: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    collectives: int = 0
    regions: int = 0
    """Calls of code that another compiler made of the graph, by option `kernels`."""
    bytes_copied: int = 0
    """Bytes that a call copies only to move gradients into buckets."""
    bytes_gathered: int = 0
    """Bytes of sharded parameters that a call gathers, as they arrive."""
    bytes_offloaded: int = 0
    """Bytes of saved values that a call copies to host memory."""
    built: int = 0
    cache_hits: int = 0
    graphs_cached: int = 0
    """1 if the graph itself was in the cache, so that nothing was lowered, scheduled or emitted."""
    graphs_received: int = 0
    """1 if another rank compiled it for this one."""
    kernels_received: int = 0
    """Its kernels, which that rank built or found. They are not in `cache_hits`."""
    graphs_uncacheable: int = 0
    """1 if the graph cannot be cached; a note says why."""
    compile_seconds: float = 0.0
    recordings: int = 0
    """CUDA graphs that were recorded of it."""
    replays: int = 0
    """Calls that were replays of one of them."""
    pieces: int = 0
    """CUDA graphs that a replay launches: one, or several with steps between them that cannot be recorded."""
    notes: list[str] = field(default_factory=list)
    """Lines for the receipt: declined optimizations, with reasons."""
    weaker: dict[str, list[str]] = field(default_factory=dict)
    """How bits may differ from stock's -> the kernels or functions that may make the difference."""
    schedule: list[Predicted] = field(default_factory=list)
    """Predicted time of each step by the cost model, in order; empty where the graph has no collectives."""
    predicted_us: float = 0.0
    """Predicted time of the graph, its last wait included."""
    exposed_us: float = 0.0
    """Part of it in which nothing is computed because a collective is waited for."""

    def __str__(self) -> str:
        """One line for people. The receipt prints the notes."""
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
    """Memory of a backward program's buckets, and their collectives."""

    def acquire(self, bucket: str) -> Any:
        """A `runtime.communication.ddp_buckets.BucketMemory` that nothing else refers to."""

    def scale(self, sync: bool) -> float:
        """Factor for gradients of `Bucket.scaled` as they are written; 1 if nothing is reduced."""

    def start(self, bucket: str, memory: Any) -> None:
        """Add what p.grad holds already, scale the rest by one over the world size, and start the all-reduce."""

    def wait(self, bucket: str, memory: Any) -> None:
        """Wait for the all-reduce that `start` began."""

    def accumulated(self) -> bool:
        """Whether a p.grad holds something that `start` would add, so that calls differ from one another."""

    def replayed(self, bucket: str, memory: Any) -> None:
        """Note that a replay included the all-reduce of this memory, without `start` and `wait`."""


Phase: TypeAlias = Literal["forward", "backward", "inference"]
"""Kind of run that a program belongs to; a forward is followed by a backward."""


class ShardSource(Protocol):
    """Collectives of a program with sharded parameters. Tensors are flat, one for each unit."""

    wanted: dict[int, Any]
    """Unreduced gradients of the units that were asked for, after a call that adds to no gradient."""

    def start_gather(self, bucket: str, full: list[Any]) -> None:
        """Start filling `full` with the units whose shards the ranks hold."""

    def wait_gather(self, bucket: str) -> None:
        """Wait for the gather that `start_gather` began."""

    def start_scatter(self, bucket: str, full: list[Any]) -> None:
        """Start summing `full` over the ranks, each of which gets its own shard."""

    def wait_scatter(self, bucket: str) -> None:
        """Wait for the reduction that `start_scatter` began, and install the shards as gradients."""

    def take_shards(self, bucket: str, sizes: list[tuple[int, ...]]) -> list[Any]:
        """Wait for the reduction that `start_scatter` began, and return the shards of `Bucket.taken`, without padding.

        The others are installed as gradients.
        """

    def pending(self, bucket: str) -> Any:
        """The torch.distributed.Work that is in flight for a bucket, or None."""

    def same_each_time(self) -> tuple[int, ...] | str:
        """Addresses of the shards that this call reads; or why a replay at these may compute something else."""

    def recorded(self) -> RecordedShards:
        """A source with the same collectives that installs no gradients, for a recording."""

    def hand_on(self, reduced: list[Any], collectives: Iterable[tuple[Any, str]]) -> None:
        """Install the reduced shards of a replay as gradients, and count its collectives.

        `reduced` has the order of `RecordedShards.reduced`.
        """

    def hand_on_count(self) -> int:
        """Number of reduced tensors that `hand_on` expects."""


class RecordedShards(ShardSource, Protocol):
    """A `ShardSource` for recording a call."""

    collectives: list[tuple[Any, str]]
    """(process group, label) of each collective that was started."""

    def reduced(self) -> list[Any]:
        """This rank's shards of each reduced bucket as one flat tensor, in the program's order.

        Valid after the call.
        """


@dataclass(frozen=True, eq=False, slots=True)
class ScaledCast:
    """How a shard becomes the 8-bit floats that are sent: multiplied by a scale, and cast."""

    dtype: Any
    scale: Any
    """Tensor of shape () and dtype float32, at one address as long as the unit lives. Each call of the model updates
    it.
    """
    given: Callable[[], Any]
    """Function for the scale that the user's code has computed; None if it is to be computed of the shards."""
    scales_of: Callable[[Any, Any], Any]
    """(largest magnitudes over all ranks, dtype) -> scales."""


class ShardUnit(Protocol):
    """One unit of sharded parameters, at run time."""

    name: str
    group: str
    """Name of its `ShardGroup`."""
    offloaded: bool
    """Whether the shard is stored in CPU memory, and copied for each gather."""
    parts: tuple[int, ...]
    """Elements of each rank's shard, in the order of ranks; empty if all are equal."""

    @property
    def dtype(self) -> Any:
        """Dtype of the computation and of gradients."""

    @property
    def cast(self) -> ScaledCast | None:
        """How the shard is cast to 8-bit floats before it is sent; None if it is sent in `dtype`."""

    def data(self) -> Any:
        """This rank's shard, padded, as a flat tensor of the compute dtype."""

    def stored(self) -> Any:
        """This rank's shard as it is stored: in place, in the parameter's own dtype."""

    def address(self) -> int:
        """Address of this rank's shard."""

    def commit(self, gradient: Any) -> None:
        """Add this rank's reduced shard to the gradient. The shard is flat and padded, in the reduce dtype."""

    def take_back(self, gradient: Any) -> None:
        """Pass this rank's whole flat gradient to FSDP, from backwards that did not reduce it."""

    def settle(self) -> None:
        """End a backward: wait until the gradient has been copied to its memory."""


AnySource: TypeAlias = BucketSource | ShardSource
"""Source of a program's collectives."""


@dataclass(frozen=True, slots=True)
class GradientReduction:
    """Arithmetic of averaging gradients.

    Operations are torch.distributed.ReduceOp; a divisor of None means no division.
    """

    divide_before: float | None
    divide_after: float | None
    scatter: Any
    reduce: Any
    """Operation of the all-reduce among replicas."""


class ShardGroup(Protocol):
    """Units that share collectives, at run time."""

    name: str

    def gather_group(self) -> Any:
        """The process group to gather over."""

    def part_group(self) -> Any:
        """Smaller process group over which the forward reshards its units for the backward, or None."""

    def scatter_group(self) -> Any:
        """The process group to reduce over."""

    def replica_group(self) -> Any:
        """The process group of ranks with the same shards; None if there is one replica."""

    def wants(self) -> Literal["nothing", "shards", "all"]:
        """Scope of reduction of the current backward: nothing, the shards alone, or replicas too."""

    def reduction(self, dtype: Any) -> GradientReduction:
        """Arithmetic of averaging gradients of this dtype."""


class Executable(Protocol):
    """A compiled graph. Calling it empties `args` (AOTAutograd's boxed convention)."""

    report: ProgramReport
    buckets: tuple[Bucket, ...]
    source: str

    def __call__(self, args: list[Any], *, buckets: AnySource | None = None, sync: bool = False) -> list[Any]:
        """Run. `sync`: whether all-reduces happen in this call. For sharded parameters, the source decides that."""


Foreseen: TypeAlias = Callable[[], "tuple[Any, Request] | None"]
"""Callable for the graph that will most likely be compiled next; it returns None if there is no prediction."""


class TraceStore(Protocol):
    """Keeps traces of AOTAutograd from one start to the next, by name."""

    def find_trace(self, key: str) -> str | None:
        """What was kept under this name; None if there is nothing, or nothing that is whole."""

    def put_trace(self, key: str, text: str) -> None:
        """Keep a trace. It works without: where that cannot be, a line says so."""


class Compiler(Protocol):
    """Compiler as capture/ sees it. `compiler` implements it, so that capture/ need not import upwards."""

    def decompositions(self, trains: bool = True) -> dict[Any, Any]:
        """Decomposition table for AOTAutograd; `trains` where the graph may need gradients."""

    def fusible(self) -> tuple[frozenset[Any], frozenset[Any]] | None:
        """(ops that become part of a loop, those of them that may be recomputed), in addition to torch's own.

        None if each operation is a kernel of its own, so that nothing is free to recompute.
        """

    def graph_passes(self) -> GraphPasses:
        """FX graph passes and output steps that the settings enable."""

    def expect_products(self) -> None:
        """Note that a graph with CPU matmuls is about to be traced."""

    def traces(self) -> TraceStore | None:
        """Where traces are kept; None where each is made anew, to be looked at or because nothing comes of it."""

    def compile_graph(self, gm: Any, request: Request, foreseen: Foreseen | None = None) -> Executable:
        """Compile one torch.fx.GraphModule with fake tensors in meta["val"].

        While its kernels are built, the compiler may plan the graph that `foreseen` returns.
        """
