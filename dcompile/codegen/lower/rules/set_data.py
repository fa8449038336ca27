"""Inputs that get other memory: `p.data = h` in a forward.

What becomes their memory is copied, since programs use their own again. But where the graph returns what looks at it
(`p.detach()`), that memory is the caller's already, and both lie in it, as in eager mode.
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
    """The steps of a program; `outputs` are those that the caller sees, of the nodes that are `returned`.

    A copy of a value may lie where the value does in a program. Only tracing tells the two apart.
    """
    if not low.data_given:
        return tuple(low.steps)
    shared = {
        (view.buffer, compat.tensors.storage_key(node.meta["val"]))
        for node, view in zip(returned, outputs, strict=False)  # what is saved for a backward is no result
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
