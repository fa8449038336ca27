"""`torch.use_deterministic_algorithms` on a GPU: the same bits in each run, or eager's error."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("compiled_anew"),
]
ROWS, WIDTH, COUNT = 50, 70, 20000
"""Hundreds of additions meet in each place: in another order, sums of floats are others."""


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def embedding(table, places, values):
    return (F.embedding(places, table) * values).square().sum()


def index_put(table, places, values):
    return table.index_put((places,), values, accumulate=True).square().sum()


def index_add(table, places, values):
    return table.index_add(0, places, values).square().sum()


def scatter_add(table, places, values):
    return table.scatter_add(0, places[:, None].expand(values.shape), values).square().sum()


def scatter_add_in_a_row(table, places, values):
    return table[:, 0].scatter_add(0, places, values[:, 0]).square().sum()


def scatter_mean(table, places, values):
    return table.scatter_reduce(0, places[:, None].expand(values.shape), values, "mean").square().sum()


def gather(table, places, values):
    return (table.gather(0, places[:, None].expand(values.shape)) * values).square().sum()


def rows(table, places, values):
    return (table[places] * values).square().sum()


def running_sum(table, places, values):
    return (values.cumsum(0) * table[0]).square().mean()


def average_pool(table, places, values):
    return (F.adaptive_avg_pool2d(values.view(1, 1, COUNT, WIDTH), (7, 3)) * table[:7, :3]).square().sum()


def bags(table, places, values):
    return (F.embedding_bag(places.view(-1, 8), table) * values[: COUNT // 8]).square().sum()


FUNCTIONS = (
    embedding, index_put, index_add, scatter_add, scatter_add_in_a_row, scatter_mean, gather, rows, running_sum,
    average_pool, bags,
)  # fmt: skip


def outcome(call, inputs):
    """Value and gradients; or the kind of error that says that there is no deterministic algorithm."""
    table, places, values = inputs
    leaves = [t.detach().clone().requires_grad_() for t in (table, values)]
    try:
        result = call(leaves[0], places, leaves[1])
        return [result.detach(), *torch.autograd.grad(result, leaves, allow_unused=True)]
    except RuntimeError as error:
        assert "does not have a deterministic implementation" in str(error), error
        return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_same_bits_or_eagers_error(function, dtype):
    inputs = (
        torch.randn(ROWS, WIDTH, dtype=dtype).to(DEVICE), torch.randint(0, ROWS, (COUNT,)).to(DEVICE),
        torch.randn(COUNT, WIDTH, dtype=dtype).to(DEVICE),
    )  # fmt: skip
    eagers = outcome(function, inputs)
    call = torch.compile(function, backend="dcompile", options={"receipt": False})
    first, *others = [outcome(call, inputs) for _ in range(4)]
    if first is None:
        assert eagers is None, "eager has a deterministic algorithm here"
        return
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    if eagers is not None:
        table, places, values = inputs
        tolerance = 1e-5 if dtype == torch.float32 else 2**-8
        exact = outcome(function, (table.double(), places, values.double()))
        for ours, theirs, right in zip(first, eagers, exact, strict=True):
            if theirs is not None:
                off, allowed = (float((t - right).abs().max()) for t in (ours, theirs))
                scale = float(right.abs().max())
                assert off <= 1.5 * allowed + tolerance * scale, (off, allowed, scale)


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "replayed"])
def test_training_twice_gives_the_same_bits(graphs):
    """An embedding, normalisation, dropout, products and a loss, for some steps, from the same seed."""

    def train():
        torch.compiler.reset()
        torch.manual_seed(0)
        layers = nn.Embedding(ROWS, 64), nn.LayerNorm(64), nn.Dropout(0.2), nn.Linear(64, ROWS)
        model = nn.Sequential(*layers).to(DEVICE)
        call = torch.compile(model, backend="dcompile", options={"receipt": False, "triton.cudagraphs": graphs})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.randint(0, ROWS, (16, 128)).to(DEVICE)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(call(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    for one, two in zip(train(), train(), strict=True):
        assert torch.equal(one, two)
