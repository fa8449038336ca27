"""From a Dynamo graph to forward and backward: which output is whose gradient, and how the sync flag travels."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.aliasing.memory import memory_of
from dcompile.capture.graph_pass import DONATED
from dcompile.capture.passes.dynamo.loss_gradient_in_forward import AHEAD
from dcompile.capture.passes.joint.min_cut import minimum_cut
from dcompile.capture.passes.joint.saved_values import COPIES, VIEWS
from dcompile.device_traits import traits_of

TOKEN = "dcompile_sync"
"""Name of the value that carries `sync` from a forward to its own backward.

Whether gradients are reduced is decided when the forward runs (no_sync), and forwards and backwards may interleave, so
the answer must travel with the saved tensors. The compiled programs do not see it: the forward's caller puts a constant
among the saved tensors, the backward's caller takes it out again.
"""


@dataclass(frozen=True)
class PartitionResult:
    """What partitioning found out."""

    gradients: tuple[tuple[int, int], ...]
    """(position among the backward's outputs, position among the graph's inputs)."""
    results: int = 0
    """Outputs of the forward before what it saves."""


def partition_joint(
    joint: Any,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    carries_sync: bool,
    fusible: tuple[frozenset[Any], frozenset[Any]],
    memory_budget: float = 1.0,
    again_for_calls: bool = False,
    **keywords: Any,
) -> tuple[Any, Any]:
    """Cut a joint graph into forward and backward by torch's min-cut; add the token where the adapter needs it.

    `fusible` says which ops, beside those torch knows, become part of a loop and which of them may be computed again.
    `memory_budget` is the part of the usual savings that may be saved. `again_for_calls` lets the backward also compute
    again what it then has to write for library calls.
    """
    ahead = return_marked(joint, num_fwd_outputs)
    forward, backward = compat.aot.min_cut_partition(
        joint,
        joint_inputs,
        *fusible,
        memory_budget,
        again_for_calls,
        minimum_cut,
        num_fwd_outputs=num_fwd_outputs + ahead,
        **keywords,
    )
    remove_outputs(forward, num_fwd_outputs, ahead)
    mark_donated(forward, backward, num_fwd_outputs)
    if carries_sync:
        add_sync_token(forward, backward, num_fwd_outputs, compat.aot.detect_fake_mode(joint_inputs))
    return forward, backward


def return_marked(joint: Any, results: int) -> int:
    """Have the forward return, behind its results, what is marked so; how many those are.

    torch's partitioners leave to the backward what no result of the forward is made from, whatever else is asked for.
    """

    def is_marked(node: Any) -> bool:
        # tracing notes with operations of the backward what is noted with those that they belong to
        of_forward = node.meta.get("partitioner_tag") != "is_backward"
        return of_forward and AHEAD in (node.meta.get("custom") or {})

    last = [node for node in joint.graph.nodes if is_marked(node) and not any(map(is_marked, node.users))]
    for node in last:
        compat.aot.never_recompute(node)
    insert_outputs(joint, results, last)
    return len(last)


def insert_outputs(gm: Any, first: int, nodes: Sequence[Any]) -> None:
    """Have a graph return these, too, from a position on."""
    output = gm.graph.output_node()
    output.args = ((*output.args[0][:first], *nodes, *output.args[0][first:]),)
    if "desc" in output.meta:
        output.meta["desc"] = [*output.meta["desc"][:first], *[None] * len(nodes), *output.meta["desc"][first:]]


def remove_outputs(forward: Any, first: int, count: int) -> None:
    """Take some outputs of a graph away again."""
    output = forward.graph.output_node()
    output.args = ((*output.args[0][:first], *output.args[0][first + count :]),)
    if count and "desc" in output.meta:
        output.meta["desc"] = [*output.meta["desc"][:first], *output.meta["desc"][first + count :]]
    forward.recompile()


def returned_views(gm: Any, parameters: Iterable[Any], results: int) -> list[Any]:
    """Which of these placeholders the graph returns a look at, as one of its first `results` outputs.

    AOTAutograd notes it of others, but not where a DTensor was made and taken apart in between.
    """
    origin = {node: node for node in parameters}
    for node in gm.graph.nodes:
        looks = str(node.target) in VIEWS - COPIES or node.target is operator.getitem
        if node.op == "call_function" and looks and node.all_input_nodes and node.all_input_nodes[0] in origin:
            origin[node] = origin[node.all_input_nodes[0]]
    outputs = gm.graph.output_node().args[0][:results]
    return list({origin[node]: None for node in outputs if isinstance(node, torch.fx.Node) and node in origin})


def gradient_positions(joint: Any, num_fwd_outputs: int) -> tuple[tuple[int, int], ...]:
    """For each gradient of a joint graph: its position among the gradients, and the input it belongs to."""
    output = joint.graph.output_node()
    pairs = zip(output.args[0][num_fwd_outputs:], output.meta["desc"][num_fwd_outputs:], strict=True)
    found = []
    for position, (node, description) in enumerate(pairs):
        index = compat.aot.primal_index(description)
        if node is not None and index is not None:
            found.append((position, index))
    return tuple(found)


def add_sync_token(forward: Any, backward: Any, num_fwd_outputs: int, fake_mode: Any) -> None:
    """Make the token the first tensor that the forward saves, and the first that the backward gets.

    First, because AOTAutograd counts some kinds of saved value from the end. Integers come before tensors in the
    backward's inputs.
    """
    with fake_mode:
        value = torch.empty((), dtype=torch.int64, device="cpu")
    output = forward.graph.output_node()
    with forward.graph.inserting_before(output):
        token = forward.graph.create_node(
            "call_function", torch.ops.aten.empty.memory_format, ([],), {"dtype": torch.int64}, name=TOKEN
        )
    token.meta["val"] = value
    insert_outputs(forward, num_fwd_outputs, [token])
    inputs = backward.graph.find_nodes(op="placeholder")
    tensors = [node for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)]
    before = tensors[0] if tensors else backward.graph.output_node()
    with backward.graph.inserting_before(before):
        received = backward.graph.create_node("placeholder", TOKEN, name=TOKEN)
    received.meta["val"] = value
    forward.recompile()
    backward.recompile()


def mark_donated(forward: Any, backward: Any, num_fwd_outputs: int) -> None:
    """Note at the backward's inputs which of them may be its own: saved tensors whose memory nobody outside may see.

    That is what shares storage neither with inputs of the forward nor with another saved tensor. Hooks and retained
    graphs may still hold it, and whoever called the model its results, which shows in each call: a training step often
    uses the loss alone, and then the gradient of the logits lies where the logits were.
    """
    *_, output = forward.graph.nodes
    results, saved = output.args[0][:num_fwd_outputs], output.args[0][num_fwd_outputs:]
    outside = {*map(memory_of, forward.graph.find_nodes(op="placeholder"))}
    outside |= {memory_of(node) for node in results if not _may_be_lent(node)}
    counts = Counter(map(memory_of, saved))
    own = {node.name for node in saved if isinstance(node, torch.fx.Node) and counts[memory_of(node)] == 1}
    own -= {node.name for node in saved if memory_of(node) is None or memory_of(node) in outside}
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in own:
            node.meta[DONATED] = True


def _may_be_lent(result: Any) -> bool:
    """Whether a backward is planned as if nobody held this result any longer.

    On GPUs what takes it over is as large. On CPUs something small may, which would cost the whole where it is held.
    """
    value = result.meta.get("val") if isinstance(result, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and traits_of(value.device.type).has_caching_allocator


def donated_positions(backward: Any) -> tuple[int, ...]:
    """Positions of the inputs that `mark_donated` has marked."""
    return tuple(n for n, node in enumerate(backward.graph.find_nodes(op="placeholder")) if DONATED in node.meta)


def saved_positions(backward: Any) -> tuple[int, ...]:
    """Positions of the inputs that are tensors which the forward has saved."""
    places = enumerate(backward.graph.find_nodes(op="placeholder"))
    return tuple(n for n, node in places if memory_of(node) is not None and not compat.aot.is_tangent(node))


def take_sync_token(gm: Any) -> int | None:
    """Remove the token from a forward's outputs or a backward's inputs; its position there, None if there is none."""
    output = gm.graph.output_node()
    nodes = [node for node in gm.graph.nodes if node.name == TOKEN]
    if not nodes:
        return None
    (token,) = nodes
    position: int
    if token.op == "placeholder":
        position = gm.graph.find_nodes(op="placeholder").index(token)
    else:
        position = list(output.args[0]).index(token)
        output.args = (tuple(node for node in output.args[0] if node is not token),)
        if "desc" in output.meta:
            output.meta["desc"] = [d for i, d in enumerate(output.meta["desc"]) if i != position]
    gm.graph.erase_node(token)
    gm.recompile()
    return position
