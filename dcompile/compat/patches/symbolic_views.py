"""Give views of symbolic sizes the requested sizes, with few guards.

torch 2.13 computes the sizes of a view by merging and splitting dimensions, and guards on each comparison. Its result
equals the requested sizes only by such a guard. A plane of `x` pixels cut into windows by `view(x // 2, 2)` becomes `x
// 2` by `x // (x // 2)`. Each view of a view makes the expressions longer. Tracing a training step of a Swin with three
layers took 360 s of CPU time, and takes 20 s with this patch (docs/lab/runtime.md, R6).

A row-major tensor can be viewed with any sizes of as many elements, and the view is row-major. torch itself uses that
where sizes are data-dependent.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from math import prod
from typing import Any


@contextlib.contextmanager
def views_as_asked() -> Iterator[None]:
    """View dense tensors of symbolic sizes with exactly the requested sizes, while graphs are traced.

    Nested uses (Dynamo's tracing calls AOTAutograd's) change nothing.
    """
    import torch
    from torch._subclasses import fake_impls

    known: dict[Any, Callable[..., Any]] = getattr(fake_impls, "op_implementations_dict", {})
    views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
    theirs = {op: known[op] for op in views if op in known and not isinstance(known[op], _Looking)}
    with unittest.mock.patch.dict(known, {op: _Looking(own) for op, own in theirs.items()}):
        yield


class _Looking:
    """torch's own implementation of a view, with a shortcut."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(self, mode: Any, func: Any, x: Any, *shape: Any, **more: Any) -> Any:
        from torch._prims_common import infer_size, make_contiguous_strides_for

        if more or len(shape) != 1 or not _is_simple(x, shape[0]):
            return self._own(mode, func, x, *shape, **more)
        _divide(x, shape[0])
        _keep(x, shape[0])
        asked = infer_size(tuple(shape[0]), x.numel())  # checks the number of elements
        return x.as_strided(asked, make_contiguous_strides_for(asked))


def _is_simple(x: Any, shape: Any) -> bool:
    """Whether sizes are symbols with known hints, and the tensor is row-major."""
    import torch

    symbolic = [size for size in (*x.shape, *shape) if isinstance(size, torch.SymInt)]
    return bool(symbolic and x.ndim and shape) and all(map(_has_number, symbolic)) and _lies_in_order(x)


def _has_number(size: Any) -> bool:
    """Whether a size's value during tracing is known: it is not data-dependent."""
    known = _numbers(size.node.shape_env)
    return all(symbol in known for symbol in size.node.expr.free_symbols)


def _numbers(shape_env: Any) -> Any:
    return shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val


def _lies_in_order(x: Any) -> bool:
    """Whether a tensor is known to be row-major, including dimensions of one element."""
    from torch._prims_common import is_contiguous_or_false, make_contiguous_strides_for
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if not is_contiguous_or_false(x):
        return False
    expected = make_contiguous_strides_for(x.shape)
    single = [place for place, size in enumerate(x.shape) if isinstance(size, int) and size == 1]
    return all(statically_known_true(x.stride(place) == expected[place]) for place in single)


def _divide(x: Any, shape: Any) -> None:
    """Where a size is a quotient, `x // 2`, guard on a zero remainder, if it is zero.

    Only then the numbers of elements are equal. torch can then simplify `2 * (x // 2)`.
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
    """Where one size is left open (-1), guard on outer sizes that stay and whose hints are equal.

    The open size is a quotient by the other sizes. If a batch is `a` in one tensor and `b` in the next, all later sizes
    would contain `a * n // b`, which is `n`.
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
