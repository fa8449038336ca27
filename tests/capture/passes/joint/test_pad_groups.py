"""Groups of convolutions are as wide as the library likes them, and nobody outside can tell."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.capture.passes.joint.pad_groups import pad_groups, padded_width
from tests.traits import change_cpu

aten = torch.ops.aten
LAST = torch.channels_last


def traced(function, *args):
    return make_fx(function, tracing_mode="fake")(*args)


def image(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype).contiguous(memory_format=LAST)


def test_widths():
    kept = (1, 4, 8, 16, 32, 64, 128, 160)
    assert [padded_width(width) for width in kept] == [*kept]
    assert [padded_width(width) for width in (2, 3, 12, 24, 40, 48, 112)] == [4, 4, 16, 32, 64, 64, 128]


def test_checkpointed_convolutions_are_still_recomputed(monkeypatch):
    change_cpu(monkeypatch, pads_groups=True)
    x, w = image(2, 72, 7, 6), image(72, 24, 3, 3)
    gm = traced(lambda x, w: aten.convolution(x, w, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 3), x, w)
    before = {*gm.graph.nodes}
    for node in before:
        node.meta["recompute"] = "as the region says"
    assert pad_groups(gm).changes == 1
    new = [node for node in gm.graph.nodes if node not in before]
    assert new and all(node.meta.get("recompute") == "as the region says" for node in new)


@pytest.mark.parametrize(("width", "out"), [(24, 24), (24, 48), (16, 12), (12, 16)])
@pytest.mark.parametrize("mask", [(True, True), (False, True), (True, False)])
def test_results_are_parts_of_padded_ones(width, out, mask, monkeypatch):
    change_cpu(monkeypatch, pads_groups=True)
    groups, how = 3, ([2, 2], [1, 1], [1, 1], False, [0, 0], 3)
    x, w = image(2, groups * width, 7, 6), image(groups * out, width, 3, 3)

    def both(x, w, g):
        y = aten.convolution(x.relu(), w, None, *how)
        grads = aten.convolution_backward(y * g, x.relu(), w, None, *how, [*mask, False])
        return y, *(grad for grad, wanted in zip(grads, mask, strict=False) if wanted)

    given = x, w, image(2, groups * out, 4, 3)
    gm, before = traced(both, *given), traced(both, *given)
    assert pad_groups(gm).changes == 2
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        filters = node.args[1].meta["val"]
        assert filters.shape[:2] == (groups * padded_width(out), padded_width(width))
        assert node.args[0].meta["val"].is_contiguous(memory_format=LAST) and filters.is_contiguous(memory_format=LAST)
    for found, expected in zip(gm(*given), before(*given), strict=True):
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("x", "w", "groups", "transposed"),
    [
        (image(2, 72, 6, 6), image(72, 1, 3, 3), 72, False),
        (image(2, 64, 6, 6), image(64, 32, 3, 3), 2, False),
        (image(2, 24, 6, 6), image(24, 24, 3, 3), 1, False),
        (image(2, 48, 6, 6).contiguous(), image(48, 24, 3, 3), 2, False),
        (image(2, 48, 6, 6), image(48, 24, 3, 3), 2, True),
        (image(2, 48, 6, 6, dtype=torch.float32), image(48, 24, 3, 3, dtype=torch.float32), 2, False),
    ],
    ids=["depthwise", "whole", "one group", "row-major", "transposed", "float32"],
)
def test_left_alone(x, w, groups, transposed, monkeypatch):
    change_cpu(monkeypatch, pads_groups=True)
    gm = traced(lambda x, w: aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups), x, w)
    text = str(gm.graph)
    assert pad_groups(gm).changes == 0 and str(gm.graph) == text


def test_cpus_have_no_such_kernels():
    gm = traced(lambda x, w: aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 2), image(2, 48, 6, 6),
                image(48, 24, 3, 3))  # fmt: skip
    assert pad_groups(gm).changes == 0
