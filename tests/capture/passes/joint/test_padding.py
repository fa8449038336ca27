"""Matmuls and groups of convolutions grow inside to sizes that libraries are fast for; results are as before."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.capture.passes.joint import padding
from dcompile.capture.passes.joint.padding import pad_groups, padded_width
from tests.traits import change_cpu

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    change_cpu(monkeypatch, wants_aligned_matmul=True)
    monkeypatch.setattr(padding, "MIN_PADDED_SIDE", 8)
    torch.compiler.reset()


def traced(function, *args):
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


def products(gm):
    return [node for node in gm.graph.nodes if node.target in (aten.mm.default, aten.addmm.default)]


def operands():
    return [torch.randn(*shape).bfloat16() for shape in ((32, 16), (13, 16), (13,))]


def both_gradients(x, w, bias):
    logits = torch.addmm(bias, x, w.t())
    given = (logits.float().softmax(-1) / 32).bfloat16()
    return given.t() @ x, given @ w, given.float().sum(0)


def test_all_sides_are_whole_and_results_are_as_before():
    gm, inputs = traced(both_gradients, *operands()), operands()
    (before,) = gm.graph.output_node().args
    before = [(node.meta["val"].shape, node.meta["val"].stride()) for node in before]
    assert padding.pad_matmuls(gm).changes == 3
    sides = {size for node in products(gm) for size in node.meta["val"].shape}
    assert sides == {32, 16}
    (after,) = gm.graph.output_node().args
    assert [(node.meta["val"].shape, node.meta["val"].stride()) for node in after] == before
    for found, wanted in zip(gm(*inputs), both_gradients(*inputs), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_matrix_that_two_products_read_grows_once():
    gm = traced(both_gradients, *operands())
    padding.pad_matmuls(gm)
    grown = [node for node in gm.graph.nodes if node.target is aten.constant_pad_nd.default]
    assert len(grown) == 3  # weight, bias, gradient of the logits


WIDE = torch.ops.dcompile_matmul


def in_two_chunks(x, w):
    """The gradients of a layer's input and weight, the latter's summed in float32, as a loss by chunks of rows does."""
    by_weight, by_hidden = None, []
    for rows in x.split(16):
        gradient = (rows @ w.t()).float().softmax(-1).bfloat16()
        by_hidden.append(WIDE.mm_float32(gradient, w))
        factors = gradient.t(), rows
        by_weight = WIDE.addmm_float32(by_weight, *factors) if by_hidden[1:] else WIDE.mm_float32(*factors)
    return by_weight, torch.cat(by_hidden)


def test_sums_in_float32_stay_padded_from_chunk_to_chunk():
    x, w, _ = operands()
    gm = traced(in_two_chunks, x, w)
    assert padding.pad_matmuls(gm).changes == 6
    wide = (WIDE.mm_float32.default, WIDE.addmm_float32.default)
    first, second = (node for node in gm.graph.nodes if node.target in wide and node.args[-2].target is aten.t.default)
    assert second.args[0] is first and second.args[1].meta["val"].shape == (16, 16)
    grown = [node for node in gm.graph.nodes if node.target is aten.constant_pad_nd.default]
    assert len(grown) == 3, "the weight, and each chunk's gradient, which both of its products read"
    for found, wanted in zip(gm(x, w), in_two_chunks(x, w), strict=True):
        assert found.shape == wanted.shape and found.stride() == wanted.stride()
        torch.testing.assert_close(found, wanted)


def test_a_matrix_to_add_that_is_not_padded_itself_stays():
    x, w, _ = operands()
    gm = traced(lambda sums, x, w: WIDE.addmm_float32(sums, x, w.t()), torch.zeros(32, 13), x, w)
    assert padding.pad_matmuls(gm).changes == 0


def test_checkpointed_products_are_still_recomputed():
    """Else what a checkpoint frees would be saved, in a larger copy."""
    gm = traced(both_gradients, *operands())
    before = {*gm.graph.nodes}
    for node in before:
        node.meta["recompute"] = "as the region says"
    assert padding.pad_matmuls(gm).changes
    new = [node for node in gm.graph.nodes if node not in before]
    assert new and all(node.meta.get("recompute") == "as the region says" for node in new)


@pytest.mark.parametrize("shape", [(32, 16, 24), (32, 4, 13)])
def test_what_is_whole_or_small_stays(shape):
    m, k, n = shape
    gm = traced(lambda a, b: a @ b, torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16())
    text = str(gm.graph)
    assert padding.pad_matmuls(gm).changes == 0 and str(gm.graph) == text


def head(x, w, bias, labels):
    logits = torch.addmm(bias, x, w.t())
    return torch.nn.functional.cross_entropy(logits.float(), labels), logits


def test_a_classifier_gives_the_same_and_its_logits_have_their_strides():
    torch.manual_seed(0)
    x, w, bias = (tensor.requires_grad_() for tensor in operands())
    labels = torch.randint(0, 13, (32,))
    found = []
    for function in (head, dcompile.compile(head, options={"receipt": False, "verify": True})):
        loss, logits = function(x, w, bias, labels)
        found.append([loss, logits, *torch.autograd.grad(loss + logits[0, 3].float(), (x, w, bias))])
    for a, b in zip(*found, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1.6e-2)


@pytest.mark.parametrize(("options", "columns"), [({}, 16), ({"shape_padding": False}, 13)])
def test_the_option_says_whether_a_compiled_product_grows(options, columns, compilers):
    x, w, bias = operands()
    found = dcompile.compile(torch.addmm, options={"receipt": False, **options})(bias, x, w.t())
    torch.testing.assert_close(found, torch.addmm(bias, x, w.t()))
    (product,) = products(compilers[0].modules[0])
    assert product.meta["val"].shape == (32, columns)


LAST = torch.channels_last


def grouped(function, *args):
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
    gm = grouped(lambda x, w: aten.convolution(x, w, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 3), x, w)
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
    gm, before = grouped(both, *given), grouped(both, *given)
    assert pad_groups(gm).changes == 2
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        filters = node.args[1].meta["val"]
        assert filters.shape[:2] == (groups * padded_width(out), padded_width(width))
        assert node.args[0].meta["val"].is_contiguous(memory_format=LAST) and filters.is_contiguous(memory_format=LAST)
    terms = both(*(tensor.abs() for tensor in given))
    for found, expected, sizes in zip(gm(*given), before(*given), terms, strict=True):
        assert found.stride() == expected.stride()
        # Some processors round parts of a convolution's sums: a bound by the result breaks where terms cancel.
        assert ((found.float() - expected.float()).abs() <= 2**-8 * sizes.float()).all()


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
    gm = grouped(lambda x, w: aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups), x, w)
    text = str(gm.graph)
    assert pad_groups(gm).changes == 0 and str(gm.graph) == text


def test_cpus_have_no_such_kernels():
    images, filters = image(2, 48, 6, 6), image(48, 24, 3, 3)
    gm = grouped(lambda x, w: aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 2), images, filters)
    assert pad_groups(gm).changes == 0
