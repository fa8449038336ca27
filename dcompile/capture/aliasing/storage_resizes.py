"""Graphs that free or allocate the memory of an input: `x.untyped_storage().resize_(n)`, as hand-written sharding does.

AOTAutograd traces such a call on the tensor's current value. After a change this is a value of the graph, not the
input. If the value were freed, the copy back to the input would read freed memory, and the input would keep its own.
"""

from __future__ import annotations

from typing import Any

import torch

from dcompile import compat
from dcompile.passes import PassReport

CHANGES = "aten.copy_.default"
"""The operation that changes an input: AOTAutograd leaves no other in-place operation in a graph."""


def resize_only_inputs(gm: Any) -> PassReport:
    """Make a traced graph resize only the storages of inputs, in place.

    Guarantees: values that are read keep their memory. An input whose value was freed last is freed instead of written.
    Other resizes of values are removed, since new memory has no content until it is written.
    """
    nodes = [node for node in gm.graph.nodes if compat.storage_offsets.resizes(node.target)]
    values = dict.fromkeys(node.args[0] for node in nodes if node.args[0].op != "placeholder")
    returned = set(gm.graph.output_node().all_input_nodes)
    for value in values:
        of_value = [node for node in nodes if node.args[0] is value]
        changes = [user for user in value.users if str(user.target) == CHANGES and user.args[1] is value]
        if value in returned:
            continue  # the caller would see the freed memory: lowering reports that it leaves such graphs to ATen
        if of_value[-1].args[1] == 0:
            for change in changes:
                _free(gm, change)
        for node in of_value:
            gm.graph.erase_node(node)
    if values:
        gm.recompile()
    return PassReport(len(values))


def _free(gm: Any, change: Any) -> None:
    """Replace the write to an input by a resize to 0 bytes."""
    resize = torch.ops.inductor.resize_storage_bytes_.default
    with gm.graph.inserting_before(change):
        freed = gm.graph.call_function(resize, (change.args[0], 0))
    freed.meta |= {key: known for key, known in change.meta.items() if key != "val"}
    freed.meta["val"] = None
    change.replace_all_uses_with(change.args[0])
    gm.graph.erase_node(change)
