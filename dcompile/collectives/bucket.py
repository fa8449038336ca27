"""Assign gradients to buckets by DDP's rule, from parameter order alone, so that ranks and recompilations agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from dcompile.collectives.contract import BucketRule, ParamInfo
from dcompile.ir.buffers import ITEMSIZE, Bucket

ALIGN_BYTES = 64
"""Alignment of each gradient, a cache line, as of freshly allocated tensors: kernels are fastest on aligned memory."""


@dataclass
class _OpenBucket:
    """A bucket that is being filled."""

    position: int
    limit: int
    nbytes: int = 0
    members: list[ParamInfo] = field(default_factory=list)


def assign(params: Sequence[ParamInfo], rule: BucketRule) -> list[list[ParamInfo]]:
    """Members of each bucket, in the order in which the buckets are reduced.

    It applies torch's `compute_bucket_assignment_by_size` to the parameters in reverse. A bucket holds one dtype of one
    device, and closes once its size reaches the limit. Buckets are ordered by their first member.
    """
    done: list[_OpenBucket] = []
    filling: dict[tuple[str, str, str], _OpenBucket] = {}
    opened: dict[tuple[str, str, str], int] = {}
    limits = rule.limits
    for position, param in enumerate(sorted(params, key=lambda p: -p.number)):
        key = (param.dtype, param.device, param.group)
        if key not in filling:
            count = opened.get(key, 0)
            filling[key] = _OpenBucket(position, limits[min(count, len(limits) - 1)])
            opened[key] = count + 1
        bucket = filling[key]
        bucket.members.append(param)
        bucket.nbytes += prod(param.shape) * ITEMSIZE[param.dtype]
        if bucket.nbytes >= bucket.limit:
            done.append(filling.pop(key))
    done += filling.values()
    return [bucket.members for bucket in sorted(done, key=lambda b: b.position)]


def lay_out(
    members: Sequence[ParamInfo], name: str, buffers: Sequence[str | None], wire: str = "", marks: bool = False
) -> Bucket:
    """Lay out a bucket: aligned gradients, one after the other. Parameters without a buffer (None) are idle.

    `marks`: append presence flags, one for each parameter.
    """
    first = members[0]
    step = ALIGN_BYTES // ITEMSIZE[first.dtype]
    known: list[tuple[int, str, int]] = []
    idle: list[tuple[int, int]] = []
    end = 0
    for param, buffer in zip(members, buffers, strict=True):
        if buffer is None:
            idle.append((param.number, end))
        else:
            known.append((param.number, buffer, end))
        end += -(-prod(param.shape) // step) * step
    return Bucket(
        name=name,
        dtype=first.dtype,
        device=first.device,
        group=first.group,
        params=tuple(number for number, _, _ in known),
        buffers=tuple(buffer for _, buffer, _ in known),
        offsets=tuple(offset for _, _, offset in known),
        numel=end + len(members) * marks,
        wire=first.dtype if wire == "own" else wire,
        idle=tuple(number for number, _ in idle),
        idle_offsets=tuple(offset for _, offset in idle),
        marks=len(members) * marks,
    )
