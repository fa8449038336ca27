"""What AOTAutograd assumes of a graph's inputs, results and tangents.

**Results at their own positions.** A result that is an input which the graph mutates itself (a counter: `self.steps +=
1`) is that input. AOTAutograd puts it at its position among the results. But inputs that are changed after the graph
(non-leaves with a gradient: `x += self.shift`) come before them. With torch 2.11 to 2.13, a model returned its counter
at another position.

**Statistics of batch norms.** In eager mode the kernel writes them without a change of their version counter. A norm
that is called twice has saved them in its first call, for a backward that does not read them in training. In a traced
graph they are mutated inputs, which are counted. If eager code called the norm before the graph did, its backward was
refused.

**Sizes of tangents.** Before it calls a backward, AOTAutograd compares the placements of a gradient with the traced
ones. The traced description of a DTensor includes its sizes. For symbolic sizes, the comparison specializes them, in a
backward that is still to be compiled, after Dynamo's guards were made. With any backend of torch 2.13, such a backward
has the first batch's sizes. The comparison is about placements, for which sizes do not matter.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from dcompile.compat.patches.torch_patch import replaced_attribute


def results_in_their_places() -> contextlib.AbstractContextManager[Any]:
    """Make AOTAutograd's graphs return computed results where mutated inputs come before results.

    The graph's caller still gets the input itself in the end.
    """
    from torch._functorch._aot_autograd import graph_capture

    def creating(own: Callable[..., Any]) -> Callable[..., Any]:
        def create(*args: Any, meta: Any, **keywords: Any) -> Any:
            return own(*args, meta=_without_inputs(meta) if meta.num_mutated_inp_runtime_indices else meta, **keywords)

        return create

    return replaced_attribute(graph_capture, "create_functionalized_fn", creating)


@contextlib.contextmanager
def without_python_kernels(wanted: bool) -> Iterator[None]:
    """Trace dropout and `upsample_*` as eager runs them, if `wanted`; their decompositions in Python round otherwise.

    Other operators with kernels in Python do there what their kernels in C++ do.
    """
    if not wanted:
        yield
        return
    names = [name for name in dir(torch.ops.aten) if name.lstrip("_").startswith(("upsample_", "dropout"))]
    packets = [getattr(torch.ops.aten, name) for name in names]
    found = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    kept = [(op, dict(op.py_kernels)) for op in found if op.py_kernels]
    try:
        for op, _ in kept:
            op.py_kernels.clear()
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernels in kept:
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def _without_inputs(meta: Any) -> Any:
    """Same metadata, without results that are inputs."""
    from torch._functorch._aot_autograd.schemas import OutputType

    changed = copy.copy(meta)
    changed.output_info = [
        dataclasses.replace(info, output_type=OutputType.non_alias) if info.output_type is OutputType.is_input else info
        for info in meta.output_info
    ]
    return changed


def unseen_statistics() -> contextlib.AbstractContextManager[Any]:
    """Mark batch norms' writes as hidden from autograd while graphs are traced; other changes still count.

    Nested uses (Dynamo's tracing calls AOTAutograd's) change nothing.
    """
    own: Any = FunctionalTensorMode.__torch_dispatch__
    if getattr(own, "hides_statistics", False):
        return contextlib.nullcontext()
    writing = (torch.ops.aten._native_batch_norm_legit.default, torch.ops.aten._batch_norm_with_update.default)

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = own(self, func, types, args, kwargs)
        if func in writing:
            for statistic in args[3:5]:
                if isinstance(statistic, FunctionalTensor):
                    statistic.mark_mutation_hidden_from_autograd()
        return result

    dispatch.hides_statistics = True  # type: ignore[attr-defined]
    return unittest.mock.patch.object(FunctionalTensorMode, "__torch_dispatch__", dispatch)


def tangents_as_results() -> contextlib.AbstractContextManager[Any]:
    """Expect a result's gradient to have the result's strides instead of row-major ones. Needed before torch 2.13.

    A gradient with other strides than expected is copied, which took two thirds of rotary embedding's backward. Strides
    of results that overlap themselves (from expand) say nothing about their gradients; the setting alone would copy
    those wrongly.
    """
    import torch._functorch.config as config
    from torch._functorch._aot_autograd import schemas

    name, kind = "guess_tangent_strides_as_outputs", getattr(schemas, "MemoryFormatMeta", None)
    if kind is None or getattr(config, name, True):
        return contextlib.nullcontext()
    own = kind.from_tensor

    def from_tensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        apart = torch._debug_has_internal_overlap(tensor) == 0
        with config.patch({name: apart}):  # type: ignore[no-untyped-call, unused-ignore]
            return own(tensor, *args, **kwargs)

    return unittest.mock.patch.object(kind, "from_tensor", staticmethod(from_tensor))


def tangents_of_any_size() -> contextlib.AbstractContextManager[Any]:
    """Make AOTAutograd ignore sizes when it compares DTensors of symbolic sizes."""
    from torch._dynamo import disable
    from torch._dynamo.eval_frame import skip_code
    from torch._functorch._aot_autograd import runtime_wrappers

    owner: Any = getattr(runtime_wrappers, "AOTDispatchAutograd", None)
    own: Callable[..., Any] | None = getattr(owner, "process_runtime_tangent", None)
    if own is None:
        return contextlib.nullcontext()
    known: dict[int, tuple[Any, Any]] = {}
    """Identity of a traced description, which stays valid as the description is kept -> (description, same without
    sizes).
    """

    def process_without_sizes(x: Any, meta: Any, *more: Any, **keywords: Any) -> Any:
        if id(meta) not in known:
            known[id(meta)] = meta, _without_sizes(meta)
        return own(x, known[id(meta)][1], *more, **keywords)

    untraced: Any = disable(process_without_sizes)  # type: ignore[no-untyped-call, unused-ignore]

    def process(x: Any, meta: Any, *more: Any, **keywords: Any) -> Any:
        chosen = own if x is None or type(x) is torch.Tensor else untraced
        return chosen(x, meta, *more, **keywords)

    skip_code(process.__code__)  # a backward may run inside a frame that Dynamo continues
    return unittest.mock.patch.object(owner, "process_runtime_tangent", staticmethod(process))


def _without_sizes(meta: Any) -> Any:
    """Traced description of a tensor, made to ignore symbolic sizes; others stay as they are."""
    spec = getattr(meta, "meta", None)
    if not isinstance(spec, tuple) or not any(map(_is_symbolic, spec)):
        return meta
    changed = copy.copy(meta)
    changed.meta = _DTensorSpec(spec)
    return changed


def _is_symbolic(part: Any) -> bool:
    """Whether a part of a DTensor's description is or contains a symbolic size."""
    shape = getattr(getattr(part, "tensor_meta", part), "shape", ())
    return isinstance(shape, tuple) and any(isinstance(size, torch.SymInt) for size in shape)


class _DTensorSpec(tuple[Any, ...]):
    """Mesh, placements and metadata of a DTensor; equal to those of a tensor with equal placements, of any size."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        same_length = isinstance(other, tuple) and len(other) == len(self)
        return same_length and all(map(_is_alike, self, other))  # type: ignore[call-overload]

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


def _is_alike(traced: Any, given: Any) -> bool:
    """Whether two parts of descriptions are equal except for sizes."""
    if not _is_symbolic(traced):
        return bool(traced == given)
    if hasattr(traced, "tensor_meta"):
        return (traced.placements, traced.mesh) == (given.placements, given.mesh)
    return traced.dtype == given.dtype and len(traced.shape) == len(given.shape)
