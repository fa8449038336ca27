"""Compare the cost model with measured steps, from files that benchmarks/gpu_ddp_fsdp.py writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dcompile.errors import OptionError
from dcompile.machine_model import table_figures
from dcompile.simulate.estimate import Setup, estimate
from dcompile.simulate.models import SHAPES, configuration
from dcompile.simulate.trace import ParallelLayout, trace

BATCHES: Mapping[str, tuple[int, int]] = {"1B": (4, 2048), "160M": (4, 1024), "tiny": (2, 64)}
"""Rows, and tokens per row, of each benchmark's model."""
COMPARED = {"ms": "step", "compute_ms": "compute", "comm_ms": "communication", "exposed_ms": "exposed"}
"""Field of the benchmark -> field of the estimate. Measured compute includes the optimizer.

The step is timed over seconds, at the power limit. The other fields are from three profiled steps, at full clocks.
"""


def check(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Predicted and measured milliseconds of each line and each of dcompile's modes, with the relative error."""
    lines = measured.get("lines")
    if not isinstance(lines, Mapping):
        raise OptionError("dcompile: the file holds no lines of benchmarks/gpu_ddp_fsdp.py")
    rows = []
    for label, peers in lines.items():
        shape, _, kind = label.partition("-")
        ours = {name: found for name, found in peers.items() if name.startswith("dcompile") and "ms" in found}
        if shape not in SHAPES or shape not in BATCHES or not ours:
            continue
        ranks, device = int(measured["ranks"]), str(measured["device"])
        predicted = {way: predict(shape, kind, ranks, device, *way) for way in sorted(set(map(_way, ours)))}
        for name, found in ours.items():
            for field, value in predicted[_way(name)].items():
                measured_as = _measured_as(field, found)
                if measured_as not in found:
                    continue
                actual = found[measured_as]
                error = value / actual - 1 if actual else None
                rows.append(
                    {"line": label, "peer": name, "what": measured_as, "predicted": value, "measured": actual}
                    | {"error": error}
                )
    if not rows:
        raise OptionError("dcompile: the file holds no measured step of dcompile on a known model")
    return {
        "device": measured["device"],
        "ranks": measured["ranks"],
        "rows": rows,
        "text": "\n".join([*map(_line, rows), *_notes(rows)]),
    }


def _measured_as(field: str, found: Mapping[str, Any]) -> str:
    """Field of the benchmark to compare with.

    For steps replayed as CUDA graphs, the measured peak leaves out their pool.
    """
    return "reserved_mib" if field == "peak_mib" and found.get("replays") else field


def _way(name: str) -> tuple[str, bool]:
    """Options from a peer's name: `recompute`, and whether all gathers are collectives."""
    return "memory" if "memory" in name else "registers", "collective" in name


def predict(
    shape: str, kind: str, ranks: int, device: str, recompute: str = "registers", collective: bool = False
) -> dict[str, float]:
    """Predicted milliseconds and peak of memory."""
    rows, length = BATCHES[shape]
    sharded = kind.startswith("fsdp")
    layout = ParallelLayout("fsdp" if sharded else "ddp", ranks, ranks if sharded else 1)
    traced = trace(configuration(shape, length), layout, batch=rows, length=length, recompute=recompute)
    figures = table_figures(device)
    if collective:
        figures = replace(figures, copy_gbs=0.0)
    lasting, fresh = (estimate(traced, Setup(f, layout)) for f in (figures, replace(figures, sustained=1.0)))
    times = {field: 1e3 * getattr(lasting if field == "ms" else fresh, name) for field, name in COMPARED.items()}
    return times | {"compute_ms": times["compute_ms"] + 1e3 * fresh.update, "peak_mib": fresh.peak / (1 << 20)}


def _notes(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Notes on the lines."""
    if any(row["what"] == "reserved_mib" for row in rows):
        yield (
            "reserved_mib: what the allocator had reserved, beside the predicted peak of what is in use; the measured "
            "peak of steps that are replayed as CUDA graphs leaves their memory out"
        )


def _line(row: Mapping[str, Any]) -> str:
    error = "" if row["error"] is None else f"{row['error']:+.0%}"
    head = f"{row['line']:12} {row['peer']:26} {row['what']:12}"
    return f"{head} predicted {row['predicted']:9.2f} measured {row['measured']:9.2f} {error}"
