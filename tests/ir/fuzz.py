"""Random loop programs for tests: always valid, the same for the same seed, small enough to interpret in milliseconds.

With `exact=True` every intermediate result is an integer that float32 holds exactly, and no operation is used whose
result depends on the order of summation, on contraction or on a mathematics library: any correct implementation must
agree bit for bit. Otherwise transcendental functions and divisions take part.

With `symbolic=True` every size that shapes are made of is a symbol, which the shapes of the inputs tell.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np

from dcompile.ir.buffers import Buffer
from dcompile.ir.index import (
    Index,
    Size,
    as_index,
    as_size,
    contiguous_strides,
    evaluate,
    flatten,
    floordiv,
    is_nonnegative,
    size_product,
    unflatten,
    var,
)
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Loop, Program, Reduce, Scan, Store, Value, View
from dcompile.ir.ops import DTYPES

LIMIT = 32
"""Values are brought back to at most this size before the next operation, so that int8 and bfloat16 stay exact."""
FLOATS = ("float32", "float32", "float32", "bfloat16", "float16", "float64")
INTS = ("int32", "int64", "int8", "int16")


def random_program(
    seed: int, size: int = 8, exact: bool = False, symbolic: bool = False
) -> tuple[Program, dict[str, np.ndarray]]:
    """A program of `size` loops and arrays for its inputs."""
    return _Maker(random.Random(seed), exact, symbolic).make(f"fuzz{seed}", size)


@dataclass(frozen=True)
class _Tensor:
    buffer: str
    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    bound: int


@dataclass
class _Point:
    """A loop under construction; `where[d]` is the coordinate along dimension d of the shape it runs over."""

    shape: tuple[Size, ...]
    outer: tuple[Size, ...]
    inner: tuple[Size, ...]
    where: tuple[Index, ...]
    body: list[Value] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)

    def add(self, value: Value, bound: int) -> int:
        self.body.append(value)
        self.bounds.append(bound)
        return len(self.body) - 1

    def dtype(self, ref: int) -> str:
        return self.body[ref].dtype


class _Maker:
    def __init__(self, rng: random.Random, exact: bool, symbolic: bool) -> None:
        self.rng = rng
        self.exact = exact
        self.tensors: list[_Tensor] = []
        self.pending: list[_Tensor] = []
        """Written by the loop under construction: readable after it."""
        self.buffers: list[Buffer] = []
        self.steps: list[Loop] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.sizes: list[Size] = [rng.choice((1, 2, 3, 5, 8)), rng.choice((4, 7, 16, 17, 33)), rng.choice((2, 3, 4))]
        self.numbers: dict[str, int] = {}
        """What the symbols are in the arrays of the inputs; no program depends on it, but for the symbols' letters."""
        if symbolic:
            self.numbers = {f"{'s' if n >= 2 else 'u'}{k}": n for k, n in enumerate(self.sizes)}
            self.sizes = [var(name) for name in self.numbers]

    def make(self, name: str, size: int) -> tuple[Program, dict[str, np.ndarray]]:
        r, c, b = self.sizes
        shapes = [(r, c), (r, c), (c,), (r,), (r, 1), (b, r, c), (c, r), ()]
        for shape in [(r, c), (c,), *self.rng.sample(shapes, 3)]:
            self._input(shape)
        for _ in range(size):
            self._step()
        mutated = self._mutation() if self.rng.random() < 0.4 else None
        read = {name for step in self.steps for name in step.reads}
        results = [t for t in self.tensors if t.buffer not in self.arrays]
        shown = [t for t in results if t.buffer not in read or self.rng.random() < 0.3]
        shown += [t for t in self.tensors if t.buffer == mutated]
        program = Program(
            name=name,
            inputs=tuple(self.arrays),
            outputs=tuple(View(t.buffer, t.shape, t.strides, t.offset) for t in shown),
            buffers=tuple(self.buffers),
            steps=tuple(self.steps),
        )
        return program, self.arrays

    # --- tensors ---

    def _count(self, size: Size) -> int:
        return evaluate(as_index(size), self.numbers)

    def _input(self, shape: tuple[Size, ...]) -> None:
        counts = tuple(map(self._count, shape))
        name = f"x{len(self.arrays)}"
        dtype = self.rng.choice((*FLOATS, *INTS, "bool", "uint8"))
        generator = np.random.default_rng(self.rng.randrange(1 << 30))
        bound = 1 if dtype == "bool" else 8
        low = 0 if dtype in ("bool", "uint8") else -bound
        values = generator.integers(low, bound + 1, counts)
        if DTYPES[dtype] == "float" and not self.exact:
            values = generator.uniform(-bound, bound, counts)
        self.arrays[name] = np.asarray(values).astype("float32" if dtype == "bfloat16" else dtype)
        if dtype == "bfloat16":  # keep to what bfloat16 can hold, so that everybody starts from the same numbers
            self.arrays[name] = (self.arrays[name].view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        self.tensors.append(self._declare(name, dtype, shape, bound))

    def _declare(self, name: str, dtype: str, shape: tuple[Size, ...], bound: int) -> _Tensor:
        order = list(range(len(shape)))
        if len(shape) > 1 and self.rng.random() < 0.2:
            self.rng.shuffle(order)
        dense = contiguous_strides(tuple(shape[d] for d in order))
        strides = tuple(stride for _, stride in sorted(zip(order, dense, strict=True)))
        self.buffers.append(Buffer(name, dtype, shape, strides))
        return _Tensor(name, dtype, shape, strides, 0, bound)

    def _new(self, dtype: str, shape: tuple[Size, ...], bound: int) -> _Tensor:
        self.pending.append(self._declare(f"b{len(self.buffers)}", dtype, shape, bound))
        return self.pending[-1]

    # --- loops ---

    def _point(self, shape: tuple[Size, ...], split: int | None = None) -> _Point:
        """A loop over `shape`: its dimensions split into rows and elements, or all flattened into one variable."""
        if split is None and shape and size_product(shape) and self.rng.random() < 0.15:
            all_of_it = size_product(shape)
            return _Point(shape, (all_of_it,), (), unflatten(var("i0"), shape, {"i0": all_of_it}))
        split = self.rng.randint(0, len(shape)) if split is None else split
        names = [f"i{d}" if d < split else f"j{d - split}" for d in range(len(shape))]
        return _Point(shape, shape[:split], shape[split:], tuple(map(var, names)))

    def _finish(self, point: _Point) -> None:
        origin = (self.rng.choice(("layer.mlp", "layer.norm", "head")),)
        name = f"k{len(self.steps)}"
        self.steps.append(Loop(name, point.outer, point.inner, tuple(point.body), tuple(point.stores), origin))
        self.tensors += self.pending
        self.pending = []

    def _step(self) -> None:
        shape = self.rng.choice(self.tensors).shape
        kinds = [self._pointwise]
        if shape and size_product(shape):
            kinds += [
                self._pointwise,
                self._rows,
                self._rows,
                self._normalise,
                self._scans,
                self._columns,
                self._gather,
                self._scatter,
            ]
        self.rng.choice(kinds)(shape)

    def _pointwise(self, shape: tuple[Size, ...]) -> None:
        point = self._point(shape)
        ref = self._expression(point, self.rng.randint(1, 5))
        self._set(point, ref, shape, point.where)
        if self.rng.random() < 0.25:
            self._set(point, self._binary(point, ref, self._leaf(point)), shape, point.where)
        self._finish(point)

    def _rows(self, shape: tuple[Size, ...]) -> None:
        split = self.rng.randint(0, len(shape) - 1)
        point = self._point(shape, split)
        ref = self._reduce(point, self._expression(point, self.rng.randint(0, 3)))
        self._set(point, ref, shape[:split], point.where[:split])
        self._finish(point)

    def _normalise(self, shape: tuple[Size, ...]) -> None:
        """Softmax and its kind: reductions of a row feed its elements, which may be reduced again."""
        split = self.rng.randint(0, len(shape) - 1)
        point = self._point(shape, split)
        ref = self._expression(point, self.rng.randint(0, 3))
        for _ in range(self.rng.randint(1, 2)):
            ref = self._binary(point, ref, self._reduce(point, ref))
            if self.rng.random() < 0.4:
                self._set(point, ref, shape, point.where)
        if self.rng.random() < 0.5:
            self._set(point, self._reduce(point, ref), shape[:split], point.where[:split])
        self._set(point, ref, shape, point.where)
        self._finish(point)

    def _scans(self, shape: tuple[Size, ...]) -> None:
        """Running sums and their kind, of elements, of rows' results and of one another; elements and rows use them."""
        split = self.rng.randint(0, len(shape) - 1)
        point = self._point(shape, split)
        ref = self._expression(point, self.rng.randint(0, 2))
        if self.rng.random() < 0.3:
            ref = self._binary(point, ref, self._reduce(point, ref))
        for _ in range(self.rng.randint(1, 2)):
            scanned = self._scan(point, ref)
            ref = self._binary(point, scanned, self._choice(point, ref, scanned))
        if self.rng.random() < 0.5:
            self._set(point, self._reduce(point, ref), shape[:split], point.where[:split])
        if self.rng.random() < 0.3:
            ref = self._binary(point, ref, self._reduce(point, ref))
        self._set(point, ref, shape, point.where)
        self._finish(point)

    def _columns(self, shape: tuple[Size, ...]) -> None:
        point = self._point(shape, self.rng.randint(0, len(shape)))
        kept = [d for d in range(len(shape)) if self.rng.random() < 0.5]
        self._combine(point, tuple(shape[d] for d in kept), [point.where[d] for d in kept])
        if self.rng.random() < 0.3:
            self._set(point, self._expression(point, 1), shape, point.where)
        self._finish(point)

    def _gather(self, shape: tuple[Size, ...]) -> None:
        """Rows of a table chosen at run time, as an embedding."""
        point = self._point(shape)
        source = self.rng.choice([t for t in self.tensors if t.shape])
        index = self._position(point, source.shape[0])
        rest = [
            point.where[-1] if size == shape[-1] else as_index(self.rng.randrange(self._least(size)))
            for size in source.shape[1:]
        ]
        place = flatten([index, *rest], source.strides) + source.offset
        ref = self._tame(point, point.add(Load(source.buffer, place, source.dtype), source.bound))
        self._set(point, self._binary(point, ref, self._leaf(point)), shape, point.where)
        self._finish(point)

    def _scatter(self, shape: tuple[Size, ...]) -> None:
        """Sums into places chosen at run time, as the gradient of an embedding."""
        point = self._point(shape, self.rng.randint(0, len(shape)))
        places = self.rng.randint(1, 6)
        index = self._position(point, places)
        if len(shape) > 1:
            self._combine(point, (places, shape[-1]), [index, point.where[-1]])
        else:
            self._combine(point, (places,), [index])
        self._finish(point)

    def _mutation(self) -> str | None:
        """The epilogue that overwrites an input with what was computed from it."""
        name = self.rng.choice(list(self.arrays))
        (target,) = [t for t in self.tensors if t.buffer == name]
        point = self._point(target.shape)
        place = flatten(point.where, target.strides)
        ref = self._tame(point, point.add(Load(name, place, target.dtype), target.bound))
        others = replace(target, bound=LIMIT)
        tensors, self.tensors = self.tensors, [t for t in self.tensors if t.buffer != name]
        ref = self._cast(point, self._binary(point, ref, self._leaf(point)), target.dtype)
        self.tensors = [others if t.buffer == name else t for t in tensors]
        point.stores.append(Store(name, place, ref))
        self._finish(point)
        return name

    # --- stores ---

    def _set(self, point: _Point, ref: int, shape: tuple[Size, ...], where: tuple[Index, ...]) -> None:
        if self.rng.random() < 0.4 and not isinstance(point.body[ref], Reduce):
            choices = (*FLOATS, "int32", "bool") if DTYPES[point.dtype(ref)] == "float" else (*FLOATS, *INTS)
            ref = self._cast(point, ref, self.rng.choice(choices))
        out = self._new(point.dtype(ref), shape, point.bounds[ref])
        point.stores.append(Store(out.buffer, flatten(where, out.strides), ref))

    def _combine(self, point: _Point, shape: tuple[Size, ...], where: list[Index]) -> None:
        """A store that reduces over all that falls on the same place."""
        ref = self._expression(point, self.rng.randint(0, 2))
        mode = self.rng.choice(("sum", "sum", "sum", "max", "min"))
        everything = self._count(size_product(point.shape))
        if mode == "sum" and DTYPES[point.dtype(ref)] != "float":
            ref = self._cast(point, ref, "int64")
        many = everything if mode == "sum" else 1
        covered = size_product(shape) and all(isinstance(i, Index) and not _runtime(i) for i in where)
        if mode != "sum" and not covered:
            mode, many = "sum", everything  # the identity of max is no number to compute with
            if point.dtype(ref) != "float32":
                ref = self._cast(point, ref, "float32")
        out = self._new(point.dtype(ref), shape, point.bounds[ref] * max(many, 1))
        point.stores.append(Store(out.buffer, flatten(where, out.strides), ref, mode))

    # --- expressions ---

    def _expression(self, point: _Point, depth: int) -> int:
        ref = self._leaf(point)
        for _ in range(depth):
            kind = self.rng.random()
            if kind < 0.5:
                ref = self._binary(point, ref, self._leaf(point))
            elif kind < 0.75:
                ref = self._unary(point, ref)
            elif kind < 0.9:
                ref = self._choice(point, ref, self._leaf(point))
            else:
                ref = self._number(point, self._cast(point, ref, self.rng.choice((*FLOATS, *INTS))))
        return ref

    def _leaf(self, point: _Point) -> int:
        """A load (plain, transposed, broadcast, strided, masked), constant or coordinate, in a dtype to compute in."""
        for _ in range(8):
            tensor = self._view(self.rng.choice(self.tensors))
            index = self._aligned(point, tensor)
            if index is not None:
                return self._number(point, point.add(Load(tensor.buffer, index, tensor.dtype), tensor.bound))
            masked = self._shifted(point, tensor)
            if masked is not None:
                return masked
        if self.rng.random() < 0.5:
            return point.add(Const(float(self.rng.randint(-3, 3)), "float32"), 3)
        return self._coordinate(point)

    def _number(self, point: _Point, ref: int) -> int:
        """In a dtype for computing, and small."""
        if point.dtype(ref) in ("bfloat16", "float16"):
            ref = self._cast(point, ref, "float32")
        if point.dtype(ref) in ("bool", "uint8"):
            ref = self._cast(point, ref, "int32")
        return self._tame(point, ref)

    def _view(self, t: _Tensor) -> _Tensor:
        choice = self.rng.random()
        if choice < 0.2:
            return replace(t, shape=t.shape[::-1], strides=t.strides[::-1])
        if choice < 0.4:
            return replace(t, shape=(*t.shape, 1), strides=(*t.strides, 0))
        if choice < 0.5 and t.shape and self._least(t.shape[-1]) > 1:
            half = as_size(floordiv(t.shape[-1] + 1, 2, {}))
            return replace(t, shape=(*t.shape[:-1], half), strides=(*t.strides[:-1], t.strides[-1] * 2))
        if choice < 0.6 and t.shape and self._least(t.shape[0]) > 1:
            return replace(t, shape=t.shape[1:], strides=t.strides[1:], offset=t.offset + t.strides[0])
        return t

    def _least(self, size: Size) -> int:
        """A number that the size is not below."""
        return size if isinstance(size, int) else 2 if is_nonnegative(size - 2, {}) else 1

    def _extent(self, point: _Point, size: Size, bound: int) -> int:
        """A size as a value."""
        return point.add(Const(size, "int64") if isinstance(size, int) else IndexOf(size), bound)

    def _aligned(self, point: _Point, t: _Tensor) -> Index | None:
        """The element of `t` at the current point, if `t` broadcasts to the shape of the loop."""
        if len(t.shape) > len(point.shape):
            return None
        pairs = list(zip(reversed(t.shape), reversed(point.shape), strict=False))
        if any(n not in (1, m) for n, m in pairs):
            return None
        where = point.where[len(point.where) - len(t.shape) :]
        terms = [w if n != 1 else as_index(0) for n, w in zip(t.shape, where, strict=True)]
        return flatten(terms, t.strides) + t.offset

    def _shifted(self, point: _Point, t: _Tensor) -> int | None:
        """A tensor that is too short, read where it reaches: what padding and concatenation lower to."""
        if len(t.shape) != len(point.shape) or not t.shape or 0 in t.shape or t.shape[:-1] != point.shape[:-1]:
            return None
        shift = self.rng.randint(0, 2)
        position = point.add(IndexOf(point.where[-1] - shift), 64)
        low = point.add(Apply("ge", (position, point.add(Const(0, "int64"), 0)), "bool"), 1)
        high = point.add(Apply("lt", (position, self._extent(point, t.shape[-1], 64)), "bool"), 1)
        mask = point.add(Apply("and", (low, high), "bool"), 1)
        place = flatten([*point.where[:-1], point.where[-1] - shift], t.strides) + t.offset
        return self._number(point, point.add(Load(t.buffer, place, t.dtype, mask), t.bound))

    def _coordinate(self, point: _Point) -> int:
        index = self.rng.choice(point.where) if point.where else as_index(1)
        return self._tame(point, point.add(IndexOf(index), 1 << 10))

    def _position(self, point: _Point, size: Size) -> Index:
        """A run-time integer in [0, size)."""
        ref = self._cast(point, self._leaf(point), "int64")
        ref = point.add(Apply("mod", (ref, self._extent(point, size, self._count(size))), "int64"), self._count(size))
        return var(f"v{ref}")

    def _tame(self, point: _Point, ref: int, limit: int = LIMIT) -> int:
        if point.bounds[ref] <= limit or point.dtype(ref) in ("bool", "bfloat16", "float16"):
            return ref
        dtype = point.dtype(ref)
        whole = DTYPES[dtype] == "int"
        low = point.add(Const(-limit if whole else float(-limit), dtype), limit)
        high = point.add(Const(limit if whole else float(limit), dtype), limit)
        ref = point.add(Apply("max", (ref, low), dtype), point.bounds[ref])
        return point.add(Apply("min", (ref, high), dtype), limit)

    def _cast(self, point: _Point, ref: int, dtype: str) -> int:
        if point.dtype(ref) == dtype:
            return ref
        if dtype not in ("bool", "int64", "float32", "float64"):
            ref = self._tame(point, ref)
        if dtype == "uint8" and point.dtype(ref) != "bool":  # the conversion of negative numbers is undefined in C
            if point.dtype(ref) in ("bfloat16", "float16"):
                ref = self._cast(point, ref, "float32")
            ref = point.add(Apply("abs", (ref,), point.dtype(ref)), point.bounds[ref])
        return point.add(Apply("cast", (ref,), dtype), 1 if dtype == "bool" else point.bounds[ref])

    def _binary(self, point: _Point, a: int, b: int) -> int:
        a, b = self._alike(point, a, b)
        dtype, ba, bb = point.dtype(a), point.bounds[a], point.bounds[b]
        names = ["add", "sub", "mul", "min", "max"]
        if DTYPES[dtype] == "float" and not self.exact:
            names.append("div")
        match self.rng.choice(names):
            case "mul":
                a, b = self._tame(point, a, 5), self._tame(point, b, 5)
                return point.add(Apply("mul", (a, b), dtype), 25)
            case "div":
                b = point.add(Apply("abs", (b,), dtype), bb)
                b = point.add(Apply("add", (b, point.add(Const(1.0, dtype), 1)), dtype), bb + 1)
                return point.add(Apply("div", (a, b), dtype), ba)
            case "min" | "max" as name:
                return point.add(Apply(name, (a, b), dtype), max(ba, bb))
            case name:
                return self._tame(point, point.add(Apply(name, (a, b), dtype), ba + bb))

    def _alike(self, point: _Point, a: int, b: int) -> tuple[int, int]:
        """Both as numbers of one dtype."""
        a, b = self._number(point, a), self._number(point, b)
        if point.dtype(a) == point.dtype(b):
            return a, b
        for dtype in ("float64", "float32", "int64"):
            if dtype in (point.dtype(a), point.dtype(b)):
                return self._cast(point, a, dtype), self._cast(point, b, dtype)
        return self._cast(point, a, "int64"), self._cast(point, b, "int64")

    def _unary(self, point: _Point, ref: int) -> int:
        ref = self._number(point, ref)
        dtype, bound = point.dtype(ref), point.bounds[ref]
        if DTYPES[dtype] == "float" and not self.exact and self.rng.random() < 0.7:
            name = self.rng.choice(("exp", "tanh", "sigmoid", "sqrt", "rsqrt", "log1p", "erf", "sin"))
            if name == "exp":
                ref = self._tame(point, ref, 3)
            elif name in ("sqrt", "rsqrt", "log1p"):
                ref = point.add(Apply("abs", (ref,), dtype), bound)
                ref = point.add(Apply("add", (ref, point.add(Const(0.5, dtype), 1)), dtype), bound + 1)
            return point.add(Apply(name, (ref,), dtype), LIMIT)
        return point.add(Apply(self.rng.choice(("neg", "abs", "sign")), (ref,), dtype), max(bound, 1))

    def _choice(self, point: _Point, a: int, b: int) -> int:
        a, b = self._alike(point, a, b)
        compare = self.rng.choice(("eq", "ne", "lt", "le", "gt", "ge"))
        test = point.add(Apply(compare, (a, b), "bool"), 1)
        if self.rng.random() < 0.2:
            test = point.add(Apply("not", (test,), "bool"), 1)
        return point.add(Apply("where", (test, a, b), point.dtype(a)), max(point.bounds[a], point.bounds[b]))

    def _reduce(self, point: _Point, ref: int) -> int:
        ref = self._number(point, ref)
        op = self.rng.choice(("sum", "sum", "max", "min", "argmax", "argmin", "any", "all"))
        if op in ("argmax", "argmin"):
            return self._tame(point, point.add(Reduce(op, ref, "int64"), 1 << 10))
        if op in ("any", "all"):
            return point.add(Reduce(op, self._cast(point, ref, "bool"), "bool"), 1)
        if op == "sum" and DTYPES[point.dtype(ref)] != "float":
            ref = self._cast(point, ref, "int64")
        bound = point.bounds[ref] * (self._count(size_product(point.inner)) if op == "sum" else 1)
        return point.add(Reduce(op, ref, point.dtype(ref)), max(bound, 1))

    def _scan(self, point: _Point, ref: int) -> int:
        ref = self._number(point, ref)
        names = ("sum", "sum", "prod", "max", "min")
        op = self.rng.choice(names if self.exact or DTYPES[point.dtype(ref)] != "float" else (*names, "logsumexp"))
        if op in ("sum", "prod") and DTYPES[point.dtype(ref)] != "float":
            ref = self._cast(point, ref, "int64")
        if op == "prod":
            ref = self._tame(point, ref, 1)
        bound = point.bounds[ref] * (self._count(size_product(point.inner)) if op == "sum" else 1) + 8 * (
            op == "logsumexp"
        )
        return self._tame(point, point.add(Scan(op, ref, point.dtype(ref)), max(bound, 1)))


def _runtime(index: Size) -> bool:
    return isinstance(index, Index) and any(name[0] == "v" for name in index.variables)
