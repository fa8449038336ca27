"""Graphs that free or make the memory of an input: `x.untyped_storage().resize_(n)`, as hand-written sharding does.

AOTAutograd notes such a call with whatever the tensor has become by then. Behind a change that is a value of the
graph's own, in place of the input: freed, it would be read when the input gets it, and the input would keep its memory.
"""

from __future__ import annotations

from typing import Any

import torch

from dcompile import compat
from dcompile.passes import PassReport

CHANGES = "aten.copy_.default"
"""How a graph changes an input: AOTAutograd leaves no other operation in place."""


def resize_only_inputs(gm: Any) -> PassReport:
    """Have a traced graph resize the storages of inputs only, in place.

    Guarantees: values that are read keep their memory. An input whose value was freed last is freed, and not written.
    Other resizes of values are left out: memory that was made anew holds nothing until it is written.
    """
    nodes = [node for node in gm.graph.nodes if compat.storage_offsets.resizes(node.target)]
    values = dict.fromkeys(node.args[0] for node in nodes if node.args[0].op != "placeholder")
    returned = set(gm.graph.output_node().all_input_nodes)
    for value in values:
        of_value = [node for node in nodes if node.args[0] is value]
        changes = [user for user in value.users if str(user.target) == CHANGES and user.args[1] is value]
        if value in returned:
            continue  # its memory is the caller's to miss: lowering says that it leaves such graphs to ATen
        if of_value[-1].args[1] == 0:
            for change in changes:
                _free(gm, change)
        for node in of_value:
            gm.graph.erase_node(node)
    if values:
        gm.recompile()
    return PassReport(len(values))


def _free(gm: Any, change: Any) -> None:
    """Free an input where a graph would have written it."""
    resize = torch.ops.inductor.resize_storage_bytes_.default
    with gm.graph.inserting_before(change):
        freed = gm.graph.call_function(resize, (change.args[0], 0))
    freed.meta |= {key: known for key, known in change.meta.items() if key != "val"}
    freed.meta["val"] = None
    change.replace_all_uses_with(change.args[0])
    gm.graph.erase_node(change)
