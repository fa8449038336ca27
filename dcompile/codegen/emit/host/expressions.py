"""Expressions of the host program for names, sizes, addresses and tensors, and the values that `make` prepares."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dcompile.ir.buffers import ITEMSIZE, Buffer
from dcompile.ir.index import Atom, Div, Extreme, Index, Mod, Size, Var, as_index, as_size, floordiv
from dcompile.ir.nodes import Arg, Program, Verbatim, View

_NAMES = (
    "torch", "as_strided", "empty_strided", "empty_cpu", "empty_cuda", "entry", "strided_view", "run", "args",
    "buckets", "sync", "call", "make", "stream",
)  # fmt: skip
_TAKEN = frozenset((*keyword.kwlist, *dir(builtins), *_NAMES))


class HostExpressions:
    """Expressions for the buffers of a program. A lookup of an address adds its line to the call."""

    def __init__(self, program: Program, late: frozenset[str]) -> None:
        self.program, self.table = program, program.table
        self.prepared: dict[str, str] = {}
        """Expression -> name of the value that `make` computes once."""
        self.lines: list[str] = []
        self.names: dict[str, str] = {}
        self.pointers: set[str] = set()
        self.hosts = {b.name: b.donor for b in program.buffers if b.donor is not None}
        """Buffer -> the donor buffer that it is placed in."""
        self.inherited: set[str] = set()
        """Donor buffers whose memory was reused so far, after their last read."""
        self.late = late
        """Size symbols known only in the call."""

    def once(self, expression: str, prefix: str) -> str:
        """Return the name of a value that `make` computes once."""
        if expression not in self.prepared:
            self.prepared[expression] = f"_{prefix}{len(self.prepared)}"
        return self.prepared[expression]

    def once_if_known(self, expression: str, prefix: str, sizes: Iterable[Size]) -> str:
        """As `once`, for a value of `sizes`: computed in the call if one of them is known only there."""
        if any(not self.late.isdisjoint(as_index(size).variables) for size in sizes):
            return expression
        return self.once(expression, prefix)

    def name(self, buffer: str) -> str:
        """Return a Python name for a buffer or a size symbol."""
        if buffer not in self.names:
            name = re.sub(r"\W", "_", buffer)
            name = f"b{name}" if not name or name[0] == "_" or name[0].isdigit() else name
            while name in _TAKEN or name in self.names.values():
                name += "_"
            self.names[buffer] = name
        return self.names[buffer]

    def memory(self, bucket: str) -> str:
        """Return the name of a bucket's memory."""
        return "_bucket_" + re.sub(r"\W", "_", bucket)

    def placed(self, name: str) -> Buffer:
        """Return the buffer that memory planning has placed: this one, or the one that it is a part of."""
        buffer = self.table[name]
        holder = buffer.holder
        return buffer if holder is None else self.table[holder]

    def _within(self, name: str) -> Size:
        """Return the bytes from the start of the placed buffer to this one."""
        buffer = self.table[name]
        return 0 if buffer.holder is None else buffer.offset

    def pointer(self, name: str) -> str:
        """Return the address of a buffer, for a kernel."""
        buffer = self.placed(name)
        if buffer.name != name:
            within = self._within(name)
            return self.pointer(buffer.name) + (f" + {within}" if within else "")
        if name in self.hosts:
            pointer = self._known_pointer(self.room(self.hosts[name]))
            return f"{pointer} + {buffer.offset}" if buffer.offset else pointer
        if buffer.storage == "arena":
            at = as_size(as_index(buffer.offset) + as_index(self._within(name)))
            return self.once(f"run.address + {self.index(at)}", "at")
        bucket = buffer.bucket
        if bucket is None:
            return self._known_pointer(self.name(name))
        pointer = self._known_pointer(self.memory(bucket), ".flat")
        return f"{pointer} + {buffer.offset}" if buffer.offset else pointer

    def _known_pointer(self, tensor: str, part: str = "") -> str:
        """Return the address of a tensor, or of a part of an object, looked up once."""
        pointer = f"_p{tensor}" if tensor.startswith("_") else f"_p_{tensor}"
        if pointer not in self.pointers:
            self.pointers.add(pointer)
            self.lines.append(f"{pointer} = {tensor}{part}.data_ptr()")
        return pointer

    def room(self, host: str) -> str:
        """Return the name of the memory that buffers in a donor use: its own, if nobody else refers to it."""
        return self.name(host if self.table[host].storage == "out" else f"{host} over")

    def address(self, view: View) -> str:
        """Return the address of a view's first element."""
        pointer, buffer = self.pointer(view.buffer), self.table[view.buffer]
        if as_index(view.offset) == as_index(0):
            return pointer
        return f"{pointer} + {self.index(as_index(view.offset) * ITEMSIZE[buffer.dtype])}"

    def place(self, name: str) -> str:
        """Return a kernel's argument in a launch table: an arena address, or the name of one known at each call."""
        buffer = self.placed(name)
        if buffer.storage != "arena":
            return self.pointer(name)
        return f"run.at({self.index(as_size(as_index(buffer.offset) + as_index(self._within(name))))})"

    def tuple_of(self, sizes: Sequence[Size]) -> str:
        """Return a tuple of sizes."""
        items = [self.index(size) for size in sizes]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"

    def index(self, size: Size) -> str:
        """Return a size or a position."""
        if isinstance(size, int):
            return str(size)
        terms = []
        for monomial, coefficient in size.terms:
            factors = [self._atom(atom) for atom in monomial]
            if coefficient != 1 or not factors:
                factors.insert(0, str(coefficient))
            terms.append(" * ".join(factors))
        return " + ".join(terms) or "0"

    def _atom(self, atom: Atom) -> str:
        match atom:
            case Var(name):
                return self.name(name)
            case Extreme(kind, left, right):
                return f"{kind}({self.index(left)}, {self.index(right)})"
            case Div(base, divisor):
                return f"(({self.index(base)}) // ({self.index(divisor)}))"
            case Mod(base, divisor):
                return f"(({self.index(base)}) % ({self.index(divisor)}))"

    def view(self, view: View, fresh: bool = False, written: bool = False) -> str:
        """Return an expression for a tensor; `fresh` if it is returned to the caller, who may keep it.

        `written` if the library may write to it: autograd's version counter of the caller's tensor must show that.
        """
        buffer = self.placed(view.buffer)
        if buffer.name != view.buffer:
            start = floordiv(as_index(self._within(view.buffer)), ITEMSIZE[buffer.dtype], {})
            view = replace(view, buffer=buffer.name, offset=as_size(as_index(view.offset) + start))
        shape, strides = self.tuple_of(view.shape), self.tuple_of(view.strides)
        if buffer.storage == "arena":
            assert not fresh, f"output {view.buffer} lies in the arena"
            at = self.index(as_size(as_index(buffer.offset) + as_index(view.offset) * ITEMSIZE[buffer.dtype]))
            text = f"run.view(torch.{buffer.dtype}, {shape}, {strides}, {at})"
            return self.once_if_known(text, "v", (*view.shape, *view.strides, view.offset))
        bucket = buffer.bucket
        if bucket is not None:
            assert isinstance(buffer.offset, int), f"{view.buffer} has no fixed place in its bucket"
            at = self.index(as_index(view.offset) + buffer.offset // ITEMSIZE[buffer.dtype])
            flat = self.memory(bucket)
            if fresh:
                return f"as_strided({flat}.flat, {shape}, {strides}, {at})"
            return f"run.bucket_view({flat}, {view.buffer!r}, {shape}, {strides}, {at})"
        if view.buffer in self.hosts:
            return self._view_in_host(view, shape, strides)
        name = self.name(view.buffer)
        if (
            _same(view.shape, buffer.shape)
            and _same(view.strides, buffer.strides)
            and as_index(view.offset) == as_index(0)
        ):
            return name
        if buffer.storage == "out" and fresh and self._is_shown_once(view.buffer):
            # a view would keep its base alive, but a backward may reuse the memory of a saved tensor
            return f"strided_view({name}, {shape}, {strides}, {self.index(view.offset)})"
        if buffer.storage == "out" and fresh:
            return f"as_strided({name}, {shape}, {strides}, {self.index(view.offset)})"
        if not fresh and not written:
            return f"strided_view({name}, {shape}, {strides}, {self.index(view.offset)})"
        offset = "" if as_index(view.offset) == as_index(0) else f" + {self.index(view.offset)}"
        return f"as_strided({name}, {shape}, {strides}, {name}.storage_offset(){offset})"

    def _is_shown_once(self, name: str) -> bool:
        return sum(isinstance(output, View) and output.buffer == name for output in self.program.outputs) == 1

    def _view_in_host(self, view: View, shape: str, strides: str) -> str:
        """Return a tensor in a donor buffer's memory."""
        buffer, host = self.table[view.buffer], self.table[self.hosts[view.buffer]]
        assert isinstance(buffer.offset, int), f"{buffer.name} has no fixed place in {host.name}"
        name, itemsize = self.room(host.name), ITEMSIZE[buffer.dtype]
        if host.dtype != buffer.dtype:
            at = self.index(as_index(view.offset) * itemsize + buffer.offset)
            return f"run.within({name}, torch.{buffer.dtype}, {shape}, {strides}, {at})"
        at = self.index(as_index(view.offset) + buffer.offset // itemsize)
        if at == "0" and _same(view.shape, host.shape) and _same(view.strides, host.strides):
            return name
        return f"strided_view({name}, {shape}, {strides}, {at})"

    def output(self, output: View | Index | int | float | bool | None) -> str:
        """Return the call's result for an output."""
        match output:
            case View():
                return self.view(output, fresh=True)
            case Index():
                return self.index(output)
            case float():
                return f"float({str(output)!r})"  # also inf and nan
            case _:
                return repr(output)

    def argument(self, arg: Arg, written: bool = False) -> str:
        """Return an argument of a library call; `written` if the call may write to it."""
        match arg:
            case View():
                return self.view(arg, written=written)
            case Index():
                return self.index(arg)
            case Verbatim(text):
                return text
            case tuple():
                return f"[{', '.join(self.argument(item, written) for item in arg)}]"
            case float():
                return repr(arg) if abs(arg) < float("inf") else f"float({str(arg)!r})"
            case _:
                return repr(arg)


def _same(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(as_index(x) == as_index(y) for x, y in zip(a, b, strict=True))
