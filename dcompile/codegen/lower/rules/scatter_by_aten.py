"""Values put or added in place by the library, on CPUs: a copy of the tensor, and its in-place operation on that.

A loop of ours that puts values first finds the number of the last one for each place, in memory of its own, and then
asks at every place whether there is one; one that adds collects sums from zero. For single elements that is memory as
large as the tensor's, filled, read and written: the library took 0.17 to 0.6 of the time (16 MB, Zen 5). What it leaves
where several values meet is the same with any number of threads: one thread has a whole line of a scatter, and all of
few values.
"""

from __future__ import annotations

from typing import Any

from dcompile.codegen.lower.context import Lowering
from dcompile.codegen.lower.lazy_tensor import LazyTensor, constant_of, copy_of, from_view
from dcompile.codegen.lower.symbolic.strides import Shape
from dcompile.ir.index import size_product, typical

MAX_SMALL_ELEMENTS = 4096
"""Elements of a tensor below which a call of the library takes longer than loops of ours over all of it."""
ONE_THREAD = 32768
"""Elements from which on ATen's index_put_ may be several threads' (at::internal::GRAIN_SIZE)."""
MIN_ELEMENTS_PER_PUT = 8
"""Elements of a tensor for each that is put or added, from which on these are few; and elements that share a place,
from which on it costs little to ask what is put there."""


def by_library(low: Lowering, x: LazyTensor, op: str, *given: Any) -> LazyTensor:
    """`x` after an in-place operation `op` of ATen with these further arguments; `x` itself stays as it is."""
    own = low.store(copy_of(x))
    assert own.view is not None
    low.extern(op, [own.view, *given], [own.view.buffer], mode="mutate", effect=True)
    return from_view(own.view, x.dtype)


def scatters_by_library(low: Lowering, x: LazyTensor, index: LazyTensor, *, adds: bool) -> bool:
    """Is a scatter on a CPU the library's? One that adds, where there is little to add to what is no zero."""
    if (
        not low.traits.aten.puts_few_values_fast
        or 0 in (*index.shape, *x.shape)
        or typical(x.numel) < MAX_SMALL_ELEMENTS
    ):
        return False
    return not adds or (typical(index.numel) * MIN_ELEMENTS_PER_PUT <= typical(x.numel) and constant_of(x) != 0)


def puts_by_library(low: Lowering, x: LazyTensor, places: Shape, values: Shape, *, adds: bool) -> bool:
    """Is an index_put on a CPU the library's? `places` is how many there are to be looked up, `values` what is put."""
    count, most, numel = (size_product(shape) for shape in (values, places, x.shape))
    if not low.traits.aten.puts_few_values_fast or not (
        isinstance(count, int) and isinstance(most, int) and isinstance(numel, int)
    ):
        return False
    if numel < MAX_SMALL_ELEMENTS or count >= ONE_THREAD or count * MIN_ELEMENTS_PER_PUT > numel:
        return False
    return constant_of(x) != 0 if adds else most * MIN_ELEMENTS_PER_PUT > numel
