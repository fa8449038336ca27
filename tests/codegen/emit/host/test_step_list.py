"""Steps as data: sizes in reverse Polish notation, and what the C++ runner cannot do, by name."""

from __future__ import annotations

import pytest

from dcompile.aot.export_files import list_steps, size_text
from dcompile.codegen.emit.target import Kernels
from dcompile.errors import ExportError
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import Index, evaluate, extreme, floordiv, modulo, var
from dcompile.ir.nodes import Extern, Program, Verbatim, View


def polish(text: int | str, symbols: dict[str, int]) -> int:
    """What the runner makes of it."""
    stack: list[int] = []
    for word in str(text).split():
        if word in ("+", "*", "//", "%", "max", "min"):
            b, a = stack.pop(), stack.pop()
            stack.append({"+": a + b, "*": a * b, "//": a // (b or 1), "%": a % (b or 1), "max": max(a, b),
                          "min": min(a, b)}[word])  # fmt: skip
        else:
            stack.append(symbols[word] if word in symbols else int(word))
    (value,) = stack
    return value


def test_sizes_are_written_so_that_they_come_to_the_same() -> None:
    a, b = var("s0"), var("s1")
    sizes = [a, a * b * 3 + 7, floordiv(a * 9 + 3, 4, {}) * 64 - b, modulo(a + 5, b, {}), extreme("max", a, b * 2)]
    for size in sizes:
        for symbols in ({"s0": 2, "s1": 3}, {"s0": 17, "s1": 5}):
            assert polish(size_text(size), symbols) == evaluate(size, symbols), size
    assert size_text(Index()) == 0 and size_text(12) == 12


def program(step: Extern, *buffers: Buffer) -> Program:
    x = Buffer("x", "float32", (4,), (1,), storage="input")
    return Program("p", ("x",), (View("y", (4,), (1,)),), (x, *buffers), (step,))


X = View("x", (4,), (1,))
Y = Buffer("y", "float32", (4,), (1,), storage="library")
BUCKET = Buffer("y", "float32", (4,), (1,), storage="bucket:b")


def test_operators_have_every_argument_of_their_schema() -> None:
    step = Extern(
        "aten.clone.default", (X,), (("memory_format", Verbatim("torch.contiguous_format")),), ("y",), "alloc"
    )
    (found,) = list_steps(program(step, Y), Kernels(()))["steps"]
    assert (found["operator"], found["overload"], found["drop"]) == ("aten::clone", "", [])
    assert found["arguments"][1] == ["some", ["memory_format", "contiguous_format"]]
    assert found["results"] == [["tensor", "y"]]


@pytest.mark.parametrize(
    ("step", "buffer", "text"),
    [
        (Extern("aten.mul.Scalar", (X, 2), (), ("y",), "alloc"), Y, "aten.mul.Scalar with an argument of type number"),
        (Extern("dcompile.check_bounds", (X, 0, 4), (), ("y",), "alloc"), Y, "check_bounds, which is Python's"),
        (Extern("aten.clone.default", (X,), (), ("y",), "alloc"), BUCKET, "memory of another kind: y lies in bucket:b"),
    ],
)
def test_what_has_no_counterpart_is_named(step: Extern, buffer: Buffer, text: str) -> None:
    with pytest.raises(ExportError, match=text):
        list_steps(program(step, buffer), Kernels(()))
