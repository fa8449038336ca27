"""Keep shards in the compute dtype where parameters are stored in another one (mixed precision).

Converting a shard for each gather costs a kernel per parameter. It also uses new memory each time, which other ranks
cannot map. So a model has one buffer for converted shards, and each program writes the ones that it gathers with one or
two kernels.

A backward converts again, as FSDP2 does, because nothing proves that parameters are unchanged since the forward. Fused
optimizers and `p.data.mul_()` do not bump a version counter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch

from dcompile import compat
from dcompile.collectives.contract import ShardUnit

MAX_MEMORY_SHARE = 1 / 16
"""Part of a GPU's memory that the buffer may take unless `shard_copies` asks for it: 5 GB of 80."""
ALIGN_BYTES = 256
"""Alignment of each shard in bytes. NCCL and copy engines are slower at addresses that are no multiples of 16."""


class ConvertedShards:
    """Converted shards of one model.

    `way` is the option `shard_copies`. `saves_memory`: the reason why "auto" keeps none, or empty.
    """

    def __init__(
        self, units: Mapping[int, ShardUnit], way: Literal["auto", "kept", "gather"], saves_memory: str
    ) -> None:
        self._units, self._way, self._saves_memory = units, way, saves_memory
        self._memory: dict[int, torch.Tensor] | None = None
        self.reason = ""
        """Why there is no buffer although shards need a conversion; empty otherwise."""

    def save_memory(self, reason: str) -> None:
        """Make "auto" keep no converted shards, unless the buffer exists already. `reason` is shown to the user."""
        self._saves_memory = self._saves_memory or reason

    def memory(self, number: int) -> torch.Tensor | None:
        """Buffer of a unit's converted shard. None if the shard is sent as stored, or is converted for each gather.

        The first call allocates the buffer, so it must not come while a CUDA graph is recorded.
        """
        if self._memory is None:
            self._memory = self._allocate()
        return self._memory.get(number)

    def sent(self, number: int) -> torch.Tensor:
        """This rank's shard as a gather sends it: the converted copy if there is one, as `convert` wrote it last."""
        kept = self.memory(number)
        return self._units[number].data() if kept is None else kept

    def convert(self, numbers: Collection[int]) -> None:
        """Write the converted shards of these units, with one kernel for each pair of dtypes.

        Pairs of dtypes are copied separately: on GPUs, some versions of torch copy a list as if all had the first one's
        dtype.
        """
        if self._memory is None:
            self._memory = self._allocate()
        kinds: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for number in numbers:
            kept = self._memory.get(number)
            if kept is not None and kept.numel():
                stored = self._units[number].stored()
                targets, sources = kinds.setdefault((kept.device, kept.dtype, stored.dtype), ([], []))
                targets.append(kept)
                sources.append(stored)
        with torch.no_grad():
            for targets, sources in kinds.values():
                compat.tensors.copy_all(targets, sources)

    def _allocate(self) -> dict[int, torch.Tensor]:
        """Allocate one storage for each device and dtype, with a slice for each converted unit."""
        with torch.inference_mode(False), compat.tensors.real_tensors(), torch.no_grad():
            stored = {number: unit.stored() for number, unit in self._units.items() if not unit.offloaded}
            converted = {n: shard for n, shard in stored.items() if shard.dtype != self._units[n].dtype}
            self.reason = self._objection(converted)
            found: dict[int, torch.Tensor] = {}
            if self.reason:
                return found
            kinds = dict.fromkeys((shard.device, self._units[number].dtype) for number, shard in converted.items())
            for device, dtype in kinds:
                here = {n: s for n, s in converted.items() if (s.device, self._units[n].dtype) == (device, dtype)}
                found |= _laid_out(here, device, dtype)
            return found

    def _objection(self, converted: Mapping[int, torch.Tensor]) -> str:
        if not converted or self._way == "kept":
            return ""
        if self._way == "gather":
            return "option shard_copies='gather'"
        nbytes = sum(shard.numel() * self._units[number].dtype.itemsize for number, shard in converted.items())
        device = next(iter(converted.values())).device
        if self._saves_memory:
            return f"to save {nbytes >> 20} MiB, since {self._saves_memory} (option shard_copies)"
        if device.type == "cuda" and nbytes > torch.cuda.get_device_properties(device).total_memory * MAX_MEMORY_SHARE:
            return f"{nbytes >> 20} MiB would be more than a sixteenth of the GPU's memory (option shard_copies)"
        return ""


def _laid_out(shards: Mapping[int, torch.Tensor], device: torch.device, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    unit = ALIGN_BYTES // dtype.itemsize
    places, total = {}, 0
    for number, shard in shards.items():
        places[number] = total
        total += -(-shard.numel() // unit) * unit
    whole = torch.empty(total, dtype=dtype, device=device)
    return {number: whole[places[number] : places[number] + shard.numel()] for number, shard in shards.items()}
