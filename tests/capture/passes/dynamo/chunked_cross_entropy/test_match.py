"""Cross-entropy of a linear layer by parts of the classes: eager's numbers, and never the logits as a whole."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import cycle, pairwise
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dcompile
from dcompile.capture.passes.dynamo.chunked_cross_entropy.match import HeadShape, choose_plan
from dcompile.capture.passes.dynamo.chunked_cross_entropy.op import spans
from dcompile.codegen.schedule.memory.memory_summary import summarize_memory
from dcompile.codegen.schedule.memory.reorder_for_peak import peak_bytes
from dcompile.compiler.driver import Pipeline
from dcompile.errors import OptionError
from dcompile.explain import plan_only
from tools.collect_programs import relabel_devices

B, S, H, V = 2, 6, 8, 70
OPTIONS = {"chunked_loss": 2, "receipt": False}  # each part is traced: the first and the last are what differs


class Model(nn.Module):
    """A layer, a head, and what `loss(logits, targets)` makes of it."""

    def __init__(self, loss, bias=True, sizes=(H, V)):
        super().__init__()
        self.embedding = nn.Embedding(sizes[1], sizes[0])
        self.layer, self.head = nn.Linear(sizes[0], sizes[0]), nn.Linear(*sizes, bias=bias)
        self.loss = loss

    def forward(self, tokens, targets):
        hidden = self.layer(self.embedding(tokens)).tanh()
        return self.loss(self.head(hidden), targets)


def inputs(classes=V, rows=(B, S)):
    torch.manual_seed(1)
    targets = torch.randint(0, classes, rows)
    targets[0, :2] = -100
    if classes == V:
        targets[-1, -2] = V // 2  # with two parts, the first class of the second
    return torch.randint(0, classes, rows), targets


def flat(logits, targets):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def shifted(logits, targets):
    """As Hugging Face's models do it."""
    logits = logits.float()
    ours = logits[..., :-1, :].contiguous().view(-1, V)
    return F.cross_entropy(ours, targets[..., 1:].contiguous().view(-1), ignore_index=-100, reduction="sum") / 7


def by_module(logits, targets):
    loss = nn.CrossEntropyLoss(ignore_index=3, label_smoothing=0.1)
    return loss(logits.flatten(0, 1), targets.clamp(min=3).flatten())


def classes_second(logits, targets):
    return F.cross_entropy(logits.transpose(1, 2), targets, label_smoothing=0.2)


def each_row(logits, targets):
    rows = F.cross_entropy(logits[:, 1:].reshape(-1, V), targets[:, 1:].reshape(-1), reduction="none")
    return (rows * torch.arange(len(rows))).sum()


def scaled(logits, targets):
    return flat(logits, targets).square() / 4


def capped(logits, targets):
    """A soft cap and a temperature."""
    return flat(torch.tanh(logits / 3.0) * 3.0 / 0.7, targets)


def padded(logits, targets):
    """Without the words that pad the vocabulary, wide, and capped by a sigmoid around a shifted middle."""
    logits = 4 * torch.sigmoid((logits[..., :61].float() - 0.5) / 2.0)
    return F.cross_entropy(logits.view(-1, 61), targets.view(-1) % 61, label_smoothing=0.1)


def weighted(logits, targets):
    weights = torch.linspace(0.5, 2, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weights, label_smoothing=0.1)


def with_z_loss(logits, targets):
    """With accuracy as a factor, so that it has a part in the loss."""
    powers = logits.float().logsumexp(-1, keepdim=True)
    right = (logits.view(-1, V).argmax(-1) == targets.flatten()).float().sum()
    return flat(logits, targets) * (1 + right) + 0.1 * (powers.squeeze(-1) ** 2).mean()


def z_loss_alone(logits, targets):
    """The loss is computed, and its value alone is used."""
    return flat(logits, targets).detach() + logits.logsumexp(dim=-1).square().mean()


LOSSES = [flat, shifted, by_module, classes_second, each_row, scaled, with_z_loss, padded]
MORE = [capped, weighted, z_loss_alone]


def compiled(model, **options):
    torch._dynamo.reset()
    return dcompile.compile(copy.deepcopy(model), options={**OPTIONS, **options})


def results(model, *args):
    model.zero_grad()
    loss = model(*args)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def notes(call):
    return [note for note in dcompile.receipt(call).notes if note.startswith("chunked_loss")]


def see_that_they_agree(model, *args, rtol=1e-5, atol=1e-6, **options):
    call = compiled(model, **options)
    expected, found = results(model, *args), results(call, *args)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    return call


# a bias is cut like the weight's rows whatever the loss is: every other loss has one
@pytest.mark.parametrize(
    ("loss", "bias"),
    [*zip(LOSSES, cycle([True, False])), *(pytest.param(loss, True, marks=pytest.mark.full) for loss in MORE)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_loss_and_gradients_are_eagers(loss, bias):
    torch.manual_seed(0)
    parts = 3 if loss is flat else 2  # one in the middle, too
    call = see_that_they_agree(Model(loss, bias), *inputs(), chunked_loss=parts)
    (note,) = notes(call)
    assert note.startswith(f"chunked_loss: {parts} parts of at most 0.0 MB are there one after another")
    assert "(float32[2, 6, 70], 0.0 MB) of test_match.py:" in note


def test_a_product_with_a_turned_weight_is_a_head_and_its_weight_may_be_tied():
    class Tied(Model):
        def forward(self, tokens, targets):
            return flat(self.layer(self.embedding(tokens)) @ self.embedding.weight.t(), targets)

    torch.manual_seed(0)
    model = Tied(flat)
    del model.head
    call = see_that_they_agree(model, *inputs())
    assert "2 parts" in notes(call)[0]


def test_frozen_heads_get_no_gradient():
    torch.manual_seed(0)
    model = Model(flat)
    model.head.requires_grad_(False)
    call = compiled(model)
    for one in (model, call):
        one(*inputs()).backward()
    assert call.head.weight.grad is None and call.head.bias.grad is None and "2 parts" in notes(call)[0]
    torch.testing.assert_close(call.layer.weight.grad, model.layer.weight.grad)


def test_float64():
    torch.manual_seed(0)
    see_that_they_agree(Model(flat).double(), *inputs(), rtol=1e-12, atol=1e-12)


def test_parts_in_16_bits_are_no_further_off_than_eagers_one_product():
    """Four parts, whose gradients with respect to the layer's input are added up."""
    torch.manual_seed(0)
    model = Model(flat, sizes=(16, 4096)).to(torch.bfloat16)
    args = inputs(4096, (4, 64))
    exact = results(copy.deepcopy(model).double(), *args)
    call = compiled(model, chunked_loss=4)
    for ours, eagers, true in zip(results(call, *args), results(model, *args), exact, strict=True):
        assert ours.dtype == eagers.dtype
        off, allowed = ((found.double() - true).norm() for found in (ours, eagers))
        assert off <= 1.25 * allowed + 1e-9, (off, allowed)


def test_under_autocast_the_head_computes_as_it_would():
    class Cast(Model):
        def forward(self, tokens, targets):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(tokens, targets)

    torch.manual_seed(0)
    call = see_that_they_agree(Cast(flat), *inputs(), rtol=2e-2, atol=1e-2)
    assert "bfloat16[2, 6, 70]" in notes(call)[0]


def test_without_gradients():
    torch.manual_seed(0)
    model = Model(by_module)
    call = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(call(*inputs()), model(*inputs()))


def test_a_head_under_no_grad_has_no_gradient_though_its_loss_is_taken_elsewhere():
    class Frozen(Model):
        def forward(self, tokens, targets):
            hidden = self.layer(self.embedding(tokens))
            with torch.no_grad():
                logits = self.head(hidden)
            return flat(logits, targets) * hidden.sum()

    torch.manual_seed(0)
    model = Frozen(flat)
    call = compiled(model)
    for one in (model, call):
        one(*inputs()).backward()
    assert call.head.weight.grad is None and "2 parts" in notes(call)[0]
    torch.testing.assert_close(call.layer.weight.grad, model.layer.weight.grad)


def test_any_number_of_rows():
    torch.manual_seed(0)
    model = Model(flat)
    call = dcompile.compile(copy.deepcopy(model), dynamic=True, options=OPTIONS)
    for rows in ((2, 6), (3, 5), (4, 9)):  # a batch of one would be compiled again
        for one, other in zip(results(call, *inputs(rows=rows)), results(model, *inputs(rows=rows)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert [variant.graphs for variant in dcompile.receipt(call).variants] == [1] and "2 parts" in notes(call)[0]


def test_all_targets_ignored_and_scaled_losses():
    tokens, targets = inputs()
    torch.manual_seed(0)
    model = Model(flat)
    call = compiled(model)
    assert call(tokens, torch.full_like(targets, -100)).isnan()
    torch.testing.assert_close((call(tokens, targets) * 1024).item(), (model(tokens, targets) * 1024).item())


def test_a_checkpointed_head_is_computed_by_parts_and_keeps_no_logits():
    class Checkpointed(Model):
        def forward(self, tokens, targets):
            hidden = self.layer(self.embedding(tokens)).tanh()
            return checkpoint(lambda h: self.loss(self.head(h), targets), hidden, use_reentrant=False)

    torch.manual_seed(0)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        call = see_that_they_agree(Checkpointed(flat), *inputs())
        saved.clear()
        call(*inputs())
    assert "2 parts" in notes(call)[0]
    assert saved and not any(shape.numel() / (B * S) >= V - 1 for shape in saved if shape[-1:] != (H,))


def test_a_head_that_a_condition_runs_stays_whole_and_says_so():
    class Conditional(Model):
        def forward(self, tokens, targets):
            hidden = self.layer(self.embedding(tokens)).tanh()
            return torch.cond(
                targets.sum() > 0, lambda h: self.loss(self.head(h), targets), lambda h: h.sum(), (hidden,)
            )

    torch.manual_seed(0)
    model = Conditional(flat)
    call = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(call(*inputs()), model(*inputs()))
    assert "may run several times" in notes(call)[0]


def test_layers_that_repeat_are_still_traced_once():
    class Deep(Model):
        def __init__(self):
            super().__init__(flat)
            self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(7))

        def forward(self, tokens, targets):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = x + layer(x).tanh()
            return self.loss(self.head(x), targets)

    torch.manual_seed(0)
    model = Deep()
    del model.layer
    call = see_that_they_agree(model, *inputs())
    assert not [note for note in dcompile.receipt(call).notes if "traced each by itself" in note]


# --- losses that stay as they are ------------------------------------------------------------------------------------


def returned(logits, targets):
    return flat(logits, targets), logits


def looked_at(logits, targets):
    return flat(logits, targets) + logits.max()


def before_a_cap(logits, targets):
    return flat(logits.tanh(), targets) + logits.logsumexp(-1).mean()


def probable(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), torch.ones(B * S, V) / V)


def scaled_each(logits, targets):
    return flat(logits * targets.sum(), targets)


def regrouped(logits, targets):
    return F.cross_entropy(logits.view(B, V, S), targets)


def as_planes(logits, targets):
    return F.cross_entropy(logits, targets.new_zeros(B, V))


def without_gradient(logits, targets):
    return flat(logits.detach(), targets) + logits.sum() * 0


def elsewhere(logits, targets):
    return logits.logsumexp(-1).mean()


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (returned, "such as `lambda **batch: model(**batch).loss`"),
        (looked_at, "`max_1` (test_match.py:"),
        (before_a_cap, "`logsumexp` (test_match.py:"),
        (probable, "its targets are probabilities"),
        (scaled_each, "not a linear layer's result alone, but `"),
        (regrouped, "classes are not the last dimension"),
        (as_planes, "classes are not the last dimension"),
        (without_gradient, "not a linear layer's result alone, but `detach"),
        (elsewhere, "computes no cross_entropy"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_done_by_parts_stays_and_says_so(loss, reason):
    torch.manual_seed(0)
    model = Model(loss)
    call = compiled(model)
    with torch.no_grad():  # there is half as much to trace
        torch.testing.assert_close(call(*inputs()), model(*inputs()))
    (note,) = notes(call)
    assert reason in note
    counted = dcompile.receipt(call).fallbacks.get("loss that chunked_loss leaves whole", 0)
    assert counted == ("computed whole" in note)


def test_what_changes_between_head_and_loss_stays():
    class Changing(Model):
        def forward(self, tokens, targets):
            hidden = self.embedding(tokens)
            logits = self.head(hidden)
            hidden[0].add_(1)
            return flat(logits, targets) + hidden.sum()

    torch.manual_seed(0)
    model = Changing(flat)
    call = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(call(*inputs()), model(*inputs()))
    assert "changes something meanwhile" in notes(call)[0]


def test_targets_may_be_written_between_head_and_loss():
    def padded(logits, targets):
        labels = targets.new_zeros(targets.shape)
        labels[:, :-1] = targets[:, 1:].clone()
        labels[:, -1] = -100
        return flat(logits, labels)

    torch.manual_seed(0)
    assert "2 parts" in notes(see_that_they_agree(Model(padded), *inputs()))[0]


# --- kernels and memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["auto", "aten"])
def test_kernels_agree_with_eager(real, kernels):
    torch.manual_seed(0)
    see_that_they_agree(Model(by_module), *inputs(), kernels=kernels)


@pytest.mark.parametrize("wrong", [V, -1])
def test_a_target_that_is_no_class_is_an_error(real, wrong):
    tokens, targets = inputs()
    targets[1, 1] = wrong
    with pytest.raises((IndexError, RuntimeError), match=r"out of|index"):
        compiled(Model(flat))(tokens, targets)


@pytest.mark.parametrize(
    ("dtype", "bias"),
    [pytest.param(torch.float32, False, marks=pytest.mark.full), (torch.bfloat16, True)],
    ids=["", "bias"],
)
def test_logits_are_never_there_as_a_whole(real, dtype, bias):
    """Plans alone: 512 rows, 4096 classes of width 16."""
    model = Model(flat, bias, sizes=(16, 4096)).to(dtype)
    whole, peaks = 512 * 4096 * dtype.itemsize, []
    for parts in (0, 4):
        report = dcompile.explain(compiled(model, chunked_loss=parts), *inputs(4096, (4, 128)))
        programs = [graph.program for graph in report.graphs]
        assert [program.name for program in programs] == ["forward0", "backward0"]
        peaks.append([peak_bytes(program) for program in programs])
        largest = max(buffer.nbytes for program in programs for buffer in program.buffers)
        assert largest == (whole // 4 if parts else whole)
        assert not parts or "4 parts" in str(report)
    for usual, less in zip(*peaks, strict=True):
        assert usual >= whole and less < usual - 0.6 * whole, (usual, less)


def test_two_losses_of_one_head_are_there_one_part_after_another(real):
    class Twice(Model):
        def forward(self, tokens, targets):
            first = self.layer(self.embedding(tokens)).tanh()
            second = self.layer(first).tanh()
            return self.loss(self.head(first), targets) + self.loss(self.head(second), targets)

    torch.manual_seed(0)
    model = Twice(flat, sizes=(16, 4096))
    see_that_they_agree(model, *inputs(4096, (4, 8)), kernels="aten")
    report = dcompile.explain(compiled(model, chunked_loss=3), *inputs(4096, (4, 128)))
    assert max(peak_bytes(graph.program) for graph in report.graphs) < 0.5 * 512 * 4096 * 4


# --- torch's own function for chunks ---------------------------------------------------------------------------------

HAS_OWN = hasattr(F, "linear_cross_entropy")  # since torch 2.13


def of_head(module, **more):
    """A loss module of torch's in place of the head, as `Model.loss` gets it."""

    class Own(Model):
        def __init__(self):
            super().__init__(None)
            options = nn.LinearCrossEntropyOptions() if module == "chunks" else None
            self.head = nn.LinearCrossEntropyLoss(H, V, bias=True, options=options, **more)

        def forward(self, tokens, targets):
            hidden = self.layer(self.embedding(tokens)).tanh()
            return self.head(hidden.flatten(0, 1), targets.flatten()).sum()

    return Own()


@pytest.mark.skipif(not HAS_OWN, reason="torch 2.13 has the first one")
@pytest.mark.parametrize(
    ("module", "more"),
    [
        ("whole", {"label_smoothing": 0.1}),
        ("chunks", {"weight": torch.linspace(0.5, 2, V), "ignore_index": 3}),
        ("chunks", {"reduction": "sum", "label_smoothing": 0.1}),  # torch has no chunks for it, and warns
        pytest.param("chunks", {"reduction": "sum"}, marks=pytest.mark.full),
        ("chunks", {"reduction": "none"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@pytest.mark.filterwarnings("ignore:linear_cross_entropy. ..options.. ignored")
def test_torchs_own_module_is_one_graph_and_in_chunks(module, more):
    torch.manual_seed(0)
    tokens, targets = inputs()
    targets = targets.clamp(min=0) if "reduction" in more else targets.clamp(min=3)
    call = see_that_they_agree(of_head(module, **more), tokens, targets)
    (note,) = notes(call)
    assert "2 parts of at most 0.0 MB" in note and "of test_match.py:" in note
    receipt = dcompile.receipt(call)
    assert receipt.graphs == 1 and not any("cross" in name or "eager" in name for name in receipt.fallbacks)


@pytest.mark.skipif(not HAS_OWN, reason="torch 2.13 has the first one")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_who_asks_torch_for_chunks_has_them_without_a_number_and_with_its_precision(dtype):
    """Logits in float32: torch's chunks round them no more. Autocast, which lowers linear layers, leaves them, too."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(size, 8).to(dtype).requires_grad_() for size in (12, V))
    targets = torch.randint(V, (12,))

    def function(hidden, weight):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear_cross_entropy(hidden, weight, targets, options=nn.LinearCrossEntropyOptions()) * 3

    torch._dynamo.reset()
    call = dcompile.compile(function, options={"receipt": False})
    loss = call(hidden, weight)
    factors = [factor.detach().double().requires_grad_() for factor in (hidden, weight)]
    exact = F.cross_entropy(factors[0] @ factors[1].t(), targets) * 3
    for found, expected in zip(
        (loss, *torch.autograd.grad(loss, (hidden, weight))), (exact, *torch.autograd.grad(exact, factors)), strict=True
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(
            found, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps / 4
        )
    (note,) = notes(call)
    assert "2 parts" in note and "the backward recomputes them" in note


@pytest.mark.skipif(not HAS_OWN, reason="torch 2.13 has the first one")
def test_probabilities_as_targets_of_torchs_own_are_whole_or_torchs_chunks():
    """torch 2.15 has chunks for them; earlier ones warn in eager mode that they have none."""
    hidden, weight = (torch.randn(size, 8, requires_grad=True) for size in (12, V))
    targets = torch.rand(12, V).softmax(1)

    def function(hidden, weight):
        return F.linear_cross_entropy(hidden, weight, targets, options=nn.LinearCrossEntropyOptions())

    torch._dynamo.reset()
    call = dcompile.compile(function, options={"receipt": False})
    found, expected = call(hidden, weight), F.cross_entropy(hidden @ weight.t(), targets)
    torch.testing.assert_close(found, expected)
    pairs = zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)
    assert dcompile.receipt(call).graphs == 1


# --- the option ------------------------------------------------------------------------------------------------------


def test_parts_cover_all_classes_once_and_are_aligned_where_they_are_large():
    assert list(spans(7, 3)) == [(0, 3), (3, 6), (6, 7)]
    assert list(spans(2, 5)) == [(0, 1), (1, 2)]
    found = list(spans(50257, 8))
    assert found[0] == (0, 6288) and found[-1][1] == 50257 and len(found) == 8
    assert all(a[1] == b[0] and b[0] % 8 == 0 for a, b in pairwise(found))


@pytest.mark.parametrize("wrong", [1, -2, True, "1", "many", 2.5, None])
def test_numbers_of_parts_that_are_none(wrong):
    with pytest.raises(OptionError, match=r"chunked_loss=.* 'auto', or .* at least 2, or 0"):
        dcompile.compile(nn.Linear(2, 2), options={"chunked_loss": wrong})


def test_it_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("DCOMPILE_CHUNKED_LOSS", "4")
    torch._dynamo.reset()
    call = dcompile.compile(Model(flat), options={"receipt": False})
    call(*inputs())
    assert "4 parts" in notes(call)[0]


def shape(rows, classes, width, dtype="bfloat16", device="cuda", **more):
    learns = {"hidden_learns": True, "weight_learns": True, "is_one_sum": True} | more
    return HeadShape(rows, classes, width, dtype, device, **learns)


FROZEN = {"weight_learns": False}


@pytest.mark.parametrize(
    ("sizes", "more", "saves", "kind"),
    [
        ((16384, 248320, 2048), {}, False, "rows"),
        ((16384, 128256, 4096), {}, False, "rows"),
        ((16384, 32768, 1024), {}, False, "rows"),  # those of test_match_gpu.py
        ((4096, 128256, 4096), {}, False, "whole"),  # the weight's sums in float32 take more than the logits
        ((4096, 128256, 4096), {}, True, "whole"),  # checkpoints save more memory for as many FLOPs
        ((4096, 128256, 4096), FROZEN, False, "rows"),
        ((16384, 248320, 2048), {"is_one_sum": False}, False, "whole"),
        ((16384, 248320, 2048), {"is_one_sum": False}, True, "classes"),
        ((16384, 248320, 2048), {"hidden_learns": False, **FROZEN}, False, "classes"),
        ((8192, 50304, 768), {"dtype": "float32", "device": "cpu"}, False, "rows"),
        ((8192, 50304, 768), {"device": "cpu"}, False, "whole"),
        ((64, 1000, 512), FROZEN, True, "whole"),
    ],
)
def test_what_gains_memory_for_little_time_is_chosen(sizes, more, saves, kind):
    plan = choose_plan(shape(*sizes, **more), saves)
    assert plan.kind == kind
    large = sizes[0] * sizes[1] * 2 >= 1 << 28
    assert (" GB for " in plan.reason) == large, "what is small needs no reason"


@pytest.mark.parametrize(
    ("sizes", "more", "kind", "share"),
    [
        ((16384, 248320, 2048), {}, "rows", 0.5),
        ((8192, 128256, 4096), {}, "classes", 0.2),  # the weight's sums in float32 take as much as the logits
        ((16384, 248320, 2048), {"is_one_sum": False}, "classes", 0.1),
        ((8192, 50304, 768), {"device": "cpu"}, "rows", 0.5),
        ((64, 1000, 512), {}, "classes", 1.6),  # too small for either: sums take more than the logits
    ],
)
def test_who_asks_for_chunks_gets_what_gains_memory(sizes, more, kind, share):
    plan = choose_plan(shape(*sizes, **more), False, True)
    assert plan.kind == kind
    assert plan.peak_bytes <= share * 2 * sizes[0] * sizes[1]


def test_reasons_for_whole_logits_name_what_would_save_memory():
    assert "16-bit factors" in choose_plan(shape(8192, 50304, 768, device="cpu"), False).reason
    reason = choose_plan(shape(16384, 248320, 2048, is_one_sum=False), False).reason
    assert "not one sum" in reason and "chunked_loss=16 would take 0.64 GB for 8.14" in reason


@pytest.fixture(scope="module")
def planned():
    """Programs for an H100 of 16384 tokens, 248320 classes and a width of 2048, and the note."""
    programs, plan = {}, Pipeline.plan

    def plan_for_gpu(pipeline, gm, request, *more):
        with relabel_devices(gm, torch.device("cuda:0")):
            found = plan(pipeline, gm, request, *more)
        programs[request.name] = found.program
        return found

    def loss(hidden, weight, labels):
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    torch._dynamo.reset()
    with (
        mock.patch.object(Pipeline, "plan", plan_for_gpu),
        mock.patch.object(plan_only, "PLANNED", replace(plan_only.PLANNED, planned_for="cuda", needs_data=False)),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        hidden, weight = (torch.empty(size, 2048, dtype=torch.bfloat16, requires_grad=True) for size in (16384, 248320))
        report = dcompile.explain(dcompile.compile(loss), hidden, weight, torch.zeros(16384, dtype=torch.int64))
    return programs, report


def test_planned_memory_of_a_large_vocabulary_on_a_gpu(planned):
    programs, report = planned
    gradients = 2 * 2048 * (16384 + 248320)
    peaks = [summarize_memory(programs[name]).peak_bytes - gradients for name in ("forward0", "backward0")]
    assert max(peaks) < 2.2e9, "below the 3.1 GB of cut cross-entropy"
    assert "8 parts of at most 1017.1 MB are there one after another" in str(report)
