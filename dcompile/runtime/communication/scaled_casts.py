"""Shards that are sent as 8-bit floats: their scales, and the casts into the memory that gathers send.

A scale belongs to a whole parameter, so it follows from the largest magnitude over all ranks. One all-reduce a call of
the model finds those of all parameters, unless the user's code has computed them, as torchao's
`precompute_float8_dynamic_scale_for_fsdp` does after the optimizer's step.

A backward casts with the scale of the last call: the shards are those of its forward, and so is the scale.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dcompile import compat
from dcompile.collectives.contract import ShardGroup, ShardUnit
from dcompile.runtime.communication.work import PendingCollective, label_of_model
from dcompile.toolchain import triton_version

AT_A_TIME = 1 << 24
"""Elements that ATen casts at a time, which bounds its float32 memory to 64 MiB for each of its steps."""
CASTS_SINCE = (8, 9)
"""Compute capability of the first GPUs with instructions that cast to 8-bit floats."""


def sent_dtype(unit: ShardUnit) -> Any:
    """Dtype in which a unit's shard is sent."""
    return unit.dtype if unit.cast is None else unit.cast.dtype


def update_scales(units: Iterable[ShardUnit], groups: Mapping[str, ShardGroup], numbers: dict[Any, int]) -> int:
    """Write this call's scale of each unit that is cast. Return the number of all-reduces that this took.

    There is one for each process group and dtype whose units lack a scale of the user's. `numbers`: see
    `label_of_model`. Every rank calls this at the same point of a step.
    """
    targets, scales = list[torch.Tensor](), list[torch.Tensor]()
    lacking: dict[tuple[Any, Any], list[ShardUnit]] = {}
    with torch.no_grad():
        for unit in units:
            if unit.cast is None:
                continue
            given = unit.cast.given()
            if given is None:
                lacking.setdefault((groups[unit.group].gather_group(), unit.cast.dtype), []).append(unit)
            else:
                # `.data` has its own version counter: backwards that are still to come have saved the scale
                targets.append(unit.cast.scale.data)
                scales.append(given)
        for (group, dtype), members in lacking.items():
            targets += [unit.cast.scale.data for unit in members if unit.cast is not None]
            scales += _scales_of_all_ranks(members, group, dtype, numbers).unbind()
        if targets:
            compat.tensors.copy_all(targets, scales)
    return len(lacking)


def _scales_of_all_ranks(units: Sequence[ShardUnit], group: Any, dtype: Any, numbers: dict[Any, int]) -> torch.Tensor:
    cast = units[0].cast
    assert cast is not None, "only units that are cast have scales"
    own = compat.tensors.largest_magnitudes([unit.stored() for unit in units])
    amax = own.to(cast.scale.device, torch.float32)

    def start(limit_s: float | None) -> Any:
        return compat.groups.start_all_reduce(group, [amax], torch.distributed.ReduceOp.MAX, limit_s)

    label = label_of_model(f"all-reduce of the scales of {len(units)} parameters", group, numbers)
    PendingCollective(group, amax.device, label, start).wait()
    scales: torch.Tensor = cast.scales_of(amax, dtype)
    return scales


def cast_shard(unit: ShardUnit, target: torch.Tensor | None = None) -> torch.Tensor:
    """Write a unit's shard as it is sent to `target`, or to new memory on the device, and return that."""
    assert unit.cast is not None, "the unit is sent in the dtype of the computation"
    scale = unit.cast.scale
    source = unit.stored().to(scale.device, non_blocking=True)
    if target is None:
        target = torch.empty(source.shape, dtype=unit.cast.dtype, device=scale.device)
    with torch.no_grad():
        if _has_kernel(target.device):
            from dcompile.runtime.communication import scaled_cast_kernel

            scaled_cast_kernel.cast(target, source, scale)
        else:
            parts = (torch.split(tensor, AT_A_TIME) for tensor in (target, source))  # type: ignore[no-untyped-call, unused-ignore]
            for to, of in zip(*parts, strict=True):
                to.copy_(compat.tensors.scaled_cast(of, scale, target.dtype))
    return target


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    """Whether one kernel casts a shard. ATen takes four, and float32 memory between them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CASTS_SINCE and bool(triton_version())
