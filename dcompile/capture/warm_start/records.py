"""Convert a traced graph's values to JSON and back: fake tensors, dtypes, devices, and AOTAutograd's descriptors.

A record is data: lists, dictionaries and texts. Reading one looks names up in short lists, and runs no code of it.

Fake tensors are rebuilt from rows of their layouts. Arithmetic on symbolic sizes makes a fake tensor slow: 1.1 ms in a
storage that others share, 0.3 ms in its own (CPU time, torch 2.13). A graph of 16 layers has 3000 symbolic tensors with
25 layouts. Inside a graph, no stage after partitioning asks which tensors share memory, so one tensor stands for all of
a layout.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from dcompile.capture.warm_start.size_symbols import Record, SizeSymbols
from dcompile.compat.aot_metadata import description_types, result_types
from dcompile.compat.inductor import FLEX, is_flex
from dcompile.compat.process_state import NotKeepable
from dcompile.compat.tensors import (
    fake_copy,
    fake_memory,
    fake_tensor,
    fake_tensor_type,
    is_overload,
    meta_tensor,
    real_tensors,
    storage_key,
)
from dcompile.ir.index import element_span

OWN_OPS = "dcompile"
"""Prefix of dcompile's operator namespaces."""
OP_NAMESPACES = frozenset(
    ("aten", "prims", "prim", "flex_lib", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
)
"""Namespaces of torch's own operators, whose behavior follows from torch's version."""
LARGEST_CONSTANT = 4096
"""Maximum bytes of a constant tensor that a record stores."""
_OPERATORS = "getitem add sub mul floordiv truediv mod pow neg eq ne lt le gt ge and_ or_"
_SIZE_FUNCTIONS = "sym_max sym_min sym_int sym_float sym_not sym_ite sym_sum"
"""Functions of torch on symbolic sizes."""


@functools.cache
def _functions() -> Mapping[str, Any]:
    """Name -> function that a traced graph calls apart from torch's operators."""
    found: dict[str, Any] = {f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()}
    found |= {f"math.{function.__name__}": function for function in (math.trunc, math.floor, math.ceil)}
    return found | {f"torch.{name}": getattr(torch, name) for name in _SIZE_FUNCTIONS.split() if hasattr(torch, name)}


@functools.cache
def _function_names() -> Mapping[Any, str]:
    return {function: name for name, function in _functions().items()}


def is_known_op(name: str) -> bool:
    """Whether an operator, such as `aten.add.Tensor`, is torch's or dcompile's: versions identify these."""
    namespace = name.partition(".")[0]
    return namespace in OP_NAMESPACES or namespace.startswith(OWN_OPS)


def _named(kind: type, names: str) -> dict[Any, str]:
    """Values of a type -> their names in torch."""
    return {value: name for name in names.split() if isinstance(value := getattr(torch, name, None), kind)}


@functools.cache
def _names() -> Mapping[str, dict[Any, str]]:
    """Kind -> its values -> their names in torch."""
    return {
        "dtype": {value: str(value).removeprefix("torch.") for value in vars(torch).values() if _is_dtype(value)},
        "layout": _named(torch.layout, "strided"),
        "format": _named(torch.memory_format, "contiguous_format preserve_format channels_last channels_last_3d"),
    }


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


class RecordWriter:
    """Writer of records. It stores each tensor, text, symbolic size and module stack once."""

    def __init__(self, symbols: SizeSymbols, node_of: Callable[[torch.fx.Node], int] | None = None) -> None:
        """`node_of` returns the number of a node; None if no node may occur."""
        self._node_of = node_of
        self._tensors: dict[Any, int] = {}
        self._storages: dict[int, int] = {}
        self._sizes: list[Record] = []
        self._texts: dict[Any, int] = {}
        self._symbols = symbols
        self._symbolic: dict[str, int] = {}

    def tables(self) -> dict[str, Record]:
        """Return the tables that records refer to by number."""
        return {
            "tensors": [list(key) for key in self._tensors],
            "storages": self._sizes,
            "texts": list(self._texts),
            "sizes": [json.loads(size) for size in self._symbolic],
        }

    def _size(self, value: Any) -> int | tuple[int]:
        """Return a number of a tensor's layout, or where it is symbolic a tuple with its place in the table."""
        if type(value) is int:
            return value
        if value.node.expr.is_Integer:  # a guard has made it a number
            return int(value.node.expr)
        return (self._symbolic.setdefault(json.dumps(self._symbols.record(value)), len(self._symbolic)),)

    def text(self, value: str) -> int:
        """Return the number of a frequent text."""
        return self._texts.setdefault(value, len(self._texts))

    def value(self, value: Any) -> Record:
        """Return the record of a node's value. Raises NotKeepable."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor):
            return {"x": self._tensor(value)}
        if isinstance(value, torch.fx.Node):
            if self._node_of is None:
                raise NotKeepable("it holds a node of another graph")
            return {"n": self._node_of(value)}
        if isinstance(value, (list, tuple, dict, set, frozenset, slice, range)):
            return self._collection(value)
        return self._atom(value)

    def _collection(self, value: Any) -> Record:
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, torch.Size):
            return {"size": [self.value(item) for item in value]}
        if type(value) is tuple:
            return {"t": [self.value(item) for item in value]}
        if isinstance(value, dict):
            return {"d": [[self.value(key), self.value(item)] for key, item in value.items()]}
        if isinstance(value, set):
            return {"set": [self.value(item) for item in sorted(value)]}
        if isinstance(value, slice):
            return {"slice": [self.value(part) for part in (value.start, value.stop, value.step)]}
        raise NotKeepable(f"it holds a {type(value).__name__}")

    def _atom(self, value: Any) -> Record:
        for kind, names in _names().items():
            if isinstance(value, torch.dtype | torch.layout | torch.memory_format) and value in names:
                return {kind: names[value]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if is_overload(value):
            return {"op": op_name(value)}
        if isinstance(value, type) and result_types().get(value.__name__) is value:
            return {"type": value.__name__}
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return {"symbolic": self._symbolic.setdefault(json.dumps(self._symbols.record(value)), len(self._symbolic))}
        if type(value).__name__ == "ViewMetaSequence":
            raise NotKeepable("a result is a view that is made anew")
        if description_types().get(type(value).__name__) is type(value):
            return self._description(value)
        raise NotKeepable(f"it holds a {type(value).__name__}")

    def _description(self, value: Any) -> Record:
        name = type(value).__name__
        if isinstance(value, enum.Enum):
            return {"enum": [name, value.name]}
        fields = {f.name: self.value(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"description": [name, fields]}

    def _tensor(self, value: torch.Tensor) -> int:
        """Return the number of a fake tensor's record, which includes its storage."""
        if type(value) is not fake_tensor_type():
            raise NotKeepable(f"it holds a {type(value).__name__}")
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise NotKeepable("it holds a tensor that is not plain: sparse, or marked as a conjugate or a negative")
        storage = self._storages.setdefault(storage_key(value), len(self._storages))
        if storage == len(self._sizes):
            self._sizes.append(self._size(value.untyped_storage().nbytes()))
        shape, strides = (tuple(map(self._size, numbers)) for numbers in (value.shape, value.stride()))
        dtype = _names()["dtype"][value.dtype]
        key = (storage, dtype, str(value.device), shape, strides, self._size(value.storage_offset()))
        return self._tensors.setdefault(key, len(self._tensors))


class RecordReader:
    """Reader of records. Use it outside fake tensor modes. Raises NotKeepable for unknown records."""

    def __init__(
        self, tables: Mapping[str, Record], symbols: SizeSymbols, boundary: Collection[int] | None = None
    ) -> None:
        """`symbols`: those of this compilation, in the order of the one that was recorded.

        `boundary`: storages in which tensors of symbolic size share memory as recorded; None for all.
        """
        self._texts = tables["texts"]
        self._symbolic = [symbols.size_of(record) for record in tables["sizes"]]
        self._rows = tables["tensors"]
        self._tensors = FakeTensors(symbols.fake_mode, self._rows, tables["storages"], self._size, boundary)
        self.nodes: list[torch.fx.Node] = []
        """Nodes made so far, by the number that records use."""

    def text(self, number: int) -> str:
        """Return a text by its number."""
        found = self._texts[number]
        if not isinstance(found, str):
            raise NotKeepable("a text is damaged")
        return found

    def value(self, record: Record) -> Any:
        """Return the value of a record."""
        if not isinstance(record, (list, dict)):
            return record
        if isinstance(record, list):
            return [self.value(item) for item in record]
        ((kind, held),) = record.items()
        read = _READERS.get(kind)
        if read is None:
            raise NotKeepable(f"a record has a value of an unknown kind, {kind}")
        return read(self, held)

    def node(self, number: int) -> torch.fx.Node:
        """Return a node by its number."""
        return self.nodes[number]

    def items(self, held: list[Record]) -> list[Any]:
        """Return the values of several records."""
        return [self.value(item) for item in held]

    def mapping(self, held: list[Any]) -> dict[Any, Any]:
        """Return a dictionary."""
        return {self.value(key): self.value(item) for key, item in held}

    def description(self, held: list[Any]) -> Any:
        """Return a dataclass of AOTAutograd."""
        name, fields = held
        return description_types()[name](**{name: self.value(item) for name, item in fields.items()})

    def tensor(self, number: int) -> Any:
        """Return a fake tensor, the same one for equal numbers."""
        return self._tensors.tensor(number, _by_name("dtype", self._rows[number][1]))

    def symbolic(self, number: int) -> Any:
        """Return a symbolic size by its number."""
        return self._symbolic[number]

    def _size(self, record: Record) -> Any:
        """Return a number of a tensor's layout."""
        return record if isinstance(record, int) else self._symbolic[record[0]]


def _by_name(kind: str, name: str) -> Any:
    value = getattr(torch, name, None)
    if value not in _names()[kind]:
        raise NotKeepable(f"a record names {name}, which is no {kind}")
    return value


_READERS: Mapping[str, Callable[[RecordReader, Any], Any]] = {
    "n": RecordReader.node,
    "x": RecordReader.tensor,
    "symbolic": RecordReader.symbolic,
    "t": lambda reader, held: tuple(reader.items(held)),
    "d": RecordReader.mapping,
    "set": lambda reader, held: set(reader.items(held)),
    "size": lambda reader, held: torch.Size(reader.items(held)),
    "slice": lambda reader, held: slice(*reader.items(held)),
    "complex": lambda _, held: complex(*held),
    "device": lambda _, held: torch.device(held),
    "dtype": lambda _, held: _by_name("dtype", held),
    "layout": lambda _, held: _by_name("layout", held),
    "format": lambda _, held: _by_name("format", held),
    "op": lambda _, held: op_of(held),
    "type": lambda _, held: result_types()[held],
    "enum": lambda _, held: description_types()[held[0]][held[1]],
    "description": RecordReader.description,
}


def node_numbers(record: Record) -> Iterator[int]:
    """Yield the numbers of the nodes in a record."""
    if isinstance(record, list):
        for item in record:
            yield from node_numbers(item)
    elif isinstance(record, dict):
        ((kind, held),) = record.items()
        yield from [held] if kind == "n" else node_numbers(held)


def op_name(op: Any) -> str:
    """Return the name of an operator of torch or dcompile, such as `aten.add.Tensor`. Raises NotKeepable for others."""
    name = str(op)
    if not is_known_op(name):
        raise NotKeepable(f"it calls {name}, an operator whose code no version tells")
    return name


def op_of(name: str) -> Any:
    """Return the operator with a name."""
    return _op_of(name)


@functools.cache
def _op_of(name: str) -> Any:
    parts = name.split(".")
    if len(parts) != 3 or not is_known_op(name):
        raise NotKeepable(f"a record names {name}, which is no operator")
    return functools.reduce(getattr, parts, torch.ops)


def target_name(target: Any) -> str:
    """Return the name of a call node's target. Raises NotKeepable."""
    if is_overload(target):
        return op_name(target)
    if is_flex(target):
        return f"flex.{target}"
    name = _function_names().get(target)
    if name is None:
        raise NotKeepable(f"it calls {getattr(target, '__name__', type(target).__name__)}, which is no operator")
    return name


def target_of(name: str) -> Any:
    """Return the target with a name of `target_name`."""
    module, _, function = name.partition(".")
    if module == "flex" and function in FLEX:
        return getattr(torch.ops.higher_order, function)
    found = _functions().get(name)
    return op_of(name) if found is None else found


def constant_record(value: Any) -> Record:
    """Return the record of a small CPU tensor with its values. Raises NotKeepable for others."""
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
        raise NotKeepable(f"it holds a {type(value).__name__} that is no plain tensor on the CPU")
    if value.nbytes > LARGEST_CONSTANT or value.requires_grad or not value.is_contiguous() or value.is_conj():
        raise NotKeepable(f"it holds a tensor of {value.nbytes} bytes")
    with real_tensors():
        numbers = bytes(value.contiguous().view(-1).view(torch.uint8).tolist()) if value.numel() else b""
    dtype = _names()["dtype"][value.dtype]
    return {"dtype": dtype, "shape": list(value.shape), "numbers": base64.b64encode(numbers).decode()}


def constant_of(record: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor of a record, in row-major order."""
    dtype, numbers = _by_name("dtype", record["dtype"]), base64.b64decode(record["numbers"], validate=True)
    with real_tensors():
        if not numbers:
            return torch.empty(record["shape"], dtype=dtype, device="cpu")
        return torch.tensor(list(numbers), dtype=torch.uint8, device="cpu").view(dtype).reshape(record["shape"])


def value_record(value: Any, symbols: SizeSymbols) -> Record:
    """Return the record of a value that belongs to no graph, with its tables. Raises NotKeepable."""
    writer = RecordWriter(symbols)
    return {"value": writer.value(value)} | writer.tables()


def value_of(record: Mapping[str, Any], symbols: SizeSymbols) -> Any:
    """Return the value of a record of `value_record`. Raises NotKeepable."""
    return RecordReader(record, symbols).value(record["value"])


class FakeTensors:
    """The fake tensors of one record, made at their first use. Use it outside fake tensor modes.

    `rows`: (storage, dtype, device, shape, strides, offset) of each. `storages`: bytes of each storage. `number`
    returns the number that a record stands for. `boundary`: storages of inputs and results, which stay apart; None
    for all.
    """

    def __init__(
        self,
        mode: Any,
        rows: Sequence[Record],
        storages: Sequence[Record],
        number: Callable[[Record], Any],
        boundary: Collection[int] | None,
    ) -> None:
        self._mode, self._rows, self._bytes, self._number = mode, rows, storages, number
        self._boundary = range(len(storages)) if boundary is None else boundary
        self._holders = Counter(row[0] for row in rows)
        self._storages: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        self._prototypes: dict[str, tuple[Any, bool]] = {}
        self._inside: dict[str, Any] = {}
        """Layout -> the tensor that stands for all of it inside the graph."""

    def tensor(self, number: int, dtype: torch.dtype) -> Any:
        """Return a fake tensor, the same one for equal numbers."""
        if number not in self._made:
            self._made[number] = self._make(self._rows[number], dtype)
        return self._made[number]

    def _make(self, row: Record, dtype: torch.dtype) -> Any:
        if row[0] in self._boundary:
            return self._separate_tensor(row, dtype)
        layout = self._layout_key(row)
        if layout not in self._inside:
            prototype, _ = self._prototype(row, dtype)
            self._inside[layout] = fake_copy(self._mode, prototype, torch.device(row[2]))
        return self._inside[layout]

    def _layout_key(self, row: Record) -> str:
        return repr((row[1:], self._bytes[row[0]]))

    def _separate_tensor(self, row: Record, dtype: torch.dtype) -> Any:
        """Return a tensor that shares memory with those alone with which it was recorded."""
        storage, _, device, shape, strides, offset = row
        nbytes, place = self._bytes[storage], torch.device(device)
        if not all(isinstance(number, int) for number in (nbytes, offset, *shape, *strides)):
            _, fills = self._prototype(row, dtype)
        else:
            fills = offset == 0 and nbytes == element_span(shape, strides) * dtype.itemsize
        alone = fills and self._holders[storage] == 1  # half the time if nothing shares the storage
        if not alone and storage not in self._storages:
            self._storages[storage] = fake_memory(self._number(nbytes))
        memory = None if alone else self._storages[storage]
        return fake_tensor(self._mode, dtype, place, memory, *self._layout(row))

    def _layout(self, row: Record) -> tuple[Any, list[Any], list[Any]]:
        _, _, _, shape, strides, offset = row
        return self._number(offset), [*map(self._number, shape)], [*map(self._number, strides)]

    def _prototype(self, row: Record, dtype: torch.dtype) -> tuple[Any, bool]:
        """Return a meta tensor of a row's layout, and whether it spans its storage."""
        nbytes = self._bytes[row[0]]
        key = self._layout_key(row)
        if key not in self._prototypes:
            offset, shape, strides = self._layout(row)
            whole, known = meta_tensor(dtype, None, 0, shape, strides), self._number(nbytes)
            fills = row[-1] == 0 and str(whole.untyped_storage().nbytes()) == str(known)
            made = whole if fills else meta_tensor(dtype, fake_memory(known), offset, shape, strides)
            self._prototypes[key] = made, fills
        return self._prototypes[key]
