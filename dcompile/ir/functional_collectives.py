"""A model's own collectives, which stand in its graph as operations: tensor parallelism's and SyncBatchNorm's.

They are library calls of a program, each with a wait of its own, in the order of the graph; what dcompile exchanges
itself are `Collective` and `Wait` steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from dcompile.ir.index import typical
from dcompile.ir.nodes import ITEMSIZE, Buffer, Extern, View

NAMESPACE = "_c10d_functional."
KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}
"""Name of an operation -> what it is called elsewhere: those of one tensor, whose traffic the cost model knows."""


def kind_of(op: str) -> str | None:
    """Which collective an operation starts; None if none that is told of one by one."""
    return KINDS.get(op.removeprefix(NAMESPACE).partition(".")[0]) if op.startswith(NAMESPACE) else None


def is_wait(op: str) -> bool:
    """Whether an operation waits for one."""
    return op.startswith(f"{NAMESPACE}wait_tensor.")


def group_of(step: Extern) -> str:
    """The process group's name, which is the last argument of each."""
    return next((arg for arg in reversed(step.args) if isinstance(arg, str)), "")


def ranks_of(step: Extern) -> int | None:
    """How many ranks take part, where the operation says so: gathers and scatters do."""
    return next((arg for arg in step.args if isinstance(arg, int) and not isinstance(arg, bool)), None)


def whole_bytes(step: Extern, table: Mapping[str, Buffer]) -> int:
    """Bytes of the whole: of what it sends or of what it makes, whichever is larger."""
    sent = (
        prod(map(typical, arg.shape)) * ITEMSIZE[table[arg.buffer].dtype] for arg in step.args if isinstance(arg, View)
    )
    made = (typical(table[out].extent) * ITEMSIZE[table[out].dtype] for out in step.outs if out is not None)
    return max((*sent, *made))
