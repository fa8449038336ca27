"""Scatter on CPUs by the library: copy the tensor, and run ATen's in-place operation on the copy.

A loop that replaces values finds the number of the last one for each position in memory of its own, and then checks
every position. A loop that adds collects sums from zero. For single elements that memory is as large as the tensor's:
it is filled, read and written. The library took 0.17 to 0.6 of the time (16 MB, Zen 5). Its result where values share a
position does not depend on the number of threads. One thread has a whole line of a scatter, and all of few values.
"""

from __future__ import annotations

from typing import Any

from dcompile.codegen.lower.context import Lowering
from dcompile.codegen.lower.lazy_tensor import LazyTensor, constant_of, copy_of, from_view
from dcompile.codegen.lower.symbolic.strides import Shape
from dcompile.ir.index import size_product, typical

MAX_SMALL_ELEMENTS = 4096
"""Elements of a tensor below which a library call takes longer than loops over all of it."""
ONE_THREAD = 32768
"""Elements from which ATen's index_put_ may use several threads (at::internal::GRAIN_SIZE)."""
MIN_ELEMENTS_PER_PUT = 8
"""Elements of a tensor for each written value, from which the values count as few. Also the elements for each position,
from which looking up its value is cheap."""


def by_library(low: Lowering, x: LazyTensor, op: str, *given: Any) -> LazyTensor:
    """Return `x` after an in-place operation `op` of ATen with these further arguments; `x` itself is unchanged."""
    own = low.store(copy_of(x))
    assert own.view is not None
    low.extern(op, [own.view, *given], [own.view.buffer], mode="mutate", effect=True)
    return from_view(own.view, x.dtype)


def scatters_by_library(low: Lowering, x: LazyTensor, index: LazyTensor, *, adds: bool) -> bool:
    """Is a scatter on a CPU the library's? One that adds is, if it adds few values to a tensor other than zero."""
    if (
        not low.traits.aten.puts_few_values_fast
        or 0 in (*index.shape, *x.shape)
        or typical(x.numel) < MAX_SMALL_ELEMENTS
    ):
        return False
    return not adds or (typical(index.numel) * MIN_ELEMENTS_PER_PUT <= typical(x.numel) and constant_of(x) != 0)


def puts_by_library(low: Lowering, x: LazyTensor, places: Shape, values: Shape, *, adds: bool) -> bool:
    """Is an index_put on a CPU the library's? `places` is the shape of the positions, `values` that of the values."""
    count, most, numel = (size_product(shape) for shape in (values, places, x.shape))
    if not low.traits.aten.puts_few_values_fast or not (
        isinstance(count, int) and isinstance(most, int) and isinstance(numel, int)
    ):
        return False
    if numel < MAX_SMALL_ELEMENTS or count >= ONE_THREAD or count * MIN_ELEMENTS_PER_PUT > numel:
        return False
    return constant_of(x) != 0 if adds else most * MIN_ELEMENTS_PER_PUT > numel
