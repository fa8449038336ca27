"""Recompute a float32 softmax of 16-bit scores in the backward, instead of saving it.

Attention written out computes its probabilities in float32, and casts them to 16 bits for the second matmul. The
gradient of the softmax needs them in float32 again. Scores have half the bytes. A kernel that holds rows in registers
reads each once either way, so recomputing costs less than the bytes that it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.joint.saved_values import VIEWS
from dcompile.device_traits import traits_of
from dcompile.passes import PassReport

aten = torch.ops.aten

MAX_ROW = 16384
"""Elements of a row that a program holds in registers; it would read longer ones several times."""
MIN_BYTES = 1 << 20
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
    chosen = [node for node in found if node not in backward and _gains(node, backward)]
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
    return is_along_rows and value.shape[-1] <= MAX_ROW and 4 * value.numel() >= MIN_BYTES


def _gains(softmax: Node, backward: set[Node]) -> bool:
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
    return all(map(is_small, sources)) and sum(map(_bytes, sources)) <= MAX_SOURCE_SHARE * _bytes(softmax)


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


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0
