"""Save less for the backward of pooling: of max pooling, the position of each maximum in its window, in 1 or 2 bytes.

ATen's operator returns positions in the image, in 8 bytes each. For the first pooling of ResNet-50 with 128 images that
is 196 MiB, as much as its largest activation. The difference to the position of the window's first element is small,
and the backward adds that position again. ATen's backwards also take the image, but read only its shape and strides.
They get uninitialized memory instead.

Guarantees: the same values. The result depends only on the graph, so it is the same on every rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.passes import PassReport

aten, prims = torch.ops.aten, torch.ops.prims

COMPACT_DTYPES = ((torch.uint8, 2**8), (torch.int16, 2**15))
"""(dtype, number of positions in a window that it can represent)."""


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
    return _rewrite(joint, [node for node in joint.graph.nodes if node.target in IMAGE_OF], _take_room)


def _rewrite(joint: GraphModule, nodes: Sequence[Node], rewrite: Callable[[Node, Any], bool]) -> PassReport:
    """Rewrite each node where that is possible, in the graph's fake mode."""
    mode = compat.aot.detect_fake_mode([node.meta.get("val") for node in nodes]) if nodes else None
    count = sum(rewrite(node, mode) for node in nodes) if mode is not None else 0
    joint.recompile()
    return PassReport(count)


def _take_room(backward: Node, mode: Any) -> bool:
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


def compact_pool_indices(joint: GraphModule) -> PassReport:
    """Save compact positions for backwards of max pooling in two dimensions."""
    backward = aten.max_pool2d_with_indices_backward.default
    return _rewrite(joint, joint.graph.find_nodes(op="call_function", target=backward), _shorten)


def _shorten(backward: Node, mode: Any) -> bool:
    """Compute one backward's positions from saved compact ones; return whether that was possible."""
    image, positions = backward.args[1], backward.args[7]
    assert isinstance(image, Node) and isinstance(positions, Node)
    value = positions.meta["val"]
    sizes = (*image.meta["val"].shape, *value.shape)
    if positions.target is not operator.getitem or not all(isinstance(size, int) for size in sizes):
        return False
    (kernel, stride, padding, dilation), width = map(_pair, backward.args[2:6]), int(sizes[-1 - value.dim()])
    stride = stride or kernel
    reach = (kernel[0] - 1) * dilation[0] * width + (kernel[1] - 1) * dilation[1]
    dtype = next((dtype for dtype, count in COMPACT_DTYPES if reach < count), None)
    if dtype is None:
        return False
    graph = backward.graph

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        node = graph.call_function(target, args, kwargs)
        given = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with mode:
            node.meta["val"] = target(*given[0], **given[1])
        return node

    def window_starts() -> Node:
        """Compute the position of each window's first element, which may be outside the image due to padding."""
        settings = {"dtype": torch.int64, "device": value.device, "requires_grad": False}
        above, beside = -padding[0] * width - padding[1], 0
        rows = call(prims.iota.default, value.shape[-2], start=above, step=stride[0] * width, **settings)
        columns = call(prims.iota.default, value.shape[-1], start=beside, step=stride[1], **settings)
        return call(aten.add.Tensor, call(aten.unsqueeze.default, rows, 1), columns)

    with graph.inserting_before(positions.next):
        short = call(aten._to_copy.default, call(aten.sub.Tensor, positions, window_starts()), dtype=dtype)
    with graph.inserting_before(backward):
        again = call(aten.add.Tensor, short, window_starts())  # int64, no conversion: cheap enough for each use
    compat.aot.always_recompute(again)
    backward.replace_input_with(positions, again)
    return True


def _pair(given: Any) -> Sequence[int]:
    """Expand a window's size as ATen does: one number is for both dimensions; an empty one stays empty."""
    numbers = [int(number) for number in given] if isinstance(given, (tuple, list)) else [int(given)]
    return numbers * 2 if len(numbers) == 1 else numbers
