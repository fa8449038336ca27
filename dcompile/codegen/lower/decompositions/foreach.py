"""Decompositions of list operations, as optimizers use them, into one operation for each tensor, which fuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_UNARY = (
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac", "lgamma",
    "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt",
    "tan", "tanh", "trunc",
)  # fmt: skip
_SAME_NAME = {
    **dict.fromkeys(_UNARY, ("default",)),
    **dict.fromkeys(("add", "sub", "mul", "div"), ("Scalar", "List", "ScalarList", "Tensor")),
    "pow": ("Scalar", "List", "ScalarList", "ScalarAndTensor"),
    "lerp": ("Scalar", "List", "ScalarList"),
    "addcmul": ("Scalar", "ScalarList"),
    "addcdiv": ("Scalar", "ScalarList"),
    "maximum": ("List",),
    "minimum": ("List",),
}
_OTHER_NAME = {
    ("clamp_min", "List"): "maximum", ("clamp_max", "List"): "minimum",
    ("clamp_min", "Scalar"): "clamp_min", ("clamp_max", "Scalar"): "clamp_max",
    ("maximum", "Scalar"): "clamp_min", ("minimum", "Scalar"): "clamp_max",
    ("norm", "Scalar"): "linalg_vector_norm",
}  # fmt: skip
_KEYWORDS = {"alpha": "alpha", "value": "value", "scalars": "value", "dtype": "dtype"}
"""Keyword arguments of the single-tensor operation, by their names in the list operation."""


def table() -> dict[Any, Callable[..., list[torch.Tensor]]]:
    """Return each list operation that has a single-tensor counterpart, with its decomposition."""
    names = {(name, overload): name for name, overloads in _SAME_NAME.items() for overload in overloads}
    found = {}
    for (name, overload), single in (names | _OTHER_NAME).items():
        packet = getattr(torch.ops.aten, f"_foreach_{name}", None)
        if packet is not None and overload in packet.overloads():
            op = getattr(packet, overload)
            found[op] = _each(op, getattr(torch.ops.aten, single))
    return found


def _each(op: Any, single: Any) -> Callable[..., list[torch.Tensor]]:
    """Apply `single` to each element of the list operation `op`'s lists; other arguments go to every call."""
    parameters = [argument.name for argument in op._schema.arguments]
    by_keyword = _KEYWORDS if "addc" in op.__name__ else {n: k for n, k in _KEYWORDS.items() if n != "scalars"}

    def each(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        count = next(len(value) for value in given.values() if isinstance(value, (list, tuple)))
        results = []
        for number in range(count):
            one = {name: v[number] if isinstance(v, (list, tuple)) else v for name, v in given.items()}
            rest = [value for name, value in one.items() if name not in by_keyword]
            results.append(single(*rest, **{by_keyword[name]: v for name, v in one.items() if name in by_keyword}))
        return results

    return each
