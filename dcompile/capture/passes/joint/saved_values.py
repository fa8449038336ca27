"""Choose, beyond torch's own rules, which values a forward saves and which ones its backward recomputes.

In order: values that must be saved, or must not, or are saved in host memory. A float32 softmax of 16-bit scores,
which is recomputed. Copies of values that nothing changes, each of which would be saved in addition to its source.
Images for the backward of pooling.

Guarantees: the same values. The result depends only on the graph, so it is the same on every rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.aliasing.input_memory import CHANGES
from dcompile.capture.aliasing.output_views import memory_of
from dcompile.device_traits import traits_of
from dcompile.ir.gemm import ALIGNMENT
from dcompile.passes import PassReport

aten = torch.ops.aten

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
"""Operations that make a view of a tensor, or convert it."""

COPIES = frozenset(("aten._to_copy.default", "aten.clone.default", "prims.convert_element_type.default"))
"""The operations of `VIEWS` whose result has its own memory."""
_LOOKS = VIEWS - COPIES
_LOOKUPS = frozenset(("aten.embedding.default", "aten.index_select.default"))


def is_view(node: Any) -> bool:
    """Whether a node is a view of what it reads, or one of several views."""
    return node.op == "call_function" and (str(node.target) in _LOOKS or node.target is operator.getitem)


OFFLOADED = "dcompile_offloaded"
"""The mark of values that are saved in host memory."""


def offload(node: Any) -> None:
    """Have a value of the forward saved in pinned host memory, where the backward needs it, in place of the device's.

    `joint_graph.partition_joint` makes the copies. Values that the caller or other saved values hold anyway stay.
    """
    compat.aot.never_recompute(node)
    node.meta[OFFLOADED] = True


def offload_by_policy(joint: Any) -> PassReport:
    """Offload what a policy of selective checkpointing wants to be (`CheckpointPolicy.MUST_CPU_OFFLOAD`)."""
    found = [node for node in joint.graph.nodes if compat.aot.asks_to_offload(node)]
    for node in found:
        offload(node)
    return PassReport(len(found))


def copy_changed_inputs(joint: Any) -> PassReport:
    """Copy inputs that the forward changes or frees and whose old values the backward needs.

    torch's partitioners save such an input itself, so the backward reads the changed values. In torch 2.11 to 2.13, a
    counter in a buffer (`self.n += 1; return x * self.n`) has gradients off by one step, with aot_eager and inductor.
    """
    changed = {node.args[0] for node in joint.graph.nodes if _changes_input(node)}
    changed |= compat.aot_metadata.changed_behind(joint)
    if not changed:
        return PassReport()
    placeholders = joint.graph.find_nodes(op="placeholder")
    backward = compat.aot_metadata.backward_nodes(joint)
    count = 0
    for old in placeholders:
        if old in changed and _is_read_in(old, backward):
            compat.aot.never_recompute(_only_copy(old) or _read_a_copy(joint, old, placeholders[-1]))
            count += 1
    return PassReport(count)


def _changes_input(node: Any) -> bool:
    """Does a node change an input, or free it?"""
    return str(node.target) == CHANGES or compat.storage_offsets.resizes(node.target)


def save_as_strided_views(joint: Any) -> PassReport:
    """Save an input's `as_strided` view in the forward, as eager does, instead of recomputing it from the input.

    By the backward, the input may have another layout (`p.data = p.data.t()`). It is then copied to the traced strides,
    in new memory, where the strides of `as_strided` would select other elements.
    """
    inputs = {memory_of(node) for node in joint.graph.find_nodes(op="placeholder")} - {None}
    count = 0
    for node in joint.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        if memory_of(node) in inputs:
            compat.aot.never_recompute(node)
            count += 1
    return PassReport(count)


def save_random_values(joint: Any) -> PassReport:
    """Save results of ATen's random operators in the forward, under gradient checkpointing as well.

    torch would save the generator's state and run them again in the backward, by a higher-order operator, which kernels
    cannot fuse with. dcompile's own random operations (`assign_rng_keys`) need no state.
    """
    drawn = [node for node in joint.graph.nodes if compat.aot.is_drawn_again(node)]
    for node in drawn:
        compat.aot.never_recompute(node)
    names = sorted({str(node.target) for node in drawn})
    notes = (f"checkpointed, but kept for the backward, since they are random: results of {n}" for n in names)
    return PassReport(len(drawn), tuple(notes))


def _is_read_in(node: Any, backward: set[Any]) -> bool:
    """Does the backward read a node, or a value that the forward computes from it?"""
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
    """Return the copy through which all other nodes read an input, or None; AOTAutograd makes one for some inputs."""
    readers = [user for user in old.users if user.op == "call_function" and not _changes_input(user)]
    return readers[0] if [str(reader.target) for reader in readers] == ["aten.clone.default"] else None


def _read_a_copy(joint: Any, old: Any, last: Any) -> Any:
    """Replace an input by a copy, except where the input is changed or returned."""
    value = old.meta["val"]
    with joint.graph.inserting_after(last):
        copy = joint.graph.call_function(aten.clone.default, (old,))
    copy.meta |= {key: old.meta[key] for key in ("stack_trace", "nn_module_stack") if key in old.meta}
    with compat.aot.detect_fake_mode([value]):
        copy.meta["val"] = value.clone()

    def reads(user: Any) -> bool:
        return user is not copy and user.op != "output" and not _changes_input(user)

    old.replace_all_uses_with(copy, delete_user_cb=reads)
    return copy


def recompute_views(joint: Any, parameters: Callable[[Any], Iterable[Any]]) -> PassReport:
    """Recompute views and conversions of sharded parameters in the backward, so the forward saves only parameters.

    A saved view or conversion of a gathered parameter would keep its memory until the backward. Rows that are looked up
    in one are saved: they are few, and the backward would gather it for them alone.
    """
    closure = set(parameters(joint))
    if not closure:
        return PassReport()
    for node in joint.graph.nodes:
        looks = node.op == "call_function" and (str(node.target) in VIEWS or node.target is operator.getitem)
        if looks and node.all_input_nodes and closure.issuperset(node.all_input_nodes):
            closure.add(node)
            compat.aot.always_recompute(node)
        elif str(node.target) in _LOOKUPS and "recompute" not in node.meta and node.args[0] in closure:
            compat.aot.never_recompute(node)
    return PassReport(len(closure))


def recompute_misaligned_views(joint: Any) -> PassReport:
    """Recompute views that do not begin at 16 bytes in the backward, so the forward saves what they are views of.

    Kernels of GPUs expect that their inputs are aligned. A saved channel of a channels-last image would be copied, with
    all other channels between its elements. What it is a view of stays in memory with it anyway. Views in checkpointed
    regions are recomputed already, and keep their region's number.
    """
    inputs = {memory_of(node) for node in joint.graph.find_nodes(op="placeholder")} - {None}
    found = set[Any]()
    for node in reversed(joint.graph.nodes):
        if not is_view(node) or memory_of(node) in inputs or "recompute" in node.meta:
            continue
        is_split = isinstance(node.meta.get("val"), (tuple, list))
        if _is_misaligned(node) or (is_split and any(user in found for user in node.users)):
            found.add(node)
            compat.aot.always_recompute(node)
    return PassReport(len(found))


def _is_misaligned(node: Any) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not traits_of(value.device.type).many_threads:
        return False
    offset = value.storage_offset() if compat.tensors.has_storage(value) else 0
    return isinstance(offset, int) and offset * value.itemsize % ALIGNMENT != 0


# --- softmax ----------------------------------------------------------------------------------------------------------

MAX_SOFTMAX_ROW = 16384
"""Elements of a row that a program holds in registers; it would read longer ones several times."""
MIN_SOFTMAX_BYTES = 1 << 20
"""Bytes of a softmax that is worth another one in the backward."""
SMALL_SHARE = 4
"""A float32 source with at most this part of the elements is no reason against it, such as a mask for all heads."""
MAX_SOURCE_SHARE = 0.75
"""Bytes of the sources, which are saved instead, relative to those of the softmax."""


def recompute_softmax(joint: GraphModule) -> PassReport:
    """Have the partitioner recompute each float32 softmax that has 16-bit sources and 16-bit readers, on GPUs.

    Guarantees: the same operations on the same values, so the same gradients up to the order of a row's sum.
    """
    calls = joint.graph.find_nodes(op="call_function", target=aten._softmax.default)
    found = [node for node in calls if _is_wide(node)]
    if not found:
        return PassReport()
    backward = compat.aot_metadata.backward_nodes(joint)
    chosen = [node for node in found if node not in backward and _is_worth_recomputing(node, backward)]
    for node in chosen:
        for again in (node, *_steps_before(node)):
            compat.aot.always_recompute(again)
    return PassReport(len(chosen))


def _steps_before(softmax: Node) -> list[Node]:
    """Return the operations between a softmax and its sources, but those of which a checkpoint decides.

    Left to itself, torch saves their float32 result if a mask has readers in several layers, of twice the bytes.
    """
    _, between = _walk(softmax.all_input_nodes, lambda node: node.all_input_nodes, _smallness(softmax))
    return [node for node in between if "recompute" not in node.meta]


def _is_wide(node: Node) -> bool:
    """Is this a large softmax in float32 along short rows of fixed size, on a device of many threads?"""
    value, dim = node.meta["val"], node.args[1]
    if (
        value.dtype != torch.float32
        or not traits_of(value.device.type).many_threads
        or not compat.sizes.is_fixed(value)
    ):
        return False
    is_along_rows = value.dim() > 0 and dim in (-1, value.dim() - 1) and value.is_contiguous()
    return is_along_rows and value.shape[-1] <= MAX_SOFTMAX_ROW and 4 * value.numel() >= MIN_SOFTMAX_BYTES


def _is_worth_recomputing(softmax: Node, backward: set[Node]) -> bool:
    """Is a softmax read in 16 bits, in float32 only by its own gradient, and are its sources smaller?"""
    if "recompute" in softmax.meta:  # of a checkpointed region
        return False
    readers, _ = _walk(softmax.users, lambda node: node.users, lambda node: _is_narrow(node) or node in backward)
    gradients = [node for node in readers if node.target is aten._softmax_backward_data.default]
    narrow = [node for node in readers if node not in backward and _is_narrow(node)]
    if not gradients or not narrow or len(gradients) + len(narrow) != len(readers):
        return False
    is_small = _smallness(softmax)
    sources, _ = _walk(softmax.all_input_nodes, lambda node: node.all_input_nodes, is_small)
    return all(map(is_small, sources)) and sum(map(_nbytes, sources)) <= MAX_SOURCE_SHARE * _nbytes(softmax)


def _smallness(softmax: Node) -> Callable[[Node], bool]:
    """Return the test whether a value has few elements, or 16 bits each, compared with a softmax."""
    elements = softmax.meta["val"].numel()

    def is_small(node: Node) -> bool:
        value = node.meta.get("val")
        size = value.numel() if isinstance(value, torch.Tensor) else 0
        return SMALL_SHARE * size <= elements or (_is_narrow(node) and size <= elements)

    return is_small


def _walk(
    nodes: Iterable[Node], following: Callable[[Node], Iterable[Node]], is_end: Callable[[Node], bool]
) -> tuple[list[Node], list[Node]]:
    """Follow paths through elementwise operations; return (where they end, what they pass).

    A path ends at an end, or at an operation of another kind.
    """
    left = list(nodes)
    seen, ends, passed = set(left), [], []
    while left:
        node = left.pop()
        if is_end(node) or not _is_elementwise(node):
            ends.append(node)
            continue
        passed.append(node)
        new = [one for one in following(node) if one not in seen]
        seen.update(new)
        left += new
    return ends, passed


def _is_elementwise(node: Node) -> bool:
    if node.op != "call_function":
        return False
    return str(node.target) in VIEWS or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_narrow(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.itemsize <= 2


def _nbytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0


# --- clones -----------------------------------------------------------------------------------------------------------

CLONES = {aten.clone.default, aten.detach.default, aten.alias.default}


def remove_clones(joint: GraphModule) -> PassReport:
    """Replace copies of unchanged values by their sources, in place."""
    if any(_writes(node) for node in joint.graph.nodes):
        return PassReport()
    found = [node for node in joint.graph.nodes if node.op == "call_function" and node.target in CLONES]
    dropped = [node for node in found if _is_its_source(node)]
    for node in dropped:
        node.replace_all_uses_with(node.args[0])
        joint.graph.erase_node(node)
    joint.recompile()
    return PassReport(len(dropped))


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _is_its_source(copy: Node) -> bool:
    source = copy.args[0]
    assert isinstance(source, Node)
    if any(user.op == "output" for user in copy.users) or "recompute" in copy.meta:
        return False
    mine, its = copy.meta.get("val"), source.meta.get("val")
    if not isinstance(mine, torch.Tensor) or not isinstance(its, torch.Tensor) or mine.stride() != its.stride():
        return False
    return _has_memory_of_its_own(source)


def _has_memory_of_its_own(node: Node) -> bool:
    """Is a value computed, and no view? Strides and offsets of views refer to memory that others share."""
    return node.op == "call_function" and not getattr(node.target, "is_view", True)


# --- pooling ----------------------------------------------------------------------------------------------------------

IMAGE_OF = {
    aten.max_pool2d_with_indices_backward.default: 1, aten.max_pool3d_with_indices_backward.default: 1,
    aten.adaptive_max_pool2d_backward.default: 1, aten.adaptive_max_pool3d_backward.default: 1,
    aten.avg_pool2d_backward.default: 1, aten.avg_pool3d_backward.default: 1,
    aten._adaptive_avg_pool2d_backward.default: 1, aten._adaptive_avg_pool3d_backward.default: 1,
}  # fmt: skip
"""Backward -> position of its argument whose values it does not read: the image."""


def drop_saved_pool_inputs(joint: GraphModule) -> PassReport:
    """Replace the image by uninitialized memory of its shape and strides in backwards of pooling.

    Relies on: no later pass changes strides.
    """
    found = [node for node in joint.graph.nodes if node.target in IMAGE_OF]
    mode = compat.aot.detect_fake_mode([node.meta.get("val") for node in found]) if found else None
    count = sum(_drop_image(node, mode) for node in found) if mode is not None else 0
    joint.recompile()
    return PassReport(count)


def _drop_image(backward: Node, mode: Any) -> bool:
    image = backward.args[IMAGE_OF[backward.target]]  # type: ignore[index]
    assert isinstance(image, Node)
    value = image.meta["val"]
    layout = (list(value.shape), list(value.stride()))
    if not compat.sizes.is_fixed(value):
        return False
    settings = {"dtype": value.dtype, "device": value.device}
    with backward.graph.inserting_before(backward), mode:
        room = backward.graph.call_function(aten.empty_strided.default, layout, settings)
        room.meta["val"] = aten.empty_strided.default(*layout, **settings)
    compat.aot.always_recompute(room)
    backward.replace_input_with(image, room)
    return True
