"""One op at a time against eager: values, dtypes and layouts, per dtype, on awkward inputs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.codegen.lower.decompositions import aten as decompositions_aten
from dcompile.codegen.lower.decompositions.table import table
from dcompile.codegen.lower.lower import lower
from dcompile.ir.nodes import Apply, Extern, Loop, Program, Reduce
from dcompile.ir.verify import verify
from tests.codegen.lower.lowered import run

aten = torch.ops.aten
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
I64, I32, BOOL = torch.int64, torch.int32, torch.bool
FLOATS = (F32, BF16)
Cases = Iterator[tuple[Any, ...]]
"""Functions, each with the tensors that it is given."""


def program_of(function: Callable[..., Any], args: tuple[Any, ...], decompose: bool = False) -> tuple[Program, Any]:
    gm = make_fx(lambda *a: function(*a), decomposition_table=table() if decompose else {}, tracing_mode="fake")(*args)
    lowered = lower(gm, "op")
    verify(lowered.program)
    returned = next(iter(reversed(gm.graph.nodes))).args[0]
    for node, view in zip(
        returned if isinstance(returned, (tuple, list)) else [returned], lowered.program.outputs, strict=True
    ):
        fake = node.meta["val"]
        for size, stride, promised in zip(fake.shape, view.strides, fake.stride(), strict=True):
            assert size <= 1 or fake.numel() == 0 or stride == promised, f"{view} where torch said {fake.stride()}"
    return lowered.program, lowered.constants


def check(
    function: Callable[..., Any],
    *args: Any,
    decompose: bool = False,
    library: int = 0,
    bitwise: bool = False,
    expected: Any = None,
) -> Program:
    """Same values, dtype and shape as eager, in the layout that torch traced, with so many library calls."""
    program, constants = program_of(function, args, decompose)
    expected = function(*args) if expected is None else expected
    actual = run(program, constants, [arg for arg in args if isinstance(arg, torch.Tensor)])
    assert_same(actual, _several(expected), bitwise=bitwise)
    calls = [s.op for s in program.steps if isinstance(s, Extern) and s.op != "dcompile.check_bounds"]
    assert len(calls) == library, calls
    return program


def assert_same(
    actual: list[torch.Tensor], expected: Sequence[torch.Tensor], *, bitwise: bool = False, of: str = ""
) -> None:
    """Values, dtypes and shapes are equal."""
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype, of
        exactly = {"rtol": 0, "atol": 0} if bitwise else {}
        torch.testing.assert_close(a, e, equal_nan=True, msg=lambda text: f"{text}\n{of}", **exactly)


def in_one_graph(test: Callable[..., Cases]) -> Callable[..., None]:
    """A test that yields functions with their arguments: each is as eager, without library calls.

    Together they are one graph, since tracing is what costs, in which each has inputs of its own.
    """

    @functools.wraps(test)
    def check_all(*args: Any, **kwargs: Any) -> None:
        cases = [(function, _own(given)) for function, *given in test(*args, **kwargs)]
        counts = [len(given) for _, given in cases]

        def every(*given: torch.Tensor) -> list[torch.Tensor]:
            rest = iter(given)
            results = [
                function(*itertools.islice(rest, count)) for (function, _), count in zip(cases, counts, strict=True)
            ]
            return [output for result in results for output in _several(result)]

        flat = tuple(arg for _, given in cases for arg in given)
        program, constants = program_of(every, flat)
        actual = iter(run(program, constants, list(flat)))
        for number, (function, given) in enumerate(cases):
            expected = _several(function(*given))
            inputs = ", ".join(f"{arg.dtype} {tuple(arg.shape)} by {arg.stride()}" for arg in given)
            assert_same(list(itertools.islice(actual, len(expected))), expected, of=f"case {number}, of {inputs}")
        calls = [s.op for s in program.steps if isinstance(s, Extern) and s.op != "dcompile.check_bounds"]
        assert not calls

    return check_all


def _own(args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that no other case has: the trace would take two of its inputs for one."""
    own = {id(arg): arg.detach() for arg in args}
    return [own[id(arg)] for arg in args]


def _several(result: Any) -> Sequence[torch.Tensor]:
    return result if isinstance(result, (tuple, list)) else [result]


def tensor(*shape: int, dtype: torch.dtype = F32, positive: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    if dtype is BOOL:
        return torch.rand(shape, generator=generator) > 0.5
    if not dtype.is_floating_point:
        return torch.randint(1 if positive else -5, 6, shape, generator=generator, dtype=dtype)
    values = torch.randn(shape, generator=generator, dtype=F32)
    return (values.abs() + 0.1 if positive else values).to(dtype)


def layouts(dtype: torch.dtype, positive: bool = False) -> list[torch.Tensor]:
    """Contiguous, transposed, sliced, expanded, without dimensions, and empty."""
    t = tensor(4, 6, dtype=dtype, positive=positive)
    return [t, t.t(), t[:, 1::2], t[:1].expand(3, 6), t[0, 0], t[:0]]


UNARY = {
    "neg": (F32, BF16, I64), "abs": (F32, BF16, I64), "sign": (F32, BF16, I64, BOOL), "relu": (F32, BF16, I64),
    "exp": FLOATS, "exp2": FLOATS, "expm1": FLOATS, "sin": FLOATS, "cos": FLOATS, "tanh": (F32, BF16, I64),
    "sigmoid": (F32, BF16, I64), "erf": FLOATS, "floor": (F32, BF16, I64), "ceil": (F32, BF16), "trunc": FLOATS,
    "round": (F32, BF16, I64), "isnan": (F32, BF16, I64), "isinf": (F32, BF16, I64), "logical_not": (F32, I64, BOOL),
    "bitwise_not": (I64, BOOL), "square": (F32, BF16, I64), "silu": FLOATS, "gelu": FLOATS, "clone": (F32, BOOL),
    "leaky_relu": FLOATS, "hardtanh": FLOATS, "isfinite": (F32, I64), "tan": (F32,),
    "atan": (F32, BF16, I64), "asinh": FLOATS, "sinh": FLOATS, "cosh": FLOATS, "erfc": FLOATS, "asin": (F32, BF16, I64),
    "acos": (F32,), "atanh": (F32,), "signbit": (F32, BF16, I64, BOOL), "angle": (F32, BF16),
}  # fmt: skip
POSITIVE = ("lgamma", "acosh", "sqrt", "rsqrt", "log", "log1p", "log2", "log10", "reciprocal")


@pytest.mark.parametrize("name", UNARY)
@in_one_graph
def test_unary(name: str) -> Cases:
    for dtype in UNARY[name]:
        for x in layouts(dtype):
            yield getattr(aten, name).default, x


@pytest.mark.parametrize("name", POSITIVE)
@in_one_graph
def test_unary_of_positive_numbers(name: str) -> Cases:
    for dtype in (F32, BF16, I64):
        for x in layouts(dtype, positive=True):
            yield getattr(aten, name).default, x


BINARY = {
    "add": (F32, BF16, F16, I64, BOOL), "sub": (F32, BF16, I64), "mul": (F32, BF16, I64, BOOL), "div": (F32, BF16, I64),
    "maximum": (F32, BF16, I64, BOOL), "minimum": (F32, BF16, I64, BOOL), "remainder": (F32, I64), "fmod": (F32, I64),
    "floor_divide": (F32, I64), "eq": (F32, BF16, I64, BOOL), "lt": (F32, I64), "ge": (F32, BF16), "atan2": (F32,),
    "logical_and": (F32, I64, BOOL), "logical_xor": (I64, BOOL), "bitwise_and": (I64, BOOL), "bitwise_or": (I64, BOOL),
    "gcd": (I64,), "lcm": (I64,), "pow": (F32, I64),
    "hypot": FLOATS, "nextafter": (F32,), "bitwise_left_shift": (I64,), "bitwise_right_shift": (I64,),
}  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
@in_one_graph
def test_binary(name: str) -> Cases:
    op = getattr(torch, name)
    for dtype in BINARY[name]:
        for x, y in zip(layouts(dtype, name == "pow"), layouts(dtype, positive=True), strict=True):
            yield op, x, y
        yield op, tensor(3, 1, 4, dtype=dtype, positive=name == "pow"), tensor(2, 1, dtype=dtype, positive=True)


@pytest.mark.parametrize("pair", [(F32, I64), (BF16, F32), (I64, BOOL), (I32, I64), (BF16, I64), (F32, F64)])
@in_one_graph
def test_mixed_dtypes_promote_as_eager(pair: tuple[torch.dtype, torch.dtype]) -> Cases:
    x, y = tensor(3, 4, dtype=pair[0]), tensor(3, 4, dtype=pair[1], positive=True)
    for op in (torch.add, torch.mul, torch.eq, torch.lt, torch.maximum, torch.div):
        yield op, x, y
        yield op, x, y[0, 0]
        yield op, x[0, 0], y


@pytest.mark.parametrize("dtype", [F32, BF16, I64])
@in_one_graph
def test_numbers_beside_tensors(dtype: torch.dtype) -> Cases:
    x = tensor(4, 6, dtype=dtype)
    for number in (2, 0.3, True, -3):
        yield lambda x, n=number: x + n, x
        yield lambda x, n=number: x * n, x
        if number is not True:
            yield lambda x, n=number: n - x, x
        yield lambda x, n=number: x / n, x
        yield lambda x, n=number: x > n, x
        yield lambda x, n=number: x == n, x
    if dtype is BF16:
        for op in (torch.add, torch.mul, torch.div, torch.gt, torch.rsub, torch.clamp_min, torch.lt):
            many = torch.linspace(-2, 2, 1001).to(BF16)
            check(lambda x, op=op: op(x, 0.3), many, bitwise=True)
    if dtype is not BF16:  # where eager rounds once in the tail of its vector loop, and twice before
        yield lambda x: aten.add.Tensor(x, x, alpha=3), x
        yield lambda x: aten.rsub.Scalar(x, 2, 3), x
    yield lambda x: aten.div.Tensor_mode(x, 3, rounding_mode="floor"), x
    yield lambda x: aten.div.Tensor_mode(x, 3, rounding_mode="trunc"), x
    yield lambda x: x.clamp(-1, 2), x
    yield lambda x: x.clamp(min=0), x
    yield lambda x: aten.clamp_max.default(x, 1), x


@in_one_graph
def test_powers() -> Cases:
    for exponent in (0, 1, 2, 3, 4, 0.5, -0.5, -1, -2, 2.5):
        yield lambda x, e=exponent: x**e, tensor(4, 5, positive=True)
    yield lambda x: x**2, tensor(4, 5, dtype=I64)
    yield lambda x: 2**x, tensor(4, 5)
    for base in (-2, -1, 0, 1, 3):  # integers to negative powers are 1, -1 or 0
        x = torch.full((4, 5), base)
        yield lambda x: x**5, x
        if base:
            yield torch.pow, x, tensor(4, 5, dtype=I64)


@in_one_graph
def test_rounding_to_decimals() -> Cases:
    for decimals in (0, 2, -1):
        for dtype in (F32, BF16):
            yield lambda x, d=decimals: torch.round(x, decimals=d), 10 * tensor(4, 5, dtype=dtype)


@in_one_graph
def test_infinities_and_nan() -> Cases:
    x = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0])
    for op in (torch.relu, torch.exp, torch.isnan, torch.isinf, torch.isfinite, torch.sign, torch.tanh, torch.sigmoid):
        yield op, x
    yield torch.maximum, x, x.flip(0)
    yield torch.fmax, x, x.flip(0).roll(1)
    yield torch.fmin, x, x.flip(0).roll(1)
    yield lambda x: x.clamp(-1, 1), x
    yield lambda x: x.amax(), x
    yield lambda x: x.argmax(), x
    yield lambda x: torch.floor_divide(x, x.flip(0)), x


@pytest.mark.parametrize("dtype", [BF16, F16])
@in_one_graph
def test_the_next_number_and_the_parts_of_every_short_one(dtype: torch.dtype) -> Cases:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for towards in (0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan")):
        to = torch.full_like(every, towards)
        check(torch.nextafter, every, to, bitwise=True)
        known = ~(every.isnan() | to.isnan())
        yield lambda *args: torch.nextafter(*args).signbit(), every[known], to[known]
    check(aten.frexp.Tensor, every, bitwise=True)
    for x in layouts(dtype):
        yield torch.nextafter, x, x * 0
        yield aten.frexp.Tensor, x


@pytest.mark.parametrize("dtype", FLOATS)
@in_one_graph
def test_choices(dtype: torch.dtype) -> Cases:
    x, y, c = tensor(4, 6, dtype=dtype), tensor(6, dtype=dtype), tensor(4, 6, dtype=BOOL)
    yield torch.where, c, x, y
    yield lambda c, x: torch.where(c, x, 0.3), c, x
    yield lambda x, c: x.masked_fill(c, float("-inf")), x, c
    yield lambda x, c, y: x.masked_fill(c, y[0]), x, c, y
    yield lambda x: aten.lerp.Scalar(x, x * 2, 0.7), x
    yield lambda x, y: aten.addcmul.default(x, y, y, value=0.5), x, y
    yield lambda x, y: aten.addcdiv.default(x, y, y.exp()), x, y
    yield lambda x, c: torch.where(c, x, x.to(torch.float32)), x, c


@pytest.mark.parametrize("dtype", FLOATS)
@in_one_graph
def test_backward_formulas(dtype: torch.dtype) -> Cases:
    g, x = tensor(4, 6, dtype=dtype), tensor(6, 4, dtype=dtype).t()
    for name in ("silu_backward", "gelu_backward", "sigmoid_backward", "tanh_backward"):
        yield getattr(aten, name).default, g, x
    yield lambda g, x: aten.gelu_backward.default(g, x, approximate="tanh"), g, x
    yield lambda x: aten.gelu.default(x, approximate="tanh"), x
    yield lambda g, x: aten.threshold_backward.default(g, x, 0), g, x


@pytest.mark.parametrize("pair", [(F32, BF16), (BF16, F32), (F32, I64), (I64, F32), (I64, BF16), (F32, BOOL),
                                  (BOOL, F32), (F32, F16), (F64, F32), (I64, I32)])  # fmt: skip
@in_one_graph
def test_casts(pair: tuple[torch.dtype, torch.dtype]) -> Cases:
    for x in layouts(pair[0]):
        yield lambda x: aten._to_copy.default(x, dtype=pair[1]), x
    yield lambda x: x.to(pair[1]).to(pair[0]) + x, tensor(5, 7, dtype=pair[0])


@pytest.mark.parametrize("dtype", [F32, BF16, I64, BOOL])
@in_one_graph
def test_reductions(dtype: torch.dtype) -> Cases:
    for x in [*layouts(dtype)[:4], tensor(2, 3, 4, dtype=dtype).permute(2, 0, 1)]:
        for dim in (None, 0, -1, (0, 1)):
            for keepdim in (False, True):
                yield lambda x, d=dim, k=keepdim: x.sum(d, keepdim=k), x
                if dtype is not BOOL:
                    yield lambda x, d=dim, k=keepdim: x.amax(() if d is None else d, keepdim=k), x
                if dtype.is_floating_point:
                    yield lambda x, d=dim, k=keepdim: x.mean(d, keepdim=k), x
                    yield lambda x, d=dim, k=keepdim: x.var(d, keepdim=k), x
                    yield lambda x, d=dim, k=keepdim: torch.var_mean(x, d, correction=0, keepdim=k), x
        yield lambda x: x.any(), x
        yield lambda x: x.all(-1), x
        yield lambda x: x.prod(0), x
        yield lambda x: x.max(), x
        yield lambda x: aten.sum.dim_IntList(x, [0], dtype=F32), x
        if dtype is not BOOL:
            yield lambda x: x.argmax(), x
            yield lambda x: x.argmin(0, keepdim=True), x


@pytest.mark.parametrize("dtype", FLOATS)
@in_one_graph
def test_spread_of_numbers_whose_squares_overflow(dtype: torch.dtype) -> Cases:
    x = tensor(4, 6, dtype=dtype) * 1e30
    yield lambda x: x.std(0), x
    yield lambda x: x.std(correction=0), x
    yield lambda x: x.std(1), torch.full((2, 5), 3e38, dtype=dtype)


@in_one_graph
def test_extremes_with_positions() -> Cases:
    for dtype in (F32, BF16, I64):
        x = torch.randperm(24, generator=torch.Generator().manual_seed(0)).reshape(4, 6).to(dtype)
        yield lambda x: tuple(x.max(0)), x
        yield lambda x: tuple(x.min(-1, keepdim=True)), x.t()


@in_one_graph
def test_reductions_of_nothing() -> Cases:
    yield lambda x: x.sum(0), tensor(0, 3)
    yield lambda x: x.sum(1), tensor(0, 3)
    yield lambda x: x.mean(), tensor(0, 3)
    yield lambda x: x.prod(), tensor(0)
    yield lambda x: x.all(), tensor(0, dtype=BOOL)


@pytest.mark.parametrize("dtype", FLOATS)
@in_one_graph
def test_rows(dtype: torch.dtype) -> Cases:
    for x in (tensor(4, 6, dtype=dtype), tensor(6, 4, dtype=dtype).t(), tensor(2, 3, 4, dtype=dtype)):
        for dim in (0, -1):
            yield lambda x, d=dim: torch.softmax(x, d), x
            yield lambda x, d=dim: torch.log_softmax(x, d), x
            # eager sums 16-bit products in 16 bits: the formula in float32, rounded once, is the better reference
            for op, y in ((aten._softmax_backward_data, x.softmax(dim)), (aten._log_softmax_backward_data, -x.abs())):
                wide = op(x.float() * 2, y.float(), dim, F32).to(dtype)
                check(lambda g, y, d=dim, op=op: op(g, y, d, g.dtype), x * 2, y, expected=wide)
            yield lambda x, d=dim: torch.logsumexp(x, d), x
        w, b = tensor(x.shape[-1], dtype=dtype), tensor(x.shape[-1], dtype=dtype, positive=True)
        yield lambda x, w, b: aten.native_layer_norm.default(x, w.shape, w, b, 1e-5)[0], x, w, b
        yield lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]), x
        yield lambda x: torch.linalg.vector_norm(x, dim=-1), x
        yield lambda x: torch.linalg.vector_norm(x, ord=float("inf")), x


def test_softmax_of_integers_which_eager_takes_without_elements() -> None:
    check(lambda x: torch.softmax(x, -1), tensor(0, 4, dtype=torch.int64))


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "reshape": lambda x: x.reshape(6, 4),
    "flatten": lambda x: x.reshape(-1),
    "split dims": lambda x: x.reshape(2, 2, 3, 2).permute(3, 1, 0, 2).reshape(4, 6),
    "transpose": lambda x: x.transpose(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "expand": lambda x: x.unsqueeze(1).expand(4, 3, 6),
    "slice": lambda x: x[1:3, ::2],
    "negative slice": lambda x: x[-3:-1],
    "select": lambda x: x[:, -1],
    "split": lambda x: tuple(x.split([1, 2, 3], 1)),
    "chunk": lambda x: tuple(x.chunk(3, 0)),
    "unbind": lambda x: tuple(x.unbind(1)),
    "diagonal": lambda x: x.diagonal(1),
    "unfold": lambda x: x.unfold(1, 3, 2),
}


@pytest.mark.parametrize("name", VIEWS)
@in_one_graph
def test_views_of_memory_and_of_computed_values(name: str) -> Cases:
    view = VIEWS[name]
    for x in (tensor(4, 6), tensor(6, 4).t(), tensor(8, 6, dtype=I64)[::2], tensor(4, 6, dtype=BF16)):
        yield view, x
        results = lambda x: [t * 2 for t in _tuple(view(x.exp() if x.is_floating_point() else x - 1))]  # noqa: E731
        yield results, x
        yield lambda x: [t.clone() for t in _tuple(view(x))], x
        yield lambda x: [t.sum(-1) for t in _tuple(view(x + 1))], x


def _tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_a_view_of_memory_makes_no_loop() -> None:
    for view in VIEWS.values():
        program, _ = program_of(view, (tensor(4, 6),))
        moved = program_of(lambda x, view=view: view(x.reshape(24)[:].view(4, 6)), (tensor(4, 6),))[0]
        if view is not VIEWS["split dims"]:
            assert not program.steps and not moved.steps


SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "cat": lambda x: torch.cat([x, x[:, :2], x * 2], 1),
    "cat of rows": lambda x: torch.cat([x.exp() if x.is_floating_point() else x, x[:0], x[2:]], 0),
    "cat of an empty": lambda x: torch.cat([torch.empty(0, dtype=x.dtype), x], 0),
    "stack": lambda x: torch.stack([x, x + 1, x * 3], 1),
    "rotate half": lambda x: torch.cat((-x[..., 3:], x[..., :3]), dim=-1),
    "slice of cat": lambda x: torch.cat([x, x + 1], 1)[:, 4:9].contiguous(),
    "pad": lambda x: aten.constant_pad_nd.default(x, [1, 2, 0, 3], 2.0),
    "crop": lambda x: aten.constant_pad_nd.default(x, [-1, 2], 0.0),
    "slice_scatter": lambda x: aten.slice_scatter.default(x, x[:, :3] * 2, 1, 1, 6, 2),
    "slice_scatter rows": lambda x: aten.slice_scatter.default(x, x[1:3] + 5, 0, 2, 9223372036854775807),
    "select_scatter": lambda x: aten.select_scatter.default(x, x[:, 0] + 7, 1, -2),
    "flip": lambda x: x.flip(0, 1),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "roll": lambda x: x.roll((1, -2), (0, 1)),
    "roll flat": lambda x: aten.roll.default(x, [5]),
    "tril": lambda x: x.tril(1),
    "triu": lambda x: x.triu(-1),
}


@pytest.mark.parametrize("name", SHAPES)
@in_one_graph
def test_shapes(name: str) -> Cases:
    for x in (tensor(4, 6), tensor(6, 4).t(), tensor(4, 6, dtype=BF16), tensor(4, 6, dtype=I64)):
        yield SHAPES[name], x


def test_results_of_copying_ops_are_their_own_memory() -> None:
    for function in (lambda x: x.repeat(1, 1), lambda x: x.flip(()), lambda x: x.clone(), lambda x: aten.copy(x, x)):
        program, _ = program_of(function, (tensor(4, 6),))
        assert all(view.buffer not in program.inputs for view in program.outputs)


@in_one_graph
def test_positions() -> Cases:
    x, rows = tensor(5, 6), torch.tensor([[0, 4, 2], [1, 1, 3]])
    for dtype in (F32, BF16, I64):
        y = x.to(dtype)
        if dtype.is_floating_point:
            yield torch.nn.functional.embedding, rows, y
        yield lambda y, r: y[r], y, rows - 2
        yield lambda y, r: y[:, r], y, rows
        yield lambda y, r: y[r, r], y, rows
        yield lambda y, r: y[r[0], :, None], y, rows
        yield lambda y, r: y.gather(1, r), y, rows
        yield lambda y, r: y.index_select(0, r[1]), y, rows
    z = tensor(4, 5, 6)
    yield lambda z, r: z[r, :, r], z, rows % 4
    yield lambda z, r: (z * 2)[r[:1], r].sum(), z, rows % 4
    yield lambda z: z[torch.arange(2)] + z[torch.arange(1, 3)], z


@in_one_graph
def test_one_element_scatter() -> Cases:
    x, where = tensor(4, 6), torch.tensor([[1], [0], [5], [5]])
    for dtype in (F32, BF16):
        y = x.to(dtype)
        yield lambda y, w: y.scatter(1, w, -1.5), y, where
        yield lambda y, w: y.scatter(1, w, y[:, :1] * 2), y, where
        yield lambda y, w: y.scatter_add(1, w, y[:, 2:3]), y, where
    yield lambda y, w: y.scatter(1, w, 0.0), x, torch.tensor([[1, 2], [0, 1], [5, 0], [5, 4]])


def test_positions_outside_raise_as_in_eager() -> None:
    x = tensor(5, 6)
    for function in (
        lambda x, r: torch.nn.functional.embedding(r, x),
        lambda x, r: x[r],
        lambda x, r: x.index_select(0, r),
    ):
        program, constants = program_of(function, (x, torch.tensor([0, 1])))
        for bad in (torch.tensor([0, 5]), torch.tensor([-6, 0])):
            with pytest.raises(IndexError):
                run(program, constants, [x, bad])


def test_positions_known_while_compiling_need_no_check() -> None:
    program, _ = program_of(lambda w: torch.nn.functional.embedding(torch.arange(4).unsqueeze(0), w), (tensor(5, 6),))
    assert not any(isinstance(step, Extern) for step in program.steps)


def test_positions_are_checked_once() -> None:
    program, _ = program_of(lambda x, y, r: x[r] + y[r], (tensor(5, 6), tensor(5, 6), torch.tensor([1, 2])))
    (loop,) = program.steps  # by the loop that reads
    assert isinstance(loop, Loop) and [v.op for v in loop.body if isinstance(v, Apply)].count("within") == 1
    program, _ = program_of(lambda x, r: x.scatter(1, r, 0.0), (tensor(5, 6), torch.tensor([[1], [2]])))
    collect, put = program.steps  # by the loop that collects in memory of its own, before anything else is written
    assert isinstance(collect, Loop) and [v.op for v in collect.body if isinstance(v, Apply)] == ["within"]
    assert isinstance(put, Loop) and not any(isinstance(v, Apply) and v.op == "within" for v in put.body)


def test_positions_outside_of_what_a_mask_leaves_are_not_looked_at() -> None:
    x, where = tensor(4, 6), torch.tensor([[1, 2], [3, 4], [5, 6], [1, 1]])
    check(lambda x, w: torch.cat((x, x.gather(1, w - 1)), 1), x, where)
    check(lambda x, w: torch.nn.functional.pad(x.gather(1, w - 1), (1, 2)), x, where)


@in_one_graph
def test_creation() -> Cases:
    x = tensor(3, 4)
    for dtype in (F32, BF16, I64, BOOL):
        yield (
            lambda x, d=dtype: torch.zeros_like(x, dtype=d) | True if d is BOOL else torch.zeros_like(x, dtype=d) + 1,
            x,
        )
        yield lambda x, d=dtype: x.new_full((2, 3), 2, dtype=d), x
        yield lambda x, d=dtype: torch.ones(3, 4, dtype=d), x
        yield lambda x, d=dtype: torch.full_like(x, 0.3 if d.is_floating_point else 1, dtype=d), x
        yield lambda x, d=dtype: torch.scalar_tensor(1, dtype=d), x
    yield lambda x: torch.arange(5), x
    yield lambda x: torch.arange(2, 17, 3, dtype=F32) + 0, x
    yield lambda x: torch.arange(0.5, 3, 0.25), x
    yield lambda x: torch.arange(7, 0, -2), x
    yield lambda x: (torch.arange(4)[None] <= torch.arange(3)[:, None]).to(F32) * x, x
    yield lambda x: torch.ops.prims.iota.default(4, start=2, step=3, dtype=I64, device="cpu", requires_grad=False), x


@pytest.mark.parametrize("name", ["tril_indices", "triu_indices"])
def test_places_of_triangles(name: str) -> None:
    """What they are made of, for every shape of a triangle; some of them traced and lowered."""
    make, ours = getattr(torch, name), getattr(decompositions_aten, name)
    for row, col, offset in itertools.product((0, 1, 3, 5), (0, 1, 4), (-6, -2, -1, 0, 1, 2, 5)):
        assert torch.equal(ours(row, col, offset), make(row, col, offset)), (row, col, offset)

    def some_of_them() -> tuple[torch.Tensor, ...]:
        small = [make(5, 4, offset) for offset in (-6, -2, 0, 2)]
        return *small, make(0, 4), make(3, 0), make(90, 70, 7, dtype=I32), make(70, 90, -30)

    check(some_of_them, decompose=True, bitwise=True)


def test_products_take_strided_operands_as_they_are() -> None:
    x, y = tensor(4, 6), tensor(4, 6)
    program = check(lambda x, y: torch.mm(x, y.t()), x, y, library=1)
    assert len(program.steps) == 1 and program.steps[0].mode == "out"
    program = check(lambda x, y: torch.mm(x[:, ::2], y[:, :3].t() * 2), x, y, library=1)
    assert len(program.steps) == 2
    check(lambda b, x, y: torch.addmm(b, x, y.t(), beta=0.5), tensor(4), x, y, library=1)
    check(torch.bmm, tensor(2, 3, 4), tensor(2, 4, 5), library=1)
    check(lambda b, x, y: torch.baddbmm(b, x, y, alpha=2), tensor(3, 5), tensor(2, 3, 4), tensor(2, 4, 5), library=1)


def test_library_calls_see_the_layout_that_torch_promised() -> None:
    x = tensor(2, 3, 4, 4).to(memory_format=torch.channels_last)
    check(lambda x: torch.sort(x * 2, 1)[0], x, library=1)
    check(lambda x: torch.sort(x.permute(0, 2, 3, 1).exp(), 1)[0], x, library=1)
    check(lambda x: torch.nn.functional.conv2d(x.relu(), x[:, :, :2, :2].contiguous()), x, library=1)
    check(lambda x: x.relu() + 1, x)


def test_complex_numbers_are_left_to_the_library() -> None:
    program, _ = program_of(lambda x: torch.view_as_complex(x) * 2, (tensor(3, 2),))
    assert all(isinstance(step, Extern) and step.fallback for step in program.steps)


def test_views_that_only_the_library_knows_own_their_memory() -> None:
    check(lambda x: x.view(torch.int32) + 1, tensor(4, 6), library=1)
    program, _ = program_of(lambda x: x.view(torch.int32), (tensor(4, 6),))
    assert program.steps[0].op == "aten.view_copy.dtype"


def test_picking_few_elements_stores_nothing_for_them() -> None:
    x, positions = tensor(32, 64), torch.randint(0, 64, (32, 1))

    def picked(x: torch.Tensor, positions: torch.Tensor) -> Any:
        shifted = x - x.amax(1, keepdim=True)
        return shifted.exp().sum(1), shifted.gather(1, positions), shifted.sin()[2, 3:4], shifted[torch.tensor([3]), :2]

    program = check(picked, x, positions)
    shifted = [name for name in program.table if name.startswith("sub")]
    readers = [step for step in program.steps if isinstance(step, Loop) and shifted[0] in step.reads]
    assert len(readers) == 2, "the sum, and the slice of the sine; the others compute it anew"


def test_picking_after_an_input_was_overwritten_reads_what_was_there() -> None:
    def picked(x: torch.Tensor, positions: torch.Tensor) -> Any:
        doubled = x * 2 + x.sin()
        total, again = doubled.sum(1), doubled.cos()
        torch.ops.aten.copy_.default(x, torch.zeros_like(x))
        return total, again, doubled.gather(1, positions)

    x, positions = tensor(8, 32), torch.randint(0, 32, (8, 1))
    expected = picked(x.clone(), positions)
    check(picked, x.clone(), positions, expected=expected)


def test_the_sum_of_a_row_with_one_element_is_that_element() -> None:
    places, terms = torch.tensor([0, 3, -1, 7, 8]), torch.tensor([1.0, -0.0, 2.0, float("inf"), 3.0])

    def one_hot(places: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(8) == places[:, None], terms[:, None], 0.0).sum(1)

    program = check(one_hot, places, terms, bitwise=True)
    (loop,) = (step for step in program.steps if isinstance(step, Loop))
    assert not [value for value in loop.body if isinstance(value, Reduce)]
    # a term that varies within the row is summed as ever
    program = check(lambda p, x: torch.where(torch.arange(8) == p[:, None], x, 0.0).sum(1), places, tensor(5, 8))
    assert [
        value for step in program.steps if isinstance(step, Loop) for value in step.body if isinstance(value, Reduce)
    ]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (torch.view_as_complex(x) * 1j).abs(),
        lambda x: (torch.view_as_complex(x) / 2j).abs(),
        lambda x: torch.fft.ifft(torch.fft.fft(x) * (2 + 1j)).real,
    ],
)
def test_gradients_of_products_with_complex_numbers(function) -> None:
    """The backward has the number's conjugate: a view, of what is no tensor."""
    x = tensor(4, 2).requires_grad_()
    compiled = dcompile.compile(function, options={"receipt": False})
    found, expected = (torch.autograd.grad(call(x).sum(), x)[0] for call in (compiled, function))
    torch.testing.assert_close(found, expected)
