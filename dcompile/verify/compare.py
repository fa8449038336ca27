"""Compare a result with ATen's, by the error that ATen's own evaluation has.

A fixed tolerance is wrong for most results: a sum of a million float32 numbers may be off by 1e-4, and a product never.
So the same computation is evaluated twice by ATen: in its own dtypes (`same`), and in float64 (`exact`). Where they
differ is the error that the dtypes bring about. A result misses where its own error against `exact` is larger than

    ATEN_ERRORS * (largest error of `same` in the tensor) + ROUNDINGS * eps * max(|exact|, root mean square of `exact`)

ATEN_ERRORS is above 1 because ATen's error is one sample of what any order of sums may give, at the same elements or at
others. The second term is for tensors whose elements ATen happened to round well, such as a single loss.

Where terms cancel, as in the gradient of a bias in front of a norm, all of a result is rounding, and a few elements are
a bad sample of it. So the sentinel and bisect compare what would miss once more, with a third evaluation: of inputs in
float32 and float64 that differ by a rounding. Its largest error takes the place of ATen's if it is larger.

Measured on correct programs of thirty models (docs/lab/numerics.md), by what ATEN_ERRORS would have to be: in float32,
0.9 for 99 % of results, 1.9 for 99.9 %, and 16 for the worst of 30,239; in bfloat16, 1.0 for the worst of 30,388. In
float32, three were above 8, each of which cancels.
Where `same` is infinite or NaN, a result must be so, too. Integers and truth values must equal either evaluation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

ATEN_ERRORS = 8.0
"""Errors of ATen's own evaluation that a result may have: more than correct results had, but where terms cancel."""
ROUNDINGS = 8.0
"""Roundings to the result's dtype that are allowed beyond them: a choice, too, for a few elementwise steps in a row."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A result that is wrong, at its worst element."""

    reason: str = ""
    """What differs other than values: shape, dtype, or being there at all. The other fields are then empty."""
    position: tuple[int, ...] = ()
    got: float = math.nan
    wanted: float = math.nan
    """The element's value in float64."""
    allowed: float = 0.0
    """Largest error of this element that is no miss."""
    count: int = 0
    """Elements that miss, of `numel`."""
    numel: int = 0

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        place = f"[{', '.join(map(str, self.position))}]"
        many = f"{self.count} of {self.numel} elements differ"
        return f"{many}; at {place} {self.got:.9g}, wanted {self.wanted:.9g} within {self.allowed:.2g}"


def compare(
    got: torch.Tensor | None,
    same: torch.Tensor | None,
    exact: torch.Tensor | None,
    rounded: torch.Tensor | None = None,
) -> Miss | None:
    """Compare a result with ATen's in the result's dtypes, and in float64; None if it is right.

    `rounded`: ATen's for inputs that differ by a rounding, if they were evaluated. Without `exact`, `same` counts as
    exact, so that only roundings are allowed. The tensors may be on any device, and are not changed. Complex numbers
    are compared part by part, and 8-bit floats by their values.
    """
    if got is None or same is None:
        return None if got is same else Miss("a result is absent" if got is None else "a result should be absent")
    if got.shape != same.shape or got.dtype != same.dtype:
        wanted = f"{same.dtype} of shape {tuple(same.shape)}"
        return Miss(f"{got.dtype} of shape {tuple(got.shape)}, wanted {wanted}")
    if got.is_complex():
        given = (got, same, exact, rounded)
        parts = [None if value is None else torch.view_as_real(value.resolve_conj()) for value in given]
        return compare(*parts)
    exact = same if exact is None or exact.shape != same.shape else exact
    if not got.is_floating_point():
        wrong = (got != same) & (got != exact.to(got.dtype))
        return _worst(wrong, wrong.double(), got, same, 0.0)
    eps = torch.finfo(got.dtype).eps
    got, same, exact = (value.detach().to(torch.float64) for value in (got, same, exact))
    if _is_within(got, same, exact, ROUNDINGS * eps):
        return None
    finite = same.isfinite() & exact.isfinite()
    reference, scale = (same - exact).abs()[finite], torch.where(finite, exact, 0.0).abs()
    if reference.numel():
        scale = scale.clamp(min=float(scale[finite].square().mean().sqrt()))
    largest = float(reference.max()) if reference.numel() else 0.0
    if rounded is not None and reference.numel():
        largest = max(largest, float((rounded.detach().to(torch.float64) - exact).abs()[finite].nan_to_num().max()))
    allowed = ATEN_ERRORS * largest + ROUNDINGS * eps * scale
    error = torch.where(finite, (got - exact).abs().nan_to_num(nan=math.inf), 0.0)
    alike = torch.where(same.isnan(), got.isnan(), got == same) | (exact.isfinite() & (got - exact).abs().le(allowed))
    error = torch.where(finite | alike, error, math.inf)
    return _worst(error > allowed, error - allowed, got, exact, allowed)


def is_near(got: Any, same: Any) -> bool:
    """Whether `compare` finds no miss without `exact`, in fewer passes. False leaves it to that, as for infinities."""
    if not isinstance(got, torch.Tensor) or not isinstance(same, torch.Tensor):
        return not isinstance(got, torch.Tensor) and not isinstance(same, torch.Tensor)
    if got.shape != same.shape or got.dtype != same.dtype or not got.is_floating_point():
        return got.shape == same.shape and got.dtype == same.dtype and torch.equal(got, same)
    share = ROUNDINGS * torch.finfo(got.dtype).eps
    wide = torch.float64 if got.dtype == torch.float64 else torch.float32
    got, same = got.detach().to(wide), same.detach().to(wide)
    return _is_within(got, same, same, share)


def _is_within(got: torch.Tensor, same: torch.Tensor, exact: torch.Tensor, share: float) -> bool:
    """Whether finite tensors differ by no more than is allowed, in half the passes that a miss takes."""
    if not got.numel():
        return True
    reference = 0.0 if exact is same else float((same - exact).abs_().max())
    size = float(exact.square().mean().sqrt())
    allowed = exact.abs().clamp_(min=size).mul_(share).add_(ATEN_ERRORS * reference)
    return math.isfinite(reference + size) and bool((got - exact).abs_().sub_(allowed).max() <= 0)


def _worst(
    wrong: torch.Tensor, excess: torch.Tensor, got: torch.Tensor, wanted: torch.Tensor, allowed: torch.Tensor | float
) -> Miss | None:
    """The miss at the element with the largest excess."""
    count = int(wrong.sum())
    if not count:
        return None
    place = torch.where(wrong, excess, -1.0).argmax()
    position = tuple(int(at) for at in torch.unravel_index(place, got.shape))
    bound = float(allowed[position]) if isinstance(allowed, torch.Tensor) else allowed
    return Miss("", position, float(got[position]), float(wanted[position]), bound, count, got.numel())
