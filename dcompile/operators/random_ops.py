"""Random operations as functions of a key: torch operators, with an implementation for where no kernel runs them.

`torch.ops.dcompile_random` has `uniform`, `normal`, `less` and `bits`. Each takes a size, a `key` and `draw`. The key
is one int64, drawn from torch's generator once per call of a graph; `draw` distinguishes the operations of a graph.
They are pure, so a backward recomputes a mask instead of saving it. With key None, they draw one: for graphs inside
graphs, which get no key.

The numbers come from Philox (`ir/philox.py`); `codegen/lower/rules/creation.py` has the same arithmetic in loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile.ir.philox import INCREMENTS, MULTIPLIERS, ROUNDS
from dcompile.operators.own_operators import define_operators

NAMESPACE = "dcompile_random"
KEY_RANGE = (-(2**63), 2**63 - 1)
"""Range from which a key is drawn, as arguments of `torch.randint`."""
DIGITS = {"float32": 24, "float64": 53, "bfloat16": 8, "float16": 11}
"""Random bits of a uniform number: the precision of the dtype, so that no number is rounded up to 1, as in eager."""
LOW = 0xFFFFFFFF

_SCHEMAS = (
    "uniform(SymInt[] size, ScalarType dtype, Device device, Tensor? key=None, int draw=0) -> Tensor",
    "normal(SymInt[] size, ScalarType dtype, Device device, Tensor? key=None, int draw=0) -> Tensor",
    "less(SymInt[] size, float p, Device device, Tensor? key=None, int draw=0) -> Tensor",
    "bits(SymInt[] size, int count, Device device, Tensor? key=None, int draw=0) -> Tensor",
)


def threshold(p: float) -> int | None:
    """Limit of words (as int32) for a probability `p`: words below it are true. None if every word is."""
    least = math.ceil(p * 2**32)
    return None if least >= 2**32 else max(least, 0) - 2**31


def words(key: torch.Tensor, size: Sequence[int], draw: int, count: int) -> list[torch.Tensor]:
    """First `count` words of each element's block, as int64 of 32 bits."""
    position = torch.arange(math.prod(size), dtype=torch.int64, device=key.device)
    a, b = position & LOW, position >> 32
    c, d = torch.full_like(a, draw & LOW), torch.full_like(a, draw >> 32)
    k0, k1 = key & LOW, key >> 32 & LOW
    for _ in range(ROUNDS):  # products wrap around in 64 bits without losing bits
        first, second = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (second >> 32 & LOW) ^ b ^ k0, second & LOW, (first >> 32 & LOW) ^ d ^ k1, first & LOW
        k0, k1 = k0 + INCREMENTS[0] & LOW, k1 + INCREMENTS[1] & LOW
    return [word.reshape(tuple(size)) for word in (a, b, c, d)[:count]]


def as_signed(word: torch.Tensor) -> torch.Tensor:
    """Reinterpret 32 bits as a signed number."""
    return (word ^ 2**31) - 2**31


def draw_key(device: torch.device) -> torch.Tensor:
    """Key from torch's generator of this device."""
    return torch.randint(*KEY_RANGE, [1], dtype=torch.int64, device=device)


def uniform(
    size: Sequence[int], dtype: torch.dtype, device: torch.device, key: torch.Tensor | None = None, draw: int = 0
) -> torch.Tensor:
    """Numbers in [0, 1), multiples of 2**-digits."""
    digits = DIGITS[str(dtype).removeprefix("torch.")]
    first, second = words(draw_key(device) if key is None else key, size, draw, 2)
    if digits > 32:
        return ((second & (1 << digits - 32) - 1) << 32 | first).to(dtype) * 2.0**-digits
    return (first >> 32 - digits).to(dtype) * 2.0**-digits


def normal(
    size: Sequence[int], dtype: torch.dtype, device: torch.device, key: torch.Tensor | None = None, draw: int = 0
) -> torch.Tensor:
    """Standard normal numbers, by the Box-Muller transform of two words."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    first, second = words(draw_key(device) if key is None else key, size, draw, 2)
    share = ((first & 2**31 - 1).to(compute) + 0.5) * 2.0**-31  # in (0, 1]
    angle = as_signed(second).to(compute) * (math.pi * 2.0**-31)
    return ((share.log() * -2).sqrt() * angle.cos()).to(dtype)


def less(
    size: Sequence[int], p: float, device: torch.device, key: torch.Tensor | None = None, draw: int = 0
) -> torch.Tensor:
    """Booleans that are true with probability `p`."""
    limit = threshold(p)
    if limit is None:
        return torch.ones(tuple(size), dtype=torch.bool, device=device)
    (word,) = words(draw_key(device) if key is None else key, size, draw, 1)
    return as_signed(word) < limit


def bits(
    size: Sequence[int], count: int, device: torch.device, key: torch.Tensor | None = None, draw: int = 0
) -> torch.Tensor:
    """Integers of `count` random bits, 32 or 63, as int64."""
    first, second = words(draw_key(device) if key is None else key, size, draw, 2)
    return first if count == 32 else (second & 2**31 - 1) << 32 | first


def _empty_of(dtype: torch.dtype | None) -> Callable[..., torch.Tensor]:
    """Fake implementation: an empty result. `dtype` None: it is the second argument."""

    def empty(size: Any, second: Any, device: Any, key: Any = None, draw: int = 0) -> torch.Tensor:
        return torch.empty(size, dtype=second if dtype is None else dtype, device=device)

    return empty


_LIBRARY = define_operators(
    NAMESPACE,
    _SCHEMAS,
    {
        "uniform": (uniform, _empty_of(None)), "normal": (normal, _empty_of(None)),
        "less": (less, _empty_of(torch.bool)), "bits": (bits, _empty_of(torch.int64)),
    },
)  # fmt: skip
"""Library of the operators, which exist as long as this object."""


def is_random(target: Any) -> bool:
    """Whether a target is one of these operators."""
    return getattr(target, "namespace", None) == NAMESPACE


def operators() -> tuple[Any, ...]:
    """Overload packets of these operators."""
    return tuple(getattr(torch.ops.dcompile_random, schema.partition("(")[0]) for schema in _SCHEMAS)
