"""Masks of attention as predicates, as tensors, and with what they read."""

from __future__ import annotations

import torch

from dcompile.ir.index import var
from dcompile.ir.piecewise import Test as Condition
from dcompile.ir.predicate import Predicate

BATCH, HEADS, LENGTH, WIDTH = 2, 2, 300, 8
Q, K, B, Z0, Z1 = map(var, ("q", "k", "b", "z0", "z1"))


def both(*conditions):
    """True where all conditions are at least 0."""
    tree = True
    for condition in reversed(conditions):
        tree = Condition(condition, tree, False)
    return tree


def masks():
    """Name -> (predicate, tensors that it reads, the mask that it stands for)."""
    at = torch.arange(LENGTH)
    causal = at[:, None] >= at
    documents = torch.stack([at // 70, at // 110])
    padding = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    padding[0, 280:] = False
    padding[1, :270] = False  # rows of queries without a key, and whole blocks of them
    prefix = torch.tensor([150, 20])
    return {
        "window": (Predicate(both(Q - K, K - Q + 63)), [], causal & (at[:, None] - at < 64)),
        "documents": (
            Predicate(both(Q - K, Z0 - Z1, Z1 - Z0), ((B, Q), (B, K))),
            [documents, documents],
            causal & (documents[:, None, :, None] == documents[:, None, None]),
        ),
        "padding": (Predicate(both(Q - K, Z0 - 1), ((B, K),)), [padding], causal & padding[:, None, None]),
        "prefix": (
            Predicate(Condition(Z0 - K - 1, True, both(Q - K)), ((B,),)),
            [prefix],
            causal | (at < prefix[:, None, None, None]),
        ),
    }  # fmt: skip


def operands(dtype=torch.float32, length=LENGTH):
    """Queries, keys and values that require gradients."""
    torch.manual_seed(0)
    shape = (BATCH, HEADS, length, WIDTH)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]
