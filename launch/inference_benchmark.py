"""Benchmark of generation: tokens a second, and the fraction of the memory bandwidth that it uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import World
from decoding import Decoder, generate
from sampling import Sampling
from torch import nn
from torch.distributed.tensor import DTensor

COPY_BYTES = {"cuda": 2**29, "cpu": 2**26}
"""Bytes of a copy that is large compared to caches: 512 MB on a GPU, 64 MB on a CPU."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians of one benchmark. Bytes and rates are those of one rank; a copy's rate counts reads and writes."""

    prompt_tokens: int
    batch: int
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int
    weight_bytes: int
    cache_bytes: int
    copy_bytes_per_second: float

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        moved = self.weight_bytes + self.cache_bytes
        rate = moved / self.decode_seconds
        share = rate / self.copy_bytes_per_second
        return [
            f"prefill: {self.batch} x {self.prompt_tokens} tokens in {self.prefill_seconds * 1e3:.1f} ms, "
            f"{self.batch * self.prompt_tokens / self.prefill_seconds:.0f} tokens/s",
            f"decode: {self.decode_seconds * 1e3:.2f} ms a token (median of {self.decode_steps} steps), "
            f"{self.batch / self.decode_seconds:.1f} tokens/s",
            f"bandwidth: {self.weight_bytes / 1e9:.3g} GB of weights and {self.cache_bytes / 1e9:.3g} GB of cache a "
            f"step, {rate / 1e9:.3g} GB/s: {share:.0%} of the {self.copy_bytes_per_second / 1e9:.3g} GB/s of a copy",
        ]


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters that one decode step reads on this rank; of an embedding table, only some rows."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables -= {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    parameters = {id(parameter): parameter for parameter in model.parameters() if id(parameter) not in tables}
    local = (p.to_local() if isinstance(p, DTensor) else p for p in parameters.values())
    return sum(parameter.nbytes for parameter in local)


def copy_rate(device: torch.device, repeats: int = 10) -> float:
    """Return the bytes a second that a large copy reads and writes here, the best of several."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 1):  # the first one touches the pages
        _wait(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(seconds[1:])


def measure(
    decoder: Decoder, prompts: Sequence[list[int]], count: int, sampling: Sampling, world: World, rounds: int = 3
) -> Speed:
    """Generate `count` tokens `rounds` times after a first time, which compiles."""
    prefills: list[float] = []
    steps: list[float] = []
    for round_ in range(rounds + 1):
        decoder.forget()
        generated = generate(decoder, [list(prompt) for prompt in prompts], count, sampling)
        if round_:
            prefills.append(generated.prefill_seconds)
            steps += generated.seconds
    cache: Any = decoder.cache
    return Speed(
        prompt_tokens=max(len(prompt) for prompt in prompts),
        batch=len(prompts),
        prefill_seconds=statistics.median(prefills),
        decode_seconds=statistics.median(steps),
        decode_steps=len(steps),
        weight_bytes=weight_bytes(decoder.model),
        cache_bytes=cache.nbytes,
        copy_bytes_per_second=copy_rate(world.device),
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
