"""Measure this machine for the cost model, once: `torchrun --nproc-per-node N -m dcompile.calibrate`.

Rank 0 stores the figures in the cache directory; option `figures="measured"` uses them.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from dcompile.config import Config
from dcompile.machine_model import to_record
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.measure.calibration import device_name, keep, measure

RELEASE_SECONDS = 0.2
"""Seconds to wait before the group ends. Gloo's threads acquire the interpreter's lock to release tensors of the last
collective. A group that ends meanwhile waits for them forever.
"""


def main() -> int:
    """Measure, store and print the figures."""
    local, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if gpu else "gloo")
    try:
        figures = measure(device, dist.group.WORLD if ranks > 1 else None)
        if ranks == 1 or dist.get_rank() == 0:
            path = keep(figures, device_name(device), KernelCache.open(Config.make()).directory)
            lines = [f"  {name}: {value}" for name, value in to_record(figures).items()]
            sys.stdout.write("\n".join([f"{path}", *lines, ""]))
    finally:
        if ranks > 1:
            time.sleep(RELEASE_SECONDS)
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
