"""Random numbers in compiled functions: what decides them, what does not, and the same once more where it must be."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dcompile

OPTIONS = {"receipt": False}


pytestmark = pytest.mark.usefixtures("compiled_anew")


def compiled(function, **options):
    return dcompile.compile(function, options={**OPTIONS, **options})


def seeded(function, *args, seed=1):
    torch.manual_seed(seed)
    return function(*args)


def test_a_graph_without_random_numbers_draws_nothing():
    f = compiled(lambda x: x * 2)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    f(torch.ones(3))
    assert torch.equal(state, torch.get_rng_state())


def test_the_seed_decides_and_calls_differ():
    x = torch.randn(50, 60)
    f = compiled(lambda x: F.dropout(x, 0.5))
    first = seeded(f, x)
    second = f(x)
    assert not torch.equal(first, second)
    assert torch.equal(first, seeded(f, x)) and torch.equal(second, f(x))
    assert not torch.equal(first, seeded(f, x, seed=2))


def test_the_gradient_is_dropped_where_the_value_was():
    x = torch.randn(50, 60, requires_grad=True)
    f = compiled(lambda x: F.dropout(x, 0.25))
    one, two = seeded(f, x), f(x)  # two forwards, then their backwards the other way round
    for y in (two, one):
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, torch.where(y != 0, 1 / 0.75, 0.0))
    assert abs(float((one != 0).float().mean()) - 0.75) < 0.03


def test_random_slopes_of_rrelu_are_those_of_its_gradient():
    x = torch.randn(50, 60, requires_grad=True)
    f = compiled(lambda x: F.rrelu(x, 0.1, 0.4, training=True))
    one, two = seeded(f, x), f(x)
    assert not torch.equal(one, two) and torch.equal(one, seeded(f, x)) and not dcompile.receipt(f).fallbacks
    (slope,) = torch.autograd.grad(two.sum(), x)
    assert torch.equal(two, x * slope) and (slope[x > 0] == 1).all()
    negative = slope[x < 0]
    assert 0.1 <= negative.min() < 0.11 and 0.39 < negative.max() <= 0.4 and abs(negative.mean() - 0.25) < 0.01


def test_threads_and_fusion_change_no_bit():
    x = torch.randn(400, 300)
    alone = compiled(lambda x: F.dropout(x, 0.5))
    fused = compiled(lambda x: (F.dropout(x, 0.5), x.exp().sum(1), x.t().contiguous()))
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results += [seeded(alone, x), seeded(fused, x)[0]]
    assert all(torch.equal(results[0], other) for other in results)
    turned = seeded(compiled(lambda x: F.dropout(x.t(), 0.5)), x.t().contiguous())
    assert torch.equal(turned, results[0]), "an element's number follows its position, whatever the strides"


def test_ends_of_the_range():
    x = torch.randn(20, 30, requires_grad=True)
    keep, drop = compiled(lambda x: F.dropout(x, 0.0)), compiled(lambda x: F.dropout(x, 1.0))
    assert torch.equal(keep(x), x) and not drop(x).any()
    (grad,) = torch.autograd.grad(drop(x).sum(), x)
    assert not grad.any()
    assert torch.equal(compiled(lambda x: F.dropout(x, 0.5, training=False))(x), x)


RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of columns": lambda x: F.dropout(x.t(), 0.3),
    "rand_like": torch.rand_like,
    "bernoulli": torch.bernoulli,
    "randn_like": torch.randn_like,
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature": lambda x: F.dropout1d(x, 0.3),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "multinomial": lambda x: torch.multinomial(x, 3),
    "randperm": lambda x: torch.randperm(20) * x[0, 0],
}


def drawn(x):
    """One after the other, so that each must also leave the generator where eager leaves it."""
    return [function(x) for function in RANDOM.values()]


def test_fallback_random_gives_eagers_bits():
    x = torch.rand(20, 40)
    found, wanted = seeded(compiled(drawn, fallback_random=True), x), seeded(drawn, x)
    for name, value, expected in zip(RANDOM, found, wanted, strict=True):
        assert torch.allclose(value, expected, rtol=1e-6, atol=0), name
    ours = compiled(drawn)
    for name, first, second, again in zip(RANDOM, seeded(ours, x), ours(x), seeded(ours, x), strict=True):
        assert first.dtype == second.dtype and not torch.equal(first, second) and torch.equal(first, again), name


class Block(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.again = again
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 16), nn.Dropout(0.3))

    def forward(self, x):
        y = checkpoint(self.layers, x, use_reentrant=False) if self.again else self.layers(x)
        return (y**2).sum()


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpointed_layer_sees_its_mask_again(whole):
    """Compiled around the checkpoint, or inside it: then torch runs the compiled forward again."""
    kept, again = Block(False), Block(True)
    again.load_state_dict(kept.state_dict())
    x = torch.randn(8, 16)
    call = dcompile.compile(kept, options=OPTIONS)
    if whole:
        other = dcompile.compile(again, options=OPTIONS)
    else:
        again.layers = dcompile.compile(again.layers, options=OPTIONS)
        other = again
    for model in (call, other):
        seeded(model, x).backward()
    for p, q in zip(kept.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_warm_start_draws_the_same(tmp_path):
    x = torch.randn(20, 30)
    results, receipts = [], []
    for _ in range(2):
        torch.compiler.reset()
        f = compiled(copy.copy(lambda x: F.dropout(x, 0.5) + 1), cache_dir=str(tmp_path), verify=False)
        results += [seeded(f, x), seeded(f, x, seed=5)]
        receipts.append(dcompile.receipt(f))
    assert receipts[0].graphs_cached == 0 and receipts[1].graphs_cached == 1
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert not torch.equal(results[0], results[1])
