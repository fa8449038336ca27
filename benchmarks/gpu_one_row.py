"""Benchmark of products of one row and a matrix, as in decoding: many tiles of dcompile's kernel, and today's.

    python -m benchmarks.gpu_one_row [--only qkv,down/2] [--rounds 5] [--json] [--save]

Sizes are those of an 8B Llama in bfloat16; `/2` is one rank's part of two. A recorded chain alternates a small kernel
(the norm of a row) and the product. Each time the product reads another copy of its matrices, which no cache holds
together. Every kernel starts while the one before it ends, as in a decoded token. The figure is the time of such a
pair. `alone` is the product without early starts and without the norm. Shares are the bytes of the matrices over the
time, relative to what `copy_` reads and writes. `usual` is what default mode takes, `best` the fastest tried.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment, finish, geomean, gpu_time, table
from benchmarks.gpu_decode import copy_rate
from dcompile.codegen.emit.target import Kernels, KernelSource
from dcompile.codegen.emit.triton import kernel as triton_kernel
from dcompile.codegen.emit.triton.horizontal_fusion import start_next_first
from dcompile.codegen.nest.row_matmul import RowTile
from dcompile.codegen.nest.tile_plan import power_of_two
from dcompile.compiler.driver import Pipeline
from dcompile.config import Config
from dcompile.ir.nodes import Loop, Program
from dcompile.ir.parse import parse
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.program import cuda_launch
from dcompile.runtime.program.argument_table import Address, library

SIZES = {
    "qkv": (1, 4096, 6144),
    "o": (1, 4096, 4096),
    "gate_up": (2, 4096, 14336),
    "down": (1, 14336, 4096),
    "lm_head": (1, 4096, 128256),
    "qkv/2": (1, 4096, 3072),
    "o/2": (1, 2048, 4096),
    "gate_up/2": (2, 4096, 7168),
    "down/2": (1, 7168, 4096),
    "lm_head/2": (1, 4096, 64128),
}
"""Name -> matrices, depth and columns. Two matrices end in SwiGLU."""
COLD_BYTES = 256 << 20
"""Bytes of all copies of the matrices: several times a GPU's L2 cache."""
MIN_PAIRS = 8
"""Pairs of kernels in a recorded chain, so that its start and end count little."""
REPLAYS = 5
TOLERANCE = 1e-2
"""Limit of a result's distance from that in float32, of its norm."""
SWIGLU = [
    "g = cast(m0, float32)",
    "s = cast(div(g, add(1.0, exp(neg(g)))), bfloat16)",
    "y[i0] = cast(mul(cast(s, float32), cast(m1, float32)), bfloat16)",
]


def product_program(matrices: int, depth: int, columns: int) -> Program:
    """Return the product of one row, as it is after fusion."""
    names = [f"w{n}" for n in range(matrices)]
    lines = [f"program p({', '.join(['x', *names])})", f"x: bfloat16[{depth}] on cuda"]
    lines += [f"{name}: bfloat16[{columns}, {depth}] on cuda" for name in names]
    lines += [f"y: bfloat16[{columns}] on cuda", f"loop y [{columns}] x [{depth}]"]
    for n, name in enumerate(names):
        factors = f"cast(x[j0], float32), cast({name}[i0, j0], float32)"
        lines.append(f"m{n} = cast(row_sum(mul({factors})), bfloat16)")
    return parse("\n".join([*lines, *(SWIGLU if matrices == 2 else ["y[i0] = m0"]), "return (y)"]))


def norm_program(depth: int) -> Program:
    """Return the norm of one row."""
    lines = ["program p(z)", f"z: bfloat16[{depth}] on cuda", f"x: bfloat16[{depth}] on cuda", f"loop x [] x [{depth}]"]
    lines += ["a = cast(z[j0], float32)", f"s = rsqrt(add(div(row_sum(mul(a, a)), {float(depth)}), 1e-05))"]
    return parse("\n".join([*lines, "x[j0] = cast(mul(a, s), bfloat16)", "return (x)"]))


def candidates(matrices: int, depth: int) -> Iterator[RowTile]:
    """Yield the tiles to try, each of whole rows in registers."""
    whole = power_of_two(depth)
    for rows in (1, 2, 4):
        for warps in (2, 4, 8, 16):
            if 16 <= rows * whole * matrices // (32 * warps) <= 64:
                yield RowTile(rows, whole, warps)


@dataclass(frozen=True, slots=True)
class Line:
    """One size and its kernels, of which None is today's."""

    name: str
    norm: KernelSource
    kernels: Mapping[RowTile | None, KernelSource]
    matrices: int
    depth: int
    columns: int

    @classmethod
    def of(cls, name: str) -> Line:
        """Emit all kernels of a size."""
        matrices, depth, columns = SIZES[name]
        made, norm = product_program(matrices, depth, columns), norm_program(depth)
        (product,), (norm_loop,) = made.steps, norm.steps
        assert isinstance(product, Loop) and isinstance(norm_loop, Loop), "programs of one loop"
        tiles: list[RowTile | None] = [None, *dict.fromkeys(candidates(matrices, depth))]
        constant = frozenset(f"w{n}" for n in range(matrices))
        first = triton_kernel.emit(norm_loop, norm.table, frozenset())
        early = [triton_kernel.emit(product, made.table, constant, tile) for tile in tiles]
        ordered = start_next_first(Kernels((first, first, *early)), made, "inference").calls
        return cls(name, ordered[1], dict(zip(tiles, ordered[2:], strict=True)), matrices, depth, columns)

    @property
    def sources(self) -> list[KernelSource]:
        """All kernels."""
        return [self.norm, *self.kernels.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return self.matrices * self.depth * self.columns * 2


class Chain:
    """Memory of one size, and recorded chains of kernels over it."""

    def __init__(self, line: Line, archives: Mapping[str, Path]) -> None:
        self.line, self.archives = line, archives
        self.copies = max(-(-COLD_BYTES // line.nbytes), 1)
        self.pairs = max(self.copies, MIN_PAIRS)
        shape = (self.copies, line.columns, line.depth)
        self.matrices = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(line.matrices)]
        self.z = torch.randn(line.depth, device="cuda", dtype=torch.bfloat16)
        self.x, self.y = torch.randn_like(self.z), torch.empty(line.columns, device="cuda", dtype=torch.bfloat16)

    def record(self, product: KernelSource, norm: KernelSource | None) -> torch.cuda.CUDAGraph:
        """Record the chain. Without the norm, kernels start in turn."""
        rows = []
        for pair in range(self.pairs):
            rows += [] if norm is None else [self._row(norm, 0)]
            rows.append(self._row(product, pair % self.copies))
        device = torch.cuda.current_device()
        tables: list[cuda_launch.LaunchTable] = []
        run = cuda_launch.launches(library(self.archives[cuda_launch.LAUNCHER]), device, 0, rows, tables)
        if norm is None:
            tables[0].start_in_turn()
        run(cuda_launch.stream_of(device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(cuda_launch.stream_of(device))
        return graph

    def _row(self, source: KernelSource, copy: int) -> tuple[Path, str, int, list[Address]]:
        known = {"x": self.x, "y": self.y, "z": self.z} | {f"w{n}": m[copy] for n, m in enumerate(self.matrices)}
        (launch,) = source.launches
        assert isinstance(launch.grid, int), "sizes are known"
        arguments = [Address(known[source.arguments[n]].data_ptr()) for n in launch.arguments]
        return self.archives[source.name], launch.function, launch.grid, arguments

    def check(self) -> None:
        """Compare the last product of a chain with the library's. Raises ArithmeticError."""
        last = (self.pairs - 1) % self.copies
        sums = [(m[last].float() @ self.x.float()).bfloat16() for m in self.matrices]
        want = sums[0].float()
        if len(sums) == 2:
            want = torch.nn.functional.silu(sums[0]).float() * sums[1].float()
        off = ((self.y.float() - want).norm() / want.norm()).item()
        if not off <= TOLERANCE:
            raise ArithmeticError(f"{self.line.name} differs by {off:.1e} of the result's norm")

    def times(self, kernels: Mapping[Any, KernelSource], norm: KernelSource | None, rounds: int) -> dict[Any, float]:
        """Return the microseconds of a pair, or of a product, by tile: the median of interleaved rounds."""
        graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        for tile, kernel in kernels.items():
            self.y.fill_(torch.nan)
            graphs[tile] = self.record(kernel, norm)
            graphs[tile].replay()
            self.check()
        taken: dict[Any, list[float]] = {tile: [] for tile in graphs}
        for _ in range(rounds):
            for tile, graph in graphs.items():
                taken[tile].append(self._time(graph.replay))
        return {tile: statistics.median(found) for tile, found in taken.items()}

    def _time(self, replay: Callable[[], object]) -> float:
        replay()
        return gpu_time(replay, REPLAYS) * 1e3 / self.pairs


def measure(line: Line, archives: Mapping[str, Path], rounds: int, rate: float) -> dict[str, Any]:
    """Time all tiles of a size in a chain, then today's and the best ones alone."""
    chain = Chain(line, archives)
    early = chain.times(line.kernels, line.norm, rounds)
    order = sorted((tile for tile in early if tile is not None), key=lambda tile: early[tile])
    alone = chain.times({tile: line.kernels[tile] for tile in (None, *order[:4])}, None, rounds)
    best = order[0]
    shares = {"usual": early[None], "best": early[best], "alone": alone[None], "best alone": alone[best]}
    return {"us": {"usual": early[None], "best": early[best], "alone": alone[None], "best alone": alone[best]},
            "shares": {name: line.nbytes / (us * 1e-6) / rate for name, us in shares.items()},
            "best": str(best), "tiles": {str(tile or "usual"): us for tile, us in early.items()},
            "tiles alone": {str(tile or "usual"): us for tile, us in alone.items()}}  # fmt: skip


HEADER = ["us of norm and product (share of copying)", "usual", "best", "ratio", "usual alone", "best alone", "tile"]


def cells(name: str, line: Mapping[str, Any]) -> list[str]:
    """Return one line of the table."""
    us, shares = line["us"], line["shares"]
    usual, best, alone, other = (
        f"{us[who]:.2f} ({shares[who]:.0%})" for who in ("usual", "best", "alone", "best alone")
    )
    return [name, usual, best, f"{us['best'] / us['usual']:.3f}", alone, other, line["best"]]


def run(names: Sequence[str], rounds: int, shown: int) -> dict[str, Any]:
    """Build all kernels at once, then measure each size and print it with its best tiles."""
    torch.empty(1, device="cuda")  # begins the context
    lines = [Line.of(name) for name in names]
    major, minor = torch.cuda.get_device_capability()
    config = Config.make(options={"receipt": False})
    sources = {source.name: source for line in lines for source in line.sources}
    archives = Pipeline(config).build([*sources.values()], arch=10 * major + minor, cache=KernelCache.open(config))
    rate, found, failed = copy_rate("cuda"), dict[str, Any](), dict[str, str]()
    print(f"{torch.cuda.get_device_name()}: copying moves {rate / 1e12:.2f} TB/s; {len(sources)} kernels", flush=True)
    for line in lines:
        try:
            found[line.name] = measure(line, archives, rounds, rate)
            print("  ".join(cells(line.name, found[line.name])), flush=True)
            for tile, us in sorted(found[line.name]["tiles"].items(), key=lambda pair: pair[1])[:shown]:
                print(f"    {us:8.2f} us  {tile}", flush=True)
            print(f"    alone: {found[line.name]['tiles alone']}", flush=True)
        except Exception as error:  # one line's failure must not hide the others' numbers
            failed[line.name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            print(line.name, failed[line.name], flush=True)
        torch.cuda.empty_cache()
    return {"benchmark": "gpu_one_row", "complete": not failed, "copy_bytes_per_second": rate, "lines": found,
            "errors": failed, "device": torch.cuda.get_device_name(),
            "environment": {**environment(torch.get_num_threads()), "cuda": torch.version.cuda}}  # fmt: skip


def main() -> int:
    """Run the sizes that the command line asks for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SIZES), help=f"sizes, of {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shown", type=int, default=8, help="tiles to show of each size")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    arguments = parser.parse_args()
    result = run(arguments.only.split(","), arguments.rounds, arguments.shown)
    print(table(HEADER, [cells(name, line) for name, line in result["lines"].items()]))
    if result["lines"]:
        ratios = [line["us"]["best"] / line["us"]["usual"] for line in result["lines"].values()]
        print(f"geometric mean of best over usual: {geomean(ratios):.3f}")
    device = result["device"].replace(" ", "-").lower()
    return finish("gpu_one_row", device, result, keep=arguments.save, as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
