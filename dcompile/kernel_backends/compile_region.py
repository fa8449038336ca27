"""Compile one region with another compiler: returns a function, or the reason for a refusal."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile import compat
from dcompile.kernel_backends.names import KernelBackend

Compiled = Callable[[list[Any]], Any]
"""A region as a function of a list of its inputs, which it empties. Returns a tensor or a sequence of tensors."""


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
    if backend.name in ("onnxruntime", "openvino"):
        bridge = importlib.import_module(f"dcompile.kernel_backends.{backend.name}")
        return bridge.compile_region  # type: ignore[no-any-return]
    if backend.row.registers:
        importlib.import_module(backend.row.registers)
    return compat.dynamo.registered_backend(backend.name)


def _boxed(compiled: Any) -> Compiled:
    """Wrap a compiled function as a function of one list, which it empties."""
    if not callable(compiled):
        raise TypeError(f"the compiler returned a {type(compiled).__name__}, not a callable")
    if getattr(compiled, "_boxed_call", False):
        return compiled  # type: ignore[no-any-return]

    def call(values: list[Any]) -> Any:
        found = compiled(*values)
        values.clear()
        return found

    return call
