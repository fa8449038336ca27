"""The state of one lowering: buffers, steps, and what each FX node has become; stores lazy tensors as loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from dcompile.codegen.lower.lazy_tensor import LazyTensor, constant, from_view, has_layout, remap_view
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.symbolic.floats import Real, follows
from dcompile.codegen.lower.symbolic.shapes import opaque_shape, variables_of
from dcompile.codegen.lower.symbolic.shapes import shape_of as shape_of
from dcompile.codegen.lower.symbolic.shapes import strides_of as strides_of
from dcompile.codegen.lower.symbolic.strides import Shape, contiguous, is_dense, is_distinct, ranges_of, variables
from dcompile.device_traits import HOST, DeviceTraits, traits_of
from dcompile.ir.float8 import OPAQUE
from dcompile.ir.index import Index, Size, flatten, var
from dcompile.ir.nodes import NUMBER, Arg, Buffer, Collective, Extern, Loop, Ref, Step, Store, Verbatim, View
from dcompile.ir.ops import DTYPES

LAY_OUT = "dcompile.lay_out"
"""lay_out(tensor, strides): a copy of a tensor with these strides."""


class Lowering:
    """Collects the program of one graph. Rules call `store`, `loop`, `extern`; nothing else changes it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.own_rows = True
        """Whether products of one row with a matrix may become loops."""
        self.deterministic = False
        """Whether sums must come in a fixed order, where eager's would too."""
        self.device = HOST
        self.buffers: dict[str, Buffer] = {}
        self.steps: list[Step] = []
        self.node = ""
        self.position = 0
        """Name and position of the FX node that is being lowered."""
        self.origin: tuple[str, ...] = ()
        self.inputs: dict[str, None] = {}
        """Buffers that are inputs of the graph, in order; attributes of the module after the arguments."""
        self.values: dict[Node, Any] = {}
        """What each node has become: a `LazyTensor`, a tuple of them, a number."""
        self.constants: dict[str, Any] = {}
        """Values of the inputs that come after the arguments."""
        self.lazy: dict[int, tuple[LazyTensor, int]] = {}
        """Tensors that are not stored and still have users: by id, with the position of the last one."""
        self.checked: dict[tuple[View, Size, Size], LazyTensor] = {}
        """Positions whose bounds were checked: where they lie, and against what."""
        self.overwritten: set[str] = set()
        """Inputs whose first values are gone."""
        self.given: dict[str, Index] = {}
        """What integer arguments are worth that are not size symbols themselves."""
        self.known: frozenset[str] = frozenset()
        """Size symbols that the arguments tell."""
        self.told: frozenset[str] = frozenset()
        """Size symbols that library calls have told so far."""
        self.followed: frozenset[str] = frozenset()
        """Those of them that follow from the arguments' sizes alone, `int(1.7 * size)` say. (A count of elements may be
        0, and what divides by it has to raise as Python does.)"""
        self.declined: list[str] = []
        """Why ops were left to the library for the sake of their sizes."""
        self.data_given: list[tuple[Extern, int]] = []
        """Calls that give an input other memory, and what tells that memory from others in eager mode."""
        self.groups: dict[str, str] = {}
        """Name of each process group that the graph names -> what plans call it."""
        self.in_flight: dict[str, Collective] = {}
        """Results of collectives that are not waited for yet -> what starts them."""
        self._stored: dict[int, tuple[LazyTensor, LazyTensor]] = {}
        self._exact: dict[int, tuple[LazyTensor, View]] = {}
        self._numbers: dict[Real, View] = {}
        self._brought: dict[tuple[View, str], LazyTensor] = {}
        """Copies of tensors that lie on another device."""
        self._from_cpu = set[str]()
        """Those of single elements of the CPU: ATen's kernels for GPUs take such for numbers."""

    # --- buffers and loops ---

    def buffer(
        self,
        shape: Shape,
        dtype: str,
        strides: Shape | None = None,
        name: str | None = None,
        device: str | None = None,
    ) -> View:
        """A new buffer, named after the FX node and on its device, as a view of all of it."""
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
        """`tensor` computed into a new buffer, with `strides`, else with its own if they are dense."""
        wanted = strides
        if wanted is None:
            wanted = tensor.strides if is_dense(tensor.shape, tensor.strides) else contiguous(tensor.shape)
        view = self.buffer(tensor.shape, tensor.dtype, wanted, name, self.device_of(tensor))
        self.store_into(tensor, view)
        return replace(from_view(view, tensor.dtype), strides=tensor.strides)

    def store_into(self, tensor: LazyTensor, view: View) -> None:
        """A loop that writes every element of `tensor` to where it lies in `view`."""
        body = self.body(ranges_of("i", tensor.shape))
        coords = variables("i", tensor.shape)
        ref = body.trace(_or_nothing(tensor), coords)
        index = flatten(coords, view.strides) + view.offset
        self.loop(tensor.shape, (), body, [Store(view.buffer, index, ref)])

    def device_of(self, tensor: LazyTensor) -> str | None:
        """The type of the device that a tensor is computed on; None where nothing tells."""
        return next((self.buffers[name].device for name in sorted(tensor.reads)), tensor.device)

    def brought(self, tensor: LazyTensor, device: str) -> LazyTensor:
        """`tensor` where loops on `device` can read it: itself, or a copy that the library makes."""
        here = self.device_of(tensor)
        if here is None or here == device:
            return tensor
        if not tensor.reads:  # computed where it is used; a number of the CPU's remains one (`is_number`)
            return replace(tensor, device=device) if tensor.shape else tensor
        stored = self.memory(tensor)
        assert stored.view is not None
        key = (stored.view, device)
        if key not in self._brought:
            copy = self.buffer(stored.shape, stored.dtype, device=device)
            to = {"device": Verbatim(f"torch.device({device!r})"), "memory_format": torch.contiguous_format}
            self.extern("aten._to_copy.default", [stored.view], [copy.buffer], kwargs=to)
            self._brought[key] = from_view(copy, stored.dtype)
            if tensor.shape == () and traits_of(here).is_host:
                self._from_cpu.add(copy.buffer)
        return replace(self._brought[key], strides=tensor.strides)

    @property
    def traits(self) -> DeviceTraits:
        """Of the device that the node's results are on."""
        return traits_of(self.device)

    def is_number(self, arg: Any) -> bool:
        """Whether an operand is a number, or what counts as one on a GPU."""
        if not isinstance(arg, LazyTensor):
            return True
        read = arg.view is not None and arg.view.buffer in self._from_cpu
        return arg.shape == () and (read or (not arg.reads and arg.device == HOST))

    def memory(self, tensor: LazyTensor, anew: bool = True) -> LazyTensor:
        """`tensor` in memory, whatever the strides: itself, a view of its stored base, or a copy.

        `anew`: whether readers of a few elements may compute those again.
        """
        if tensor.view is not None:
            return tensor
        key = id(tensor)
        if key not in self._stored:
            if tensor.base is not None and tensor.again is not None:
                stored = replace(tensor.again(self.memory(tensor.base)), strides=tensor.strides)
                stored = stored if stored.view is not None else self.store(tensor)
            else:
                stored = self.store(tensor)
                if anew:
                    stored = replace(stored, made=tensor, sources=stored.reads | tensor.sources)
            self._stored[key] = (tensor, stored)  # the tensor is kept, so that its id stays its own
        return self._stored[key][1]

    def exact(self, tensor: LazyTensor) -> View:
        """`tensor` in memory with the strides that torch gave it: what a library call expects."""
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
        """Whether sizes are known here: from the arguments, or from the library calls so far."""
        return variables_of(sizes) <= self.known | self.told

    def _strides(self, view: View, torchs: Shape) -> Shape:
        """Those of a view, and of single elements torch's: they mean nothing, but libraries look at them all the same.

        (Attention refuses a bias for one key whose last stride is 0.)
        """
        each = zip(view.shape, view.strides, torchs, strict=True)
        return tuple(told if size == 1 and self.has((told,)) else own for size, own, told in each)

    def _store_by_library(self, stored: LazyTensor, strides: Shape) -> View:
        """A copy with strides of which only the run shows whether they tell elements apart."""
        view = self.buffer(stored.shape, stored.dtype, strides, device=self.device_of(stored))
        self.extern(LAY_OUT, [stored.view, strides], [view.buffer], fallback=True)
        return view

    def _store_once(self, tensor: LazyTensor, once: Shape) -> View:
        """`tensor` stored with its strides, what is repeated only once: `once` is its shape without repetitions."""
        part = tensor
        if once != tensor.shape:
            part = replace(remap_view(tensor, once, lambda _, coords: coords), device=tensor.device)
        view = self.store(part, tensor.strides).view
        assert view is not None
        return replace(view, shape=tensor.shape)

    def trace_over(
        self, tensor: LazyTensor, outer_dims: Sequence[int], inner_dims: Sequence[int]
    ) -> tuple[Body, Ref, Coords]:
        """A body over `outer_dims` (i) and `inner_dims` (j) of a tensor, its element there, and the coordinates."""
        outer = tuple(tensor.shape[dim] for dim in outer_dims)
        inner = tuple(tensor.shape[dim] for dim in inner_dims)
        body = self.body({**ranges_of("i", outer), **ranges_of("j", inner)})
        where = dict(zip(outer_dims, variables("i", outer), strict=True))
        where |= dict(zip(inner_dims, variables("j", inner), strict=True))
        coords = tuple(where[dim] for dim in range(len(tensor.shape)))
        return body, body.trace(_or_nothing(tensor), coords), coords

    def body(self, ranges: dict[str, Size]) -> Body:
        """An empty body that reads what is stored already from memory."""
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
        # what tells or takes a size that is known late keeps its place among such calls
        effect = effect or not variables_of(sizes) <= self.known
        tells = tells or self._told_by(outs)
        self.told |= frozenset(tells)
        if follows((*args, *(kwargs or {}).values()), self.known | self.followed):
            self.followed |= frozenset(tells)
        call = Extern(op, converted, named, tuple(outs), mode, fallback, self.origin, effect, tells=tells)
        self.steps.append(replace(call, cost_us=cost_us) if cost_us else call)

    def _told_by(self, outs: Sequence[str | None]) -> tuple[str, ...]:
        """Symbols that are a size of what a call returns, and that nothing has told before."""
        sizes = (size for out in outs if out is not None for size in self.buffers[out].shape)
        plain = (name for size in sizes for name in variables_of((size,)) if size == var(name) and name[0] != "?")
        return tuple(dict.fromkeys(name for name in plain if name not in self.known | self.told))

    def argument(self, value: Any) -> Arg:
        """A library call's argument: tensors are put into memory, what only torch knows becomes text."""
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
        """A float made of sizes, worked out by the host program."""
        if value not in self._numbers:
            self._numbers[value] = view = self.buffer((), NUMBER, name=value.name)
            self.extern(value.target, value.args, [view.buffer], effect=True)
        return self._numbers[value]

    def result(self, value: torch.Tensor, name: str) -> LazyTensor:
        """A buffer for a tensor that a library call allocates, on its own device: a custom operator may use several."""
        shape, strides = opaque_shape(value)
        view = self.buffer(shape, dtype_name(value.dtype), strides, name, value.device.type)
        return from_view(view, dtype_name(value.dtype))

    def keep_before_overwrite(self, buffer: str, position: int) -> None:
        """Store what still has to be read from `buffer` before it is overwritten."""
        self.overwritten.add(buffer)
        for tensor, last in list(self.lazy.values()):
            if last > position and buffer in tensor.reads:
                self.memory(tensor)


def _sizes_in(arg: Arg) -> list[Size]:
    """The sizes in a library call's argument."""
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
    """An empty tensor as a constant: a loop over no elements should share no memory that fusion could join it by."""
    return constant(0, tensor.shape, tensor.dtype) if 0 in tensor.shape and tensor.dtype not in OPAQUE else tensor


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")


def literal_text(value: Any) -> str:
    """Python text for a torch object that has a global name."""
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if callable(value) and hasattr(value, "_schema"):
        return f"torch.ops.{value}"
    if hasattr(value, "namespace") and callable(value):
        return f"torch.ops.{value.namespace}.{value}"
    return str(value) if str(value).startswith("torch.") else repr(value)
