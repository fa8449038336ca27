"""Keep recurrent layers whole: AOTAutograd would decompose them into single time steps."""

from __future__ import annotations

from typing import Any

import torch

from dcompile import rnn_ops
from dcompile.device_traits import traits_of
from dcompile.passes import PassReport


def keep_recurrent_layers_whole(gm: Any) -> PassReport:
    """Replace torch's recurrent functions in a graph by dcompile's operators, in place."""
    found = 0
    for node in list(gm.graph.nodes):
        name = getattr(node.target, "__name__", "")
        if node.op != "call_function" or name not in rnn_ops.KINDS or len(node.args) != 9 or node.kwargs:
            continue
        value, hidden, weights, has_biases, layers, dropout, train, bidirectional, batch_first = node.args
        device = node.args[0].meta["example_value"].device.type
        if isinstance(hidden, torch.fx.Node) and name == "lstm":  # a packed sequence, or states in one object
            continue
        # the state of a GPU's generator is no tensor that a program could use
        if dropout and train and not traits_of(device).is_host:
            continue
        states = list(hidden) if name == "lstm" else [hidden]
        how = has_biases, layers, dropout, train, bidirectional, batch_first
        with gm.graph.inserting_before(node):
            arguments = (name, value, states, list(weights), *how)
            whole = gm.graph.call_function(torch.ops.dcompile_rnn.forward.default, arguments)
        whole.meta.update(node.meta)
        node.replace_all_uses_with(whole)
        gm.graph.erase_node(node)
        found += 1
    if not found:
        return PassReport()
    gm.recompile()
    return PassReport(found, (f"recurrent layers are library calls, whose backward runs the forward again: {found}",))
