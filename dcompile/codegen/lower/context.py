"""The state of one lowering: buffers, steps, and the value of each FX node; stores lazy tensors as loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from dcompile.codegen.lower.lazy_tensor import LazyTensor, constant, from_view, has_layout, remap_view
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.symbolic.strides import Shape, contiguous, is_dense, is_distinct, ranges_of, variables
from dcompile.compat.size_expressions import Real, follows, opaque_shape, variables_of
from dcompile.compat.size_expressions import shape_of as shape_of
from dcompile.compat.size_expressions import strides_of as strides_of
from dcompile.device_traits import HOST, DeviceTraits, traits_of
from dcompile.ir.buffers import NUMBER, Buffer
from dcompile.ir.float8 import OPAQUE
from dcompile.ir.index import Index, Size, flatten, var
from dcompile.ir.nodes import Arg, Collective, Extern, Loop, Ref, Step, Store, Verbatim, View
from dcompile.ir.ops import DTYPES

LAY_OUT = "dcompile.lay_out"
"""lay_out(tensor, strides): copy a tensor into these strides."""


class Lowering:
    """Collects the program of one graph. Rules change it only through `store`, `loop` and `extern`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.own_rows = True
        """Whether matmuls of one row may become loops (GEMV)."""
        self.deterministic = False
        """Whether sums need a fixed order where eager's have one."""
        self.positions_in_loops = False
        """Whether loops replace indices out of range themselves, on each device."""
        self.device = HOST
        self.buffers: dict[str, Buffer] = {}
        self.steps: list[Step] = []
        self.node = ""
        self.position = 0
        """Name and position of the FX node being lowered."""
        self.origin: tuple[str, ...] = ()
        self.inputs: dict[str, None] = {}
        """Buffers that are inputs of the graph, in order; attributes of the module follow the arguments."""
        self.values: dict[Node, Any] = {}
        """Value of each node: a `LazyTensor`, a tuple of them, or a number."""
        self.constants: dict[str, Any] = {}
        """Values of the inputs that follow the arguments."""
        self.lazy: dict[int, tuple[LazyTensor, int]] = {}
        """Unstored tensors with remaining users, by id, with the position of the last user."""
        self.checked: dict[tuple[View, Size, Size], LazyTensor] = {}
        """Index tensors whose bounds were checked, by their view and the bounds."""
        self.overwritten: set[str] = set()
        """Inputs that no longer hold their initial values."""
        self.given: dict[str, Index] = {}
        """Values of integer arguments that are not size symbols themselves."""
        self.known: frozenset[str] = frozenset()
        """Size symbols defined by the arguments."""
        self.defined: frozenset[str] = frozenset()
        """Size symbols defined by library calls so far."""
        self.followed: frozenset[str] = frozenset()
        """Those of them that the arguments' sizes determine, such as `int(1.7 * size)`. (A count of elements may be 0,
        and a division by it must raise as in Python.)"""
        self.declined: list[str] = []
        """Reasons why ops with unsupported sizes became library calls."""
        self.data_given: list[tuple[Extern, int]] = []
        """Calls that give an input other memory, with the storage key of that memory in eager mode."""
        self.groups: dict[str, str] = {}
        """Name of each process group in the graph -> its name in plans."""
        self.in_flight: dict[str, Collective] = {}
        """Results of pending collectives -> the step that starts each."""
        self._stored: dict[int, tuple[LazyTensor, LazyTensor]] = {}
        self._exact: dict[int, tuple[LazyTensor, View]] = {}
        self._numbers: dict[Real, View] = {}
        self._brought: dict[tuple[View, str], LazyTensor] = {}
        """Copies of tensors from another device."""
        self._from_cpu = set[str]()
        """Copies of single CPU elements: ATen's GPU kernels treat such elements as numbers."""

    # --- buffers and loops ---

    def buffer(
        self,
        shape: Shape,
        dtype: str,
        strides: Shape | None = None,
        name: str | None = None,
        device: str | None = None,
    ) -> View:
        """Add a buffer, named after the FX node and on its device; return a view of all of it."""
        base = name or self.node
        unique, number = base, 0
        while unique in self.buffers:
            number += 1
            unique = f"{base}_{number}"
        strides = contiguous(shape) if strides is None else strides
        self.buffers[unique] = Buffer(unique, dtype, shape, strides, device or self.device)
        return View(unique, shape, strides)

    def loop(self, outer: Shape, inner: Shape, body: Body, stores: Sequence[Store]) -> None:
        values, kept = body.finish(tuple(stores))
        self.steps.append(Loop(kept[0].buffer, outer, inner, values, kept, self.origin))

    def store(self, tensor: LazyTensor, strides: Shape | None = None, name: str | None = None) -> LazyTensor:
        """Compute `tensor` into a new buffer, with `strides`, else with its own if they are dense."""
        wanted = strides
        if wanted is None:
            wanted = tensor.strides if is_dense(tensor.shape, tensor.strides) else contiguous(tensor.shape)
        view = self.buffer(tensor.shape, tensor.dtype, wanted, name, self.device_of(tensor))
        self.store_into(tensor, view)
        return replace(from_view(view, tensor.dtype), strides=tensor.strides)

    def store_into(self, tensor: LazyTensor, view: View) -> None:
        """Add a loop that writes every element of `tensor` into `view`."""
        body = self.body(ranges_of("i", tensor.shape))
        coords = variables("i", tensor.shape)
        ref = body.trace(_or_nothing(tensor), coords)
        index = flatten(coords, view.strides) + view.offset
        self.loop(tensor.shape, (), body, [Store(view.buffer, index, ref)])

    def device_of(self, tensor: LazyTensor) -> str | None:
        """Return the type of the device that computes a tensor; None where it is undetermined."""
        return next((self.buffers[name].device for name in sorted(tensor.reads)), tensor.device)

    def brought(self, tensor: LazyTensor, device: str) -> LazyTensor:
        """Return `tensor` readable by loops on `device`: itself, or a copy made by the library."""
        here = self.device_of(tensor)
        if here is None or here == device:
            return tensor
        if not tensor.reads:  # recomputed at each use; a number of the CPU's remains one (`is_number`)
            return replace(tensor, device=device) if tensor.shape else tensor
        stored = self.memory(tensor)
        assert stored.view is not None
        key = (stored.view, device)
        if key not in self._brought:
            copy = self.buffer(stored.shape, stored.dtype, device=device)
            to = {"device": Verbatim(f"torch.device({device!r})"), "memory_format": torch.contiguous_format}
            source = stored.view
            if tensor.shape == () and traits_of(here).is_host:
                # without waiting for the GPU: memory that is not pinned is read before the call returns
                to["non_blocking"] = True
                if source.buffer in self.inputs:
                    source = self.buffer((), stored.dtype, device=here)
                    self.extern("aten.clone.default", [stored.view], [source.buffer])
            self.extern("aten._to_copy.default", [source], [copy.buffer], kwargs=to)
            self._brought[key] = from_view(copy, stored.dtype)
            if tensor.shape == () and traits_of(here).is_host:
                self._from_cpu.add(copy.buffer)
        return replace(self._brought[key], strides=tensor.strides)

    @property
    def traits(self) -> DeviceTraits:
        """Of the device that the node's results are on."""
        return traits_of(self.device)

    def is_number(self, arg: Any) -> bool:
        """Return whether an operand is a number, or is treated as one on a GPU."""
        if not isinstance(arg, LazyTensor):
            return True
        read = arg.view is not None and arg.view.buffer in self._from_cpu
        return arg.shape == () and (read or (not arg.reads and arg.device == HOST))

    def memory(self, tensor: LazyTensor, anew: bool = True) -> LazyTensor:
        """Return `tensor` in memory, with any strides: itself, a view of its stored base, or a copy.

        `anew`: whether readers of a few elements may recompute them.
        """
        if tensor.view is not None:
            return tensor
        key = id(tensor)
        if key not in self._stored:
            if tensor.base is not None and tensor.rebuilt_on is not None:
                stored = replace(tensor.rebuilt_on(self.memory(tensor.base)), strides=tensor.strides)
                stored = stored if stored.view is not None else self.store(tensor)
            else:
                stored = self.store(tensor)
                if tensor.is_cheap:
                    stored = replace(stored, cast_from=tensor)
                if anew:
                    stored = replace(stored, made=tensor, sources=stored.reads | tensor.sources)
            self._stored[key] = (tensor, stored)  # keeps the tensor alive, so that its id stays unique
        return self._stored[key][1]

    def exact(self, tensor: LazyTensor) -> View:
        """Return `tensor` in memory with torch's strides, as a library call expects."""
        stored = self.memory(tensor)
        fits = tensor.dtype not in DTYPES or has_layout(stored, tensor.strides)
        once = tuple(1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.strides, strict=True))
        if not fits and is_distinct(once, tensor.strides):
            if id(tensor) not in self._exact:
                self._exact[id(tensor)] = tensor, self._store_once(tensor, once)
            return self._exact[id(tensor)][1]
        if not fits and any(isinstance(stride, Index) for stride in tensor.strides):
            if id(tensor) not in self._exact:
                self._exact[id(tensor)] = tensor, self._store_by_library(stored, tensor.strides)
            return self._exact[id(tensor)][1]
        assert stored.view is not None
        return replace(stored.view, strides=self._strides(stored.view, tensor.strides))

    def has(self, sizes: Iterable[Size]) -> bool:
        """Return whether sizes are known here, from the arguments or from library calls so far."""
        return variables_of(sizes) <= self.known | self.defined

    def _strides(self, view: View, torchs: Shape) -> Shape:
        """Return a view's strides, with torch's for dimensions of one element, which mean nothing but are checked.

        (Attention refuses a bias for one key whose last stride is 0.)
        """
        each = zip(view.shape, view.strides, torchs, strict=True)
        return tuple(told if size == 1 and self.has((told,)) else own for size, own, told in each)

    def _store_by_library(self, stored: LazyTensor, strides: Shape) -> View:
        """Copy into strides that may make elements overlap: only the values at run time decide."""
        view = self.buffer(stored.shape, stored.dtype, strides, device=self.device_of(stored))
        self.extern(LAY_OUT, [stored.view, strides], [view.buffer], fallback=True)
        return view

    def _store_once(self, tensor: LazyTensor, once: Shape) -> View:
        """Store `tensor` with its strides, each repeated element once; `once` is its shape without repetitions."""
        part = tensor
        if once != tensor.shape:
            part = replace(remap_view(tensor, once, lambda _, coords: coords), device=tensor.device)
        view = self.store(part, tensor.strides).view
        assert view is not None
        return replace(view, shape=tensor.shape)

    def trace_over(
        self, tensor: LazyTensor, outer_dims: Sequence[int], inner_dims: Sequence[int]
    ) -> tuple[Body, Ref, Coords]:
        """Return a body over `outer_dims` (i) and `inner_dims` (j) of a tensor, its element, and its coordinates."""
        outer = tuple(tensor.shape[dim] for dim in outer_dims)
        inner = tuple(tensor.shape[dim] for dim in inner_dims)
        body = self.body({**ranges_of("i", outer), **ranges_of("j", inner)})
        where = dict(zip(outer_dims, variables("i", outer), strict=True))
        where |= dict(zip(inner_dims, variables("j", inner), strict=True))
        coords = tuple(where[dim] for dim in range(len(tensor.shape)))
        return body, body.trace(_or_nothing(tensor), coords), coords

    def body(self, ranges: dict[str, Size]) -> Body:
        """Return an empty body that loads stored tensors from memory."""
        return Body(ranges, self._stored)

    # --- library calls ---

    def extern(
        self,
        op: str,
        args: Sequence[Any],
        outs: Sequence[str | None],
        *,
        kwargs: dict[str, Any] | None = None,
        mode: Any = "alloc",
        fallback: bool = False,
        effect: bool = False,
        tells: tuple[str, ...] = (),
        cost_us: float = 0.0,
    ) -> None:
        converted = tuple(self.argument(arg) for arg in args)
        named = tuple((key, self.argument(value)) for key, value in (kwargs or {}).items())
        sizes = [size for out in outs if out is not None for size in self.buffers[out].shape]
        sizes += [size for arg in (*converted, *(value for _, value in named)) for size in _sizes_in(arg)]
        # calls that define or use a size known late keep their order
        effect = effect or not variables_of(sizes) <= self.known
        tells = tells or self._told_by(outs)
        self.defined |= frozenset(tells)
        if follows((*args, *(kwargs or {}).values()), self.known | self.followed):
            self.followed |= frozenset(tells)
        call = Extern(op, converted, named, tuple(outs), mode, fallback, self.origin, effect, tells=tells)
        self.steps.append(replace(call, cost_us=cost_us) if cost_us else call)

    def _told_by(self, outs: Sequence[str | None]) -> tuple[str, ...]:
        """Return the symbols that are a size of a call's results and have no earlier definition."""
        sizes = (size for out in outs if out is not None for size in self.buffers[out].shape)
        plain = (name for size in sizes for name in variables_of((size,)) if size == var(name) and name[0] != "?")
        return tuple(dict.fromkeys(name for name in plain if name not in self.known | self.defined))

    def argument(self, value: Any) -> Arg:
        """Convert a library call's argument: tensors are stored, torch objects become text."""
        match value:
            case LazyTensor():
                return self.exact(value)
            case View() | Index() | Verbatim() | bool() | int() | float() | str() | None:
                return value
            case tuple() | list():
                return tuple(self.argument(item) for item in value)
            case Real():
                return self.number(value)
            case _:
                return Verbatim(literal_text(value))

    def number(self, value: Real) -> View:
        """Return a float computed from sizes by the host program."""
        if value not in self._numbers:
            self._numbers[value] = view = self.buffer((), NUMBER, name=value.name)
            self.extern(value.target, value.args, [view.buffer], effect=True)
        return self._numbers[value]

    def result(self, value: torch.Tensor, name: str) -> LazyTensor:
        """Add a buffer for a library call's result, on its own device: a custom operator may use several devices."""
        shape, strides = opaque_shape(value)
        view = self.buffer(shape, dtype_name(value.dtype), strides, name, value.device.type)
        return from_view(view, dtype_name(value.dtype))

    def keep_before_overwrite(self, buffer: str, position: int) -> None:
        """Store lazy tensors that still read `buffer` before it is overwritten."""
        self.overwritten.add(buffer)
        for tensor, last in list(self.lazy.values()):
            if last > position and buffer in tensor.reads:
                self.memory(tensor)


def _sizes_in(arg: Arg) -> list[Size]:
    """Return the sizes in a library call's argument."""
    match arg:
        case View():
            return [*arg.shape, *arg.strides, arg.offset]
        case Index():
            return [arg]
        case tuple():
            return [size for item in arg for size in _sizes_in(item)]
        case _:
            return []


def _or_nothing(tensor: LazyTensor) -> LazyTensor:
    """Return an empty tensor as a constant: a loop over no elements should share no memory that could fuse it."""
    return constant(0, tensor.shape, tensor.dtype) if 0 in tensor.shape and tensor.dtype not in OPAQUE else tensor


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")


def literal_text(value: Any) -> str:
    """Return Python text for a torch object that has a global name."""
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if callable(value) and hasattr(value, "_schema"):
        return f"torch.ops.{value}"
    if hasattr(value, "namespace") and callable(value):
        return f"torch.ops.{value.namespace}.{value}"
    return str(value) if str(value).startswith("torch.") else repr(value)
