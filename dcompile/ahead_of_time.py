"""export(): compile a model for inference into files that run without a compiler (`runtime/program/exported.py`)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from dcompile.capture.graph_pass import GraphRequest, run_passes
from dcompile.capture.output_steps import OutputRequest, plan_outputs
from dcompile.collectives.contract import Request
from dcompile.compat import pytree
from dcompile.compiler import CachingCompiler
from dcompile.config import Config
from dcompile.driver import Pipeline
from dcompile.errors import ExportError
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.program.artifact import Loadable, to_record
from dcompile.runtime.program.exported import (
    ALIGN_BYTES,
    FORMAT,
    MANIFEST,
    PROGRAM,
    TENSORS,
    machine,
    torch_range,
)
from dcompile.toolchain import own_version

NAME = "exported"


def export(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
) -> None:
    """Compile a model for inference on CPUs, and write it to `path`: a folder, or a zip file for the suffix .zip.

    `args`, `kwargs` and `dynamic_shapes` are those of torch.export.export, whose program is compiled. The parameters
    are written with it. `dcompile.load(path)` needs no compiler. Raises ExportError for models that cannot be written,
    and torch.export's errors for models that it cannot capture.
    """
    config = Config.make(None, options)
    if config.backend is not None:
        raise ExportError(
            f"dcompile: kernels by {config.backend.name} cannot be exported; use kernels='auto' or 'aten'"
        )
    compiler = CachingCompiler(config)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's warnings about its own names
        program = torch.export.export(
            model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
        )
        program = program.run_decompositions(compiler.decompositions(False))
    target = Path(path)
    with tempfile.TemporaryDirectory(prefix="dcompile-export-") as folder:
        _Export(program, compiler, config, Path(folder), list(kwargs or {})).write()
        _publish(Path(folder), target)


def _publish(folder: Path, target: Path) -> None:
    """Copy the written files to the target."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".zip":
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as file:
            for part in sorted(folder.iterdir()):
                file.write(part, part.name)
        return
    if target.exists() and not (target / MANIFEST).is_file() and any(target.iterdir()):
        raise ExportError(f"dcompile: {target} holds something else; give a folder that is empty or not there yet")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)


@dataclass
class _Export:
    """One program that is being written to a folder."""

    program: Any
    compiler: CachingCompiler
    config: Config
    folder: Path
    keywords: list[str]
    """Names of the keyword arguments, in order."""

    def write(self) -> None:
        gm = self.program.graph_module
        inputs, arguments = self._inputs(gm)
        results, changed = self._results()
        run_passes(self.compiler.graph_passes().joint, gm, GraphRequest(self.config, NAME), "inference")
        count = len(gm.graph.output_node().args[0])
        separate = self._separate(gm, count)
        made = self._compile(gm, count)
        objects = [name for name, value in made.constants.items() if not isinstance(value, torch.Tensor)]
        if objects:
            raise ExportError(f"dcompile: {', '.join(objects)} cannot be written: a call with graphs as arguments")
        tensors = {what: self._state(what) for kind, what in inputs if kind == "tensor"}
        constants = {name: f"constant.{name}" for name in made.graph.constants}
        tensors |= {constants[name]: made.constants[name] for name in constants}
        manifest = {
            "format": FORMAT,
            "dcompile": own_version(),
            "torch": torch_range(),
            "machine": machine(),
            "graph": to_record(made.graph) | {"source": ""},
            "libraries": self._libraries(made),
            "constants": constants,
            "tensors": _write_tensors(tensors, self.folder / TENSORS),
            "inputs": inputs,
            "arguments": arguments,
            "keywords": self.keywords,
            "given": _structure(self.program.call_spec.in_spec, "arguments"),
            "results": results,
            "returned": _structure(self.program.call_spec.out_spec, "results"),
            "changed": changed,
            "separate": separate,
        }
        (self.folder / PROGRAM).write_text(made.graph.source)
        manifest["files"] = {file.name: _digest(file) for file in sorted(self.folder.iterdir())}
        text = json.dumps(manifest)
        outer = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": text}
        (self.folder / MANIFEST).write_text(json.dumps(outer))

    def _inputs(self, gm: Any) -> tuple[list[tuple[str, Any]], list[dict[str, Any]]]:
        """Inputs of the program, in order: ("tensor", name) or ("argument", place); and requirements for arguments.

        Arguments that are not tensors become constants of the program, and leave the graph.
        """
        inputs: list[tuple[str, Any]] = []
        arguments: list[dict[str, Any]] = []
        specs = self.program.graph_signature.input_specs
        for node, spec in zip(gm.graph.find_nodes(op="placeholder"), specs, strict=True):
            value = node.meta.get("val")
            if spec.kind != InputKind.USER_INPUT:
                if not isinstance(value, torch.Tensor):
                    raise ExportError(f"dcompile: {spec.target} is a {type(value).__name__}, not a tensor")
                inputs.append(("tensor", spec.target))
                continue
            if isinstance(value, torch.Tensor):
                inputs.append(("argument", len(arguments)))
                arguments.append(self._argument(value, len(arguments)))
                continue
            constant = getattr(spec.arg, "value", value)
            if node.users or not (constant is None or isinstance(constant, (bool, int, float, str))):
                raise ExportError(f"dcompile: argument {len(arguments)} is a {type(constant).__name__}, not a tensor")
            arguments.append({"constant": constant})
            gm.graph.erase_node(node)
        gm.recompile()
        return inputs, arguments

    def _argument(self, value: torch.Tensor, number: int) -> dict[str, Any]:
        if value.device.type != "cpu" or value.layout != torch.strided:
            raise ExportError(f"dcompile: argument {number} is on {value.device}; models are exported for the CPU")
        shape = [self._size(size, number) for size in value.shape]
        fixed = all(isinstance(stride, int) for stride in value.stride())
        if not fixed and not value.is_contiguous():
            raise ExportError(f"dcompile: argument {number} has symbolic sizes and is not contiguous")
        strides = [*value.stride()] if fixed else None
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": shape, "strides": strides}

    def _size(self, size: Any, number: int) -> int | tuple[str, int, int | None]:
        """Describe a size: an int, or a symbol with its range."""
        if isinstance(size, int):
            return size
        symbol = size.node.expr
        if not symbol.is_Symbol:
            raise ExportError(f"dcompile: argument {number} has a size {symbol}; give it a dimension of its own")
        found = self.program.range_constraints[symbol]
        high = int(found.upper) if found.upper < 2**31 else None
        return str(symbol), int(found.lower), high

    def _results(self) -> tuple[list[tuple[str, Any]], list[tuple[int, str]]]:
        """("result", place) or ("constant", value) of each returned leaf; (place, tensor) of each changed buffer."""
        results: list[tuple[str, Any]] = []
        changed: list[tuple[int, str]] = []
        for place, spec in enumerate(self.program.graph_signature.output_specs):
            if spec.kind == OutputKind.BUFFER_MUTATION:
                changed.append((place, spec.target))
            elif spec.kind != OutputKind.USER_OUTPUT:
                raise ExportError(f"dcompile: the model changes its argument {spec.target}, which an export cannot do")
            elif hasattr(spec.arg, "value"):
                results.append(("constant", spec.arg.value))
            else:
                results.append(("result", place))
        return results, changed

    def _separate(self, gm: Any, count: int) -> list[tuple[int, int]]:
        """Pairs of results that must be two tensors, though a program may return one for both."""
        steps = plan_outputs(self.compiler.graph_passes().outputs, gm, OutputRequest(count), "inference")
        plans = {run.__name__: plan for run, plan in steps}
        if "view_as_dtypes" in plans:
            raise ExportError("dcompile: the model returns a view of a result as another dtype; return a copy")
        return [(place, earlier) for place, earlier, _ in plans.get("separate_results", ())]

    def _compile(self, gm: Any, count: int) -> Loadable:
        cache, request = KernelCache.open(self.config), Request(NAME, "inference", results=count)
        pipeline = Pipeline(self.config)
        made, _ = pipeline.finish(pipeline.begin(gm, request, cache), gm, request, cache)
        if made.graph.device != "cpu":
            raise ExportError(f"dcompile: the model computes on {made.graph.device}; models are exported for the CPU")
        return made

    def _state(self, target: str) -> torch.Tensor:
        found = self.program.state_dict.get(target)
        tensor = self.program.constants[target] if found is None else found
        return tensor.detach()  # type: ignore[no-any-return]

    def _libraries(self, made: Loadable) -> dict[str, str]:
        """Copy compiled kernels; kernel name -> file."""
        files = {path: f"kernels{n}{path.suffix}" for n, path in enumerate(dict.fromkeys(made.libraries.values()))}
        for path, name in files.items():
            shutil.copyfile(path, self.folder / name)
        return {kernel: files[path] for kernel, path in made.libraries.items()}


def _structure(spec: Any, what: str) -> str:
    try:
        return pytree.to_text(spec)
    except NotImplementedError as error:
        raise ExportError(f"dcompile: {what} of this model hold a class that has no name as text: {error}") from error


def _write_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> dict[str, dict[str, Any]]:
    """Write tensors one after the other, each aligned to a cache line. Return their dtypes, layouts and offsets."""
    entries: dict[str, dict[str, Any]] = {}
    with file.open("wb") as stream:
        for name, tensor in tensors.items():
            stream.write(b"\0" * (-stream.tell() % ALIGN_BYTES))
            offset = stream.tell()
            strides = list(tensor.stride())
            last = sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
            room = torch.zeros(1 + last if tensor.numel() else 0, dtype=tensor.dtype, device="cpu")
            room.as_strided(tensor.shape, strides).copy_(tensor)
            stream.write(room.view(torch.uint8).numpy().tobytes())
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries[name] = {"dtype": dtype, "shape": [*tensor.shape], "strides": strides, "offset": offset}
    return entries


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
