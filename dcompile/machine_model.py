"""Machine figures on which the schedule of a program depends: immutable values, measured or from a table.

Passes get a `Figures` and query no device, so that equal figures give equal plans. The table holds rounded figures by
kind of device, each with its source. `runtime/measure/calibration.py` measures a machine once, rounds, and stores them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dcompile.ir.collective_kinds import COLLECTIVES, CollectiveKind


@dataclass(frozen=True, slots=True)
class Link:
    """Speed of collectives within groups of up to `ranks` ranks.

    `gbs` is the bus bandwidth in 10^9 bytes a second: the ring traffic that passes one rank (nccl-tests,
    doc/PERFORMANCE.md). For a network, it is the part that each rank of a node adds. `latency_us` is the fixed time of
    any collective, `hop_us` the additional time for each hop from one rank to the next.
    """

    ranks: int
    gbs: float
    latency_us: float
    hop_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one device and its links.

    Rates are those of large work; `*_us` is the least time of a unit of work.
    """

    name: str
    memory_gbs: float
    """Memory traffic, reads and writes together, in 10^9 bytes a second."""
    tflops: tuple[tuple[str, float], ...]
    """(dtype, 10^12 operations a second of large GEMMs); float32 also applies to dtypes that are not listed."""
    attention: float
    """Part of that rate that attention kernels reach."""
    arithmetic_gops: float
    """Additions inside dcompile's kernels, in 10^9 a second, over all vector lanes."""
    kernel_us: float
    """Least time of one kernel of dcompile's."""
    library_us: float
    """Least time of one library call."""
    links: tuple[Link, ...]
    """Links within a node by group size, ascending; the last one's size is that of a node."""
    network: Link | None = None
    """Link between nodes; None: all ranks are in one."""
    interference: float = 0.0
    """Slowdown of concurrent work, as a part of a collective's time."""
    member_us: float = 0.0
    """Time of each further tensor of a collective; 0 where the backend packs them into one message."""
    crowding: float = 0.0
    """Slowdown of a collective, as a part of its time, while something is computed."""
    copy_gbs: float = 0.0
    """Rate of copies from another rank's memory in the same node, in 10^9 bytes a second; 0: none."""
    host_gbs: float = 25.0
    """Rate of copies between the device and pinned host memory, in either direction, in 10^9 bytes a second."""
    sustained: float = 1.0
    """Part of GEMM rates that lasts for more than a second: GPUs reduce their clocks at the power limit."""

    def rate(self, dtype: str) -> float:
        """Operations a second of large GEMMs, in training."""
        rates = dict(self.tflops)
        return rates.get(dtype, rates["float32"]) * 1e12 * self.sustained

    def link(self, ranks: int) -> Link:
        """Link of a group of so many ranks in one node."""
        return next((link for link in self.links if link.ranks >= ranks), self.links[-1])


@dataclass(frozen=True, slots=True)
class GroupSize:
    """A process group: its number of ranks, and its communicator, whose collectives run one after another.

    `replicas`: number of such groups among which reduced data is summed again (HSDP). `copies`: its gathers are copies
    from peer memory, which take no multiprocessors.
    """

    ranks: int = 2
    lane: str = "communication"
    replicas: int = 1
    copies: bool = False


MAX_ONE_SHOT_BYTES = 256 << 10
"""Size of an all-reduce up to which every rank sends its whole operand to all others, in one kernel."""
MIN_COPIED_BYTES = 32 << 20
"""Average bytes of a model's gathers below which one kernel is faster than a copy for each parameter and rank (two
H200: 13.5 MiB for each layer of a model of 160 M).
"""
COPY_US = 15.0
"""Fixed time of one gather's copies, without their bytes (two H200: nine of 2 KiB to 17 MiB)."""


def collective_seconds(figures: Figures, kind: CollectiveKind, nbytes: int, ranks: int, stride: int = 1) -> float:
    """Time of one collective on a whole buffer of `nbytes` (what a gather writes, a reduction reads).

    It is the ring's latency plus its traffic over the slowest link; for an all-reduce, the latency of a tree if that is
    shorter. Several rings share a node's adapters (as in NCCL, src/graph/tuning.cc). Global ranks of the group are
    `stride` apart, and ranks of a node are consecutive.
    """
    if ranks <= 1:
        return figures.library_us * 1e-6
    node = figures.links[-1].ranks
    network = figures.network if ranks * stride > node else None
    inside = max(1, min(ranks, node // stride)) if network else ranks
    link = figures.link(inside)
    nodes = -(-ranks // inside)
    traits = COLLECTIVES[kind]
    rounds = traits.ring_passes
    latency, gbs = link.latency_us + rounds * (ranks - nodes) * link.hop_us, link.gbs
    if network is not None:
        gbs = min(network.gbs * inside, link.gbs if inside > 1 else network.gbs)
        latency = network.latency_us + rounds * ((ranks - nodes) * link.hop_us + (nodes - 1) * network.hop_us)
        if traits.has_tree:
            deep = 2 * ((inside - 1) * link.hop_us + 2 * math.ceil(math.log2(nodes)) * network.hop_us)
            latency = min(latency, network.latency_us + deep)
    return latency * 1e-6 + rounds * nbytes * (ranks - 1) / ranks / (gbs * 1e9)


def host_copy_seconds(figures: Figures, nbytes: int) -> float:
    """Time of one copy between the device and pinned host memory."""
    return figures.library_us * 1e-6 + nbytes / (figures.host_gbs * 1e9)


def copying_seconds(figures: Figures, nbytes: int, ranks: int) -> float:
    """Time in which a rank copies the missing part of a gathered buffer of `nbytes` from peer memory."""
    return COPY_US * 1e-6 + nbytes * (ranks - 1) / ranks / (figures.copy_gbs * 1e9)


CPU = Figures(
    "cpu",
    memory_gbs=10.0,
    tflops=(("float32", 0.1), ("bfloat16", 0.2), ("float16", 0.05), ("float64", 0.05)),
    attention=0.4,
    arithmetic_gops=8.0,
    kernel_us=2.0,
    library_us=5.0,
    # Gloo over the loop-back device, two processes of one machine
    links=(Link(1 << 20, gbs=1.0, latency_us=150.0, hop_us=50.0),),
    interference=0.5,
    host_gbs=5.0,  # a copy in memory: it reads and writes
)
"""One core of a server: orders of magnitude, since cores, threads and other jobs vary; measure for better figures."""

_NVLINK4 = (
    Link(2, gbs=260.0, latency_us=26.0, hop_us=1.9),  # two H200, NCCL: 265 GB/s from 116 to 416 MiB
    Link(8, gbs=340.0, latency_us=24.0, hop_us=1.9),  # nccl-tests on DGX H100: 340 to 370 of 450 GB/s each way
)
_INFINIBAND_400 = Link(1 << 20, gbs=45.0, latency_us=35.0, hop_us=4.0)
"""DGX H100: one ConnectX-7 of 400 Gb/s for each GPU, 90 % of 50 GB/s. Hops are from NCCL's tuning.cc (LL128)."""

_H200 = Figures(
    "h200",
    memory_gbs=4100.0,  # kernels of a 1B Llama's step, 34 GB in 8.5 ms; a copy: 4270; data sheet: 4800
    # bf16: all GEMMs of that step, 51 TFLOP in 70 ms; data sheet: 989
    tflops=(("float32", 50.0), ("bfloat16", 740.0), ("float16", 740.0), ("float64", 60.0)),
    attention=0.37,  # causal, heads of 64, forward and backward: 3.8 TFLOP of that step in 13.8 ms
    arithmetic_gops=30000.0,
    kernel_us=2.5,
    library_us=4.0,
    links=_NVLINK4,
    network=_INFINIBAND_400,
    # 18 reductions and 34 gathers on two: kernels take 6 ms longer than alone (docs/lab/runtime.md, R11)
    interference=0.45,
    crowding=0.5,
    copy_gbs=360.0,  # two H200, one stream, nine copies of 61 MB in all: 168 us
    sustained=0.95,  # 700 W: 1980 MHz become 1640 on average
    member_us=2.5,  # two H200, NCCL, a block of nine parameters, 13.5 MiB: 69 us, and 49 us as one
)

TABLE: Mapping[str, Figures] = {
    "cpu": CPU,
    "h200": _H200,
    "h100": replace(
        _H200,
        name="h100",
        memory_gbs=2860.0,  # in proportion; data sheet: 3350
        tflops=(("float32", 50.0), ("bfloat16", 700.0), ("float16", 700.0), ("float64", 60.0)),
    ),
    "a100": Figures(
        "a100",
        memory_gbs=1250.0,  # in proportion; data sheet: 1555 (40 GB), 2039 (80 GB)
        tflops=(("float32", 18.0), ("bfloat16", 250.0), ("float16", 250.0), ("float64", 15.0)),  # data sheet: 312 bf16
        attention=0.35,
        arithmetic_gops=9000.0,
        kernel_us=3.0,
        library_us=5.0,
        links=(Link(8, gbs=225.0, latency_us=28.0, hop_us=1.9),),  # of 300 GB/s NVLink each way
        network=Link(1 << 20, gbs=22.0, latency_us=40.0, hop_us=4.0),  # DGX A100: 200 Gb/s for each GPU
        interference=0.35,
        copy_gbs=225.0,
        member_us=2.5,
    ),
}
"""Figures by kind of device. GEMM rates are 80 to 90 % of the data sheet's dense ones, as large GEMMs reach."""


def table_figures(device: str) -> Figures:
    """Table entry of a device, named "cpu" or as its driver names it; that of the H100 for an unknown GPU."""
    name = device.lower()
    return next((figures for kind, figures in TABLE.items() if kind in name), TABLE["h100"])


def round_figures(figures: Figures) -> Figures:
    """Round every rate and time to powers of the fourth root of two, so that noise seldom changes a plan."""
    return replace(
        figures,
        memory_gbs=_round(figures.memory_gbs),
        tflops=tuple((dtype, _round(rate)) for dtype, rate in figures.tflops),
        arithmetic_gops=_round(figures.arithmetic_gops),
        kernel_us=_round(figures.kernel_us),
        library_us=_round(figures.library_us),
        member_us=_round(figures.member_us),
        host_gbs=_round(figures.host_gbs),
        links=tuple(map(_rounded_link, figures.links)),
        network=None if figures.network is None else _rounded_link(figures.network),
    )


def _rounded_link(link: Link) -> Link:
    return replace(link, gbs=_round(link.gbs), latency_us=_round(link.latency_us), hop_us=_round(link.hop_us))


def _round(value: float) -> float:
    """Three digits of the nearest power of 2 ** (1/4): steps of 19 %."""
    return float(f"{2 ** (round(4 * math.log2(value)) / 4):.3g}") if value > 0 else 0.0


def to_record(figures: Figures) -> dict[str, object]:
    """Convert to JSON types."""
    links = [*figures.links, *filter(None, (figures.network,))]
    return {name: getattr(figures, name) for name in _PLAIN} | {
        "tflops": [list(pair) for pair in figures.tflops],
        "links": [[link.ranks, link.gbs, link.latency_us, link.hop_us] for link in links],
        "has_network": figures.network is not None,
    }


_RATES = ("memory_gbs", "attention", "arithmetic_gops", "kernel_us", "library_us", "sustained", "host_gbs")
_PARTS = ("interference", "crowding", "member_us", "copy_gbs")
_PLAIN = ("name", *_RATES, *_PARTS)


def from_record(record: Mapping[str, object]) -> Figures:
    """Inverse of `to_record`. Raises ValueError for any other record."""
    try:
        rates = {field: _positive(record[field]) for field in _RATES}
        parts = {field: _number(record[field]) for field in _PARTS}
        links = [
            Link(int(_positive(ranks)), _positive(gbs), _positive(latency), _number(hop))
            for ranks, gbs, latency, hop in _rows(record["links"], 4)
        ]
        network = links.pop() if record["has_network"] is True and len(links) > 1 else None
        return Figures(
            name=str(record["name"]),
            tflops=tuple((str(dtype), _positive(rate)) for dtype, rate in _rows(record["tflops"], 2)),
            links=tuple(links),
            network=network,
            **rates,
            **parts,
        )
    except KeyError as error:
        raise ValueError(f"not the figures of a machine: {error} is missing") from error


def _rows(value: object, width: int) -> list[list[object]]:
    rows = value if isinstance(value, list) else []
    if not rows or not all(isinstance(row, list) and len(row) == width for row in rows):
        raise ValueError(f"not the figures of a machine: no table of {width} columns")
    return rows


def _positive(value: object) -> float:
    if _number(value) == 0:
        raise ValueError("not the figures of a machine: a rate or time of 0")
    return _number(value)


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"not the figures of a machine: {value!r} is no rate or time")
    return float(value)
