"""The type of a lowering rule, and the dtype rules that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from dcompile.codegen.lower.fx_nodes import Kind
from dcompile.codegen.lower.lazy_tensor import LazyTensor
from dcompile.ir.float8 import FLOAT8
from dcompile.ir.index import Index, Size
from dcompile.ir.ops import DTYPES

Result = Any
"""A LazyTensor, a tuple of them, or NotImplemented where the rule does not cover the arguments; then the library is
called."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What dcompile does with an ATen op: the row of the op, under its name, in the table of a module in `rules/`.

    `lower(lowering, fake_value, *args, **kwargs)` makes loops of it; `kind` says how it takes its arguments.
    """

    lower: Callable[..., Result]
    kind: Kind = "loop"
    recompute: bool = True
    """Whether a loop costs no more than reading its saved results, so that the backward may compute them again. Others
    read much more than they write, or change the shape: inputs are fused into them, and their results are saved."""
    decomposed: bool = False
    """Whether torch's decomposition, if there is one, comes first: the rule is for what it leaves, or other graphs."""


def opmath(dtype: str) -> str:
    """Return the dtype in which arithmetic on `dtype` is done."""
    return "float32" if dtype in ("bfloat16", "float16", *FLOAT8) else dtype


@lru_cache(maxsize=256)
def promote(left: str, right: str) -> str:
    return str(torch.promote_types(getattr(torch, left), getattr(torch, right))).removeprefix("torch.")


def common_dtype(args: tuple[Any, ...]) -> str:
    """Return the dtype in which operands are compared: torch's promotion, tensors with dimensions first."""
    ranks: list[str | None] = [None, None, None]  # tensors with dimensions, tensors without, Python numbers
    for arg in args:
        rank = (0 if arg.shape else 1) if isinstance(arg, LazyTensor) else 2
        dtype = arg.dtype if isinstance(arg, LazyTensor) else number_dtype(arg)
        present = ranks[rank]
        ranks[rank] = dtype if present is None else promote(present, dtype)
    result: str | None = None
    for present in ranks:
        if present is not None and (result is None or _category(present) > _category(result)):
            result = present if result is None else promote(present, result)
    assert result is not None, "an operation without operands"
    return result


def number_dtype(number: bool | float | Size) -> str:
    return "bool" if isinstance(number, bool) else "int64" if isinstance(number, int | Index) else "float32"


def _category(dtype: str) -> int:
    return ("bool", "int", "float").index(DTYPES[dtype])
