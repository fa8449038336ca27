"""Products whose rows do not end at whole 16 bytes grow inside, and nobody outside can tell."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.capture.passes.joint import pad_matmul
from tests.traits import change_cpu

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    change_cpu(monkeypatch, wants_aligned_matmul=True)
    monkeypatch.setattr(pad_matmul, "MIN_PADDED_SIDE", 8)
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
    assert pad_matmul.pad_matmuls(gm).changes == 3
    sides = {size for node in products(gm) for size in node.meta["val"].shape}
    assert sides == {32, 16}
    (after,) = gm.graph.output_node().args
    assert [(node.meta["val"].shape, node.meta["val"].stride()) for node in after] == before
    for found, wanted in zip(gm(*inputs), both_gradients(*inputs), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_matrix_that_two_products_read_grows_once():
    gm = traced(both_gradients, *operands())
    pad_matmul.pad_matmuls(gm)
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
    assert pad_matmul.pad_matmuls(gm).changes == 6
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
    assert pad_matmul.pad_matmuls(gm).changes == 0


def test_checkpointed_products_are_still_recomputed():
    """Else what a checkpoint frees would be saved, in a larger copy."""
    gm = traced(both_gradients, *operands())
    before = {*gm.graph.nodes}
    for node in before:
        node.meta["recompute"] = "as the region says"
    assert pad_matmul.pad_matmuls(gm).changes
    new = [node for node in gm.graph.nodes if node not in before]
    assert new and all(node.meta.get("recompute") == "as the region says" for node in new)


@pytest.mark.parametrize("shape", [(32, 16, 24), (32, 4, 13)])
def test_what_is_whole_or_small_stays(shape):
    m, k, n = shape
    gm = traced(lambda a, b: a @ b, torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16())
    text = str(gm.graph)
    assert pad_matmul.pad_matmuls(gm).changes == 0 and str(gm.graph) == text


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
