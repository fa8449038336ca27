"""The model's own collectives, which are operations of its graph: tensor parallelism's and SyncBatchNorm's.

In a program they are `Collective` and `Wait` steps with a `call`, provided that their operands' sizes are known
beforehand. Others are library calls in the order of the graph, each with its own wait. So are all of them where ATen
runs everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from dcompile.ir.buffers import ITEMSIZE, Buffer
from dcompile.ir.collective_kinds import KINDS, CollectiveKind
from dcompile.ir.index import typical
from dcompile.ir.nodes import Collective, Extern, Step, views_of

NAMESPACE = "_c10d_functional."
WAITS = ("wait_tensor", "wait_tensors")
"""The second waits for all results of one that returns several, since torch 2.15."""


def kind_of(op: str) -> CollectiveKind | None:
    """Kind of the collective that an operation starts; None for other operations."""
    return KINDS.get(_name(op))


def is_own_collective(step: Step) -> bool:
    """Whether a step starts one of the model's own collectives, as a `Collective` or as a library call."""
    if isinstance(step, Collective):
        return step.call is not None and not step.copies_by_host
    return isinstance(step, Extern) and kind_of(step.op) is not None


def is_wait(op: str) -> bool:
    """Whether an operation waits for a functional collective."""
    return _name(op) in WAITS


def _name(op: str) -> str:
    """An operation's name in torch's namespace of functional collectives; empty for those of other namespaces."""
    return op.removeprefix(NAMESPACE).partition(".")[0] if op.startswith(NAMESPACE) else ""


def group_of(step: Extern) -> str:
    """Name of the process group, which is the last argument of each operation."""
    return next((arg for arg in reversed(step.args) if isinstance(arg, str)), "")


def ranks_of(step: Extern) -> int | None:
    """Number of ranks, for operations that state it: gathers and scatters. None for others."""
    return next((arg for arg in step.args if isinstance(arg, int) and not isinstance(arg, bool)), None)


def whole_bytes(step: Extern, table: Mapping[str, Buffer]) -> int:
    """Bytes of the operands or of the results, whichever is larger."""
    views = [view for arg in step.args for view in views_of(arg)]
    sent = sum(prod(map(typical, view.shape)) * ITEMSIZE[table[view.buffer].dtype] for view in views)
    made = sum(table[out].typical_bytes for out in step.outs if out is not None)
    return max(sent, made)
