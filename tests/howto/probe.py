"""Run in a process of its own beside a changed copy of dcompile: what the changes came to, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import dcompile
from dcompile.codegen.emit.select_target import TARGETS
from dcompile.codegen.lower.lower import lower
from dcompile.ir.ops import OPS


def compiled(folder: str) -> dict[str, Any]:
    """A function of the new ops, compiled with the new pass in the list."""
    x = torch.linspace(0.1, 9, 64)

    def function(x: torch.Tensor) -> torch.Tensor:
        waves = torch.special.bessel_j0(x) + torch.special.spherical_bessel_j0(x)
        return waves + torch.special.chebyshev_polynomial_t(x / 9, 3) + torch.cdist(x.view(8, 8), x.view(8, 8)).view(64)

    call = dcompile.compile(function, options={"dump": folder, "receipt": False, "cache_dir": f"{folder}/cache"})
    with torch.no_grad():
        difference = (call(x) - function(x)).abs().max().item()
    receipt = dcompile.receipt(call)
    return {
        "difference": difference,
        "kernels": receipt.kernels,
        "fallbacks": dict(receipt.fallbacks),
        "passes": sorted(path.stem.partition("_")[2] for path in Path(folder).rglob("*.txt")),
        "spelled": [target.spelling.keys() == OPS.keys() for target in TARGETS.values()],
    }


def lowered() -> list[str]:
    """Steps of a graph with a broadcast."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    group: Any = dist.group.WORLD
    graph = make_fx(lambda x: collectives.wait_tensor(collectives.broadcast(x * 2, 0, group)), tracing_mode="fake")
    steps = lower(graph(torch.ones(3)), "graph").program.steps
    return [type(step).__name__ for step in steps]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compiled(sys.argv[1]) | {"steps": lowered()}))
