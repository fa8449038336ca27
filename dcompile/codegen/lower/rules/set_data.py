"""Give inputs other memory: `p.data = h` in a forward.

The new data is copied, since programs reuse their memory. But where the graph returns a view of it (`p.detach()`), the
memory belongs to the caller already, and both share it, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from dcompile import compat
from dcompile.codegen.lower.context import Lowering
from dcompile.ir.nodes import Extern, Step, View


def with_shared_data(low: Lowering, returned: Sequence[Any], outputs: Sequence[Any]) -> tuple[Step, ...]:
    """Return the steps of a program; `outputs` are the results of the nodes `returned` that the caller sees.

    A program may store a copy of a value at the value's address. Only tracing distinguishes the two.
    """
    if not low.data_given:
        return tuple(low.steps)
    shared = {
        (view.buffer, compat.tensors.storage_key(node.meta["val"]))
        for node, view in zip(returned, outputs, strict=False)  # tensors saved for a backward are no results
        if isinstance(node, Node) and isinstance(view, View)
    }
    memories = {id(step): memory for step, memory in low.data_given}

    def settled(step: Step) -> Step:
        if isinstance(step, Extern) and id(step) in memories:
            source = step.args[1]
            if isinstance(source, View) and (source.buffer, memories[id(step)]) in shared:
                return replace(step, args=(*step.args[:2], False))
        return step

    return tuple(map(settled, low.steps))
