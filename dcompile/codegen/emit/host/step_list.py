"""List a program's steps as data, for the C++ runner (`include/dcompile/runner.h`), which reads no Python.

The list holds calls of kernels with their buffers, and of ATen's operators with every argument of their schema. Sizes
are numbers, or sums over size symbols in reverse Polish notation: `s0 12 * 3 +`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dcompile.codegen.emit.host.batch_launches import last_uses
from dcompile.codegen.emit.host.extern_calls import in_torch, out_overload, resolve
from dcompile.codegen.emit.target import Kernels, KernelSource, LibraryReplacement
from dcompile.errors import ExportError
from dcompile.ir.buffers import IN_DONOR, WITHIN
from dcompile.ir.index import Atom, Div, Extreme, Index, Mod, Size, Var, as_index
from dcompile.ir.nodes import Arg, Extern, Loop, Program, Step, Verbatim, View
from dcompile.ir.symbols import late_symbols, sources

SHIMS = {"aten.addmm.out": "aoti_torch_cpu_addmm_out", "aten.baddbmm.out": "aoti_torch_cpu_baddbmm_out"}
"""Functions of torch's stable interface for operators that take numbers of any type, with the arguments
(out, added, left, right, beta, alpha)."""
_PLACES = ("arena", "out", "input", "library")
_NAMED = {"ScalarType": "dtype", "Layout": "layout", "MemoryFormat": "memory_format"}


def list_steps(program: Program, kernels: Kernels) -> dict[str, Any]:
    """Describe the program in types of JSON. Raises ExportError with the name of a step that the C++ runner lacks."""
    if late_symbols(program):
        raise ExportError(f"sizes that depend on values: {', '.join(sorted(late_symbols(program)))}")
    table = program.table
    if any(buffer.device != "cpu" for buffer in program.buffers):
        raise ExportError("kernels for a GPU")
    if others := [name for name in program.inputs if name not in table or not table[name].is_tensor]:
        raise ExportError(f"inputs that are no tensors: {', '.join(others)}")
    return {
        "inputs": [*program.inputs],
        "symbols": [
            [name, found.input, found.what, found.dim, size_text(found.factor), size_text(found.rest)]
            for name, found in sources(program).items()
        ],
        "arena_bytes": size_text(program.arena_bytes),
        "buffers": {name: _buffer(program, name) for name in table if table[name].is_tensor},
        "steps": _steps(program, kernels),
        "outputs": [_output(output) for output in program.outputs],
    }


def size_text(size: Size) -> int | str:
    """Write a size: a number, or a sum in reverse Polish notation."""
    if isinstance(size, int):
        return size
    if (known := size.constant) is not None:
        return int(known)
    return " ".join(_tokens(size))


def _tokens(size: Size) -> list[str]:
    terms = as_index(size).terms
    if not terms:
        return ["0"]
    found: list[str] = []
    for number, (monomial, coefficient) in enumerate(terms):
        found.append(str(coefficient))
        for atom in monomial:
            found += [*_atom(atom), "*"]
        found += ["+"] if number else []
    return found


def _atom(atom: Atom) -> list[str]:
    match atom:
        case Var(name):
            return [name]
        case Extreme(kind, left, right):
            return [*_tokens(left), *_tokens(right), kind]
        case Div(base, divisor):
            return [*_tokens(base), *_tokens(divisor), "//"]
        case Mod(base, divisor):
            return [*_tokens(base), *_tokens(divisor), "%"]


def _all(sizes: Sequence[Size]) -> list[int | str]:
    return [size_text(size) for size in sizes]


def _buffer(program: Program, name: str) -> dict[str, Any]:
    """Describe a buffer, and its place: its own, or `offset` bytes into another buffer's memory."""
    buffer = program.table[name]
    storage = buffer.storage or ""
    holder = next((storage.removeprefix(before) for before in (WITHIN, IN_DONOR) if storage.startswith(before)), None)
    if holder is None and storage not in _PLACES:
        raise ExportError(f"memory of another kind: {name} lies in {storage or 'nothing'}")
    place = {"in": holder, "shares": storage.startswith(WITHIN)} if holder is not None else {"storage": storage}
    return place | {
        "dtype": buffer.dtype,
        "shape": _all(buffer.shape),
        "strides": _all(buffer.strides),
        "offset": size_text(buffer.offset),
    }


def _steps(program: Program, kernels: Kernels) -> list[dict[str, Any]]:
    hosts = {buffer.name: buffer.donor for buffer in program.buffers if buffer.donor is not None}
    returned = program.returned
    dying: dict[int, list[str]] = {}
    for name, position in last_uses(program, kernels.calls, hosts).items():
        if name not in returned and name not in program.inputs:
            dying.setdefault(position, []).append(name)
    calls, steps = iter(kernels.calls), list[dict[str, Any]]()
    for position, step in enumerate(program.steps):
        product = kernels.products.get(position)
        kernel = next(calls) if isinstance(step, Loop) else None
        done = _product(product) if product is not None else _step(program, step, kernel)
        origin = ", ".join(getattr(step, "origin", ()))
        steps.append(done | {"origin": origin, "drop": dying.get(position, [])})
    return steps


def _step(program: Program, step: Step, kernel: KernelSource | None) -> dict[str, Any]:
    match step:
        case Loop() if kernel is not None:
            return {"kernel": kernel.name, "arguments": [*kernel.arguments], "sizes": [*kernel.sizes]}
        case Extern():
            return _call(program, step)
    raise ExportError(f"{type(step).__name__} steps")


def _product(product: LibraryReplacement) -> dict[str, Any]:
    """Describe a matmul or attention by our kernel, which takes sizes and strides as numbers in memory."""
    views = [None if view is None else _view(view) for view in product.views]
    return {"product": product.kernel.name, "views": views, "sizes": _all(product.sizes)}


def _view(view: View) -> dict[str, Any]:
    shape, strides = _all(view.shape), _all(view.strides)
    return {"buffer": view.buffer, "shape": shape, "strides": strides, "offset": size_text(view.offset)}


def _output(output: View | Index | float | None) -> dict[str, Any] | None:
    """Describe a result. The manifest holds results that are constants."""
    if isinstance(output, Index):
        raise ExportError(f"a result that is a number, {output}")
    return _view(output) if isinstance(output, View) else None


# --- operators --------------------------------------------------------------------------------------------------------


def _call(program: Program, step: Extern) -> dict[str, Any]:
    """Describe a call of an operator, with all arguments of its schema in order."""
    if not in_torch(step.op) or step.op.startswith("dcompile"):
        raise ExportError(f"the call {step.op}, which is Python's")
    if any(name is not None and not program.table[name].is_tensor for name in step.outs):
        raise ExportError(f"the call {step.op}, whose result is no tensor")
    op, written = out_overload(step.op) if step.mode == "out" else (step.op, ())
    given = dict(step.kwargs)
    for keyword, name in zip(written, step.outs, strict=False):
        assert name is not None, f"{step.op} drops a result that it is to write"
        buffer = program.table[name]
        given[keyword] = View(name, buffer.shape, buffer.strides)
    schema = resolve(op)._schema
    others = schema.arguments[len(step.args) :]
    values = [*step.args, *(given[a.name] if a.name in given else _default(op, a) for a in others)]
    pairs = zip(schema.arguments, values, strict=True)
    if op in SHIMS:
        return _shim(op, {argument.name: value for argument, value in pairs})
    arguments = [_argument(program, op, str(argument.real_type), value) for argument, value in pairs]
    results = [] if step.mode == "out" else _results(op, schema.returns, step.outs if step.mode == "alloc" else ())
    if step.mode == "out":
        results = [["tensor", None] for _ in schema.returns]
    return {"arguments": arguments, "results": results} | _named(op)


def _named(op: str) -> dict[str, str]:
    packet, overload = op.rsplit(".", 1)
    return {"operator": packet.replace(".", "::"), "overload": "" if overload == "default" else overload}


def _default(op: str, argument: Any) -> Any:
    assert argument.has_default_value(), f"{op} is not given {argument.name}"
    found = argument.default_value
    return tuple(found) if isinstance(found, list) else found


def _shim(op: str, values: dict[str, Arg]) -> dict[str, Any]:
    *tensors, beta, alpha, out = values.values()
    if not all(isinstance(number, (bool, int, float)) for number in (beta, alpha)):
        raise ExportError(f"the call {op} with a factor that is no number")
    assert isinstance(out, View) and all(isinstance(tensor, View) for tensor in tensors), f"{op} takes tensors"
    views = [_view(view) for view in (out, *tensors) if isinstance(view, View)]
    numbers = [repr(float(beta)), repr(float(alpha))]  # type: ignore[arg-type]
    return {"shim": SHIMS[op], "views": views, "numbers": numbers} | _named(op)


def _results(op: str, returns: Sequence[Any], outs: Sequence[str | None]) -> list[list[Any]]:
    """Name or drop each tensor among the results, and skip numbers."""
    if len(returns) == 1 and str(returns[0].type) == "List[Tensor]":
        return [["list", [*outs]]]
    names = [*outs, *[None] * len(returns)][: len(returns)]  # what returns nothing has one that is None
    found: list[list[Any]] = []
    for result, name in zip(returns, names, strict=True):
        if str(result.type) not in ("Tensor", "int", "float", "bool"):
            raise ExportError(f"the call {op}, which returns {result.type}")
        found.append(["tensor", name] if str(result.type) == "Tensor" else ["number"])
    return found


def _argument(program: Program, op: str, kind: str, value: Arg) -> list[Any]:
    """Describe an argument with the type of its schema."""
    if (inner := _element_kind(kind, "Optional")) is not None:
        return ["none"] if value is None else ["some", _argument(program, op, inner, value)]
    if (inner := _element_kind(kind, "List")) is not None:
        items: Iterable[Arg] = value if isinstance(value, tuple) else (value,)  # a number stands for several
        return ["list", [_argument(program, op, inner, item) for item in items]]
    match kind, value:
        case "Tensor", View(name) if program.table[name].is_tensor:
            return ["tensor", _view(value)]
        case (("int" | "SymInt"), (int() | Index())):
            return ["int", size_text(value)]
        case "float", (int() | float()):
            return ["float", repr(float(value))]
        case "bool", (bool() | int()):
            return ["bool", bool(value)]
        case "str", str():
            return ["string", value]
        case "Device", Verbatim("torch.device('cpu')"):
            return ["device", "cpu"]
        case (("ScalarType" | "Layout" | "MemoryFormat"), Verbatim(text)):
            return [_NAMED[kind], text.removeprefix("torch.")]
    raise ExportError(f"the call {op} with an argument of type {kind} ({value})")


def _element_kind(kind: str, outer: str) -> str | None:
    """Type inside of `Optional[...]` or `List[...]`, or None for other types."""
    return kind[len(outer) + 1 : -1] if kind.startswith(f"{outer}[") and kind.endswith("]") else None
