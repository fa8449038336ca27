"""Partition of a joint graph into forward and backward, with gradients' positions, and the token for reductions.

torch's partitioner needs a minimum cut between the values that a forward computes and those that its backward needs.
For that it uses networkx, whose push-relabel in Python took a fifth of a warm start of 32 Llama layers. In the
partitioner's graphs most edges have infinite capacity, so the side of most nodes is known. The rest falls into small
components, which are cut here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.aliasing.output_views import memory_of
from dcompile.capture.passes.dynamo.chunked_cross_entropy.op import COMPUTED_IN_FORWARD
from dcompile.capture.passes.joint.saved_values import OFFLOADED, is_view
from dcompile.capture.passes.run_passes import DONATED
from dcompile.device_traits import traits_of
from dcompile.operators.host_copies import LOAD, OFFLOAD

TOKEN = "dcompile_sync"
"""Name of the token that tells a backward whether to reduce gradients.

The forward determines that (no_sync), and forwards and backwards may interleave. So the token is among the saved
tensors. Compiled programs do not have it: the forward's caller inserts a constant, and the backward's caller removes
it.
"""


def partition_joint(
    joint: Any,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    carries_sync: bool,
    fusible: tuple[frozenset[Any], frozenset[Any]] | None,
    memory_budget: float = 1.0,
    recompute_library_operands: bool = False,
    choose_saved: Callable[..., Any] | None = None,
    **keywords: Any,
) -> tuple[Any, Any]:
    """Cut a joint graph into forward and backward by torch's min-cut; add the token if the adapter needs it.

    `fusible`: the ops, in addition to torch's own list, that are fused into loops, and those of them that may be
    recomputed; None if each operation is a kernel of its own, which only the user's checkpoints run again.
    `memory_budget`: fraction of the usual saved bytes that may be saved.
    `recompute_library_operands`: whether the backward may also recompute operands of library calls, which it must then
    write to memory.
    `choose_saved`: chooses which values are saved, in place of torch: see `compat.aot.min_cut_partition`.
    """
    ahead = return_marked(joint, num_fwd_outputs)
    forward, backward = compat.aot.min_cut_partition(
        joint,
        joint_inputs,
        fusible,
        memory_budget,
        recompute_library_operands,
        minimum_cut,
        choose_saved,
        num_fwd_outputs=num_fwd_outputs + ahead,
        **keywords,
    )
    remove_outputs(forward, num_fwd_outputs, ahead)
    mark_donated(forward, backward, num_fwd_outputs)
    if carries_sync:
        add_sync_token(forward, backward, num_fwd_outputs, compat.aot.detect_fake_mode(joint_inputs))
    return forward, backward


def return_marked(joint: Any, results: int) -> int:
    """Return values marked `COMPUTED_IN_FORWARD` from the forward, after its results; return their number.

    torch's partitioners otherwise move values that no result of the forward depends on to the backward.
    """

    def is_marked(node: Any) -> bool:
        # tracing copies annotations from a forward operation to its operations in the backward
        of_forward = node.meta.get("partitioner_tag") != "is_backward"
        return of_forward and COMPUTED_IN_FORWARD in (node.meta.get("custom") or {})

    last = [node for node in joint.graph.nodes if is_marked(node) and not any(map(is_marked, node.users))]
    for node in last:
        compat.aot.never_recompute(node)
    insert_outputs(joint, results, last)
    return len(last)


def insert_outputs(gm: Any, first: int, nodes: Sequence[Any]) -> None:
    """Insert these nodes into a graph's outputs, from a position on."""
    output = gm.graph.output_node()
    output.args = ((*output.args[0][:first], *nodes, *output.args[0][first:]),)
    if "desc" in output.meta:
        output.meta["desc"] = [*output.meta["desc"][:first], *[None] * len(nodes), *output.meta["desc"][first:]]


def remove_outputs(forward: Any, first: int, count: int) -> None:
    """Remove some outputs of a graph."""
    output = forward.graph.output_node()
    output.args = ((*output.args[0][:first], *output.args[0][first + count :]),)
    if count and "desc" in output.meta:
        output.meta["desc"] = [*output.meta["desc"][:first], *output.meta["desc"][first + count :]]
    forward.recompile()


def returned_views(gm: Any, parameters: Iterable[Any], results: int) -> list[Any]:
    """Return those of these placeholders that have a view among the graph's first `results` outputs.

    AOTAutograd reports views of inputs, but not if a DTensor was made and split in between.
    """
    origin = {node: node for node in parameters}
    for node in gm.graph.nodes:
        if is_view(node) and node.all_input_nodes and node.all_input_nodes[0] in origin:
            origin[node] = origin[node.all_input_nodes[0]]
    outputs = gm.graph.output_node().args[0][:results]
    return list({origin[node]: None for node in outputs if isinstance(node, torch.fx.Node) and node in origin})


def gradient_positions(joint: Any, num_fwd_outputs: int) -> tuple[tuple[int, int], ...]:
    """Return (position among the gradients, position of its input) for each gradient of a joint graph."""
    output = joint.graph.output_node()
    pairs = zip(output.args[0][num_fwd_outputs:], output.meta["desc"][num_fwd_outputs:], strict=True)
    found = []
    for position, (node, description) in enumerate(pairs):
        index = compat.aot_metadata.primal_index(description)
        if node is not None and index is not None:
            found.append((position, index))
    return tuple(found)


def add_sync_token(forward: Any, backward: Any, num_fwd_outputs: int, fake_mode: Any) -> None:
    """Make the token the first tensor that the forward saves, and the first tensor input of the backward.

    It is the first, since AOTAutograd finds some kinds of saved values by position from the end. Integers come before
    tensors in the backward's inputs, and opaque objects, such as meshes, after saved tensors.
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
    after = (isinstance(val := node.meta.get("val"), torch.Tensor) or compat.tensors.is_opaque(val) for node in inputs)
    before = next(
        (node for node, is_after in zip(inputs, after, strict=True) if is_after), backward.graph.output_node()
    )
    with backward.graph.inserting_before(before):
        received = backward.graph.create_node("placeholder", TOKEN, name=TOKEN)
    received.meta["val"] = value
    forward.recompile()
    backward.recompile()


def mark_donated(forward: Any, backward: Any, num_fwd_outputs: int) -> None:
    """Mark the backward's inputs whose memory its program may overwrite, if nothing else refers to it in a call.

    These are saved tensors that share storage neither with inputs of the forward nor with another saved tensor. Each
    call checks for other references, from hooks, retained graphs, or the caller's results. A training step often uses
    only the loss, and then the gradient of the logits may overwrite the logits.
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


def offload_marked(forward: Any, backward: Any, num_fwd_outputs: int, everything_on: str = "") -> list[str]:
    """Save marked values (`saved_values.offload`) in host memory: copy them there, and back before their first reader.

    A value that outlives the forward on its device anyway stays there: a result, an input, or what shares their memory
    or that of another saved value. So does one with gaps, whose strides a copy would not have. Returns a line for the
    receipt for each that stays. `everything_on`: offload all on this type of device, marked or not.
    """
    stay: list[str] = []
    output = forward.graph.output_node()
    outputs = list(output.args[0])
    held = Counter(map(memory_of, outputs)) + Counter(map(memory_of, forward.graph.find_nodes(op="placeholder")))
    places = {node: number for number, node in enumerate(forward.graph.nodes)}
    inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    marked = {memory_of(node) for node in forward.graph.nodes if OFFLOADED in node.meta}  # or a view of it is saved
    for at, node in enumerate(outputs[num_fwd_outputs:], num_fwd_outputs):
        if not (memory_of(node) in marked - {None} or _is_made_on(node, everything_on)):
            continue
        value, received = node.meta["val"], inputs[node.name]
        is_dense = compat.sizes.is_dense(value) or compat.sizes.is_known_contiguous(value)
        if held[memory_of(node)] != 1 or not is_dense:
            why = "its memory has gaps" if held[memory_of(node)] == 1 else "its memory is held otherwise, too"
            stay.append(f"saved on its device, not in host memory: {node.name} ({node.target}): {why}")
            continue
        last = max((user for user in (node, *node.users) if user is not output), key=places.__getitem__)
        with forward.graph.inserting_after(last):
            outputs[at] = _host_copy(forward, OFFLOAD, (node,), node)
        _load_back(backward, received)
    output.args = (tuple(outputs),)
    forward.recompile()
    backward.recompile()
    return stay


def _is_made_on(node: Any, device: str) -> bool:
    """Whether a node is a tensor that the forward computes on this type of device, and no token."""
    is_tensor = memory_of(node) is not None
    return is_tensor and node.op == "call_function" and node.name != TOKEN and node.meta["val"].device.type == device


def _load_back(backward: Any, received: Any) -> None:
    """Make an input of the backward one in host memory, and load it where it is read first."""
    value = received.meta["val"]
    readers = [node for node in backward.graph.nodes if node in received.users]
    with backward.graph.inserting_before(readers[0]):  # the output, if nothing else reads it
        loaded = _host_copy(backward, LOAD, (received, value.device), received)
    received.replace_all_uses_with(loaded, delete_user_cb=lambda user: user is not loaded)
    received.meta = {key: kept for key, kept in received.meta.items() if key not in (DONATED, "tensor_meta")}
    with compat.aot.detect_fake_mode([value]):
        received.meta["val"] = OFFLOAD(value)


def _host_copy(gm: Any, operation: Any, args: tuple[Any, ...], of: Any) -> Any:
    """Insert a copy between a device and host memory, with the origin of the value that it copies."""
    value = of.meta["val"]
    copy = gm.graph.call_function(operation, args)
    copy.meta |= {key: of.meta[key] for key in ("stack_trace", "nn_module_stack") if key in of.meta}
    with compat.aot.detect_fake_mode([value]):
        host = OFFLOAD(value)
        copy.meta["val"] = host if len(args) == 1 else LOAD(host, value.device)
    return copy


def _may_be_lent(result: Any) -> bool:
    """Is a backward planned to overwrite this result?

    On GPUs the value in its place is as large. On CPUs a small value may be placed there. If the caller still holds the
    result, that would cost an allocation of the whole size.
    """
    value = result.meta.get("val") if isinstance(result, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and traits_of(value.device.type).has_caching_allocator


def donated_positions(backward: Any) -> tuple[int, ...]:
    """Return the positions of the inputs that `mark_donated` has marked."""
    return tuple(n for n, node in enumerate(backward.graph.find_nodes(op="placeholder")) if DONATED in node.meta)


def saved_positions(backward: Any) -> tuple[int, ...]:
    """Return the positions of the inputs that are tensors saved by the forward."""
    places = enumerate(backward.graph.find_nodes(op="placeholder"))
    return tuple(n for n, node in places if memory_of(node) is not None and not compat.aot_metadata.is_tangent(node))


def take_sync_token(gm: Any) -> int | None:
    """Remove the token from a forward's outputs or a backward's inputs; return its position, or None without one."""
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


Partition = tuple[set[Any], set[Any]]
SOURCE_SIDE, SINK_SIDE = 0, 1
"""Numbers of all nodes that no finite cut separates from the source, and from the sink."""


def minimum_cut(graph: Any, source: Any, sink: Any, otherwise: Callable[..., Any]) -> tuple[float, Partition]:
    """Return `networkx.minimum_cut(graph, source, sink)`: (value, (nodes on the source's side, nodes on the sink's)).

    Of several minimum cuts it returns the one nearest the sink, as networkx does. The sink's side has all nodes from
    which the residual graph reaches the sink. That set is the same for every maximum flow (Ford and Fulkerson). The
    flow is found by Dinic's algorithm (1970). An edge without a capacity cannot be cut. If no finite cut exists, the
    result is that of `otherwise`.
    """
    near = _closure(source, lambda node: (v for v, data in graph.succ[node].items() if _capacity(data) == inf))
    far = _closure(sink, lambda node: (u for u, data in graph.pred[node].items() if _capacity(data) == inf))
    if not near.isdisjoint(far):
        return otherwise(graph, source, sink)  # type: ignore[no-any-return]
    number: dict[Any, int] = {**dict.fromkeys(near, SOURCE_SIDE), **dict.fromkeys(far, SINK_SIDE)}
    for node in graph:
        number.setdefault(node, len(number) - len(near) - len(far) + 2)
    between: dict[tuple[int, int], float] = {}
    for u, v, data in graph.edges(data=True):
        pair = number[u], number[v]
        if pair[0] != pair[1] and pair[0] != SINK_SIDE and pair[1] != SOURCE_SIDE:
            between[pair] = between.get(pair, 0) + _capacity(data)
    flow = _Flow(len(number) - len(near) - len(far) + 2, between)
    value = flow.most()
    reaching = flow.reaching_the_sink()
    there = {node for node in graph if reaching[number[node]]}
    return value, (set(graph) - there, there)


def _capacity(data: dict[str, Any]) -> float:
    return data.get("capacity", inf)  # type: ignore[no-any-return]


def _closure(start: Any, after: Callable[[Any], Any]) -> set[Any]:
    found, waiting = {start}, [start]
    while waiting:
        new = [node for node in after(waiting.pop()) if node not in found]
        found.update(new)
        waiting += new
    return found


class _Flow:
    """A flow network with residual capacities; edge k ^ 1 is the reverse of edge k."""

    def __init__(self, nodes: int, between: dict[tuple[int, int], float]) -> None:
        self.edges: list[list[int]] = [[] for _ in range(nodes)]
        self.ends: list[int] = []
        self.left: list[float] = []
        for (u, v), capacity in between.items():
            for start, end, left in ((u, v, capacity), (v, u, 0)):
                self.edges[start].append(len(self.ends))
                self.ends.append(end)
                self.left.append(left)

    def most(self) -> float:
        """Find a maximum flow, along shortest paths whose length grows from phase to phase; return its value."""
        total: float = 0
        while (level := self._levels())[SINK_SIDE] >= 0:
            turn = [0] * len(self.edges)
            while sent := self._send(level, turn):
                total += sent
        return total

    def _levels(self) -> list[int]:
        level = [-1] * len(self.edges)
        level[SOURCE_SIDE] = 0
        row = [SOURCE_SIDE]
        while row and level[SINK_SIDE] < 0:
            following = []
            for node in row:
                for k in self.edges[node]:
                    end = self.ends[k]
                    if level[end] < 0 and self.left[k]:
                        level[end] = level[node] + 1
                        following.append(end)
            row = following
        return level

    def _send(self, level: list[int], turn: list[int]) -> float:
        """Send flow along one shortest path; return its amount, 0 if there is no path.

        `turn`: for each node, the number of its edges that are exhausted in this phase.
        """
        path: list[int] = []
        node = SOURCE_SIDE
        while node != SINK_SIDE:
            edges = self.edges[node]
            while turn[node] < len(edges):
                k = edges[turn[node]]
                if self.left[k] and level[self.ends[k]] == level[node] + 1:
                    break
                turn[node] += 1
            if turn[node] < len(edges):
                path.append(k)
                node = self.ends[k]
            elif path:
                node = self.ends[path.pop() ^ 1]
                turn[node] += 1
            else:
                return 0
        sent = min(self.left[k] for k in path)
        for k in path:
            self.left[k] -= sent
            self.left[k ^ 1] += sent
        return sent

    def reaching_the_sink(self) -> list[bool]:
        """Return for each node whether the residual graph reaches the sink from it."""
        found = [False] * len(self.edges)
        found[SINK_SIDE] = True
        waiting = [SINK_SIDE]
        while waiting:
            for k in self.edges[waiting.pop()]:
                if self.left[k ^ 1] and not found[self.ends[k]]:
                    found[self.ends[k]] = True
                    waiting.append(self.ends[k])
        return found
