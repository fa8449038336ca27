"""Loops that models are made of, built by hand: (program, names of its inputs)."""

from __future__ import annotations

import math
from dataclasses import replace

from dcompile.ir.buffers import Buffer
from dcompile.ir.index import Index, as_index, contiguous_strides, floordiv, modulo, var
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Loop, Program, Reduce, Scan, Store, Value, View

I0, J0 = var("i0"), var("j0")


class Body:
    """A loop body under construction; 16-bit loads come out as float32."""

    def __init__(self) -> None:
        self.values: list[Value] = []

    def put(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def load(self, buffer: str, index: Index, dtype: str = "float32", mask: int | None = None) -> int:
        ref = self.put(Load(buffer, index, dtype, mask))
        return self.op("cast", ref, dtype="float32") if dtype in ("bfloat16", "float16") else ref

    def const(self, value: float, dtype: str = "float32") -> int:
        return self.put(Const(value, dtype))

    def op(self, name: str, *args: int, dtype: str = "float32") -> int:
        return self.put(Apply(name, args, dtype))

    def reduce(self, name: str, arg: int, dtype: str = "float32") -> int:
        return self.put(Reduce(name, arg, dtype))

    def scan(self, name: str, arg: int, dtype: str = "float32") -> int:
        return self.put(Scan(name, arg, dtype))

    def narrow(self, ref: int, dtype: str) -> int:
        return ref if dtype == "float32" else self.op("cast", ref, dtype=dtype)


def program(
    body: Body, outer: tuple[int, ...], inner: tuple[int, ...], stores: list[Store], **buffers: object
) -> Program:
    """A program of one loop. Buffers are given as (dtype, shape) or (dtype, shape, strides)."""
    made = []
    for name, given in buffers.items():
        dtype, shape, *strides = given  # type: ignore[misc]
        made.append(Buffer(name, dtype, shape, strides[0] if strides else contiguous_strides(shape)))
    loop = Loop("k", outer, inner, tuple(body.values), tuple(stores))
    outputs = tuple(View(b.name, b.shape, b.strides) for b in made if b.name in loop.writes)
    return Program("hand", tuple(b.name for b in made if b.name not in loop.writes), outputs, tuple(made), (loop,))


def moved_by_roots(n: int) -> Program:
    """AdamW's end: v += g * g; p -= m / (sqrt(v) + 1e-8), p and v in place."""
    b = Body()
    p, g, m, v = (b.load(name, I0) for name in "pgmv")
    squares = b.op("add", v, b.op("mul", g, g))
    root = b.op("add", b.op("sqrt", squares), b.const(1e-8))
    stores = [Store("v", I0, squares), Store("p", I0, b.op("sub", p, b.op("div", m, root)))]
    shape = ("float32", (n,))
    return program(b, (n,), (), stores, p=shape, g=shape, m=shape, v=shape)


def rms_norm(rows: int, n: int, dtype: str = "float32") -> Program:
    b = Body()
    x = b.load("x", I0 * n + J0, dtype)
    total = b.reduce("sum", b.op("mul", x, x))
    mean = b.op("add", b.op("mul", total, b.const(1 / n)), b.const(1e-6))
    r = b.op("rsqrt", mean)
    y = b.op("mul", b.op("mul", x, r), b.load("w", J0, dtype))
    stores = [Store("y", I0 * n + J0, b.narrow(y, dtype)), Store("r", I0, r)]
    shapes = {"x": (dtype, (rows, n)), "w": (dtype, (n,)), "y": (dtype, (rows, n)), "r": ("float32", (rows,))}
    return program(b, (rows,), (n,), stores, **shapes)


def rms_norm_backward(rows: int, n: int, dtype: str = "float32") -> Program:
    """dx and the column sum dw in one loop."""
    b = Body()
    at = I0 * n + J0
    x, g = b.load("x", at, dtype), b.load("g", at, dtype)
    w, r = b.load("w", J0, dtype), b.load("r", I0)
    hat, gw = b.op("mul", x, r), b.op("mul", g, w)
    mean = b.op("mul", b.reduce("sum", b.op("mul", gw, hat)), b.const(1 / n))
    dx = b.op("mul", b.op("sub", gw, b.op("mul", hat, mean)), r)
    dw = b.op("mul", g, hat)
    stores = [Store("dx", at, b.narrow(dx, dtype)), Store("dw", J0, dw, "sum")]
    return program(
        b, (rows,), (n,), stores,
        x=(dtype, (rows, n)), g=(dtype, (rows, n)), w=(dtype, (n,)), r=("float32", (rows,)),
        dx=(dtype, (rows, n)), dw=("float32", (n,)),
    )  # fmt: skip


def softmax(rows: int, n: int, dtype: str = "float32") -> Program:
    b = Body()
    x = b.load("x", I0 * n + J0, dtype)
    e = b.op("exp", b.op("sub", x, b.reduce("max", x)))
    y = b.op("div", e, b.reduce("sum", e))
    stores = [Store("y", I0 * n + J0, b.narrow(y, dtype))]
    return program(b, (rows,), (n,), stores, x=(dtype, (rows, n)), y=(dtype, (rows, n)))


def sum_exp(rows: int, n: int, dtype: str = "float32", *, columns: bool = False) -> Program:
    """Each row's largest element and the sum of exponentials below it, of rows or of columns of a matrix."""
    b = Body()
    x = b.load("x", J0 * rows + I0 if columns else I0 * n + J0, dtype)
    stores = [Store("top", I0, b.reduce("max", x)), Store("total", I0, b.reduce("sum_exp", x))]
    shape = (n, rows) if columns else (rows, n)
    return program(b, (rows,), (n,), stores, x=(dtype, shape), top=("float32", (rows,)), total=("float32", (rows,)))


def first_row_alone(rows: int, n: int) -> Program:
    """Long rows, and for each a number: of the first row that at a constant place of `s`, of others 0."""
    b = Body()
    first = b.op("lt", b.put(IndexOf(I0, "int64")), b.put(Const(1, "int64")), dtype="bool")
    here = b.put(Load("s", as_index(0), "float32", mask=first))
    x = b.load("x", I0 * n + J0)
    top = b.reduce("max", x)
    stores = [Store("y", I0 * n + J0, b.op("sub", x, top)), Store("z", I0, here)]
    shapes = {"x": (rows, n), "y": (rows, n), "z": (rows,), "s": (1,)}
    return program(b, (rows,), (n,), stores, **{name: ("float32", shape) for name, shape in shapes.items()})


def cross_entropy(rows: int, n: int) -> Program:
    """Loss of each row, and what backward needs, from logits and labels."""
    b = Body()
    x = b.load("x", I0 * n + J0)
    top = b.reduce("max", x)
    total = b.reduce("sum", b.op("exp", b.op("sub", x, top)))
    lse = b.op("add", top, b.op("log", total))
    label = b.put(Load("t", I0, "int64"))
    picked = b.load("x", I0 * n + var(f"v{label}"))
    stores = [Store("loss", I0, b.op("sub", lse, picked)), Store("lse", I0, lse)]
    return program(
        b,
        (rows,),
        (n,),
        stores,
        x=("float32", (rows, n)),
        t=("int64", (rows,)),
        loss=("float32", (rows,)),
        lse=("float32", (rows,)),
    )


def bias_gelu(rows: int, n: int, dtype: str = "float32") -> Program:
    b = Body()
    x = b.op("add", b.load("x", I0 * n + var("i1"), dtype), b.load("bias", var("i1"), dtype))
    cube = b.op("mul", b.op("mul", x, x), x)
    u = b.op("mul", b.op("add", x, b.op("mul", cube, b.const(0.044715))), b.const(math.sqrt(2 / math.pi)))
    y = b.op("mul", b.op("mul", x, b.const(0.5)), b.op("add", b.op("tanh", u), b.const(1.0)))
    stores = [Store("y", I0 * n + var("i1"), b.narrow(y, dtype))]
    return program(b, (rows, n), (), stores, x=(dtype, (rows, n)), bias=(dtype, (n,)), y=(dtype, (rows, n)))


def transpose(rows: int, n: int, dtype: str = "float32") -> Program:
    b = Body()
    x = b.put(Load("x", I0 * n + var("i1"), dtype))
    return program(b, (rows, n), (), [Store("y", var("i1") * rows + I0, x)], x=(dtype, (rows, n)), y=(dtype, (n, rows)))


def channels_last(filters: int, channels: int, positions: int, dtype: str = "float32") -> Program:
    """Filters whose channels become neighbours in memory."""
    b, i2 = Body(), var("i2")
    x = b.put(Load("x", I0 * (channels * positions) + var("i1") * positions + i2, dtype))
    to = Store("y", I0 * (channels * positions) + i2 * channels + var("i1"), x)
    space = (filters, channels, positions)
    return program(b, space, (), [to], x=(dtype, space), y=(dtype, (filters, positions, channels)))


def transposed_sum(rows: int, n: int, dtype: str = "float32") -> Program:
    """A transposed copy of (n, rows), and the sums of its columns."""
    b = Body()
    x = b.load("x", J0 * rows + I0, dtype)
    stores = [Store("y", I0 * n + J0, x), Store("total", J0, x, "sum")]
    return program(b, (rows,), (n,), stores, x=(dtype, (n, rows)), y=(dtype, (rows, n)), total=("float32", (n,)))


def scaled_images(images: int, pixels: int, channels: int, dtype: str = "float32", function: str = "exp") -> Program:
    """Images times a function of a number for each of their channels, and sums over all pixels."""
    b = Body()
    at = I0 * (pixels * channels) + var("i1") * channels + J0
    y = b.op("mul", b.load("x", at, dtype), b.op(function, b.load("s", I0 * channels + J0)))
    stores = [Store("y", at, b.narrow(y, dtype)), Store("total", J0, y, "sum")]
    whole = (dtype, (images, pixels, channels))
    scales, total = ("float32", (images, channels)), ("float32", (channels,))
    return program(b, (images, pixels), (channels,), stores, x=whole, y=whole, s=scales, total=total)


def stacked_sum(rows: int, pieces: int, width: int) -> Program:
    """Tensors stacked between rows and columns, as gradients of `qkv.unbind`, and the sums of all columns."""
    b, j1, value = Body(), var("j1"), 0
    place = b.put(IndexOf(J0, "int64"))
    for number in range(pieces):
        mask = b.op("eq", place, b.const(number, "int64"), dtype="bool")
        x = b.load(f"x{number}", I0 * width + j1, mask=mask)
        value = b.op("where", mask, x, value) if number else x
    at = I0 * (pieces * width) + J0 * width + j1
    stores = [Store("y", at, value), Store("total", J0 * width + j1, value, "sum")]
    parts = {f"x{number}": ("float32", (rows, width)) for number in range(pieces)}
    whole, total = ("float32", (rows, pieces, width)), ("float32", (pieces, width))
    return program(b, (rows,), (pieces, width), stores, **parts, y=whole, total=total)


def argmax(rows: int, n: int, dtype: str = "float32", op: str = "argmax") -> Program:
    b = Body()
    stores = [Store("y", I0, b.reduce(op, b.load("x", I0 * n + J0, dtype), "int64"))]
    return program(b, (rows,), (n,), stores, x=(dtype, (rows, n)), y=("int64", (rows,)))


def column_reduce(rows: int, n: int, op: str = "sum", dtype: str = "float32") -> Program:
    """Over dim 0, as a loop over the columns that are kept."""
    b = Body()
    out = "int64" if op.startswith("arg") else dtype
    stores = [Store("y", I0, b.reduce(op, b.put(Load("x", J0 * n + I0, dtype)), out))]
    return program(b, (n,), (rows,), stores, x=(dtype, (rows, n)), y=(out, (n,)))


def embedding(rows: int, n: int, vocabulary: int) -> Program:
    b, i1 = Body(), var("i1")
    token = b.put(Load("t", I0, "int64"))
    stores = [Store("y", I0 * n + i1, b.load("w", var(f"v{token}") * n + i1))]
    table = ("float32", (vocabulary, n))
    return program(b, (rows, n), (), stores, t=("int64", (rows,)), w=table, y=("float32", (rows, n)))


def concatenated(rows: int, *widths: int) -> Program:
    """Tensors put together in rows of one, as cat does."""
    b, i1, n, at = Body(), var("i1"), sum(widths), 0
    place, value = b.put(IndexOf(i1, "int64")), b.const(0.0)
    for number, width in enumerate(widths):
        before = b.op("lt", place, b.const(at, "int64"), dtype="bool")
        inside = b.op("lt", place, b.const(at + width, "int64"), dtype="bool")
        mask = b.op("and", b.op("not", before, dtype="bool"), inside, dtype="bool")
        x = b.load(f"x{number}", I0 * width + i1 - at, mask=mask)
        value, at = b.op("where", mask, x, value), at + width
    parts = {f"x{number}": ("float32", (rows, width)) for number, width in enumerate(widths)}
    return program(b, (rows, n), (), [Store("y", I0 * n + i1, value)], **parts, y=("float32", (rows, n)))


def rolled(rows: int, n: int, shift: int) -> Program:
    """Rows turned around: what is pushed out at the end comes in at the beginning."""
    b, i1 = Body(), var("i1")
    place = modulo(i1 + (n - shift), n, {"i1": n})
    return program(
        b, (rows, n), (), [Store("y", I0 * n + i1, b.load("x", I0 * n + place))], x=("float32", (rows, n)),
        y=("float32", (rows, n)),
    )  # fmt: skip


def stretched(rows: int, n: int) -> Program:
    """Rows of twice the length, between neighbours: where to read and with which weights is the same in every row."""
    b, i1 = Body(), var("i1")
    middle = b.op("add", b.op("cast", b.put(IndexOf(i1, "int64"))), b.const(0.5))
    at = b.op("max", b.op("sub", b.op("mul", middle, b.const(0.5)), b.const(0.5)), b.const(0.0))
    left = b.op("cast", at, dtype="int64")
    end = b.const(n - 1, "int64")
    right = b.op("min", b.op("add", left, b.const(1, "int64"), dtype="int64"), end, dtype="int64")
    weight = b.op("sub", at, b.op("cast", left))
    first, second = (b.load("x", I0 * n + var(f"v{place}")) for place in (left, right))
    value = b.op("add", first, b.op("mul", b.op("sub", second, first), weight))
    return program(
        b, (rows, 2 * n), (), [Store("y", I0 * (2 * n) + i1, value)], x=("float32", (rows, n)),
        y=("float32", (rows, 2 * n)),
    )  # fmt: skip


def picked(rows: int, n: int) -> Program:
    """Elements of each row, in any order; negative positions count from its end."""
    b, i1 = Body(), var("i1")
    at = b.put(Load("at", I0 * n + i1, "int64"))
    at = b.op("within", at, b.const(-n, "int64"), b.const(n, "int64"), dtype="int64")
    below = b.op("lt", at, b.const(0, "int64"), dtype="bool")
    at = b.op("where", below, b.op("add", at, b.const(n, "int64"), dtype="int64"), at, dtype="int64")
    stores = [Store("y", I0 * n + i1, b.load("x", I0 * n + var(f"v{at}")))]
    shape = ("float32", (rows, n))
    return program(b, (rows, n), (), stores, at=("int64", (rows, n)), x=shape, y=shape)


def embedding_backward(rows: int, n: int, vocabulary: int) -> Program:
    b = Body()
    token = b.put(Load("t", I0, "int64"))
    g = b.load("g", I0 * n + J0)
    stores = [Store("dw", var(f"v{token}") * n + J0, g, "sum")]
    return program(
        b, (rows,), (n,), stores, t=("int64", (rows,)), g=("float32", (rows, n)), dw=("float32", (vocabulary, n))
    )


def one_token_backward(rows: int, n: int, vocabulary: int) -> Program:
    """Of an embedding of one token alone: the other rows of its gradient are 0."""
    b = Body()
    stores = [Store("dw", as_index(n) + J0, b.load("g", I0 * n + J0), "sum")]
    return program(b, (rows,), (n,), stores, g=("float32", (rows, n)), dw=("float32", (vocabulary, n)))


def put_at(heads: int, length: int, n: int) -> Program:
    """What a cache of `length` places takes at one of them."""
    b = Body()
    place = b.put(Load("t", Index(), "int64"))
    value = b.put(Load("new", I0 * n + J0, "bfloat16"))
    stores = [Store("cache", I0 * (length * n) + var(f"v{place}") * n + J0, value)]
    buffers = {"t": ("int64", (1,)), "new": ("bfloat16", (heads, n)), "cache": ("bfloat16", (heads, length, n))}
    made = program(b, (heads,), (n,), stores, **buffers)
    return replace(made, inputs=(*made.inputs, "cache"))


def row_sum(rows: int, n: int, op: str = "sum", dtype: str = "float32") -> Program:
    b = Body()
    stores = [Store("y", I0, b.reduce(op, b.put(Load("x", I0 * n + J0, dtype)), dtype))]
    return program(b, (rows,), (n,), stores, x=(dtype, (rows, n)), y=(dtype, (rows,)))


def narrow_row_sum(rows: int, n: int) -> Program:
    """Of bfloat16, in float32."""
    b = Body()
    stores = [Store("y", I0, b.reduce("sum", b.load("x", I0 * n + J0, "bfloat16")))]
    return program(b, (rows,), (n,), stores, x=("bfloat16", (rows, n)), y=("float32", (rows,)))


def unary(op: str, n: int, dtype: str = "float32", out: str | None = None) -> Program:
    b = Body()
    stores = [Store("y", I0, b.op(op, b.put(Load("x", I0, dtype)), dtype=out or dtype))]
    return program(b, (n,), (), stores, x=(dtype, (n,)), y=(out or dtype, (n,)))


def binary(op: str, n: int, dtype: str = "float32", out: str | None = None) -> Program:
    return applied(op, "xz", n, dtype, out)


def applied(op: str, names: str, n: int, dtype: str = "float32", out: str | None = None) -> Program:
    """An operation on the elements of buffers with these names."""
    b = Body()
    args = [b.put(Load(name, I0, dtype)) for name in names]
    stores = [Store("y", I0, b.op(op, *args, dtype=out or dtype))]
    inputs = dict.fromkeys(names, (dtype, (n,)))
    return program(b, (n,), (), stores, **inputs, y=(out or dtype, (n,)))


def arange(n: int, dtype: str = "int64") -> Program:
    b = Body()
    return program(b, (n,), (), [Store("y", I0, b.put(IndexOf(as_index(I0) * 3 + 1, dtype)))], y=(dtype, (n,)))


def random_words(n: int, draws: tuple[int, ...]) -> Program:
    """Words of random operations: 4 times an operation's number, and which word of its block."""
    b = Body()
    key = b.put(Load("key", as_index(0), "int64"))
    place = b.put(IndexOf(as_index(I0), "int64"))
    words = [b.op("philox", key, place, b.const(draw, "int64"), dtype="int32") for draw in draws]
    stores = [Store(f"y{number}", I0, word) for number, word in enumerate(words)]
    return program(b, (n,), (), stores, key=("int64", (1,)), **{f"y{k}": ("int32", (n,)) for k in range(len(draws))})


def scanned_softmax(rows: int, n: int) -> Program:
    """z = x * (sum over k <= j of softmax(x)[k]), and the running largest of z."""
    b = Body()
    x = b.load("x", I0 * n + J0)
    exp = b.op("exp", b.op("sub", x, b.reduce("max", x)))
    share = b.op("div", exp, b.reduce("sum", exp))
    total = b.op("cast", b.scan("sum", b.op("cast", share, dtype="float64"), "float64"))
    z = b.op("mul", x, total)
    stores = [Store("z", I0 * n + J0, z), Store("m", I0 * n + J0, b.scan("max", z))]
    shape = ("float32", (rows, n))
    return program(b, (rows,), (n,), stores, x=shape, z=shape, m=shape)


def centred_scan(rows: int, n: int, columns: bool = False) -> Program:
    """y = s - (sum of s) of the running sums s of x: the scan is needed in two passes."""
    b = Body()
    at = J0 * rows + I0 if columns else I0 * n + J0
    s = b.scan("sum", b.load("x", at))
    shape = ("float32", (n, rows) if columns else (rows, n))
    return program(b, (rows,), (n,), [Store("y", at, b.op("sub", s, b.reduce("sum", s)))], x=shape, y=shape)


def scan(rows: int, n: int, op: str = "sum", dtype: str = "float32", columns: bool = False) -> Program:
    """y = scan of x along the columns of (rows, n), or down the rows of (n, rows)."""
    b = Body()
    at = J0 * rows + I0 if columns else I0 * n + J0
    shape = (dtype, (n, rows) if columns else (rows, n))
    stores = [Store("y", at, b.scan(op, b.load("x", at, dtype), dtype))]
    return program(b, (rows,), (n,), stores, x=shape, y=shape)


def side_by_side() -> Program:
    """Three kernels that need nothing of one another, two of them the same, and one that needs the first."""
    parts = [softmax(6, 130), rms_norm(5, 100), softmax(6, 130)]
    buffers: list[Buffer] = []
    steps: list[Loop] = []
    for n, part in enumerate(parts):
        names = {b.name: f"{b.name}{n}" for b in part.buffers}
        buffers += [replace(b, name=names[b.name]) for b in part.buffers]
        steps += [_renamed(step, names) for step in part.steps if isinstance(step, Loop)]
    last = _renamed(steps[0], {"x0": "y0", "y0": "z"})
    buffers.append(replace(next(b for b in buffers if b.name == "y0"), name="z"))
    written = {name for step in (*steps, last) for name in step.writes}
    outputs = tuple(View(b.name, b.shape, b.strides) for b in buffers if b.name in written)
    inputs = tuple(b.name for b in buffers if b.name not in written)
    return Program("side_by_side", inputs, outputs, tuple(buffers), (*steps, last))


def _renamed(loop: Loop, names: dict[str, str]) -> Loop:
    body = tuple(replace(v, buffer=names.get(v.buffer, v.buffer)) if isinstance(v, Load) else v for v in loop.body)
    return replace(loop, body=body, stores=tuple(replace(s, buffer=names.get(s.buffer, s.buffer)) for s in loop.stores))


OPTIMIZED = [300] * 7 + [64] * 3 + [300] * 6
"""Elements of parameters: sixteen counts, thirteen updates and three."""


def on_a_gpu(program: Program) -> Program:
    """The same with all of its memory there."""
    return replace(program, buffers=tuple(replace(b, device="cuda") for b in program.buffers))


def optimizer(sizes: list[int]) -> Program:
    """For each parameter what its count of steps will be, and an update that reads that; then the counts, in place."""
    steps: list[Loop] = []
    counts: list[Loop] = []
    buffers = {"rate": Buffer("rate", "float32", (), ())}
    for n, size in enumerate(sizes):
        count, b = Body(), Body()
        more = count.op("add", count.load(f"count{n}", as_index(0)), count.const(1.0))
        for name, found in (("next", steps), ("count", counts)):
            store = Store(f"{name}{n}", as_index(0), more)
            found.append(Loop(f"{name}{n}", (), (), tuple(count.values), (store,)))
            buffers[f"{name}{n}"] = Buffer(f"{name}{n}", "float32", (), ())
        amount = b.op("div", b.load(f"g{n}", I0, "bfloat16"), b.load(f"next{n}", as_index(0)))
        new = b.op("sub", b.load(f"p{n}", I0, "bfloat16"), b.op("mul", amount, b.load("rate", as_index(0))))
        store = Store(f"p{n}", I0, b.narrow(new, "bfloat16"))
        steps.append(Loop(f"update{n}", (size,), (), tuple(b.values), (store,)))
        buffers |= {f"{name}{n}": Buffer(f"{name}{n}", "bfloat16", (size,), (1,)) for name in "pg"}
    inputs = tuple(name for name in buffers if not name.startswith("next"))
    outputs = tuple(View(b.name, b.shape, b.strides) for b in buffers.values() if b.name[0] in "pc")
    return Program("optimizer", inputs, outputs, tuple(buffers.values()), (*steps, *counts))


def scan_of_ones(rows: int, n: int) -> Program:
    """Positions as image models count them: the same in every row."""
    b = Body()
    counted = b.scan("sum", b.const(1.0))
    return program(b, (rows,), (n,), [Store("out", I0 + J0 * rows, counted)], out=("float32", (n, rows)))


def columns_of_many(rows: Index | int, n: int, count: int) -> Program:
    """Column sums of the sum of `count` matrices."""
    b = Body()
    total = b.const(0.0)
    for number in range(count):
        total = b.op("add", total, b.load(f"x{number}", I0 * n + J0))
    matrices = {f"x{number}": ("float32", (rows, n)) for number in range(count)}
    return program(b, (rows,), (n,), [Store("out", J0, total, "sum")], **matrices, out=("float32", (n,)))


def shifted_windows(rows: int, n: int) -> Program:
    """Rows of 8 x 8 images in the order of windows of 2 x 2, shifted by one around the edges, and their column sums."""
    b = Body()
    pixel = var("i1")
    column = modulo(modulo(pixel, 2, {}) + modulo(floordiv(pixel, 4, {}), 4, {}) * 2 + 1, 8, {})
    row = modulo(modulo(floordiv(pixel, 2, {}), 2, {}) + floordiv(pixel, 16, {}) * 2 + 1, 8, {})
    scaled = b.op("mul", b.load("x", I0 * (64 * n) + row * (8 * n) + column * n + J0), b.const(2.0))
    stores = [Store("y", I0 * (64 * n) + pixel * n + J0, scaled), Store("out", J0, scaled, "sum")]
    shape = ("float32", (rows, 64, n))
    return program(b, (rows, 64), (n,), stores, x=shape, y=shape, out=("float32", (n,)))
