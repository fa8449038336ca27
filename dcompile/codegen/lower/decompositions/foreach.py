"""Operations over lists of tensors, as optimizers use them: one operation for each tensor, which fuse by tensor."""

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
"""Arguments that the operation on one tensor takes by keyword, by their name in the operation over lists."""


def table() -> dict[Any, Callable[..., list[torch.Tensor]]]:
    """Each operation over lists that has a counterpart for single tensors, with its decomposition."""
    names = {(name, overload): name for name, overloads in _SAME_NAME.items() for overload in overloads}
    found = {}
    for (name, overload), single in (names | _OTHER_NAME).items():
        packet = getattr(torch.ops.aten, f"_foreach_{name}", None)
        if packet is not None and overload in packet.overloads():
            op = getattr(packet, overload)
            found[op] = _each(op, getattr(torch.ops.aten, single))
    return found


def _each(op: Any, single: Any) -> Callable[..., list[torch.Tensor]]:
    """The list operation `op` by way of `single`: lists are taken element by element, all else goes to every call."""
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
