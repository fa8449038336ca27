"""From a Dynamo graph to forward and backward: which output is whose gradient, and how the sync flag travels."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.aliasing.memory import memory_of
from dcompile.capture.aliasing.storage_resizes import CHANGES, resize_only_inputs
from dcompile.capture.passes.dynamo.loss_gradient_in_forward import AHEAD
from dcompile.capture.passes.joint.min_cut import minimum_cut
from dcompile.capture.passes.joint.rng_keys import assign_rng_keys

TOKEN = "dcompile_sync"
"""Name of the value that carries `sync` from a forward to its own backward.

Whether gradients are reduced is decided when the forward runs (no_sync), and forwards and backwards may interleave, so
the answer must travel with the saved tensors. The compiled programs do not see it: the forward's caller puts a constant
among the saved tensors, the backward's caller takes it out again.
"""

DONATED = "dcompile_donated"
"""The mark of a backward's inputs that its program may overwrite."""


@dataclass(frozen=True)
class PartitionResult:
    """What partitioning found out."""

    gradients: tuple[tuple[int, int], ...]
    """(position among the backward's outputs, position among the graph's inputs)."""
    results: int = 0
    """Outputs of the forward before what it saves."""


def partitioner(
    carries_sync: bool,
    found: Callable[[PartitionResult], None],
    fusible: Callable[[], tuple[frozenset[Any], frozenset[Any]]],
    prepare: Callable[[Any], object] = lambda joint: None,
    memory_budget: float = 1.0,
    again_for_calls: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """A partition function for AOTAutograd: torch's min-cut, with the token added where the adapter needs it.

    `fusible` says which ops, beside those torch knows, become part of a loop and which of them may be computed again.
    `prepare` may change the joint graph before; `memory_budget` is the part of the usual savings that may be saved.
    `again_for_calls` lets the backward also compute again what it then has to write for library calls.
    """

    def partition(joint: Any, joint_inputs: Any, *, num_fwd_outputs: int, **keywords: Any) -> tuple[Any, Any]:
        found(PartitionResult(gradient_positions(joint, num_fwd_outputs), num_fwd_outputs))
        compat.sizes.multiply_pairwise(joint)
        assign_rng_keys(joint)
        resize_only_inputs(joint)
        copy_changed_inputs(joint)
        save_as_strided_views(joint)
        prepare(joint)
        ahead = return_marked(joint, num_fwd_outputs)
        forward, backward = compat.aot.min_cut_partition(
            joint,
            joint_inputs,
            *fusible(),
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

    return partition


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


def copy_changed_inputs(joint: Any) -> None:
    """Have the forward copy what it changes or frees and what the backward computes with: an input, as it was before.

    torch's partitioners save such an input itself, which the backward then finds changed (torch 2.11 to 2.13: a counter
    in a buffer, `self.n += 1; return x * self.n`, has its gradients off by one step, with aot_eager as with inductor).
    """
    changed = {node.args[0] for node in joint.graph.nodes if _changes(node)}
    changed |= compat.aot.changed_behind(joint)
    if not changed:
        return
    placeholders = joint.graph.find_nodes(op="placeholder")
    backward = set(filter(compat.aot.is_tangent, placeholders))
    for node in joint.graph.nodes:
        if not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    for old in placeholders:
        if old in changed and _is_read_in(old, backward):
            compat.aot.never_recompute(_only_copy(old) or _read_a_copy(joint, old, placeholders[-1]))


def _changes(node: Any) -> bool:
    """Whether a node changes an input, or frees it."""
    return str(node.target) == CHANGES or compat.storage_offsets.resizes(node.target)


def save_as_strided_views(joint: Any) -> None:
    """Have the forward save what it sees of an input by `as_strided`, as eager does, rather than the input alone.

    In the backward the input may lie otherwise (`p.data = p.data.t()`). It is copied to where it lay, then: the same
    numbers in other memory, of which the same strides would show something else.
    """
    inputs = {memory_of(node) for node in joint.graph.find_nodes(op="placeholder")} - {None}
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        if memory_of(node) in inputs:
            compat.aot.never_recompute(node)


def save_random_values(joint: Any) -> list[str]:
    """Have the forward save what the library's random operators make under gradient checkpointing; returns notes.

    torch would save the generator's state and run them again in the backward, through an operator on functions that no
    kernels can be made around. Our own random numbers (`assign_rng_keys`) need no state.
    """
    drawn = [node for node in joint.graph.nodes if compat.aot.is_drawn_again(node)]
    for node in drawn:
        parts = (user for user in node.users if user.target is operator.getitem)
        for kept in (node, *parts):
            compat.aot.never_recompute(kept)
    names = sorted({str(node.target) for node in drawn})
    return [f"checkpointed, but kept for the backward, since they are random: results of {n}" for n in names]


def _is_read_in(node: Any, backward: set[Any]) -> bool:
    """Whether the backward computes with a node, or with what the forward makes of it."""
    seen, left = {node}, [node]
    while left:
        for user in left.pop().users:
            if user in backward:
                return True
            if user.op == "call_function" and user not in seen:
                seen.add(user)
                left.append(user)
    return False


def _only_copy(old: Any) -> Any | None:
    """The copy of an input through which all else reads it; AOTAutograd makes one of some."""
    readers = [user for user in old.users if user.op == "call_function" and not _changes(user)]
    return readers[0] if [str(reader.target) for reader in readers] == ["aten.clone.default"] else None


def _read_a_copy(joint: Any, old: Any, last: Any) -> Any:
    """Put a copy of an input in its place, but for where it is changed and returned."""
    value = old.meta["val"]
    with joint.graph.inserting_after(last):
        copy = joint.graph.call_function(torch.ops.aten.clone.default, (old,))
    copy.meta |= {key: old.meta[key] for key in ("stack_trace", "nn_module_stack") if key in old.meta}
    with compat.aot.detect_fake_mode([value]):
        copy.meta["val"] = value.clone()

    def reads(user: Any) -> bool:
        return user is not copy and user.op != "output" and not _changes(user)

    old.replace_all_uses_with(copy, delete_user_cb=reads)
    return copy


VIEWS = frozenset(
    (
        "aten.t.default", "aten.permute.default", "aten.transpose.int", "aten.view.default",
        "aten._unsafe_view.default", "aten.reshape.default", "aten.expand.default", "aten.unsqueeze.default",
        "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.slice.Tensor", "aten.select.int",
        "aten.detach.default", "aten.alias.default", "aten.split.Tensor", "aten.split_with_sizes.default",
        "aten.unbind.int", "aten._to_copy.default", "aten.clone.default", "aten.as_strided.default",
        "prims.convert_element_type.default",
    )
)  # fmt: skip
"""What only looks at a tensor, or converts it."""

COPIES = frozenset(("aten._to_copy.default", "aten.clone.default", "prims.convert_element_type.default"))
"""Those of them whose result has memory of its own."""


def recompute_views(joint: Any, parameters: Iterable[Any]) -> None:
    """Have the backward look at these parameters anew, so that the forward saves nothing of them but themselves.

    A saved view or conversion of a gathered parameter would keep its memory until the backward.
    """
    closure = set(parameters)
    if not closure:
        return
    for node in joint.graph.nodes:
        looks = node.op == "call_function" and (str(node.target) in VIEWS or node.target is operator.getitem)
        if looks and node.all_input_nodes and closure.issuperset(node.all_input_nodes):
            closure.add(node)
            compat.aot.always_recompute(node)


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
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


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
