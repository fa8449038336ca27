"""Rules that pad tensors with what they hold, mirrored at their edges, or with the edges.

Edges of images with channels last are repeated by torch's decomposition, which alone knows how eager lays them out
(`rewrites.replication_pad`).
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
    """Which of `size` elements is seen at a place before, among or behind them."""
    last = body.index(as_index(size) - 1)
    near = body.apply("sub", last, body.apply("abs", body.index(at)))
    return body.apply("sub", last, body.apply("abs", near))


def _nearest(body: Body, at: Index, size: Size) -> Ref:
    """The same where edges are repeated."""
    return body.apply("min", body.apply("max", body.index(at), body.index(ZERO)), body.index(as_index(size) - 1))


@dataclass(frozen=True, slots=True)
class _PaddingRule:
    """Which of `size` elements is seen at a place anywhere, at one before them, and at one behind them."""

    anywhere: Callable[[Body, Index, Size], Ref]
    before: Callable[[Index, Size], Index]
    behind: Callable[[Index, Size], Index]


_MIRRORED = _PaddingRule(_mirrored, lambda at, _: at * -1, lambda at, size: as_index(size) * 2 - 2 - at)
_REPEATED = _PaddingRule(_nearest, lambda *_: ZERO, lambda _, size: as_index(size) - 1)


def _where(body: Body, condition: Ref | bool) -> AbstractContextManager[None]:
    """What is read inside is read where this holds."""
    return nullcontext() if isinstance(condition, bool) else body.masked(condition)


def _pad(
    low: Lowering, value: torch.Tensor, /, x: LazyTensor, padding: Sequence[Size], *, way: _PaddingRule
) -> LazyTensor:
    """Along the last dimension a CPU is told apart what lies beyond which edge, so that loops read in order.

    (`emit/cpp/split_loops.py`; looked up element by element, it took 1.7 to 3 times as long.) Along others the place
    is the same for a whole row.
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

RULES: dict[str, Rule] = {f"aten.reflection_pad{n}d.default": Rule(_reflection_pad) for n in (1, 2, 3)} | {
    f"aten.replication_pad{n}d.default": Rule(_replication_pad) for n in (1, 2, 3)
}
