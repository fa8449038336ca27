"""Recurrent layers: captured whole, one library call each way, with eager's results, gradients and random numbers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dcompile

pytestmark = [
    pytest.mark.usefixtures("compiled_anew", "quiet"),
    # Dynamo itself looks at .grad of a non-leaf when it goes on after a graph break
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setenv("DCOMPILE_RECEIPT", "0")


class Tagger(nn.Module):
    def __init__(self, kind, batch_first=True, **how):
        super().__init__()
        self.layers = getattr(nn, kind)(4, 5, batch_first=batch_first, **how)
        width = how.get("proj_size") or 5
        self.head = nn.Linear(width * (2 if how.get("bidirectional") else 1), 3)

    def forward(self, x, state=None):
        output, last = self.layers(x, state)
        return self.head(output), last


KINDS = {
    "lstm": ("LSTM", {}),
    "gru": ("GRU", {}),
    "rnn": ("RNN", {"nonlinearity": "relu"}),
    "time first": ("LSTM", {"batch_first": False}),
    "layers both ways": ("LSTM", {"num_layers": 2, "bidirectional": True}),
    "gru without biases": ("GRU", {"bias": False, "num_layers": 2}),
    "projected": ("LSTM", {"proj_size": 3}),
}


def leaves(value):
    return [value] if isinstance(value, torch.Tensor) else [leaf for item in value for leaf in leaves(item)]


def assert_trains_as_eager(call, eager, compiled, *inputs, **keywords):
    for _ in range(2):
        both = []
        for function in (call, eager):
            torch.manual_seed(3)
            given = [value.clone().requires_grad_() for value in inputs]
            results = leaves(function(*given, **keywords))
            sum(result.square().sum() for result in results).backward()
            both.append([*results, *(value.grad for value in given)])
        for own, stock in zip(*both, strict=True):
            torch.testing.assert_close(own, stock)
            assert own.stride() == stock.stride()
    for p, q in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "how"), KINDS.values(), ids=KINDS)
def test_training_is_eagers(kind, how):
    eager = Tagger(kind, **how)
    compiled = copy.deepcopy(eager)
    call = torch.compile(compiled, backend="dcompile", fullgraph=True)
    assert_trains_as_eager(call, eager, compiled, torch.randn(2, 6, 4))
    receipt = dcompile.receipt(call)
    assert receipt.graphs == 1 and receipt.graph_breaks == 0
    names = ("dcompile_rnn.forward.default", "dcompile_rnn.backward.default")
    assert {name: receipt.fallbacks[name] for name in names} == dict.fromkeys(names, 1)
    assert any("recurrent layers are library calls" in note for note in receipt.notes)


def test_states_that_are_given_and_inference():
    eager = Tagger("LSTM", num_layers=2)
    compiled = dcompile.compile(copy.deepcopy(eager), fullgraph=True)
    x, states = torch.randn(2, 3, 4), (torch.randn(2, 2, 5), torch.randn(2, 2, 5))
    for own, stock in zip(leaves(compiled(x, states)), leaves(eager(x, states)), strict=True):
        torch.testing.assert_close(own, stock)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager(x))


def test_dropout_is_drawn_as_eager_draws_it_and_the_same_in_the_backward():
    eager = Tagger("GRU", num_layers=2, dropout=0.5)
    compiled = copy.deepcopy(eager)
    call = dcompile.compile(compiled, fullgraph=True)
    assert_trains_as_eager(call, eager, compiled, torch.randn(2, 6, 4))
    before = torch.get_rng_state()
    call(torch.randn(2, 6, 4))[0].sum().backward()
    assert not torch.equal(before, torch.get_rng_state())  # the forward has drawn
    call.eval(), eager.eval()
    x = torch.randn(2, 6, 4)
    torch.testing.assert_close(call(x), eager(x))


def test_sequences_of_other_lengths_share_a_program():
    eager = Tagger("LSTM")
    compiled = dcompile.compile(copy.deepcopy(eager))
    for steps in (3, 5, 7, 9):
        x = torch.randn(2, steps, 4)
        torch.testing.assert_close(compiled(x), eager(x))
    assert len(dcompile.receipt(compiled).variants) == 2


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_packed_sequences_are_right(kind):
    class Packed(Tagger):
        def forward(self, x):
            output, last = self.layers(pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True))
            return self.head(pad_packed_sequence(output, batch_first=True)[0]), last

    eager = Packed(kind)
    compiled = copy.deepcopy(eager)
    assert_trains_as_eager(dcompile.compile(compiled), eager, compiled, torch.randn(2, 3, 4))


def test_under_autocast_dynamo_skips_them_and_the_receipt_says_so():
    eager = Tagger("GRU")
    compiled = dcompile.compile(copy.deepcopy(eager))
    x = torch.randn(2, 3, 4)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(compiled(x)[0], eager(x)[0])
    receipt = dcompile.receipt(compiled)
    if torch.__version__ >= "2.15":  # Dynamo leaves the layer alone there, and compiles what is behind it
        assert (receipt.graphs, receipt.graph_breaks) == (1, 1)
        return
    assert receipt.graphs == 0 and receipt.fallbacks == {"call of the model, run eagerly": 1}
    assert "nothing of it was compiled" in receipt.reasons[0]
