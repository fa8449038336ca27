"""Cross-entropy on a CPU, whose gradient is made with the loss: eager's numbers, whatever becomes of the loss."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dcompile
from dcompile.capture.passes.dynamo import loss_gradient_in_forward
from dcompile.ir.nodes import View

ROWS, CLASSES = 6, 1500


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()


@pytest.fixture
def made(monkeypatch):
    """How many losses made their gradient as well."""
    calls = []
    monkeypatch.setattr(
        loss_gradient_in_forward,
        "cross_entropy_ahead",
        lambda *args, **how: calls.append(how) or original(*args, **how),
    )
    return calls


original = loss_gradient_in_forward.cross_entropy_ahead


def given(dtype=torch.float32, ignored=()):
    torch.manual_seed(0)
    logits, targets = 3 * torch.randn(ROWS, CLASSES, dtype=dtype), torch.randint(0, CLASSES, (ROWS,))
    targets[list(ignored)] = -100
    return logits, targets


def gradient(function, logits, targets, factor=1.0):
    logits = logits.clone().requires_grad_()
    loss = function(logits, targets)
    (found,) = torch.autograd.grad(loss, logits, torch.full_like(loss, factor))
    return loss.detach(), found


def assert_equals_eager(function, logits, targets, factors=(1.0, 1.0), **tolerance):
    compiled = dcompile.compile(function, options={"receipt": False})
    for factor in factors:
        found, expected = (gradient(f, logits, targets, factor) for f in (compiled, function))
        torch.testing.assert_close(found, expected, msg=lambda text, f=factor: f"factor {f}: {text}", **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_whatever_the_loss_is_multiplied_by(dtype, made):
    exact = {} if dtype != torch.bfloat16 else {"rtol": 2e-2, "atol": 4e-4}  # eager rounds the logarithms, too
    assert_equals_eager(F.cross_entropy, *given(dtype, ignored=(1, 4)), (1.0, 0.25, -3.0, 0.0, 1.0), **exact)
    assert made


def test_bfloat16_is_nearer_to_float32_than_eager():
    logits, targets = given(torch.bfloat16)
    _, exact = gradient(F.cross_entropy, logits.float(), targets)
    _, eager = gradient(F.cross_entropy, logits, targets)
    _, found = gradient(dcompile.compile(F.cross_entropy, options={"receipt": False}), logits, targets)
    assert (found.float() - exact).abs().mean() < (eager.float() - exact).abs().mean() / 2


def test_the_number_of_rows_is_as_exact_as_the_logits():
    logits, targets = given(torch.float64, ignored=(3,))  # a fifth has no end
    assert_equals_eager(F.cross_entropy, logits, targets, rtol=1e-12, atol=1e-14)
    torch._dynamo.reset()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert_equals_eager(F.cross_entropy, *given(torch.float32, ignored=(3,)), rtol=2e-6, atol=1e-8)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("how", [{"reduction": "sum"}, {"ignore_index": 7}, {"ignore_index": 7, "reduction": "sum"}])
def test_settings_of_the_loss(how, made):
    logits, targets = given()
    targets[2] = 7
    assert_equals_eager(lambda x, y: F.cross_entropy(x, y, **how), logits, targets, rtol=2e-6, atol=1e-6)
    assert made


def test_rows_that_are_all_left_out():
    logits, targets = given(ignored=range(ROWS))
    assert_equals_eager(F.cross_entropy, logits, targets, equal_nan=True)


def test_infinite_and_missing_logits():
    logits, targets = given()
    logits[0, 3], logits[1, 4], logits[2, 5] = torch.inf, -torch.inf, torch.nan
    assert_equals_eager(F.cross_entropy, logits, targets, equal_nan=True)


@pytest.mark.parametrize(
    "how",
    [
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"weight": torch.linspace(0.5, 1.5, CLASSES)},
    ],
    ids=lambda how: next(iter(how)),
)
def test_what_stays_as_it_is(how, made):
    assert_equals_eager(lambda x, y: F.cross_entropy(x, y, **how).sum(), *given(), rtol=2e-6, atol=1e-6)
    assert not made


def test_float16_keeps_the_factor_of_a_grad_scaler(made):
    """Probabilities divided by the number of rows are zero in float16; multiplied by the factor first they are not."""
    logits, targets = given(torch.float16)
    assert_equals_eager(F.cross_entropy, logits, targets, (65536.0, 65536.0), rtol=2e-2, atol=1e-2, equal_nan=True)
    assert not made


def test_without_gradients_nothing_is_made(made):
    logits, targets = given()
    compiled = dcompile.compile(F.cross_entropy, options={"receipt": False})
    with torch.no_grad():
        torch.testing.assert_close(compiled(logits.requires_grad_(), targets), F.cross_entropy(logits, targets))
    assert not made


def test_a_retained_graph_and_gradients_that_are_held():
    logits, targets = given()
    expected = gradient(F.cross_entropy, logits, targets)[1]
    logits.requires_grad_()
    loss = dcompile.compile(F.cross_entropy, options={"receipt": False})(logits, targets)
    found = [torch.autograd.grad(factor * loss, logits, retain_graph=factor < 3)[0] for factor in (1, 2, 1, 3)]
    for factor, one in zip((1, 2, 1, 3), found, strict=True):
        torch.testing.assert_close(one, factor * expected)


class Tagger(nn.Module):
    """As language models are: logits of a layer, in float32 for the loss; they are a result, too."""

    def __init__(self, wide, shown):
        super().__init__()
        self.body, self.head = nn.Linear(32, 64), nn.Linear(64, CLASSES, bias=False)
        self.wide, self.shown = wide, shown

    def forward(self, x, targets):
        logits = self.head(self.body(x).tanh())
        rows = (logits.float() if self.wide else logits).view(-1, CLASSES)
        loss = F.cross_entropy(rows, targets.view(-1))
        return (loss, logits) if self.shown else (loss,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shown", [False, True])
def test_a_model_with_such_a_loss_trains_as_in_eager(dtype, shown, made):
    torch.manual_seed(0)
    eager = Tagger(wide=True, shown=shown).to(dtype)
    model = copy.deepcopy(eager)
    compiled = dcompile.compile(model, options={"receipt": False})
    x, targets = torch.randn(2, 9, 32, dtype=dtype), torch.randint(0, CLASSES, (2, 9))
    exact = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    for _ in range(2):
        expected, found = eager(x, targets), compiled(x, targets)
        expected[0].backward()
        found[0].backward()
        torch.testing.assert_close(found, expected, **exact)
        grads = [[p.grad for p in m.parameters()] for m in (model, eager)]
        torch.testing.assert_close(*grads, **exact)
    assert made
    (forward, backward) = (graph.program for graph in dcompile.explain(compiled, x, targets).graphs)
    results = {output.buffer for output in forward.outputs if isinstance(output, View)}
    large = [b for b in forward.buffers if b.name in results and b.extent == 18 * CLASSES]
    assert [b.dtype for b in large] == [str(dtype).removeprefix("torch.")] * (1 + shown)
    assert sum(b.nbytes for b in backward.buffers if b.storage == "out" and b.extent == 18 * CLASSES) == 0


def doubled(x):
    x.mul_(2)


def halved(x):
    x /= 2  # another operator in Dynamo's graph


def cut_off(x):
    F.relu(x, True)


@pytest.mark.parametrize("change", [doubled, halved, cut_off])
def test_logits_that_change_before_the_loss_are_read_as_they_were(change):
    def function(x, targets):
        logits = x.bfloat16()
        rows = logits.float()
        change(logits)
        return F.cross_entropy(rows, targets) + logits.detach().float().mean()

    assert_equals_eager(function, *given(), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize(
    "other", [lambda x, y: x.logsumexp(1).square().mean(), F.cross_entropy], ids=["logsumexp", "cross_entropy"]
)
def test_logits_that_the_backward_needs_anyway_are_not_kept_beside_a_gradient(other, made):
    assert_equals_eager(lambda x, y: F.cross_entropy(x, y) + other(x, y), *given(), rtol=2e-6, atol=1e-6)
    assert not made


def test_a_measure_of_the_logits_is_no_reason(made):
    def function(x, targets):
        right = (x.argmax(1) == targets).float().mean()
        return F.cross_entropy(x, targets) + 0 * right

    assert_equals_eager(function, *given(), rtol=2e-6, atol=1e-6)
    assert made


def test_arguments_by_name():
    def function(x, targets):
        return F.cross_entropy(target=targets, input=torch.flatten(input=x.unsqueeze(0).float(), end_dim=1))

    assert_equals_eager(function, *given(), rtol=2e-6, atol=1e-6)


def test_marks_of_the_users_own():
    """Noted with the loss, they are noted with all that it is made of, and ours must not be."""
    from torch.fx.traceback import annotate

    def function(x, targets):
        with annotate({"stage": 0}):
            return F.cross_entropy(x, targets)

    assert_equals_eager(function, *given(), rtol=2e-6, atol=1e-6)


def test_what_nobody_reads_is_done_all_the_same():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x, targets):
            self.calls.add_(1)
            return F.cross_entropy(x, targets)

    model = Counting()
    gradient(dcompile.compile(model, options={"receipt": False}), *given())
    assert model.calls == 1


def test_a_batch_of_functions_is_left_alone(made):
    def function(x, targets):
        return torch.func.vmap(F.cross_entropy)(x.view(2, 3, -1), targets.view(2, 3)).sum()

    assert_equals_eager(function, *given(), rtol=2e-6, atol=1e-6)
    assert not made


def test_atens_kernels_have_atens_gradient(made):
    logits, targets = given()
    found = gradient(dcompile.compile(F.cross_entropy, options={"kernels": "aten", "receipt": False}), logits, targets)
    torch.testing.assert_close(found, gradient(F.cross_entropy, logits, targets), rtol=0, atol=0)
    assert not made
