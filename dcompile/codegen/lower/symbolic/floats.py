"""Floats computed from sizes, such as `1 / x.shape[0]`: kernels evaluate them as Python would."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from dcompile.codegen.lower.symbolic.shapes import Inexpressible
from dcompile.ir.index import Index

OPS: Mapping[str, str | None] = MappingProxyType(
    {
        "operator.truediv": "div", "operator.mul": "mul", "operator.add": "add", "operator.sub": "sub",
        "operator.neg": "neg", "operator.pow": "pow", "torch.sym_float": None, "torch.sym_sqrt": "sqrt",
        "math.sqrt": "sqrt",
    }
)  # fmt: skip
"""Python operations on floats -> operations of the IR in float64; None: the argument as a float."""


@dataclass(frozen=True, slots=True)
class Real:
    """`target(*args)`, a key of OPS. Rules pass it to `Body.const`; rules that branch on its value cannot use it."""

    target: str
    args: tuple[Real | Index | int | float, ...]
    name: str = field(compare=False)
    """Its name in the host program, if a library call needs it."""

    def _unknown(self, *_: Any) -> NoReturn:
        raise Inexpressible("a decision by a number that sizes give")

    __bool__ = __int__ = __float__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _unknown


def follows(args: Iterable[Any], known: frozenset[str]) -> bool:
    """Return whether these are numbers of the program text, or computed from known sizes."""
    return all(
        isinstance(arg, Real | int | float) or (isinstance(arg, Index) and arg.variables <= known) for arg in args
    )


def real(target: str, args: Any, name: str, known: frozenset[str]) -> Real | None:
    """Return the number that a node computes, if it is one of these operations on sizes known from the arguments."""
    return Real(target, tuple(args), name) if target in OPS and follows(args, known) else None
