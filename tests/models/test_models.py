"""Whole models: forward, backward and optimizer steps give what eager PyTorch gives.

How near is said in tests/models/checks.py. `make models` runs every model in every way; each test run, a part of that.
"""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.device import device
from tests.models.checks import LOSS, LR, TENSOR, assert_close, assert_same_state, compiled, twins
from tests.models.zoo import CASES, MLP, ResNet, gpt2, llama
from tests.subject import IS_DCOMPILE

# Dynamo itself reads .grad of what crosses a graph break
pytestmark = [
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
FALLBACKS: set[str] = set()


def cases(*names):
    """Those models in each test run, the others by `make models`."""
    assert set(names) <= CASES.keys()
    marks = {name: () if name in names else pytest.mark.full for name in CASES}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in CASES])


def short_llama(dropout=0.0):
    """One layer, where what is tested is not between layers."""
    return llama(dropout, num_hidden_layers=1)


def short_resnet(dropout=0.0):
    """One block, the one with a stride."""
    model = ResNet(dropout)
    model.blocks = model.blocks[1:]
    return model


def short_gpt2(dropout=0.0):
    """One layer, which already draws for an embedding, attention and two residuals."""
    return gpt2(dropout, layers=1)


def short_bert(dropout=0.0):
    """One layer."""
    model = CASES["bert"].make(dropout)
    model.bert.encoder.layer = model.bert.encoder.layer[1:]
    return model


def short_mlp(dropout=0.0):
    """Two linear layers."""
    model = MLP(dropout)
    model.layers = model.layers[:2]
    return model


SHORT = {"llama": short_llama, "resnet": short_resnet, "gpt2": short_gpt2, "bert": short_bert}


def small(name):
    """How to make a model, the transformers with one layer, the ResNet with one block."""
    return SHORT.get(name, CASES[name].make)


def forward_backward(call, batch, seed=5):
    torch.manual_seed(seed)
    output = call(**batch)
    output["loss"].backward()
    return output


def assert_trains_alike(model, theirs, call, batches, tolerance=TENSOR, steps=None):
    """An AdamW step per batch with both; `call` runs `model` compiled. eps bounds what noise in tiny gradients does."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=LR, eps=1e-4) for m in (model, theirs)]
    for number, batch in enumerate(batches):
        output, expected = forward_backward(call, batch), forward_backward(theirs, batch)
        assert_close(output["loss"], expected["loss"], LOSS, f"loss of step {number}")
        assert_close(output["logits"], expected["logits"], tolerance, f"logits of step {number}")
        assert_same_state(model, theirs, tolerance, f"step {number}:")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model, theirs, tolerance, "after the last step:")


# a usual run trains GPT-2 with dropout, below, and encoders in test_encoders.py
@cases("mlp", "resnet", "llama")
def test_three_adamw_steps(name):
    """The Llama with two layers, which stands for all models that have one behind another."""
    case = CASES[name]
    model, theirs = twins(case.make if name in ("llama", "resnet") else small(name), 0.0)
    batches = [case.batch(4, 12) for _ in range(3)]
    call = compiled(model, fullgraph=case.fullgraph)
    assert_trains_alike(model.train(), theirs.train(), call, batches)
    if IS_DCOMPILE:
        import dcompile

        receipt = dcompile.receipt(call)
        assert receipt.kernels > 0 and receipt.fallbacks.keys() <= FALLBACKS, str(receipt)


# GPT-2 drops what an MLP does, and attention's probabilities
@cases("gpt2")
def test_dropout_draws_what_eager_draws(name):
    case = CASES[name]
    model, theirs = twins(small(name), 0.3)
    batch = case.batch(4, 12)
    call = compiled(model.train(), eagers_bits=True, fullgraph=case.fullgraph)
    output = forward_backward(call, batch, seed=7)
    expected = forward_backward(theirs.train(), batch, seed=7)
    assert_close(output["loss"], expected["loss"], LOSS)
    assert_same_state(model, theirs)
    other = theirs(**batch)  # continues the generator: another mask
    assert abs(other["loss"] - expected["loss"]) > 1e-4, "dropout does nothing here"


# a usual run has a decoder without gradients in test_decoders.py
@cases("resnet")
def test_evaluation_without_gradients(name):
    case = CASES[name]
    model, theirs = twins(small(name), 0.3)
    batch = case.batch(4, 12)
    call = compiled(model.eval(), fullgraph=case.fullgraph)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output, expected = call(**batch), theirs.eval()(**batch)
        assert not output["logits"].requires_grad
        assert output["logits"].is_inference() == expected["logits"].is_inference()
        assert_close(output["loss"], expected["loss"], LOSS)
        assert_close(output["logits"], expected["logits"], TENSOR)


def test_training_and_evaluation_in_turn():
    model, theirs = twins(short_resnet)
    call = compiled(model, fullgraph=True)
    for training in (True, False, True, False):
        batch = CASES["resnet"].batch(4, 12)
        model.train(training), theirs.train(training)
        with contextlib.nullcontext() if training else torch.no_grad():
            output, expected = call(**batch), theirs(**batch)
        if training:
            output["loss"].backward(), expected["loss"].backward()
        assert output["logits"].requires_grad == training
        assert_close(output["loss"], expected["loss"], LOSS)
        assert_close(output["logits"], expected["logits"], TENSOR)
        assert_same_state(model, theirs)


@pytest.mark.parametrize("name", [pytest.param("mlp", marks=pytest.mark.full), "llama"])
def test_bfloat16(name):
    """Against eager bfloat16, with eager's own distance from float32 as the measure of what rounding does."""
    case = CASES[name]
    exact, theirs = twins(small(name))
    theirs = theirs.bfloat16()
    model = copy.deepcopy(theirs)
    batch = case.batch(4, 12)
    in_bf16 = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}
    forward_backward(exact, batch)
    output = forward_backward(compiled(model, fullgraph=True), in_bf16)
    expected = forward_backward(theirs, in_bf16)
    assert output["logits"].dtype == torch.bfloat16
    assert_close(output["loss"], expected["loss"], 2**-7)
    for (parameter, p), q, x in zip(model.named_parameters(), theirs.parameters(), exact.parameters(), strict=True):
        ours, eagers = (p.grad.float() - x.grad).norm(), (q.grad.float() - x.grad).norm()
        assert ours <= 1.5 * eagers + 1e-3 * x.grad.norm(), f"{parameter}: off by {ours:.2e}, eager by {eagers:.2e}"


@pytest.mark.parametrize("name", [pytest.param("mlp", marks=pytest.mark.full), "llama"])
def test_autocast(name):
    """Autocast outside the compiled call; parameters and gradients stay float32."""
    case = CASES[name]
    exact, theirs = twins(small(name))
    model = copy.deepcopy(theirs)
    batch = case.batch(4, 12)
    call = compiled(model, fullgraph=True)
    forward_backward(exact, batch)
    with torch.autocast(device(), dtype=torch.bfloat16):
        output, expected = call(**batch), theirs(**batch)
    output["loss"].backward(), expected["loss"].backward()
    assert output["logits"].dtype == expected["logits"].dtype == torch.bfloat16
    assert_close(output["loss"], expected["loss"], 2**-7)
    for (parameter, p), q, x in zip(model.named_parameters(), theirs.parameters(), exact.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        ours, eagers = (p.grad - x.grad).norm(), (q.grad - x.grad).norm()
        assert ours <= 1.5 * eagers + 1e-3 * x.grad.norm(), f"{parameter}: off by {ours:.2e}, eager by {eagers:.2e}"


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing():
    model, theirs = twins(short_llama)
    for m in (model, theirs):
        m.gradient_checkpointing_enable({"use_reentrant": False})
        m.train()
    batches = [CASES["llama"].batch(4, 12) for _ in range(2)]
    call = compiled(model, fullgraph=True)
    assert_trains_alike(model, theirs, call, batches)
    if IS_DCOMPILE:  # attention may draw random numbers, and does not: no state of a generator is to be saved
        import dcompile

        receipt = dcompile.receipt(call)
        assert not receipt.fallbacks
        assert any("1 attention calls were given a causal mask" in note for note in receipt.notes)


class Checkpointed(MLP):
    """The layers run again in the backward, dropout included."""

    reentrant = False

    def forward(self, x, labels):
        logits = self.head(checkpoint(self.layers, x, use_reentrant=self.reentrant))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_the_dropout_mask(reentrant, monkeypatch):
    """What is run again must drop what the forward dropped, or gradients belong to another function."""
    monkeypatch.setattr(Checkpointed, "reentrant", reentrant)
    model, theirs = twins(Checkpointed, 0.5)
    call = compiled(model, eagers_bits=True, fullgraph=True)
    batches = [CASES["mlp"].batch(8, 0) for _ in range(2)]
    for batch in batches:
        batch["x"].requires_grad_()  # else eager's reentrant one gives no gradients
    assert_trains_alike(model, theirs, call, batches)
    if IS_DCOMPILE:  # what eager's numbers made is kept: running it again would leave all of the graph to ATen
        import dcompile

        receipt = dcompile.receipt(call)
        assert not receipt.fallbacks and any("kept for the backward" in note for note in receipt.notes), str(receipt)


@pytest.mark.skipif(not IS_DCOMPILE, reason="about random numbers of ours")
@cases("gpt2")
def test_dropout_of_our_own(name):
    """A gradient belongs to the masks of its forward: it says how the loss moves along it, under the same seed."""
    case = CASES[name]
    model, _ = twins(small(name), 0.3)
    batch = case.batch(4, 12)
    call = compiled(model.train(), fullgraph=case.fullgraph)
    first = forward_backward(call, batch, seed=7)["loss"]
    norm = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    step, losses = 2e-3 / norm, []
    for sign in (1, -1):
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p += sign * (1 if sign > 0 else 2) * step * p.grad
        torch.manual_seed(7)
        losses.append(float(call(**batch)["loss"].detach()))
    slope = (losses[0] - losses[1]) / (2 * step)
    assert abs(slope / norm**2 - 1) < 0.05, (slope, norm**2)
    torch.manual_seed(8)
    assert abs(float(call(**batch)["loss"].detach()) - float(first.detach())) > 1e-4, "another seed, another loss"


class Tied(nn.Module):
    """One matrix for the embedding and the head, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels):
        logits = self.head(self.layer(self.embed(input_ids)).tanh())
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_tied_weights():
    model, theirs = twins(Tied)
    assert model.head.weight is model.embed.weight
    batches = [CASES["llama"].batch(4, 12) for _ in range(2)]
    assert_trains_alike(model, theirs, compiled(model, fullgraph=True), batches)
    assert model.head.weight is model.embed.weight


def test_frozen_parameters_get_no_gradient():
    """A first layer, behind which nothing asks for gradients; a weight through which they pass; a scale."""
    model, theirs = twins(MLP)
    for m in (model, theirs):
        m.layers[0].requires_grad_(False)
        m.layers[2].weight.requires_grad_(False)
        m.layers[4].weight.requires_grad_(False)
    batches = [CASES["mlp"].batch(4, 0) for _ in range(2)]
    assert_trains_alike(model, theirs, compiled(model, fullgraph=True), batches)
    assert model.layers[0].weight.grad is None and model.layers[4].weight.grad is None


@pytest.mark.parametrize("name", ["mlp", pytest.param("llama", marks=pytest.mark.full), "resnet"])
def test_other_shapes_and_a_ragged_last_batch(name):
    """Another length and fewer rows at once, for one graph less to trace: graphs for other sizes, the same training.

    A Llama of all sizes trains in tests/dynamic/test_models.py, so that a usual run has none here; an MLP has rows
    alone, down to one, which is a graph more.
    """
    case = CASES[name]
    model, theirs = twins(small(name))
    sizes = ((4, 12), (3, 12), (1, 12)) if name == "mlp" else ((4, 12), (3, 16), (4, 20), (2, 12))
    batches = [case.batch(*size) for size in sizes]
    assert_trains_alike(model, theirs, compiled(model), batches)


@pytest.mark.parametrize("dynamic", [True, False])
def test_dynamic_as_asked_for(dynamic):
    model, theirs = twins(short_mlp)
    batches = [CASES["mlp"].batch(rows, 0) for rows in (4, 6)]
    assert_trains_alike(model, theirs, compiled(model, dynamic=dynamic, fullgraph=True), batches)


class Broken(MLP):
    """A graph break between two layers that share their weights across it."""

    def forward(self, x, labels):
        y = self.layers(x)
        torch._dynamo.graph_break()
        y = self.layers[4](y) + y.relu()
        return {"loss": nn.functional.cross_entropy(self.head(y), labels), "logits": self.head(y)}


def test_graph_break_with_a_layer_on_both_sides():
    model, theirs = twins(Broken)
    call = compiled(model)
    assert_trains_alike(model, theirs, call, [CASES["mlp"].batch(4, 0) for _ in range(3)])
    if IS_DCOMPILE:
        import dcompile

        assert dcompile.receipt(call).graphs == 2 and dcompile.receipt(call).graph_breaks == 1


class Counting(MLP):
    """Buffers written in place: a counter, a moving average, one row of a table at a computed position."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("history", torch.zeros(5, 4))

    def forward(self, x, labels):
        output = super().forward(x, labels)
        mean = output["logits"].detach().mean(0)
        self.average.mul_(0.9).add_(mean, alpha=0.1)
        self.history.index_copy_(0, self.count[None] % 5, mean[None])
        self.count += 1
        return {"loss": output["loss"] + self.average.sum() * 0.1, "logits": output["logits"]}


def test_buffers_written_in_place():
    model, theirs = twins(Counting)
    buffer = model.history
    assert_trains_alike(model, theirs, compiled(model, fullgraph=True), [CASES["mlp"].batch(4, 0) for _ in range(7)])
    assert model.history is buffer and int(model.count) == 7
    with torch.no_grad():
        compiled(model.eval())(**CASES["mlp"].batch(4, 0))
    assert int(model.count) == 8


def test_input_gradients_and_accumulation():
    """Gradients of inputs, and two backwards that add up."""
    model, theirs = twins(MLP)
    call = compiled(model, fullgraph=True)
    batches = [CASES["mlp"].batch(4, 0) for _ in range(2)]
    for batch in batches:
        x, y = batch["x"].clone().requires_grad_(), batch["x"].clone().requires_grad_()
        call(x, batch["labels"])["loss"].backward()
        theirs(y, batch["labels"])["loss"].backward()
        assert_close(x.grad, y.grad, TENSOR)
    assert_same_state(model, theirs)
