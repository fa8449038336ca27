"""Estimate a training step on machines that are not available: `python -m dcompile.simulate --help`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dcompile.errors import OptionError
from dcompile.machine_model import FABRICS
from dcompile.settings import suggestion
from dcompile.simulate.check import check
from dcompile.simulate.estimate import Setup, estimate, extrapolate_layers
from dcompile.simulate.models import SHAPES, configuration, with_layers
from dcompile.simulate.trace import ParallelLayout, TracedStep, trace

GIB = 1 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Trace, estimate and print."""
    options = _parser().parse_args(argv)
    try:
        if options.check:
            result: Any = check(_measured(Path(options.check)))
            sys.stdout.write(json.dumps(result, indent=1) + "\n" if options.json else result["text"] + "\n")
            return 0
        result = simulate(options)
    except (OptionError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(result, indent=1) + "\n" if options.json else "\n".join(page(result)) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dcompile.simulate", description=__doc__)
    parser.add_argument("--config", default="llama-7b", help=f"a name ({', '.join(SHAPES)}), or a file")
    parser.add_argument("--world-size", default="8,64,512,1024", help="ranks, comma-separated: a row each")
    parser.add_argument("--kind", choices=("ddp", "fsdp", "plain"), default="fsdp", help="how parameters are spread")
    parser.add_argument("--shard", type=int, help="ranks that share one copy of the parameters; default: all")
    parser.add_argument("--batch", type=int, default=1, help="sequences of one rank")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--dtype", default="bfloat16", help="of what is computed and gathered")
    parser.add_argument("--state-dtype", default="float32", help="of parameters and optimizer as they are kept")
    parser.add_argument("--reduce-dtype", default="float32", help="of gradients while they are reduced (fsdp)")
    parser.add_argument("--no-reshard", action="store_true", help="keep parameters gathered from forward to backward")
    parser.add_argument("--layers", type=int, default=4, help="layers to trace; deeper models follow from the last two")
    parser.add_argument("--fabric", default="h100-ib400,h100-eth100", help=f"of {', '.join(FABRICS)}")
    parser.add_argument("--overlap-mb", type=int, default=-1, help="as the option overlap_mb")
    parser.add_argument("--check", metavar="FILE", help="compare with times that benchmarks/gpu_ddp_fsdp.py measured")
    parser.add_argument("--json", action="store_true")
    return parser


def _measured(path: Path) -> Mapping[str, Any]:
    """Read a benchmark's results. Raises OptionError."""
    wanted = "a file that `python -m benchmarks.gpu_ddp_fsdp` writes with --out or --save"
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise OptionError(f"dcompile: --check {path}: this is no JSON ({error}); it takes {wanted}") from error
    if not isinstance(found, Mapping) or not {"lines", "ranks", "device"} <= found.keys():
        raise OptionError(f"dcompile: --check {path}: this is not what it takes, {wanted}")
    return found


def simulate(options: argparse.Namespace) -> dict[str, Any]:
    """Compute all rows of the table. Raises OptionError."""
    config = configuration(options.config, options.length)
    layers, worlds = config.num_hidden_layers, [int(n) for n in options.world_size.split(",")]
    fabrics = _fabrics(options.fabric.split(","))
    depths: tuple[int, ...] = (layers,) if layers <= options.layers else (options.layers - 1, options.layers)
    if options.layers < 2:
        raise OptionError("dcompile: --layers must be 2 or more: what a layer adds follows from two depths")
    began, rows = time.perf_counter(), []
    traced: dict[int, list[TracedStep]] = {}
    for world in worlds:
        layout = _layout(options, world)
        if layout.shard not in traced:
            known = {"batch": options.batch, "length": options.length, "dtype": options.dtype}
            traced[layout.shard] = [trace(with_layers(config, depth), layout, **known) for depth in depths]
        for fabric in fabrics:
            early = None if options.overlap_mb < 0 else options.overlap_mb << 20
            setup = Setup(FABRICS[fabric], layout, options.state_dtype, early)
            found = [estimate(one, setup) for one in traced[layout.shard]]
            whole = (
                found[0] if len(found) == 1 else extrapolate_layers(found[0], found[1], (depths[0], depths[1]), layers)
            )
            tokens = options.batch * options.length * world / whole.step
            rows.append({"world": world, "shard": layout.shard, "fabric": fabric, "tokens_s": tokens, **asdict(whole)})
    return {
        "config": options.config,
        "kind": options.kind,
        "layers": layers,
        "traced_layers": list(depths),
        "batch": options.batch,
        "length": options.length,
        "seconds": time.perf_counter() - began,
        "rows": rows,
    }


def _layout(options: argparse.Namespace, world: int) -> ParallelLayout:
    shard = min(options.shard or world, world) if options.kind == "fsdp" else 1
    if world % shard:
        raise OptionError(f"dcompile: {world} ranks are no whole number of groups of {shard}")
    return ParallelLayout(options.kind, world, shard, options.reduce_dtype, not options.no_reshard)


def _fabrics(names: Iterable[str]) -> list[str]:
    chosen = list(names)
    for name in chosen:
        if name not in FABRICS:
            raise OptionError(f"dcompile: unknown fabric {name!r}{suggestion(name, FABRICS, 'fabrics')}")
    return chosen


HEAD = (
    "ranks", "shard", "fabric", "params", "grads", "adam", "saved", "gathered", "peak GiB", "coll.", "GiB",
    "compute ms", "comm ms", "exposed", "tail", "step ms", "tokens/s",
)  # fmt: skip


def page(result: dict[str, Any]) -> Iterable[str]:
    """Lines of the table, and of how it was made."""
    traced = result["traced_layers"]
    tokens = f"{result['batch']} x {result['length']} tokens a rank"
    yield f"{result['config']}, {result['kind']}: {result['layers']} layers, {tokens}"
    rows = [HEAD, *(_cells(row) for row in result["rows"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    yield (
        f"All {result['layers']} layers were traced"
        if len(traced) == 1
        else f"Traced with {traced[0]} and {traced[1]} layers; each further one counts as the difference"
    ) + f", on CPU without data, in {result['seconds']:.0f} s; docs/internals/overlap.md says what is left out."


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    gib = (f"{row[name] / GIB:.2f}" for name in ("parameters", "gradients", "optimizer", "saved", "gathered", "peak"))
    times = (f"{row[name] * 1e3:.1f}" for name in ("compute", "communication", "exposed", "tail", "step"))
    counts = (f"{row['collectives']:.0f}", f"{row['exchanged'] / GIB:.1f}")
    return (
        *(str(row["world"]), str(row["shard"]), row["fabric"]),
        *gib,
        *counts,
        *times,
        f"{row['tokens_s']:.3g}",
    )


if __name__ == "__main__":
    raise SystemExit(main())
