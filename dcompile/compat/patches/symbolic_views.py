"""Views of symbolic sizes have the sizes that were asked for, with few guards.

torch 2.13 finds the sizes of a view by merging and splitting dimensions. It guards on every comparison on the way, and
what it returns is equal to what was asked for by such a guard alone: a plane of `x` pixels cut into windows, by
`view(x // 2, 2)`, comes out as `x // 2` by `x // (x // 2)`. Each view of a view makes that longer: a training step of a
Swin of three layers had 545 guards of up to 665 terms, and took 360 s of CPU time to trace; now 127, and 20 s.

What lies in row-major order can be looked at with any sizes that come to as many elements, and lies in row-major order
then: torch says so itself where sizes depend on values.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from math import prod
from typing import Any


@contextlib.contextmanager
def views_as_asked() -> Iterator[None]:
    """While graphs are traced, look at dense tensors of symbolic sizes with the very sizes that are asked for.

    Within itself (Dynamo's tracing calls AOTAutograd's) it changes nothing.
    """
    import torch
    from torch._subclasses import fake_impls

    known: dict[Any, Callable[..., Any]] = getattr(fake_impls, "op_implementations_dict", {})
    views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
    theirs = {op: known[op] for op in views if op in known and not isinstance(known[op], _Looking)}
    with unittest.mock.patch.dict(known, {op: _Looking(own) for op, own in theirs.items()}):
        yield


class _Looking:
    """torch's own implementation of a view, with a shorter way."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(self, mode: Any, func: Any, x: Any, *shape: Any, **more: Any) -> Any:
        from torch._prims_common import infer_size, make_contiguous_strides_for

        if more or len(shape) != 1 or not _is_simple(x, shape[0]):
            return self._own(mode, func, x, *shape, **more)
        _divide(x, shape[0])
        _keep(x, shape[0])
        asked = infer_size(tuple(shape[0]), x.numel())  # sees to it that there are as many elements
        return x.as_strided(asked, make_contiguous_strides_for(asked))


def _is_simple(x: Any, shape: Any) -> bool:
    """Whether this is about symbols, whose numbers are all known, and a tensor that lies in row-major order."""
    import torch

    symbolic = [size for size in (*x.shape, *shape) if isinstance(size, torch.SymInt)]
    return bool(symbolic and x.ndim and shape) and all(map(_has_number, symbolic)) and _lies_in_order(x)


def _has_number(size: Any) -> bool:
    """Whether the number that a size stands for while it is traced is known: it does not depend on values."""
    known = _numbers(size.node.shape_env)
    return all(symbol in known for symbol in size.node.expr.free_symbols)


def _numbers(shape_env: Any) -> Any:
    return shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val


def _lies_in_order(x: Any) -> bool:
    """Whether a tensor is known to lie in row-major order, dimensions of one element included."""
    from torch._prims_common import is_contiguous_or_false, make_contiguous_strides_for
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if not is_contiguous_or_false(x):
        return False
    expected = make_contiguous_strides_for(x.shape)
    single = [place for place, size in enumerate(x.shape) if isinstance(size, int) and size == 1]
    return all(statically_known_true(x.stride(place) == expected[place]) for place in single)


def _divide(x: Any, shape: Any) -> None:
    """Where a size is a quotient, `x // 2`, guard on there being no rest, if there is none.

    The number of elements is equal only then, and torch knows from now on what to make of `2 * (x // 2)`.
    """
    import sympy  # type: ignore[import-untyped, unused-ignore]
    import torch
    from torch.fx.experimental.symbolic_shapes import statically_known_true
    from torch.utils._sympy.functions import FloorDiv, Mod

    if any(isinstance(size, int) and size < 0 for size in shape) or statically_known_true(x.numel() == prod(shape)):
        return
    for size in shape:
        for factor in sympy.Mul.make_args(size.node.expr) if isinstance(size, torch.SymInt) else ():
            if isinstance(factor, FloorDiv) and factor.args[1].is_Integer:
                rest = Mod(*factor.args)
                if rest.xreplace(_numbers(size.node.shape_env)) == 0:
                    size.node.shape_env.evaluate_expr(sympy.Eq(rest, 0))


def _keep(x: Any, shape: Any) -> None:
    """Where one size is left open, guard on the outer sizes that stay as they are, by their numbers, being equal.

    What is left open is a quotient by the others: a batch that is `a` by one tensor and `b` by the next would leave
    `a * n // b` in all that follows, which is `n`.
    """
    import sympy
    import torch
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    given = [size for size in shape if isinstance(size, torch.SymInt) or size >= 0]
    if len(given) == len(shape) or statically_known_true(x.numel() % prod(given) == 0):
        return
    env = next(size.node.shape_env for size in (*x.shape, *shape) if isinstance(size, torch.SymInt))
    for pair in zip(x.shape, shape, strict=False):
        equal = sympy.Eq(*(size.node.expr if isinstance(size, torch.SymInt) else size for size in pair))
        if not equal.xreplace(_numbers(env)):
            return
        if equal != sympy.true:
            env.evaluate_expr(equal)
