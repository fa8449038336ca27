"""The collectives of a program, one line each, the same on every rank that runs the same program."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from dcompile.collectives.contract import ParamInfo
from dcompile.ir.nodes import Bucket


def plan_of(buckets: Iterable[Bucket], params: Iterable[ParamInfo]) -> list[str]:
    """Of its own buckets, in the order in which they are exchanged."""
    infos = {info.number: info for info in params}
    lines = []
    for bucket in buckets:
        names = ", ".join(f"{infos[n].fqn}[{prod(infos[n].shape)}]" for n, _ in bucket.places)
        what = f"{bucket.dtype} as {bucket.wire}" if bucket.wire else bucket.dtype
        exchange = f"{bucket.kind} {bucket.name} {what} {bucket.numel} elements of {bucket.group}"
        lines.append(f"{exchange}: {names}")
    return lines
