"""Whole models with dynamic=True: one graph for all lengths and batches, all of it in kernels and library calls."""

import copy
from functools import partial

import pytest
import torch

import dcompile
from dcompile.capture.entry import find_model
from tests.models.zoo import gpt2, llama

pytestmark = pytest.mark.usefixtures("compiled_anew")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(gpt2, layers=1), id="gpt2", marks=pytest.mark.full),
        pytest.param(partial(llama, num_hidden_layers=1), id="llama"),
    ],
)
def test_language_models_train_at_any_length(make):
    model = make()
    theirs = copy.deepcopy(model)
    dcompile.compile(model, dynamic=True, options={"receipt": False})
    for batch, length in ((2, 8), (3, 11), (4, 29)):
        tokens, mask = torch.randint(0, 64, (batch, length)), torch.ones(batch, length, dtype=torch.long)
        mask[0, : length // 2] = 0
        given = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
        losses = []
        for net in (model, theirs):
            net.zero_grad()
            losses.append(net(**given).loss)
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-4)
    receipt = dcompile.receipt(model)
    assert receipt.graphs == 1 and receipt.kernels and not receipt.fallbacks
    assert all("keep their mask as a tensor" in note and "lengths are symbols" in note for note in receipt.notes)
    state = find_model(model)
    (number,) = state.newest.graphs
    assert all("def sizes" in e.source for e in state.graphs[number].executables.values())
