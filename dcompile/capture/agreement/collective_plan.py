"""Plan of a program's collectives for comparison: one line each, equal on every rank that runs the same program."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from dcompile.collectives.contract import ParamInfo
from dcompile.ir.buffers import Bucket


def plan_of(buckets: Iterable[Bucket], params: Iterable[ParamInfo]) -> list[str]:
    """Return the lines of a program's buckets, in the order of their collectives."""
    infos = {info.number: info for info in params}
    lines = []
    for bucket in buckets:
        names = ", ".join(f"{infos[n].fqn}[{prod(infos[n].shape)}]" for n, _ in bucket.places)
        what = f"{bucket.dtype} as {bucket.wire}" if bucket.wire else bucket.dtype
        exchange = f"{bucket.kind} {bucket.name} {what} {bucket.numel} elements of {bucket.group}"
        lines.append(f"{exchange}: {names}")
    return lines
