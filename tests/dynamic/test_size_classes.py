"""Many lengths: how many graphs Dynamo compiles, and that each length computes as in eager mode."""

import random

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import dcompile
from dcompile import compat
from dcompile.errors import OptionError

LENGTHS = random.Random(0).sample(range(512, 8193), 400)


class Tagger(nn.Module):
    """Embeds tokens, mixes neighbours with a float that is an attribute, and has a loss."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(16, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.share = 0.25

    def forward(self, tokens):
        x = self.table(tokens)
        x = torch.relu(self.up(x[:, 1:] + self.share * x[:, :-1]))
        return nn.functional.cross_entropy(self.down(x).flatten(0, 1), tokens[:, 1:].flatten() % 3)


MODES = {"unasked": ({}, None, 2), "marked": ({}, 1, 1), "classes": ({"size_classes": "auto"}, None, 1)}
"""Options, a dimension to mark, and how many graphs are compiled."""


@pytest.mark.parametrize("mode", MODES)
def test_400_lengths(mode, compiled_anew):
    options, marked, graphs = MODES[mode]
    counters.clear()
    torch.manual_seed(0)
    model, theirs = Tagger(), Tagger()
    theirs.load_state_dict(model.state_dict())
    dcompile.compile(model, options={"receipt": False, **options})
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(16, (2, length))
        if marked is not None:
            torch._dynamo.mark_dynamic(tokens, marked)
        loss = model(tokens)
        if number % 40 < 2:
            expected = theirs(tokens)
            torch.testing.assert_close(loss, expected)
            loss.backward()
            expected.backward()
    assert counters["stats"]["unique_graphs"] == graphs
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad)


def test_a_dimension_that_torch_may_not_ask_about(compiled_anew):
    """`mark_unbacked`: 0 and 1 are sizes like others."""
    counters.clear()
    compiled = dcompile.compile(lambda x: (x * 2).sum(0) + x.shape[0], options={"receipt": False})
    for rows in (3, 1, 0, 7):
        x = torch.randn(rows, 5)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        torch.testing.assert_close(compiled(x), (x * 2).sum(0) + rows)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("given", [[512, 1], "512,many", [True], [], 0, [2.5]])
def test_classes_that_are_no_sizes(given):
    with pytest.raises(OptionError, match=r"size_classes=.* should be sizes of at least 2, such as"):
        dcompile.compile(nn.Linear(2, 2), options={"size_classes": given})


def test_classes_of_sizes_that_never_vary():
    with pytest.raises(OptionError, match="leave it out, or dynamic=False"):
        dcompile.compile(nn.Linear(2, 2), dynamic=False, options={"size_classes": "auto"})


def test_how_classes_are_written():
    make = dcompile.config.Config.make
    assert (
        make(None, {"size_classes": (1024, 512)}).size_bounds == make(None, {"size_classes": " 512, 1024"}).size_bounds
    )
    assert make(None, {"size_classes": "auto"}).size_bounds == ()
    assert make(None, {"size_classes": None}).size_bounds is make().size_bounds is None


def test_inputs_that_are_sizes():
    found = []

    def backend(gm, inputs):
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
            node.meta["val"] = value
        found.append((compat.sizes.size_inputs(gm), [isinstance(value, int | torch.SymInt) for value in inputs]))
        return gm.forward

    torch.compile(lambda x: x.sin(), backend=backend, dynamic=True)(torch.randn(3, 4))
    ((places, numbers),) = found
    assert list(places) == [place for place, number in enumerate(numbers) if number] and len(places) == 2
