"""Plan of a program's collectives for comparison: one line each, equal on every rank that runs the same program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from dcompile import compat
from dcompile.collectives.contract import ParamInfo
from dcompile.ir.buffers import Bucket
from dcompile.ir.functional_collectives import NAMESPACE, is_wait


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


def own_collectives(gm: Any) -> Iterator[tuple[str, str]]:
    """Yield (name of the process group, line) for each collective that is an operation of a graph.

    Lines contain no sizes, since batches may differ between ranks.
    """
    for node in gm.graph.nodes:
        op = str(node.target)
        if node.op == "call_function" and op.startswith(NAMESPACE) and not is_wait(op):
            texts = [arg for arg in node.args if isinstance(arg, str)]
            if texts:  # otherwise its group is an object, which lowering reports
                *how, group = texts
                yield group, f"{' '.join((op.split('.')[1], *how))} over {compat.groups.size_of(group)} ranks"


def by_group(own: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for group, line in own:
        found.setdefault(group, []).append(line)
    return found
