"""Rules that pad tensors by reflection or by replication of their edges.

Replication of channels-last images is torch's decomposition, which alone reproduces eager's layout
(`decompositions.aten.replication_pad`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, constant, make_lazy
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.rule import Rule
from dcompile.codegen.lower.rules.concat import below, either, not_below, value_of
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.ir.index import ZERO, Index, Size, as_index
from dcompile.ir.nodes import Ref


def _mirrored(body: Body, at: Index, size: Size) -> Ref:
    """Return the element, among `size`, that reflection shows at a position before, inside or after them."""
    last = body.index(as_index(size) - 1)
    near = body.apply("sub", last, body.apply("abs", body.index(at)))
    return body.apply("sub", last, body.apply("abs", near))


def _nearest(body: Body, at: Index, size: Size) -> Ref:
    """Return the element, among `size`, that replication shows at a position."""
    return body.apply("min", body.apply("max", body.index(at), body.index(ZERO)), body.index(as_index(size) - 1))


@dataclass(frozen=True, slots=True)
class _PaddingRule:
    """The element shown at any position, at a position before the elements, and at one after them."""

    anywhere: Callable[[Body, Index, Size], Ref]
    before: Callable[[Index, Size], Index]
    behind: Callable[[Index, Size], Index]


_MIRRORED = _PaddingRule(_mirrored, lambda at, _: at * -1, lambda at, size: as_index(size) * 2 - 2 - at)
_REPEATED = _PaddingRule(_nearest, lambda *_: ZERO, lambda _, size: as_index(size) - 1)


def _where(body: Body, condition: Ref | bool) -> AbstractContextManager[None]:
    """Restrict loads inside to where the condition holds."""
    return nullcontext() if isinstance(condition, bool) else body.masked(condition)


def _pad(
    low: Lowering, value: torch.Tensor, /, x: LazyTensor, padding: Sequence[Size], *, way: _PaddingRule
) -> LazyTensor:
    """Pad by `way`. On CPUs the last dimension has a case for each side of its edges, so that loops read in order.

    `emit/cpp/loop_conditions.py` splits the loop at these edges; a lookup of each element took 1.7 to 3 times as long.
    Along other dimensions the position is constant for a whole row.
    """
    shape, dtype, last = shape_of(value), dtype_name(value.dtype), len(x.shape) - 1
    if 0 in shape:
        return constant(0, shape, dtype)
    first = {last - n: padding[2 * n] for n in range(len(padding) // 2)}
    looked_up = [dim for dim in first if dim != last or not low.traits.splits_loops]
    x = x if x.is_cheap else low.memory(x)

    def at(body: Body, coords: Coords) -> Ref:
        found = list(coords)
        for dim in looked_up:
            size = x.shape[dim]
            found[dim] = body.as_index(way.anywhere(body, coords[dim] - first[dim], size), size)
        if last in looked_up:
            return body.trace(x, tuple(found))
        moved, size, lead = coords[last] - first[last], x.shape[last], tuple(found[:-1])

        def element(index: Index) -> Ref:
            return value_of(body, x, (*lead, index), dtype)

        def later() -> Ref:
            with _where(body, not_below(body, moved, 0)):
                return either(body, below(body, moved, size), lambda: element(moved), beyond)

        def beyond() -> Ref:
            with _where(body, not_below(body, moved, size)):
                return element(way.behind(moved, size))

        return to_dtype(
            body, either(body, below(body, moved, 0), lambda: element(way.before(moved, size)), later), dtype
        )

    return make_lazy(shape, dtype, at, (x,), ops=8)


_reflection_pad, _replication_pad = partial(_pad, way=_MIRRORED), partial(_pad, way=_REPEATED)

RANKS = (1, 2, 3)
RULES: dict[str, Rule] = {
    **{f"aten.reflection_pad{n}d.default": Rule(_reflection_pad, recompute=False) for n in RANKS},
    **{f"aten.replication_pad{n}d.default": Rule(_replication_pad, recompute=False, decomposed=True) for n in RANKS},
}
