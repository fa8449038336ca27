"""Benchmark of products of few rows and a matrix: kernels of dcompile's with several tiles, and cuBLAS.

    python -m benchmarks.gpu_few_rows [--rows 2,8] [--only mm_4096x14336,gated_4096x14336] [--json] [--save]

Sizes are those of an 8B Llama in bfloat16. A call reads one of several copies of its matrices, which no cache holds
together. `mm` is a product alone, `gated` two products and SwiGLU, `residual` a product and an addition; the library's
line is cuBLAS and, where something follows, a separate kernel. Shares are the bytes of the matrices over the time,
relative to what `copy_` reads and writes. `usual` is the tile that default mode takes, `best` the fastest tried.

The last lines say what to change: sizes where the library is faster than the usual tile (`contraction.MAX_ROWS`), and
tiles that are faster than the usual one by more than noise (`contraction.choose_tile`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment, finish, geomean, gpu_time, table
from dcompile.compiler.autotune import (
    contest_calls,
    launch_calls,
    library_call,
    make_copies,
    medians,
    skinny_candidates,
)
from dcompile.compiler.driver import Pipeline
from dcompile.config import Config
from dcompile.ir.nodes import Loop, Program, Tile
from dcompile.ir.parse import parse
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.program import cuda_launch

ROWS = (2, 4, 8, 16)
SIZES = {
    "mm_4096x4096": ("mm", 4096, 4096),
    "mm_4096x14336": ("mm", 4096, 14336),
    "mm_14336x4096": ("mm", 14336, 4096),
    "mm_4096x6144": ("mm", 4096, 6144),
    "mm_4096x128256": ("mm", 4096, 128256),
    "gated_4096x14336": ("gated", 4096, 14336),
    "residual_14336x4096": ("residual", 14336, 4096),
}
"""Name -> kind, depth and columns."""
LINES = {
    "mm": ["y[i0, i1] = m0"],
    "gated": [
        "g = cast(m0, float32)",
        "s = cast(div(g, add(1.0, exp(neg(g)))), bfloat16)",
        "y[i0, i1] = cast(mul(cast(s, float32), cast(m1, float32)), bfloat16)",
    ],
    "residual": ["y[i0, i1] = cast(add(cast(m0, float32), cast(r[i0, i1], float32)), bfloat16)"],
}
"""What follows the products m0 and m1."""
NOISE = 0.02
TOLERANCE = 1e-2
"""Limit of a result's distance from that in float32, of its norm."""


def program(kind: str, rows: int, depth: int, columns: int) -> Program:
    """Return the program of one line, as it is after fusion."""
    products = 2 if kind == "gated" else 1
    matrices = [f"w{n}" for n in range(products)]
    more = ["r"] if kind == "residual" else []
    lines = [f"program p({', '.join(['x', *matrices, *more])})", f"x: bfloat16[{rows}, {depth}] on cuda"]
    lines += [f"{name}: bfloat16[{columns}, {depth}] on cuda" for name in matrices]
    lines += [f"{name}: bfloat16[{rows}, {columns}] on cuda" for name in (*more, "y")]
    lines.append(f"loop y [{rows}, {columns}] x [{depth}]")
    for n, name in enumerate(matrices):
        factors = f"cast(x[i0, j0], float32), cast({name}[i1, j0], float32)"
        lines.append(f"m{n} = cast(row_sum(mul({factors})), bfloat16)")
    return parse("\n".join([*lines, *LINES[kind], "return (y)"]))


def expected(kind: str, memory: Mapping[str, torch.Tensor], rows: int, depth: int, columns: int) -> torch.Tensor:
    """Return the result in float32 [rows, columns], with products rounded as eager rounds them."""
    x = memory["x"].view(rows, depth)
    products = [x @ memory[name].view(columns, depth).t() for name in ("w0", "w1") if name in memory]
    if kind == "gated":
        return torch.nn.functional.silu(products[0]).float() * products[1].float()
    return products[0].float() + (memory["r"].view(rows, columns).float() if kind == "residual" else 0)


def copy_rate() -> float:
    """Return the bytes a second that `copy_` of 2 GiB reads and writes."""
    source = torch.empty(1 << 30, device="cuda", dtype=torch.bfloat16).normal_()
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / (gpu_time(lambda: target.copy_(source), 20) * 1e-3)


class Line:
    """One size: its candidates, and what they take."""

    def __init__(self, name: str, rows: int) -> None:
        self.name, self.rows = name, rows
        self.kind, self.depth, self.columns = SIZES[name]
        made = program(self.kind, rows, self.depth, self.columns)
        (loop,) = made.steps
        assert isinstance(loop, Loop), "a program of one loop"
        self.candidates = skinny_candidates(loop, made.table)
        self.nbytes = (2 if self.kind == "gated" else 1) * self.depth * self.columns * 2

    def measure(self, archives: Mapping[str, Path], rounds: int, rate: float) -> dict[str, Any]:
        """Compare each candidate with eager's result, then time all. Raises ArithmeticError."""
        contest, launcher = self.candidates.contest(archives), archives[cuda_launch.LAUNCHER]
        device = torch.device("cuda", torch.cuda.current_device())
        copies = make_copies(contest, device)
        want = expected(self.kind, copies[0], self.rows, self.depth, self.columns)
        for tile, launches in contest.rivals.items():
            if (call := launch_calls(launches, copies[0], launcher, device.index)) is not None:
                self._check(str(tile), call, copies[0], want)
        self._check("library", library_call(contest, copies[0], launcher, device.index), copies[0], want)
        times = medians(contest_calls(contest, copies, launcher, device.index), rounds, 0.02)
        usual = self.candidates.usual
        own = {tile: ms for tile, ms in times.items() if tile is not None}
        best = min(own, key=lambda tile: own[tile])
        shares = {name: self.nbytes / (ms * 1e-3) / rate for name, ms in
                  (("library", times[None]), ("usual", own[usual]), ("best", own[best]))}  # fmt: skip
        return {"us": {"library": times[None] * 1e3, "usual": own[usual] * 1e3, "best": own[best] * 1e3},
                "shares": shares, "usual": _text(usual), "best": _text(best),
                "tiles": {_text(tile): ms * 1e3 for tile, ms in own.items()}}  # fmt: skip

    def _check(self, what: str, call: Any, memory: Mapping[str, torch.Tensor], want: torch.Tensor) -> None:
        memory["y"].fill_(torch.nan)
        call()
        off = ((memory["y"].view_as(want).float() - want).norm() / want.norm()).item()
        if not off <= TOLERANCE:
            raise ArithmeticError(f"{what} differs by {off:.1e} of the result's norm")


def _text(tile: Tile) -> str:
    return f"{tile.rows}x{tile.columns}x{tile.depth} w{tile.warps} s{tile.stages}"


def run(names: Sequence[str], rows: Sequence[int], rounds: int) -> dict[str, Any]:
    """Build all kernels at once, then measure each line and print it."""
    torch.empty(1, device="cuda")  # begins the context
    lines = [Line(name, count) for name in names for count in rows]
    major, minor = torch.cuda.get_device_capability()
    config = Config.make(options={"receipt": False})
    sources = [source for line in lines for source in line.candidates.sources]
    archives = Pipeline(config).build(sources, arch=10 * major + minor, cache=KernelCache.open(config))
    rate, found, failed = copy_rate(), dict[str, Any](), dict[str, str]()
    print(f"{torch.cuda.get_device_name()}: copying moves {rate / 1e12:.2f} TB/s; {len(sources)} kernels", flush=True)
    for line in lines:
        name = f"{line.name} x{line.rows}"
        try:
            found[name] = line.measure(archives, rounds, rate)
            print("  ".join(cells(name, found[name])), flush=True)
        except Exception as error:  # one line's failure must not hide the others' numbers
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            print(name, failed[name], flush=True)
        torch.cuda.empty_cache()
    return {"benchmark": "gpu_few_rows", "complete": not failed, "copy_bytes_per_second": rate, "lines": found,
            "errors": failed, "device": torch.cuda.get_device_name(),
            "environment": {**environment(torch.get_num_threads()), "cuda": torch.version.cuda}}  # fmt: skip


HEADER = ["us (share of copying)", "library", "usual", "best", "usual/library", "best/usual", "best tile"]


def cells(name: str, line: Mapping[str, Any]) -> list[str]:
    """Return one line of the table."""
    us, shares = line["us"], line["shares"]
    times = [f"{us[who]:.1f} ({shares[who]:.0%})" for who in ("library", "usual", "best")]
    ratios = f"{us['usual'] / us['library']:.2f}", f"{us['best'] / us['usual']:.2f}"
    return [name, *times, *ratios, "as usual" if line["best"] == line["usual"] else line["best"]]


def conclusions(lines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what the table says of default mode."""
    slower = [name for name, line in lines.items() if line["us"]["usual"] > (1 + NOISE) * line["us"]["library"]]
    found = [f"the library is faster than the usual tile: {', '.join(slower) or 'nowhere'}"]
    gains = {name: line["us"]["best"] / line["us"]["usual"] for name, line in lines.items()}
    for name, gain in gains.items():
        if gain < 1 - NOISE:
            found.append(
                f"another tile is faster: {name}: {lines[name]['best']} for {lines[name]['usual']}, {gain:.2f}"
            )
    ratios = [line["us"]["usual"] / line["us"]["library"] for line in lines.values()]
    best = [line["us"]["best"] / line["us"]["library"] for line in lines.values()]
    return [*found, f"geometric means over the library: usual {geomean(ratios):.2f}, best {geomean(best):.2f}"]


def main() -> int:
    """Run the lines that the command line asks for, and print table and conclusions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"sizes, of {', '.join(SIZES)}")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(SIZES)
    result = run(names, [int(count) for count in arguments.rows.split(",")], arguments.rounds)
    print(table(HEADER, [cells(name, line) for name, line in result["lines"].items()]))
    if result["lines"]:
        print("\n".join(conclusions(result["lines"])))
    device = result["device"].replace(" ", "-").lower()
    return finish("gpu_few_rows", device, result, keep=arguments.save, as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
