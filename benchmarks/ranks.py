"""Jobs of several ranks for benchmarks: start processes on one machine, watch them under a deadline, and end them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

GRACE_S = 20.0
"""Time for the other ranks to report their errors after one has failed."""


def run_job(
    module: str, arguments: Sequence[str], ranks: int, deadline_s: float, settings: Mapping[str, str] | None = None
) -> str:
    """Run `python -m module arguments` on several ranks; return errors, or an empty string.

    All ranks share empty compiler caches, which are removed after the job. Rank 0 writes to this process's output. The
    ends of all ranks' error outputs are returned.
    """
    with tempfile.TemporaryDirectory(prefix="dcompile-bench-") as folder:
        environment = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "DCOMPILE_CACHE_DIR": f"{folder}/dcompile",
            **(settings or {}),
        }
        command = [sys.executable, "-m", module, *arguments]
        with contextlib.ExitStack() as files:
            processes = []
            for rank in range(ranks):
                errors = files.enter_context(open(f"{folder}/errors{rank}", "w"))
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                out = None if rank == 0 else errors
                processes.append(subprocess.Popen(command, env=own, stdout=out, stderr=errors))
            failed = _watch(processes, deadline_s)
        tails = [f"rank {rank}: {_tail(Path(folder) / f'errors{rank}')}" for rank in range(ranks)]
    return "\n".join([failed, *tails]) if failed else ""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _watch(processes: Sequence[subprocess.Popen[bytes]], deadline_s: float) -> str:
    """Wait for all processes; after a failure or the deadline, end the remaining ones."""
    end, failed = time.monotonic() + deadline_s, ""
    while any(process.poll() is None for process in processes):
        bad = [f"rank {rank} ended with {p.returncode}" for rank, p in enumerate(processes) if p.returncode]
        if bad and not failed:
            failed, end = "; ".join(bad), min(end, time.monotonic() + GRACE_S)
        if time.monotonic() > end:
            failed = failed or f"still running after {deadline_s:.0f} s"
            break
        time.sleep(0.1)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    bad = [f"rank {rank} ended with {p.returncode}" for rank, p in enumerate(processes) if p.returncode]
    return failed or "; ".join(bad)


def _tail(path: Path, lines: int = 12) -> str:
    return "\n".join(path.read_text(errors="replace").strip().splitlines()[-lines:])


@dataclass(frozen=True)
class Job:
    """This process as a rank of a job."""

    rank: int
    size: int
    device: Any
    control: Any
    """A Gloo group for messages between ranks outside of the measured work."""

    @property
    def main(self) -> bool:
        return self.rank == 0

    def all(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.control)
        return found

    def barrier(self) -> None:
        """Wait until this rank's GPU is idle, and all ranks have come here."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.all(None)


def is_rank() -> bool:
    """Has a launcher started this process as a rank?"""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def joined(device: str, timeout_s: float = 300.0) -> Iterator[tuple[Job, dict[str, float]]]:
    """Join a job as a rank. At the end, the dict gets `teardown_s`, the seconds to end the process groups."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # not every machine has NVLink multicast
    import torch
    import torch.distributed as dist

    local, limit = int(os.environ.get("LOCAL_RANK", "0")), timedelta(seconds=timeout_s)
    if device == "cuda":
        torch.cuda.set_device(local)
        place = torch.device("cuda", local)
        dist.init_process_group("nccl", timeout=limit)
        control = dist.new_group(backend="gloo", timeout=limit)
    else:
        place = torch.device("cpu")
        dist.init_process_group("gloo", timeout=limit)
        control = dist.new_group(timeout=limit)
    job, after = Job(dist.get_rank(), dist.get_world_size(), place, control), dict[str, float]()
    yield job, after
    job.barrier()
    began = time.perf_counter()
    dist.destroy_process_group()
    after["teardown_s"] = time.perf_counter() - began
