"""Base class of peers in benchmarks of several ranks: time, memory and kernels of steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import gpu_time, middle_and_spread, rotated
from benchmarks.ranks import Job


class Peer:
    """A peer, whose `step` a benchmark times. Subclasses make model and optimizer, then call `warm_up`."""

    def __init__(self, name: str, job: Job) -> None:
        self.name, self.job, self.gpu = name, job, job.device.type == "cuda"
        self._before = held_memory(job.device)
        self.losses: list[float] = []
        self.warm_up_s = 0.0

    def step(self) -> Any:
        """Run one step; return the loss."""
        raise NotImplementedError

    def rate(self, ms: float, device: str) -> dict[str, float]:
        """Return the tokens a second of one GPU, and the MFU, from a step's milliseconds."""
        raise NotImplementedError

    def warm_up(self, steps: int) -> None:
        """Run the first steps, which compile."""
        import torch

        for _ in range(steps):
            self.losses.append(float(self.step()))
        if self.gpu:
            torch.cuda.synchronize()

    def time(self, steps: int) -> float:
        """Return the milliseconds a step, averaged over `steps`, on the slowest rank."""
        self.job.barrier()
        if self.gpu:
            return max(self.job.all(gpu_time(self.step, steps)))
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        return max(self.job.all((time.perf_counter() - began) * 1e3 / steps))

    def peak_memory(self) -> dict[str, float]:
        """Return the peak memory of a step: allocated bytes, and reserved bytes with the pools of CUDA graphs."""
        import torch

        held_memory(self.job.device)
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        own = [peak - before for peak, before in zip(peaks, self._before, strict=True)]
        worst = [max(values) / 2**20 for values in zip(*self.job.all(own), strict=True)]
        return {"peak_mib": worst[0], "reserved_mib": worst[1]}

    def kernel_events(self, steps: int) -> list[tuple[str, float, float]]:
        """Return (name, begin, end) in milliseconds of each kernel of some steps."""
        import torch

        self.job.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(steps):
                self.step()
            torch.cuda.synchronize()
        return [
            (event.name, event.time_range.start / 1e3, event.time_range.end / 1e3)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        ]


def held_memory(device: Any) -> tuple[int, int]:
    """Return (allocated, reserved) bytes on a GPU after its cache is emptied; 0 on a CPU."""
    import torch

    if device.type != "cuda":
        return 0, 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def time_in_turn(
    peers: Sequence[Peer],
    rounds: int,
    steps: int,
    device: str,
    found: dict[str, Any],
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Time all peers round after round; each round starts with another peer, and `keep` gets `found` after it."""
    samples: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for turn in range(rounds):
        for peer in rotated(peers, turn):
            samples[peer.name].append(peer.time(steps))
        for peer in peers:
            taken = samples[peer.name]
            found[peer.name] |= {**middle_and_spread(taken), "rounds": len(taken)}
            found[peer.name] |= peer.rate(found[peer.name]["ms"], device)
        keep(found)


def first_line(error: BaseException) -> str:
    """Return the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def cell(value: float | None, digits: int) -> str:
    """Format a number for a table; None becomes an empty cell."""
    return "" if value is None else f"{value:.{digits}f}"
