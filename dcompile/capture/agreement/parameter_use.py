"""Find parameters that a forward used outside the compiled graphs, from the autograd graph of its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dcompile.compat.autograd import is_compiled_backward

SHOWN = 4
"""Names in a reason."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a forward's result: as in DDP, those inside sequences, mappings and dataclasses, too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def outside_use(result: Any, name_of: Callable[[Any], str | None]) -> list[str]:
    """Return why compiled graphs would not reduce all gradients of this result; empty if they would.

    `name_of` returns the name of a synchronized parameter, None for any other tensor.
    """
    roots = [tensor.grad_fn for tensor in tensors_in(result) if tensor.grad_fn is not None]
    if not roots:
        return ["no differentiable tensor was found in what the module returned"]
    outside: dict[str, None] = {}
    seen: set[Any] = set()
    stack: list[Any] = list(roots)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        compiled = is_compiled_backward(node)
        for following, _ in node.next_functions:
            if following is None:
                continue
            leaf = getattr(following, "variable", None)  # AccumulateGrad: a leaf tensor
            if leaf is None:
                stack.append(following)
            elif not compiled and (name := name_of(leaf)) is not None:
                outside[name] = None
    if not outside:
        return []
    return [f"{counted_names(sorted(outside))} {'is' if len(outside) == 1 else 'are'} used outside the compiled graph"]


def counted_names(names: list[str]) -> str:
    """Return "parameter a", or "6 parameters (a, b, c, d and 2 more)": a recurrent layer has dozens."""
    if len(names) == 1:
        return f"parameter {names[0]}"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} parameters ({', '.join(names[:SHOWN])}{more})"


def counted_reasons(reasons: Iterable[str]) -> str:
    """Return all reasons; of more than four, three and the number of the others."""
    first, *rest = reasons
    more = f"; and {len(rest) - 2} more like that" if len(rest) > 3 else ""
    return "; ".join((first, *(rest[:2] if more else rest))) + more
