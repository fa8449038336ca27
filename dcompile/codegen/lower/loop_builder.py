"""Build one loop body: equal values are shared, constants are folded, and masks are applied to loads."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from dcompile.codegen.lower.symbolic.strides import lower_bound, simplify
from dcompile.compat.size_expressions import FLOAT_OPS, Real
from dcompile.ir.float8 import FLOAT8, OPAQUE, from_bytes, to_bytes
from dcompile.ir.index import Index, Size, as_index, is_nonnegative, size_product, substitute, upper_bound, var
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Reduce, Ref, Scan, Store, Value
from dcompile.ir.ops import COMPUTE_DTYPES, DTYPES, OPS

Coords = tuple[Index, ...]

MAX_ANEW = 64
"""Values in a body beyond which no stored element is recomputed."""

_EXACT = {
    "bool": frozenset(DTYPES) - {*OPAQUE},
    "uint8": frozenset(("int16", "int32", "int64", "float32", "float64")),
    "int8": frozenset(("int16", "int32", "int64", "float32", "float64")),
    "int16": frozenset(("int32", "int64", "float32", "float64")),
    "int32": frozenset(("int64", "float64")),
    "int64": frozenset[str](),
    "bfloat16": frozenset(("float32", "float64")),
    "float16": frozenset(("float32", "float64")),
    "float32": frozenset(("float64",)),
    "float64": frozenset[str](),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), frozenset(("bfloat16", "float16", "float32", "float64"))),
    "float8_e8m0fnu": frozenset(("bfloat16", "float32", "float64")),
}
"""Lossless casts: a cast there and back is the identity."""


class Traceable(Protocol):
    """The interface of a tensor that a body can trace (`lazy_tensor.LazyTensor`)."""

    @property
    def loads(self) -> int:
        """Distinct loads of one element."""

    @property
    def made(self) -> Traceable | None:
        """The tensor that a stored one was computed from, if its elements may be recomputed."""

    @property
    def at(self) -> Callable[[Body, Coords], Ref]:
        """Traces the element at given coordinates."""


class Body:
    """Values of one loop in SSA form. `ranges` bounds the loop variables and the run-time indices seen so far."""

    def __init__(
        self, ranges: dict[str, Size], stored: Mapping[int, tuple[Traceable, Traceable]] | None = None
    ) -> None:
        self.ranges = ranges
        self.stored = stored or {}
        """Tensors stored in memory by now, by id: loaded instead of recomputed."""
        self.values: list[Value] = []
        self.mask: Ref | None = None
        self.anew = False
        self._refs: dict[object, Ref] = {}
        self._traced: dict[tuple[int, Coords, Ref | None], tuple[Traceable, Ref]] = {}

    def trace(self, tensor: Traceable, coords: Coords) -> Ref:
        """Return the element of `tensor` at `coords`, computed once for each pair."""
        if tensor.loads and id(tensor) in self.stored:
            tensor = self.stored[id(tensor)][1]
        if self.anew and tensor.made is not None and len(self.values) < MAX_ANEW:
            tensor = tensor.made
        key = (id(tensor), coords, self.mask)
        if key not in self._traced:
            # keeps the tensor alive, so that its id stays unique
            self._traced[key] = (tensor, tensor.at(self, coords))
        return self._traced[key][1]

    @contextmanager
    def computing_anew(self, wanted: bool) -> Iterator[None]:
        """Recompute elements of stored tensors inside, if `wanted`, instead of loading them."""
        outer = self.anew
        self.anew = outer or wanted
        try:
            yield
        finally:
            self.anew = outer

    @contextmanager
    def without_stored(self) -> Iterator[None]:
        """Recompute elements of stored tensors inside, down to what only memory holds."""
        outer, self.stored = self.stored, {}
        try:
            yield
        finally:
            self.stored = outer

    @contextmanager
    def masked(self, mask: Ref) -> Iterator[None]:
        """Restrict loads inside to where `mask`, and every mask around it, holds."""
        outer = self.mask
        self.mask = mask if outer is None else self.apply("and", outer, mask)
        try:
            yield
        finally:
            self.mask = outer

    def dtype(self, ref: Ref) -> str:
        return self.values[ref].dtype

    def const(self, value: bool | float | Size | Real, dtype: str) -> Ref:
        """Return a number, or a number computed from sizes at run time."""
        if isinstance(value, Real):
            ref = self._real(value)
            return self.cast(ref if dtype in COMPUTE_DTYPES else self.cast(ref, "float32"), dtype)
        if isinstance(value, Index):
            ref = self.index(value)
            return self.cast(ref if dtype in COMPUTE_DTYPES else self.cast(ref, "float32"), dtype)
        number = as_dtype(value, dtype)
        if dtype in COMPUTE_DTYPES:
            return self._add(Const(number, dtype))
        return self._add(Apply("cast", (self.const(number, "float32"),), dtype))

    def _real(self, value: Real) -> Ref:
        """Compute a float from sizes in the precision of Python's floats."""
        op, args = FLOAT_OPS[value.target], [self.const(arg, "float64") for arg in value.args]
        return args[0] if op is None else self.apply(op, *args)

    def index(self, index: Index, dtype: str = "int64") -> Ref:
        """Return an index as a value."""
        constant = index.constant
        return self._add(IndexOf(index, dtype)) if constant is None else self.const(constant, dtype)

    def load(self, buffer: str, index: Index, dtype: str) -> Ref:
        return self._add(Load(buffer, simplify(index), dtype, self.mask))

    def reduce(self, op: str, arg: Ref, dtype: str | None = None) -> Ref:
        """Reduce over the row; a row of one element reduces to that element, at position 0."""
        if self._single():
            return self.const(0, "int64") if op.startswith("arg") else arg
        single = self._only_term(arg) if op == "sum" and dtype in (None, self.dtype(arg)) else None
        return self._add(Reduce(op, arg, dtype or self.dtype(arg))) if single is None else single

    def _only_term(self, arg: Ref) -> Ref | None:
        """Replace the sum over a row of `place == position ? term : 0` by `term` or 0.

        Place and term must belong to the row. A cross-entropy's gradient is such a row; summed element by element, it
        costs a pass over the vocabulary.
        """
        value = self.values[arg]
        if isinstance(value, Apply) and value.op == "cast" and {DTYPES[value.dtype], self._kind(value)} == {"float"}:
            single = self._only_term(value.args[0])
            return None if single is None else self.cast(single, value.dtype)
        if not (isinstance(value, Apply) and value.op == "where" and DTYPES[value.dtype] == "float"):
            return None
        condition, term, other = value.args
        hit, zero = self.values[condition], self.values[other]
        if not (isinstance(hit, Apply) and hit.op == "eq" and isinstance(zero, Const) and zero.value == 0):
            return None
        place, counter = sorted(hit.args, key=lambda ref: isinstance(self.values[ref], IndexOf))
        if self._in_row(term) or self._in_row(place) or not self._counts_row(self.values[counter]):
            return None
        size = size_product(size for name, size in self.ranges.items() if name[0] == "j")
        dtype = self.dtype(place)
        inside = self.apply("ge", place, self.const(0, dtype))
        inside = self.apply("and", inside, self.apply("lt", place, self.const(size, dtype)))
        # accounts for the other terms: a sum that starts at 0 has no negative zero
        return self.apply("add", self.apply("where", inside, term, other), self.const(0.0, value.dtype))

    def _kind(self, value: Apply) -> str:
        return DTYPES[self.dtype(value.args[0])]

    def _counts_row(self, value: Value) -> bool:
        """Return whether a value is the position in a row that has one variable."""
        names = [name for name, size in self.ranges.items() if name[0] == "j" and size != 1]
        return isinstance(value, IndexOf) and len(names) == 1 and value.index == var(names[0])

    def _in_row(self, ref: Ref) -> bool:
        """Does a value vary within the row?"""
        value = self.values[ref]
        direct = isinstance(value, (Load, IndexOf)) and any(name[0] == "j" for name in value.index.variables)
        return not isinstance(value, Reduce) and (direct or any(map(self._in_row, _refs_of(value))))

    def scan(self, op: str, arg: Ref) -> Ref:
        """Scan over the row; a row of one element is its own scan."""
        return arg if self._single() else self._add(Scan(op, arg, self.dtype(arg)))

    def _single(self) -> bool:
        return all(size == 1 for name, size in self.ranges.items() if name[0] == "j")

    def cast(self, ref: Ref, dtype: str) -> Ref:
        """Round to `dtype`; a widening cast is undone for free, a narrowing round trip is kept."""
        value = self.values[ref]
        if value.dtype == dtype:
            return ref
        if isinstance(value, Const):
            return self.const(value.value, dtype)
        if isinstance(value, IndexOf) and DTYPES[dtype] == "int" and self._fits(value.index, dtype):
            return self._add(IndexOf(value.index, dtype))
        if isinstance(value, Apply) and value.op == "cast":
            source = self.dtype(value.args[0])
            if isinstance(self.values[value.args[0]], Const):
                return self.cast(value.args[0], dtype)  # already rounded at its creation
            if value.dtype in _EXACT[source] and (source == dtype or dtype in _EXACT[source]):
                return self.cast(value.args[0], dtype)
        return self._add(Apply("cast", (ref,), dtype))

    def apply(self, op: str, *args: Ref, dtype: str | None = None) -> Ref:
        """Apply an operation of the table to arguments in a compute dtype; trivial ones are folded."""
        rule = OPS[op].rule
        result = dtype or (rule if rule in ("bool", "int32") else self.dtype(args[1] if op == "where" else args[0]))
        values = [self.values[arg] for arg in args]
        folded = self._fold(op, args, values, result)
        return self._add(Apply(op, args, result)) if folded is None else folded

    def as_index(self, ref: Ref, bound: Size) -> Index:
        """Return an integer value as an index; `bound` is a size that it is known (or checked) to stay below."""
        value = self.values[ref]
        if isinstance(value, IndexOf):
            return value.index
        if isinstance(value, Const):
            return as_index(int(value.value))
        name = f"v{ref}"
        known = self.ranges.get(name, bound)
        self.ranges[name] = known if is_nonnegative(as_index(bound) - known, {}) else bound
        return var(name)

    def finish(self, stores: tuple[Store, ...]) -> tuple[tuple[Value, ...], tuple[Store, ...]]:
        """Return the body and stores without unused values."""
        used: set[Ref] = set()
        todo = [store.value for store in stores]
        for store in stores:
            todo += _runtime_refs(store.index)
        while todo:
            ref = todo.pop()
            if ref not in used:
                used.add(ref)
                todo += _refs_of(self.values[ref])
        if len(used) == len(self.values):
            return tuple(self.values), stores
        return _renumber(self.values, stores, sorted(used), self.ranges)

    def _add(self, value: Value) -> Ref:
        # True == 1 == 1.0 and 0.0 == -0.0 in Python: the text distinguishes constants
        key: object = (repr(value.value), value.dtype) if isinstance(value, Const) else value
        ref = self._refs.get(key)
        if ref is None:
            ref = self._refs[key] = len(self.values)
            self.values.append(value)
        return ref

    def _fits(self, index: Index, dtype: str) -> bool:
        high, low, limits = upper_bound(index, self.ranges), lower_bound(index, self.ranges), np.iinfo(dtype)
        return high is not None and low is not None and limits.min <= low and high <= limits.max

    def _fold(self, op: str, args: tuple[Ref, ...], values: list[Value], result: str) -> Ref | None:
        if all(isinstance(value, Const) for value in values):
            return self._fold_constants(op, [value for value in values if isinstance(value, Const)], result)
        match op, values:
            case "where", [Const(value=condition), _, _]:
                return args[1] if condition else args[2]
            case "where", _ if args[1] == args[2]:
                return args[1]
            case ("and", [Const(value=True, dtype="bool"), _]) | ("or" | "xor", [Const(value=False, dtype="bool"), _]):
                return args[1]
            case ("and", [_, Const(value=True, dtype="bool")]) | ("or" | "xor", [_, Const(value=False, dtype="bool")]):
                return args[0]
            case "xor", [Const(value=True, dtype="bool"), _]:
                return self.apply("not", args[1])
            case "xor", [_, Const(value=True, dtype="bool")]:
                return self.apply("not", args[0])
            case ("mul" | "div", [_, Const(value=1)]) | ("sub", [_, Const(value=0)]):
                return args[0] if not _is_negative_zero(values[1]) else None
            case "mul", [Const(value=1), _]:
                return args[1]
            case (("add" | "sub" | "mul"), [IndexOf(dtype="int64"), IndexOf() | Const()]):
                return self._fold_index(op, values[0], values[1])
            case (("add" | "mul"), [Const(), IndexOf(dtype="int64")]):
                return self._fold_index(op, values[1], values[0])
        return None

    def _fold_index(self, op: str, left: Value, right: Value) -> Ref:
        assert isinstance(left, IndexOf)
        other = right.index if isinstance(right, IndexOf) else as_index(int(right.value))  # type: ignore[union-attr]
        index = left.index + other if op == "add" else left.index - other if op == "sub" else left.index * other
        return self.index(index)

    def _fold_constants(self, op: str, values: list[Const], result: str) -> Ref | None:
        fails = OPS[op].fails
        if fails is not None and DTYPES[values[0].dtype] == "int" and fails(*(value.value for value in values)):
            return None  # it has to fail when it runs, as in eager mode
        arrays = [np.asarray(value.value, dtype=value.dtype) for value in values]
        with np.errstate(all="ignore"):
            return self.const(OPS[op].meaning(*arrays).item(), result)


def _is_negative_zero(value: Value) -> bool:
    return isinstance(value, Const) and value.value == 0 and math.copysign(1.0, value.value) < 0


def as_dtype(value: bool | int | float, dtype: str) -> bool | int | float:
    """Return the Python number that `value` becomes in `dtype`."""
    kind = DTYPES[dtype]
    if kind == "bool":
        return bool(value)
    if kind == "int" and isinstance(value, float) and not abs(value) < 2**63:
        with np.errstate(all="ignore"):
            return int(np.asarray(value).astype(dtype))  # this processor's result, as in ATen's code
    if kind == "int":
        return int(np.asarray(int(value)).astype(dtype)) if abs(value) < 2**63 else int(value)
    number = float(value)
    if dtype == "float64" or not math.isfinite(number):
        return number
    if dtype == "bfloat16":
        return _round_bfloat16(number)
    if dtype in FLOAT8:
        return float(from_bytes(to_bytes(np.asarray(number, np.float32), dtype), dtype))
    with np.errstate(all="ignore"):
        return float(np.asarray(number).astype(dtype))


def _round_bfloat16(number: float) -> float:
    with np.errstate(all="ignore"):
        single = float(np.float32(number))
    if not math.isfinite(single):
        return single
    (bits,) = struct.unpack("<I", struct.pack("<f", single))
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # nearest, ties to even
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


@lru_cache(maxsize=4096)
def _runtime_refs(index: Index) -> tuple[Ref, ...]:
    return tuple(int(name[1:]) for name in index.variables if name[0] == "v")


def _refs_of(value: Value) -> tuple[Ref, ...]:
    match value:
        case Apply():
            return value.args
        case Reduce() | Scan():
            return (value.arg,)
        case Load():
            refs = _runtime_refs(value.index)
            return refs if value.mask is None else (*refs, value.mask)
        case IndexOf():
            return _runtime_refs(value.index)
        case Const():
            return ()


def _renumber(
    values: list[Value], stores: tuple[Store, ...], used: list[Ref], ranges: dict[str, Size]
) -> tuple[tuple[Value, ...], tuple[Store, ...]]:
    new = {old: position for position, old in enumerate(used)}
    names = {f"v{old}": var(f"v{position}") for old, position in new.items() if old != position}
    bounds = {**ranges, **{f"v{new[old]}": ranges[f"v{old}"] for old in used if f"v{old}" in ranges}}

    def moved(value: Value) -> Value:
        match value:
            case Apply():
                return replace(value, args=tuple(new[arg] for arg in value.args))
            case Reduce() | Scan():
                return replace(value, arg=new[value.arg])
            case Load():
                mask = None if value.mask is None else new[value.mask]
                return replace(value, index=substitute(value.index, names, bounds), mask=mask)
            case IndexOf():
                return replace(value, index=substitute(value.index, names, bounds))
            case Const():
                return value

    kept = [replace(s, index=substitute(s.index, names, bounds), value=new[s.value]) for s in stores]
    return tuple(moved(values[ref]) for ref in used), tuple(kept)
