"""How near a compiled result has to be to eager's, and what else of it has to be equal.

Results must agree within torch.testing's defaults for their dtype. Where they do not, sums were taken in another order:
then ours may be no further from the float64 answer than twice eager's own largest error, beside those defaults.
Dtypes, shapes, strides of outputs, and which inputs an output shares memory with must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Answer:
    """What a call gave. `outputs` ends with the inputs, which it may have changed; `grads` is None without a backward.

    `exact` is the float64 answer, where there is one. `repeatable`: eager gives the same twice.
    """

    outputs: list[Any]
    grads: list[Any] | None
    aliases: list[tuple[int, ...]]
    """For each output, the numbers of the inputs whose memory it lies in."""
    repeatable: bool = True
    exact: Answer | None = None


def difference(expected: Answer, actual: Answer) -> str | None:
    """What is wrong with `actual`, None if nothing is."""
    exact = expected.exact
    if (expected.grads is None) != (actual.grads is None):
        return "gradients are " + ("missing" if actual.grads is None else "there where eager has none")
    pairs = [("output", expected.outputs, actual.outputs, exact.outputs if exact else None)]
    if expected.grads is not None and actual.grads is not None:
        pairs.append(("gradient", expected.grads, actual.grads, exact.grads if exact else None))
    for what, theirs, ours, reference in pairs:
        if len(theirs) != len(ours):
            return f"{len(ours)} {what}s where eager has {len(theirs)}"
        aligned = reference if reference is not None and len(reference) == len(theirs) else [None] * len(theirs)
        for number, (their, our, right) in enumerate(zip(theirs, ours, aligned, strict=True)):
            problem = _far(their, our, right, expected.repeatable)
            if problem is None and what == "output":
                problem = _laid_out_otherwise(their, our)
            if problem:
                return f"{what} {number}: {problem}"
    if expected.aliases != actual.aliases:
        return f"outputs lie in the memory of inputs {actual.aliases}, in eager {expected.aliases}"
    return None


def _laid_out_otherwise(their: Any, our: Any) -> str | None:
    if not isinstance(their, torch.Tensor) or their.layout != torch.strided or their.numel() < 2:
        return None
    pairs = zip(their.shape, their.stride(), our.stride(), strict=True)
    if all(size == 1 or a == b for size, a, b in pairs):
        return None
    return f"strides {our.stride()} of {tuple(our.shape)} where eager has {their.stride()}"


def _far(their: Any, our: Any, right: Any, repeatable: bool) -> str | None:
    if not isinstance(their, torch.Tensor):
        if isinstance(our, torch.Tensor):
            return f"a tensor where eager has {their}"
        same = our == their or (our != our and their != their)
        return None if same or not repeatable else f"{our} where eager has {their}"
    if not isinstance(our, torch.Tensor):
        return f"a {type(our).__name__}"
    if (our.dtype, our.shape, our.layout) != (their.dtype, their.shape, their.layout):
        return f"{our.dtype} {tuple(our.shape)} where eager has {their.dtype} {tuple(their.shape)}"
    if not repeatable:
        return None  # uninitialised memory: nothing to compare but shapes
    try:
        torch.testing.assert_close(our, their, equal_nan=True)
    except AssertionError as error:
        if isinstance(right, torch.Tensor) and _as_near(our, their, right):
            return None
        return " ".join(str(error).split()[:40])
    return None


def _as_near(our: torch.Tensor, their: torch.Tensor, right: torch.Tensor) -> bool:
    """No further from the float64 answer than twice eager, beside the default tolerance."""
    if not our.dtype.is_floating_point or right.shape != our.shape or not right.dtype.is_floating_point:
        return False
    ours, theirs = our.double(), their.double()
    known = right.isfinite() & (ours.isfinite() | theirs.isfinite())  # eager may overflow where the answer does not
    special = [torch.where(known, 0, values).nan_to_num(1, 2, 3) for values in (ours, theirs)]
    if not torch.equal(*special):
        return False
    rtol, atol = torch.testing._comparison.default_tolerances(our.dtype)
    off = (theirs - right)[known & theirs.isfinite()].abs()
    allowed = atol + rtol * right[known].abs() + (2 * off.max() if off.numel() else 0)
    return bool(((ours - right)[known].abs() <= allowed).all())


def same(first: Answer, second: Answer) -> bool:
    """Did eager give the same twice?"""
    leaves = (torch.utils._pytree.tree_leaves((a.outputs, a.grads)) for a in (first, second))
    return all(map(_equal, *leaves))


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b or a != a)
    if a.layout != torch.strided or a.is_quantized:
        return True
    return a.shape == b.shape and torch.equal(*(t.nan_to_num() if t.dtype.is_floating_point else t for t in (a, b)))
