"""Complex arithmetic between pairs of real numbers is computed on pairs, as eager computes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.capture.passes.joint.complex_pairs import pair_complex_numbers

ROWS, LENGTH, HEADS, WIDTH = 2, 12, 3, 8


def angles() -> torch.Tensor:
    return torch.outer(torch.arange(16.0), 1 / 100 ** (torch.arange(WIDTH // 2) / (WIDTH // 2)))


def as_complex(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def gathered(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as in torchtitan: factors by the positions of packed documents."""
    positions = torch.arange(LENGTH).flip(0).expand(ROWS, -1)
    index = positions[..., None].expand(-1, -1, WIDTH // 2)
    factors = torch.gather(cis[None].expand(ROWS, -1, -1), 1, index)[:, :, None]
    return torch.view_as_real(as_complex(x) * factors).flatten(3).type_as(x)


def broadcast(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as in Meta's Llama: the factors of a prefix, viewed to be broadcast."""
    factors = cis[:LENGTH].view(1, LENGTH, 1, WIDTH // 2)
    return torch.view_as_real(factors * as_complex(x)).flatten(-2).type_as(x)


def made(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    """Factors that the program itself makes, a conjugate, sums, and real factors."""
    angle = angles()[:LENGTH, None]
    made = torch.complex(angle.cos(), angle.sin())
    z = as_complex(x)
    z = z * torch.polar(torch.ones_like(angle), angle) + z.conj() * made - z * 0.5
    return torch.view_as_real(-(z * x[..., ::2]).transpose(1, -2)).flatten(-2)


def moved(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    """Every kind of view between the ends."""
    z = as_complex(x).permute(0, -2, 1, -1).unsqueeze(-1).squeeze(-1)[:, -2:, 1:].reshape(-1, WIDTH // 2)
    z = z.index_select(0, torch.tensor([3, 0, 5])).view(3, 1, -1).expand(-1, 2, -1).select(-2, 1)[torch.tensor([2, 2])]
    return torch.view_as_real(z.squeeze() * cis[:2].contiguous()).sum(-1)


def rewritten(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[GraphModule, int]:
    """The traced function after the pass, and the number of its complex values that are no inputs."""
    gm = make_fx(function, tracing_mode="fake")(*args)
    report = pair_complex_numbers(gm)
    values = [node.meta["val"] for node in gm.graph.nodes if node.op == "call_function"]
    left = sum(value.is_complex() for value in values if isinstance(value, torch.Tensor))
    assert bool(report.changes) == (not left)
    return gm, left


@pytest.fixture
def cis() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.polar(torch.ones(16, WIDTH // 2), angles())


@pytest.mark.parametrize("function", [gathered, broadcast, made, moved])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_comes_from_pairs_and_ends_as_pairs_has_no_complex_values(
    function: Callable[..., torch.Tensor], dtype: torch.dtype, cis: torch.Tensor
) -> None:
    x = torch.randn(ROWS, LENGTH, HEADS, WIDTH, dtype=dtype)
    gm, left = rewritten(function, x, cis)
    assert not left
    torch.testing.assert_close(gm(x, cis), function(x, cis))


@pytest.mark.parametrize("function", [gathered, broadcast, made, moved])
def test_gradients_are_eager_ones(function: Callable[..., torch.Tensor], cis: torch.Tensor) -> None:
    x = torch.randn(ROWS, LENGTH, HEADS, WIDTH, requires_grad=True)
    expected, found = function(x, cis), dcompile.compile(function)(x, cis)
    weights = torch.rand_like(expected)
    (wanted,), (gradient,) = (torch.autograd.grad(result, x, weights) for result in (expected, found))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, cis: torch.view_as_real(torch.fft.fft(as_complex(x)) * 2),
        lambda x, cis: as_complex(x) * cis[:LENGTH, None],
        lambda x, cis: (as_complex(x) * 1j).abs(),
        lambda x, cis: torch.view_as_real(as_complex(x) / cis[:LENGTH, None]),
        lambda x, cis: torch.view_as_real(as_complex(x) * (1 + 2j)),
    ],
    ids=["a transform", "a complex result", "a length", "a quotient", "a complex number"],
)
def test_what_no_rule_knows_stays_complex(function: Callable[..., torch.Tensor], cis: torch.Tensor) -> None:
    x = torch.randn(ROWS, LENGTH, HEADS, WIDTH)
    gm, left = rewritten(function, x, cis)
    assert left
    torch.testing.assert_close(gm(x, cis), function(x, cis))


def test_a_length_that_is_a_symbol(cis: torch.Tensor) -> None:
    def rotate(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(as_complex(x) * cis[: x.shape[1], None]).flatten(3)

    compiled = dcompile.compile(rotate, dynamic=True)
    for length in (5, 7, 16):
        x = torch.randn(ROWS, length, HEADS, WIDTH)
        torch.testing.assert_close(compiled(x), rotate(x))
