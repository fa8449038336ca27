"""Cross-entropy of a linear layer by parts of the rows: gradients in the forward, no further off than eager's."""

from itertools import cycle

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dcompile
from dcompile.capture.passes.dynamo.chunked_cross_entropy import match
from dcompile.capture.passes.dynamo.chunked_cross_entropy.match import LossPlan
from dcompile.capture.passes.dynamo.chunked_cross_entropy.op import chunked_cross_entropy, row_spans
from tests.capture.passes.dynamo.chunked_cross_entropy.test_match import (
    Model,
    V,
    by_module,
    capped,
    classes_second,
    compiled,
    flat,
    inputs,
    notes,
    padded,
    scaled,
    see_that_they_agree,
    shifted,
    weighted,
)

try:
    from transformers.loss import loss_utils
except ImportError:
    loss_utils = None


@pytest.fixture(autouse=True)
def in_rows(monkeypatch):
    """The cost model, which would leave these small losses whole, chooses three parts of rows."""
    monkeypatch.setattr(match, "choose_plan", lambda *_: LossPlan("rows", 3, 0, 0.0, "forced"))


def gradients(function, *given, scale=1.0):
    """The loss, and the gradients of all arguments that require one."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in given]
    loss = function(*leaves)
    (loss * scale).backward()
    return [loss.detach(), *(x.grad for x in leaves if x.requires_grad)]


def operands(rows=48, width=16, classes=384, dtype=torch.float32, factor=1.0):
    torch.manual_seed(0)
    hidden = (torch.randn(rows, width) * factor).to(dtype).requires_grad_()
    weight = (torch.randn(classes, width) / 4).to(dtype).requires_grad_()
    target = torch.randint(0, classes, (rows,))
    target[:5] = -100
    return hidden, weight, target


def by_rows(hidden, weight, target, bias=None, class_weight=None, dtype=None, **settings):
    given = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "by_rows": True} | settings
    kind = dtype or hidden.dtype
    return chunked_cross_entropy(
        hidden, weight, bias, target, class_weight,
        chunks=3, begun=0, dtype=kind, result=torch.promote_types(kind, torch.float32), grad=True,
        **given,
    )  # fmt: skip


def are_no_further(ours, theirs, true):
    """Are gradients, behind a loss that is within two units in the last place, no further off than eager's?"""
    for number, (one, other, exact) in enumerate(zip(ours, theirs, true, strict=True)):
        assert one.dtype == other.dtype
        off, allowed = ((found.double() - exact).norm() for found in (one, other))
        assert off <= 1.02 * allowed + (2.5e-7 if number == 0 else 0) * exact.norm(), (number, off, allowed)


WAYS = {
    "rows": {"reduction": "mean", "keeps_powers": True},
    "rows on GPUs": {"reduction": "sum", "keeps_powers": False},
    "classes": {"reduction": "mean", "by_rows": False},
}


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# a usual run has each dtype by rows, and one with each other way
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        pytest.param(way, dtype, marks=() if way == "rows" or dtype == torch.bfloat16 else pytest.mark.full)
        for way in WAYS
        for dtype in DTYPES
    ],
    ids=str,
)
def test_gradients_are_no_further_from_float64_than_eagers(dtype, way):
    hidden, weight, target = operands(512, 64, 2048, dtype)
    scale, reduction = 64.0 if dtype == torch.float16 else 1.0, WAYS[way]["reduction"]

    def eager(h, w):
        return F.cross_entropy(F.linear(h, w).float(), target, reduction=reduction)

    def exact(h, w):
        return F.cross_entropy(F.linear(h, w), target, reduction=reduction)

    true = gradients(exact, hidden.double(), weight.double(), scale=scale)
    ours = gradients(lambda h, w: by_rows(h, w, target, **WAYS[way]), hidden, weight, scale=scale)
    are_no_further(ours, gradients(eager, hidden, weight, scale=scale), true)


def test_under_autocast_the_weights_gradient_is_not_rounded_to_16_bits():
    hidden, weight, target = operands(256, 64, 1024)

    def eager(h, w):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(F.linear(h, w).float(), target)

    true = gradients(lambda h, w: F.cross_entropy(F.linear(h, w), target), hidden.double(), weight.double())
    ours = gradients(lambda h, w: by_rows(h, w, target, dtype=torch.bfloat16), hidden, weight)
    are_no_further(ours, gradients(eager, hidden, weight), true)
    assert not torch.equal(ours[2], ours[2].bfloat16().float())


# --- edges ------------------------------------------------------------------------------------------------------------


def agree(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_without_rows_that_count_a_mean_is_nan_and_gradients_are_zero():
    hidden, weight, target = operands()
    target = torch.full_like(target, -100)
    ours = gradients(lambda h, w: by_rows(h, w, target), hidden, weight)
    agree(ours, gradients(lambda h, w: F.cross_entropy(F.linear(h, w), target), hidden, weight))
    assert ours[0].isnan() and not ours[1].any() and not ours[2].any()


@pytest.mark.parametrize(("smoothing", "way"), [(0.0, "rows"), (0.1, "rows on GPUs"), (0.0, "classes")])
def test_classes_without_probability(smoothing, way):
    hidden, weight, target = operands()
    bias = torch.zeros(len(weight)).index_fill(0, torch.arange(200, 384), -torch.inf).requires_grad_()
    target = torch.where(target >= 200, 7, target)  # the last chunk of classes has none
    settings = {"label_smoothing": smoothing, "reduction": WAYS[way]["reduction"]}
    ours = gradients(lambda h, w, b: by_rows(h, w, target, b, **WAYS[way] | settings), hidden, weight, bias)
    agree(ours, gradients(lambda h, w, b: F.cross_entropy(F.linear(h, w, b), target, **settings), hidden, weight, bias))


def test_one_class():
    hidden, weight, target = operands(classes=1)
    ours = gradients(lambda h, w: by_rows(h, w, target), hidden, weight)
    agree(ours, gradients(lambda h, w: F.cross_entropy(F.linear(h, w), target), hidden, weight))


@pytest.mark.parametrize("way", WAYS)
def test_scores_far_apart(way):
    hidden, weight, target = operands(factor=300.0)
    settings = {"reduction": WAYS[way]["reduction"]}
    ours = gradients(lambda h, w: by_rows(h, w, target, **WAYS[way]), hidden, weight)
    agree(ours, gradients(lambda h, w: F.cross_entropy(F.linear(h, w), target, **settings), hidden, weight))


def test_a_class_of_no_weight_still_has_its_label_smoothing():
    hidden, weight, target = operands()
    of_class = torch.rand(len(weight)).index_fill(0, target[10:20], 0.0)
    settings = {"label_smoothing": 0.3}
    ours = gradients(lambda h, w: by_rows(h, w, target, class_weight=of_class, **settings), hidden, weight)
    agree(
        ours,
        gradients(lambda h, w: F.cross_entropy(F.linear(h, w), target, of_class, **settings), hidden, weight),
    )  # fmt: skip


def test_chunks_cover_all_rows_once_and_have_whole_tiles_where_they_are_large():
    assert list(row_spans(7, 3)) == [(0, 3), (3, 6), (6, 7)]
    assert list(row_spans(1000, 3)) == [(0, 384), (384, 768), (768, 1000)]
    assert list(row_spans(16384, 8))[-1] == (14336, 16384)


# --- compiled models --------------------------------------------------------------------------------------------------


def of_hugging_face(logits, targets):
    return loss_utils.ForCausalLMLoss(logits, targets, V, num_items_in_batch=torch.tensor(7))


def of_nanogpt(logits, targets):
    targets = targets.clamp(min=-1)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def with_accuracy(logits, targets):
    right = (logits.argmax(-1) == targets).float().sum()
    return flat(logits, targets) * (1 + right)


# losses that differ in what is matched alone are test_match.py's, by classes
LOSSES = [of_hugging_face, with_accuracy]
MORE = [flat, shifted, by_module, classes_second, scaled, of_nanogpt, capped, padded, weighted]


@pytest.mark.parametrize(
    ("loss", "bias"),
    [
        *zip(LOSSES, cycle([True, False])),
        *(pytest.param(loss, n % 2 == 0, marks=pytest.mark.full) for n, loss in enumerate(MORE)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_loss_and_gradients_are_eagers(loss, bias):
    if loss is of_hugging_face and loss_utils is None:
        pytest.skip("needs transformers")
    torch.manual_seed(0)
    call = see_that_they_agree(Model(loss, bias), *inputs(), chunked_loss="auto")
    (note,) = notes(call)
    assert note.startswith("chunked_loss: 3 parts of at most 0.0 MB are there one after another")
    assert note.endswith("with their gradients: forced")


@pytest.mark.parametrize("loss", [weighted, pytest.param(capped, marks=pytest.mark.full)])
def test_kernels_agree_with_eager(real, loss):
    torch.manual_seed(0)
    see_that_they_agree(Model(loss), *inputs(), chunked_loss="auto", kernels="auto")


@pytest.mark.full
@pytest.mark.parametrize("wrong", [V, -1])
def test_a_target_that_is_no_class_is_an_error(real, wrong):
    tokens, targets = inputs()
    targets[1, 1] = wrong
    with pytest.raises((IndexError, RuntimeError), match=r"out of|index"):
        compiled(Model(flat), chunked_loss="auto", kernels="auto")(tokens, targets)


@pytest.mark.full
def test_a_tied_weight_has_both_gradients():
    class Tied(Model):
        def forward(self, tokens, targets):
            return flat(self.layer(self.embedding(tokens)) @ self.embedding.weight.t(), targets)

    torch.manual_seed(0)
    model = Tied(flat)
    del model.head
    assert "with their gradients" in notes(see_that_they_agree(model, *inputs(), chunked_loss="auto"))[0]


def test_a_frozen_head_gets_no_gradient_and_none_is_computed(real):
    torch.manual_seed(0)
    model = Model(flat, False, sizes=(16, 512))
    model.head.requires_grad_(False)
    report = dcompile.explain(compiled(model, chunked_loss="auto", kernels="auto"), *inputs(512, (4, 64)))
    forward = report.graphs[0].program
    made = [buffer for buffer in forward.buffers if buffer.name not in forward.inputs]
    assert max(buffer.nbytes for buffer in made) == 86 * 512 * 4 and (512, 16) not in [buffer.shape for buffer in made]
    assert sum(getattr(step, "op", "") == "aten.mm.default" for step in forward.steps) == 2 * 3  # in three parts


def test_a_checkpointed_loss_is_not_computed_again(real):
    class Checkpointed(Model):
        def forward(self, tokens, targets):
            hidden = self.layer(self.embedding(tokens)).tanh()
            return checkpoint(lambda h: self.loss(self.head(h), targets), hidden, use_reentrant=False)

    torch.manual_seed(0)
    model = Checkpointed(flat)
    report = dcompile.explain(compiled(model, chunked_loss="auto", kernels="auto"), *inputs())
    assert not any(V in buffer.shape[1:] for buffer in report.graphs[1].program.buffers), "no logits in the backward"


def test_accumulated_gradients_and_a_kept_graph():
    torch.manual_seed(0)
    model = Model(flat)
    call = compiled(model, chunked_loss="auto")
    for one in (model, call):
        one(*inputs()).backward()
        loss = one(*inputs()) / 3
        loss.backward(retain_graph=True)
        loss.backward()
    for ours, theirs in zip(call.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
