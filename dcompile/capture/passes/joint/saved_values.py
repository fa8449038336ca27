"""Choose, beyond torch's own rules, which values a forward saves and which ones its backward recomputes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.aliasing.output_views import memory_of
from dcompile.capture.aliasing.storage_resizes import CHANGES
from dcompile.device_traits import traits_of
from dcompile.ir.gemm import ALIGNMENT
from dcompile.passes import PassReport

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


def copy_changed_inputs(joint: Any) -> PassReport:
    """Copy inputs that the forward changes or frees and whose old values the backward needs.

    torch's partitioners save such an input itself, so the backward reads the changed values. In torch 2.11 to 2.13, a
    counter in a buffer (`self.n += 1; return x * self.n`) has gradients off by one step, with aot_eager and inductor.
    """
    changed = {node.args[0] for node in joint.graph.nodes if _changes(node)}
    changed |= compat.aot_descriptors.changed_behind(joint)
    if not changed:
        return PassReport()
    placeholders = joint.graph.find_nodes(op="placeholder")
    backward = compat.aot_descriptors.backward_nodes(joint)
    count = 0
    for old in placeholders:
        if old in changed and _is_read_in(old, backward):
            compat.aot.never_recompute(_only_copy(old) or _read_a_copy(joint, old, placeholders[-1]))
            count += 1
    return PassReport(count)


def _changes(node: Any) -> bool:
    """Does a node change an input, or free it?"""
    return str(node.target) == CHANGES or compat.storage_offsets.resizes(node.target)


def save_as_strided_views(joint: Any) -> PassReport:
    """Save an input's `as_strided` view in the forward, as eager does, instead of recomputing it from the input.

    By the backward, the input may have another layout (`p.data = p.data.t()`). It is then copied to the traced strides,
    in new memory, where the strides of `as_strided` would select other elements.
    """
    inputs = {memory_of(node) for node in joint.graph.find_nodes(op="placeholder")} - {None}
    count = 0
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
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
    readers = [user for user in old.users if user.op == "call_function" and not _changes(user)]
    return readers[0] if [str(reader.target) for reader in readers] == ["aten.clone.default"] else None


def _read_a_copy(joint: Any, old: Any, last: Any) -> Any:
    """Replace an input by a copy, except where the input is changed or returned."""
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
