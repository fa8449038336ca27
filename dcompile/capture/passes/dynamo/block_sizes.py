"""Make the sides of FlexAttention's blocks numbers: kernels are written for them, as torch.compile's are.

TorchDynamo of torch 2.11 makes them symbols with `dynamic=True`, like any other number that a call is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.dynamo.symbolic_elements.elements import value_of
from dcompile.passes import PassReport

BLOCK_MASK = 4
"""Position of the block mask among FlexAttention's arguments."""


def specialize_block_sizes(gm: GraphModule) -> PassReport:
    """Replace symbolic sides of blocks in FlexAttention's calls by numbers, in subgraphs, too.

    Guarantees: a guard of torch's on each side that was a symbol, so that other sides get a graph of their own.
    """
    count = 0
    for module in gm.modules():
        calls = module.graph.nodes if isinstance(module, GraphModule) else ()
        for node in [node for node in calls if compat.inductor.is_flex(node.target)]:
            before: Any = node.args[BLOCK_MASK] if len(node.args) > BLOCK_MASK else ()
            if not compat.flex.is_known_mask(before):
                continue
            sides = [_number(item) for item in before[compat.flex.SIDES]]
            count += sides != [*before[compat.flex.SIDES]]
            node.update_arg(BLOCK_MASK, (*before[: compat.flex.SIDES.start], *sides, before[-1]))
    return PassReport(count)


def _number(item: Any) -> Any:
    """Return the value of a node that is a size, and everything else as it is."""
    value = value_of(item) if isinstance(item, Node) else None
    return int(value) if isinstance(value, torch.SymInt) else item
