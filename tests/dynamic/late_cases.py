"""Functions with sizes that a library call tells in the middle of a graph, held to eager at several sizes.

python -m tests.dynamic.late_cases runs them as planned for a GPU, kernels by Triton's interpreter: a line of JSON, from
the name of each to what is wrong, or "". It takes TRITON_INTERPRET=1, chosen before Triton is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._dynamo import config

import dcompile

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def counted(x, w):
    """A matrix product before, sums over what is found behind."""
    found = (x @ w > 0).nonzero()
    return (found.float() * 2).sum(0), found * 3, (x.exp() + 1).sum(1)


def chosen(x, w):
    """Rows of a late number: a norm, a softmax, a product, sums over them."""
    kept = x[x[:, 0] > 0.2]
    wide = torch.tanh(kept @ w) + 1
    return wide.softmax(-1), wide.sum(0), wide.mean(-1), (kept * kept.shape[0]).amax(1), x.relu().sum(0)


def two(x, w):
    """Two late sizes in one graph, and a place that depends on one of them."""
    a, b = x[x[:, 1] > 0], w[w[:, 0] > 0]
    return torch.cat([a, b, a * 2], 0) * 2, (a[:, None, :1] + b[None, :, :1]).tanh(), a.t() * 3


def item(x, w):
    """A late number as a size, as an end, and as a value."""
    k = (w > 0).sum().item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return torch.arange(k, device=x.device) * 2, torch.full((k, 3), 1.5, device=x.device) + x[0, :3], x.exp() + k


def saved(x, w):
    """A backward with sizes that its forward was told late."""
    kept = x[x[:, 0] > -0.2]
    left, right = (kept * 2).split(3, -1)
    return ((left.sigmoid() * right) @ w[:3]).square().sum()


FUNCTIONS: Mapping[str, Callable[..., Any]] = {f.__name__: f for f in (counted, chosen, two, item, saved)}


def inputs(rows: int, device: str, shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """`shift` below -10: nothing is found."""
    generator = torch.Generator().manual_seed(rows)
    x, w = (torch.randn(n, 6, generator=generator) + shift for n in (rows, 6))
    return x.to(device).requires_grad_(), w.to(device).requires_grad_()


def problem(function: Callable[..., Any], device: str, dynamic: bool | None, **options: Any) -> tuple[str, Any]:
    """(what differs from eager, or ""; the receipt)."""
    torch._dynamo.reset()
    call = torch.compile(
        function, backend="dcompile", fullgraph=True, dynamic=dynamic, options={"receipt": False, **options}
    )
    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        for rows, shift in ((40, 0.0), (40, 0.5), (40, -20.0), (57 if dynamic else 40, 20.0)):
            try:
                _compare(function, call, rows, device, shift)
            except Exception as error:
                return f"{rows} rows shifted by {shift}: {type(error).__name__}: {str(error)[-600:]}", None
    return "", dcompile.receipt(call)


def _compare(function: Callable[..., Any], call: Callable[..., Any], rows: int, device: str, shift: float) -> None:
    ours, theirs = inputs(rows, device, shift), inputs(rows, device, shift)
    actual, expected = (r if isinstance(r, tuple) else (r,) for r in (call(*ours), function(*theirs)))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
        assert not a.numel() or a.stride() == b.stride(), f"{a.stride()} where eager has {b.stride()}"
    sums = [sum(r.square().sum() for r in results if r.is_floating_point()) for results in (actual, expected)]
    for total in sums:
        total.backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)


def main(names: list[str]) -> None:
    """Run cases by name, as "item" or, with symbolic sizes, "item dynamic"."""
    from tests.dynamic.interpreted import on_cpu  # late: only where Triton interprets

    found = {}
    for name in names:
        function, _, dynamic = name.partition(" ")
        with on_cpu() as texts:
            text, _ = problem(FUNCTIONS[function], "cpu", True if dynamic else None)
        found[name] = {"problem": text, "texts": texts}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
