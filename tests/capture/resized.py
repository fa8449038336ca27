"""Functions that free or make an input's memory, compiled and in eager mode. A wrong program reads memory that is gone.

python -m tests.capture.resized: prints a line of JSON, from each case to what is wrong with it, or "".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

import dcompile

N = 1000
BYTES = 4 * N


def freed(x: Any, w: Any) -> Any:
    y = torch.sin(x + 1) * w
    x.untyped_storage().resize_(0)
    return torch.cos(y)


def filled(x: Any, w: Any) -> Any:
    x.untyped_storage().resize_(BYTES)
    x.copy_(w.detach() * 3)
    return (x * w).sin()


def gathered(x: Any, w: Any) -> Any:
    """As sharded parameters are: there for a while."""
    with torch.no_grad():
        x.untyped_storage().resize_(BYTES)
        x.copy_(w.detach() * 3)
    y = x.detach() + w
    with torch.no_grad():
        x.untyped_storage().resize_(0)
    return y.sin()


def twice(x: Any, w: Any) -> Any:
    with torch.no_grad():
        x.untyped_storage().resize_(BYTES)
        x.copy_(w.detach() * 3)
        y = x.detach() + 1
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(BYTES)
        x.copy_(w.detach() * 5)
        z = x.detach() + w
        x.untyped_storage().resize_(0)
    return (y + z) * w


def anew(x: Any, w: Any) -> Any:
    y = x * w
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(BYTES)
    x.copy_(y.detach())
    return y + w


EMPTY = (filled, gathered, twice)
"""Those whose input has no memory before."""
LEARNING = (freed, gathered, twice)
"""Those in which eager keeps for its backward what is there then."""


def run(function: Callable[..., Any], original: Callable[..., Any], learns: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(N), torch.randn(N, requires_grad=learns)
    if original in EMPTY:
        x.untyped_storage().resize_(0)
    y = function(x, w)
    torch.full((BYTES,), torch.nan)  # takes memory that is free
    if learns:
        y.sum().backward()
    size = x.untyped_storage().size()
    found = [y.detach(), torch.tensor(size), *([x.detach().clone()] if size else [])]
    return [*found, *([w.grad] if w.grad is not None else [])]


def wrong(function: Callable[..., Any], learns: bool) -> str:
    want = run(function, function, learns)
    torch._dynamo.reset()
    compiled = dcompile.compile(function, fullgraph=True)
    for _ in range(2):
        got = run(compiled, function, learns)
        if len(got) != len(want) or not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True)):
            return f"{got} in place of {want}"
    return ""


def main() -> None:
    cases = [(f, False) for f in (freed, filled, gathered, twice, anew)] + [(f, True) for f in LEARNING]
    sys.stdout.write(json.dumps({f"{f.__name__} {learns}": wrong(f, learns) for f, learns in cases}) + "\n")


if __name__ == "__main__":
    main()
