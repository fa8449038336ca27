"""Compile a graph for inference, and write it: host program, steps, kernels, tensors, and a manifest.

`export` and `aot_compile` share it; `runtime/program/exported.py` reads it.

The steps are data for the C++ runner (`include/dcompile/runner.h`), which reads no Python: calls of kernels with their
buffers, and of ATen's operators with every argument of their schema. Sizes are numbers, or sums over size symbols in
reverse Polish notation: `s0 12 * 3 +`.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from dcompile import compat
from dcompile.capture.aliasing.output_views import OutputRequest, plan_outputs
from dcompile.capture.passes.run_passes import GraphRequest, run_passes
from dcompile.codegen.emit.host.batch_launches import last_uses
from dcompile.codegen.emit.host.extern_calls import in_torch, out_overload, resolve
from dcompile.codegen.emit.target import Kernels, KernelSource, LibraryReplacement
from dcompile.collectives.contract import Request
from dcompile.compiler.caching import CachingCompiler
from dcompile.compiler.driver import Pipeline
from dcompile.config import Config
from dcompile.device_traits import HOST
from dcompile.errors import ExportError
from dcompile.ir.buffers import IN_DONOR, WITHIN
from dcompile.ir.index import Atom, Div, Extreme, Index, Mod, Size, Var, as_index, element_span
from dcompile.ir.nodes import Arg, Extern, Loop, Program, Step, Verbatim, View
from dcompile.ir.symbols import late_symbols, sources
from dcompile.logs import own_dump
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.program.artifact import Loadable, to_record
from dcompile.runtime.program.exported import (
    ALIGN_BYTES,
    FORMAT,
    MANIFEST,
    PROGRAM,
    STEPS,
    TENSORS,
    machine,
    torch_range,
)
from dcompile.toolchain import own_version

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


NAME = "exported"


@dataclass(frozen=True)
class WritableProgram:
    """A compiled graph that holds nothing but what files can."""

    made: Loadable
    steps: Mapping[str, Any]
    """Steps for the C++ runner, or the reason why there are none."""
    separate: list[tuple[int, int]]
    """Pairs of results that must be two tensors, though a program may return one for both."""


def own_config(options: Mapping[str, Any] | None, mode: str | None = None) -> Config:
    """Settings for an export. Raises ExportError for kernels by another compiler, which cannot be written."""
    return own_dump(check_writable(Config.make(mode, options)))


def check_writable(config: Config) -> Config:
    """Return settings whose programs can be written. Raises ExportError for kernels by another compiler."""
    if config.backend is not None:
        raise ExportError(
            f"dcompile: kernels by {config.backend.name} cannot be exported; use kernels='auto' or 'aten'"
        )
    return config


def decompositions(compiler: CachingCompiler, *, for_gpu: bool = False) -> dict[Any, Any]:
    """Decompositions of a captured frame, and those that AOTAutograd applies without a table.

    For a GPU that may be absent, attention stays whole: ATen chooses its kernel when the program runs.
    """
    own = compiler.decompositions(False)
    found = compat.aot.composite_decompositions() | own if own else own
    if for_gpu:
        found.pop(torch.ops.aten.scaled_dot_product_attention.default, None)
    return found


def compile_inference(compiler: CachingCompiler, gm: Any, device: str = "cpu") -> WritableProgram:
    """Compile a functional graph. Raises ExportError for graphs that cannot be written, or are on another device."""
    run_passes(compiler.graph_passes().joint, gm, GraphRequest(compiler.config, NAME), "inference")
    count = len(gm.graph.output_node().args[0])
    separate = _separate(compiler, gm, count)
    return compile_writable(compiler, gm, Request(NAME, "inference", results=count), device, separate)


def compile_writable(
    compiler: CachingCompiler,
    gm: Any,
    request: Request,
    device: str = "cpu",
    separate: Sequence[tuple[int, int]] = (),
) -> WritableProgram:
    """Compile a graph whose passes have run. Raises ExportError as `compile_inference` does."""
    cache, pipeline = KernelCache.open(compiler.config), Pipeline(compiler.config)
    begun = pipeline.begin(gm, request, cache)
    made, _ = pipeline.finish(begun, gm, request, cache)
    if made.graph.device not in ("cpu", device):
        raise ExportError(f"dcompile: the model computes on {made.graph.device}, but is exported for {device}")
    if device != "cpu" and not made.libraries and compiler.config.own_kernels:
        raise ExportError(f"dcompile: no kernel was compiled for {device}: {'; '.join(made.graph.report.notes)}")
    objects = [name for name, value in made.constants.items() if not isinstance(value, torch.Tensor)]
    if objects:
        raise ExportError(f"dcompile: {', '.join(objects)} cannot be written: a call with graphs as arguments")
    try:
        steps = list_steps(begun.plan.program, begun.plan.kernels)
    except ExportError as error:
        steps = {"refused": str(error)}
    return WritableProgram(made, steps, [*separate])


def _separate(compiler: CachingCompiler, gm: Any, count: int) -> list[tuple[int, int]]:
    steps = plan_outputs(compiler.graph_passes().outputs, gm, OutputRequest(count), "inference")
    plans = {run.__name__: plan for run, plan in steps}
    if "view_as_dtypes" in plans:
        raise ExportError("dcompile: the model returns a view of a result as another dtype; return a copy")
    return [(place, earlier) for place, earlier, _ in plans.get("separate_results", ())]


def write_files(
    folder: Path, program: WritableProgram, tensors: Mapping[str, torch.Tensor], call: Mapping[str, Any]
) -> None:
    """Write a program to an empty folder, with the model's own `tensors` and a description of its `call`."""
    made = program.made
    constants = {name: f"constant.{name}" for name in made.graph.constants}
    written = {**tensors, **{constants[name]: made.constants[name] for name in constants}}
    manifest = {
        "format": FORMAT,
        "dcompile": own_version(),
        "torch": torch_range(),
        "machine": machine(),
        "gpu": None if made.graph.device == HOST else torch.cuda.get_device_capability(),
        "graph": to_record(made.graph) | {"source": ""},
        "libraries": _copy_libraries(made, folder),
        "constants": constants,
        "tensors": _write_tensors(written, folder / TENSORS),
        "separate": program.separate,
        **call,
    }
    (folder / PROGRAM).write_text(made.graph.source)
    (folder / STEPS).write_text(json.dumps(program.steps))
    manifest["files"] = {file.name: _digest(file) for file in sorted(folder.iterdir())}
    text = json.dumps(manifest)
    outer = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": text}
    (folder / MANIFEST).write_text(json.dumps(outer))


def write_archive(folder: Path, target: Path | IO[bytes]) -> None:
    """Write the files of a folder to a zip file, uncompressed and in the order of their names."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as file:
        for part in sorted(folder.iterdir()):
            file.write(part, part.name)


def archive(program: WritableProgram, tensors: Mapping[str, torch.Tensor], call: Mapping[str, Any]) -> bytes:
    """Return the zip file that `write_files` and `write_archive` make of a program."""
    with tempfile.TemporaryDirectory(prefix="dcompile-aot-") as name:
        write_files(Path(name), program, tensors, call)
        write_archive(Path(name), data := io.BytesIO())
        return data.getvalue()


def _copy_libraries(made: Loadable, folder: Path) -> dict[str, str]:
    """Copy compiled kernels. Return the file of each kernel by name."""
    files = {path: f"kernels{n}{path.suffix}" for n, path in enumerate(dict.fromkeys(made.libraries.values()))}
    for path, name in files.items():
        shutil.copyfile(path, folder / name)
    return {kernel: files[path] for kernel, path in made.libraries.items()}


def remove_tokens(gm: Any, count: int) -> None:
    """Replace calls with effects by plain ones: lowering keeps their order without torch's tokens.

    The graph's first `count` inputs and results are tokens. torch.export's checks of metadata are removed, too.
    """
    for node in compat.aot.metadata_checks(gm.graph):
        gm.graph.erase_node(node)
    for node in [*gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)]:
        token, op, *args = node.args
        with gm.graph.inserting_before(node):
            call = gm.graph.call_function(op, tuple(args), dict(node.kwargs))
        single = len(op._schema.returns) == 1
        call.meta = {**node.meta, "val": node.meta["val"][1] if single else node.meta["val"][1:]}
        for user in [*node.users]:
            place = user.args[1]
            if place and not single:
                user.args = (call, place - 1)
                continue
            user.replace_all_uses_with(call if place else token)
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
    output = gm.graph.output_node()
    output.args = (tuple(output.args[0][count:]),)
    for node in [*gm.graph.find_nodes(op="placeholder")][:count]:
        gm.graph.erase_node(node)
    gm.recompile()


def _write_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> dict[str, dict[str, Any]]:
    """Write tensors one after the other, each on a cache line; where each lies."""
    entries: dict[str, dict[str, Any]] = {}
    with file.open("wb") as stream:
        for name, tensor in tensors.items():
            stream.write(b"\0" * (-stream.tell() % ALIGN_BYTES))
            offset = stream.tell()
            strides = list(tensor.stride())
            room = torch.zeros(element_span(tensor.shape, strides), dtype=tensor.dtype, device="cpu")
            room.as_strided(tensor.shape, strides).copy_(tensor)
            stream.write(room.view(torch.uint8).numpy().tobytes())
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries[name] = {"dtype": dtype, "shape": [*tensor.shape], "strides": strides, "offset": offset}
    return entries


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
