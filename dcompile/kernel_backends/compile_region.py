"""Compile one region with another compiler, and call it, with checks of its results."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile import compat
from dcompile.errors import DcompileError
from dcompile.kernel_backends.exported import SESSIONS, compile_session
from dcompile.kernel_backends.names import KernelBackend

Compiled = Callable[[list[Any]], Any]
"""A region as a function of a list of its inputs, which it empties. Returns a tensor or a sequence of tensors."""
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""(shape, strides, dtype) of a result."""


def refusal(backend: KernelBackend, gm: Any, trains: bool) -> str | None:
    """Reason, from the table of compilers, not to give this region to a compiler; None to try it."""
    row = backend.row
    values = [node.meta.get("val") for node in gm.graph.nodes if node.op != "output"]
    if trains and not row.trains:
        return "training graph"
    if not row.symbolic and compat.sizes.symbols_of(values):
        return "symbolic sizes"
    tensors = [t for v in values for t in (v if isinstance(v, (tuple, list)) else (v,)) if isinstance(t, torch.Tensor)]
    others = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors} - set(row.dtypes)
    if row.dtypes and others:
        return f"dtype {', '.join(sorted(others))}"
    if not all(isinstance(tensor, torch.Tensor) for tensor in _inputs(gm)) and not row.symbolic:
        return "a number as input"
    return None


def compile_region(backend: KernelBackend, gm: Any, trains: bool) -> Compiled | str:
    """Compile a region with a compiler that gets `gm` and fake tensors.

    Returns a function, or the reason for a refusal. Any exception of the compiler is a refusal: other kernels can run
    the region, and the receipt repeats the reason.
    """
    found = refusal(backend, gm, trains)
    if found is not None:
        return found
    try:
        with compat.inductor.outside_tracing(), compat.tensors.real_tensors():
            with compat.sizes.adding_no_guards(gm):
                inputs = compat.tensors.in_memory_of_their_own(_inputs(gm))
            return _boxed(_contract(backend)(gm, inputs))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return text if len(text) <= 200 else f"{text[:200]}..."


def _inputs(gm: Any) -> list[Any]:
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def _contract(backend: KernelBackend) -> Callable[[Any, Sequence[Any]], Any]:
    """Compiler with the signature of torch's backends."""
    if backend.function is not None:
        return backend.function
    if backend.name == "inductor":
        return compat.inductor.compile_region
    if backend.name in SESSIONS:
        return functools.partial(compile_session, SESSIONS[backend.name])
    for module in backend.row.modules:
        importlib.import_module(module)
    return compat.dynamo.registered_backend(backend.name)


def _boxed(compiled: Any) -> Compiled:
    """Wrap a compiled function as a function of one list, which it empties."""
    if not callable(compiled):
        raise TypeError(f"the compiler returned a {type(compiled).__name__}, not a callable")
    several = getattr(getattr(compiled, "__code__", None), "co_flags", 0) & inspect.CO_VARARGS
    if getattr(compiled, "_boxed_call", False) and not several:  # AOTAutograd's function of several has the mark, too
        return compiled  # type: ignore[no-any-return]

    def call(values: list[Any]) -> Any:
        found = compiled(*values)
        values.clear()
        return found

    return call


def region_name(number: int) -> str:
    """Name of a region's call in graphs and programs."""
    return f"dcompile_region{number}"


class RegionCall:
    """One region, called with a list of its inputs (tensors and numbers). Returns a tensor, or a tuple of several.

    Results have memory of their own, with the strides from tracing. The first call raises DcompileError if the other
    compiler returns another shape or dtype.
    """

    def __init__(
        self,
        number: int,
        backend: str,
        function: Callable[[list[Any]], Any],
        layouts: Sequence[Layout | None],
        what: str,
        cost_us: float = 0.0,
    ) -> None:
        self.number, self.backend, self.function, self.what = number, backend, function, what
        self.layouts = layouts
        """Layout of each result; None where sizes are symbols."""
        self.cost_us = cost_us
        """Estimated time of a call, in microseconds."""
        self._checked = False
        self.__name__ = region_name(number)

    def __call__(self, values: list[Any]) -> Any:
        """Run. `values` is emptied, so that inputs without other holders are freed on the way."""
        if not self._checked:
            return self._first(values)
        return self._returned([*self.function(values)])

    def _first(self, values: list[Any]) -> Any:
        """Run the first call: check results, and find those that must be copied because they share memory."""
        inputs = {_memory(value) for value in values if isinstance(value, torch.Tensor)}
        found = self.function(values)
        if isinstance(found, torch.Tensor):
            self.function, found = _in_list(self.function), [found]
        results = [*found]
        self._check(results)
        self._separate(results, inputs)
        self._checked = True
        return self._returned(results)

    def _returned(self, results: list[Any]) -> Any:
        for place, layout in enumerate(self.layouts):
            if layout is not None and results[place].stride() != layout[1]:
                results[place] = _laid_out(results[place], layout)
        return results[0] if len(results) == 1 else tuple(results)

    def _check(self, results: Sequence[Any]) -> None:
        if len(results) != len(self.layouts):
            self._refuse(f"{len(results)} results", f"{len(self.layouts)}")
        for place, (result, layout) in enumerate(zip(results, self.layouts, strict=True)):
            if layout is None:
                continue
            shape, _, dtype = layout
            if not isinstance(result, torch.Tensor) or (tuple(result.shape), result.dtype) != (shape, dtype):
                found = f"{tuple(result.shape)}, {result.dtype}" if isinstance(result, torch.Tensor) else type(result)
                self._refuse(f"{found} as result {place}", f"{shape}, {dtype}")

    def _refuse(self, found: str, wanted: str) -> None:
        raise DcompileError(
            f"dcompile: {self.backend} returned {found}, where the graph says {wanted}, for {self.what}; "
            'options={"kernels": "auto"} runs it on kernels of dcompile'
        )

    def _separate(self, results: list[Any], inputs: set[int]) -> None:
        """Copy results that share memory with an input or with each other, in this call and in later ones."""
        seen = inputs - {0}
        shared: list[int] = []
        for place, result in enumerate(results):
            if _memory(result) in seen:
                shared.append(place)
                results[place] = result.clone()
            seen |= {_memory(result)} - {0}
        if shared:
            self.function = _copying(self.function, shared)


def _memory(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Copy a tensor to the given strides, which may repeat elements. Raises if sizes differ."""
    shape, strides, dtype = layout
    once = tuple(1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True))
    made = torch.empty_strided(once, strides, dtype=dtype, device=tensor.device)
    made.copy_(tensor[tuple(slice(0, size) for size in once)])
    return made.expand(shape) if once != shape else made


def _in_list(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], list[Any]]:
    """Wrap a function with one result, so that it returns a list."""

    def call(values: list[Any]) -> list[Any]:
        return [function(values)]

    return call


def _copying(function: Callable[[list[Any]], Any], places: Sequence[int]) -> Callable[[list[Any]], list[Any]]:
    """Wrap a function so that these results are copied."""

    def call(values: list[Any]) -> list[Any]:
        results = [*function(values)]
        for place in places:
            results[place] = results[place].clone()
        return results

    return call
