"""Calls of torch's operators: the function, its out= overload, and its results."""

from __future__ import annotations

import functools
from typing import Any

import torch

NARROWED = {f"aten.{name}.out": f"torch.{name}" for name in ("mm", "addmm", "bmm", "baddbmm")}
"""Matmuls, which use another algorithm for 16 bits on some processors (`runtime/program/half_gemm.py`)."""
_PYTHON = NARROWED | {"aten.convolution.default": "torch.convolution"}
"""Functions whose arguments torch parses in half the time of an operator's: 0.8 us for 1.5."""


def resolve(op: str) -> Any:
    """Return the overload of a name such as `aten.mm.default`."""
    return functools.reduce(getattr, op.split("."), torch.ops)


def function(op: str) -> str:
    """Return the expression to call for an overload."""
    return _PYTHON.get(op, f"entry(torch.ops.{op})")


def in_torch(op: str) -> bool:
    """Return whether an op is in `torch.ops`; others are dcompile's checks and Python functions on numbers."""
    return op.split(".", 1)[0] not in ("dcompile", "operator", "math", "builtins", "torch")


def is_custom(op: str) -> bool:
    """Return whether an op is registered outside torch, with a fake implementation that describes its results."""
    return in_torch(op) and op.split(".", 1)[0] not in ("aten", "prims", "_c10d_functional")


@functools.cache
def has_late_shape(op: str) -> bool:
    """Return whether the shape of an op's results depends on its arguments' elements."""
    return in_torch(op) and torch.Tag.dynamic_output_shape in getattr(resolve(op), "tags", ())


@functools.cache
def returns_one_tensor(op: str) -> bool:
    """Return whether a call returns a tensor (or a number, as aten.sym_numel does) and not a tuple or list."""
    schema = getattr(resolve(op), "_schema", None) if in_torch(op) else None
    return schema is None or (len(schema.returns) == 1 and not str(schema.returns[0].type).startswith("List["))


@functools.cache
def out_overload(op: str) -> tuple[str, tuple[str, ...]]:
    """Return the out= overload of an op, and the names of its out arguments."""
    function = resolve(op)
    outs = tuple(a.name for a in function._schema.arguments if a.is_out)
    if outs:
        return op, outs
    wanted = [(a.name, str(a.type)) for a in function._schema.arguments]
    packet, _ = op.rsplit(".", 1)
    for overload in resolve(packet).overloads():
        arguments = getattr(resolve(packet), overload)._schema.arguments
        outs = tuple(a.name for a in arguments if a.is_out)
        if outs and [(a.name, str(a.type)) for a in arguments if not a.is_out] == wanted:
            return f"{packet}.{overload}", outs
    raise AssertionError(f"{op} has no out= overload: lowering must not choose mode out for it")
