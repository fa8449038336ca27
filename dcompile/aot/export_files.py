"""Compile a graph for inference, and write it: host program, steps, kernels, tensors, and a manifest.

`export` and `aot_compile` share it; `runtime/program/exported.py` reads it.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from dcompile import compat
from dcompile.capture.aliasing.output_views import OutputRequest, plan_outputs
from dcompile.capture.passes.run_passes import GraphRequest, run_passes
from dcompile.codegen.emit.host.step_list import list_steps
from dcompile.collectives.contract import Request
from dcompile.compiler.caching import CachingCompiler
from dcompile.compiler.driver import Pipeline
from dcompile.config import Config
from dcompile.device_traits import HOST
from dcompile.errors import ExportError
from dcompile.ir.index import element_span
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
