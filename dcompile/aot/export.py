"""export(): compile a model for inference into files that run without a compiler (`runtime/program/exported.py`)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from dcompile import compat
from dcompile.aot.export_files import (
    compile_inference,
    decompositions,
    own_config,
    remove_tokens,
    write_archive,
    write_files,
)
from dcompile.compat import pytree
from dcompile.compiler.caching import CachingCompiler
from dcompile.errors import ExportError
from dcompile.runtime.program.exported import MANIFEST
from dcompile.toolchain import triton_version


def export(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    gpu: str | None = None,
) -> None:
    """Compile a model for inference, and write it to `path`: a folder, or a zip file for the suffix .zip.

    `args`, `kwargs` and `dynamic_shapes` are those of torch.export.export, whose program is compiled. The parameters
    are written with it. `dcompile.load(path)` needs no compiler. Raises ExportError for models that cannot be written,
    and torch.export's errors for models that it cannot capture.

    The model and its arguments are on the CPU, and so is the program. With `gpu`, "sm_90" for compute capability
    9.0 say, the program is for such a GPU, which need not be in this machine.
    """
    compiler = CachingCompiler(own_config(options))
    target = None if gpu is None else _gpu(gpu, compiler)
    with torch.no_grad(), warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="dcompile-export-") as folder:
        warnings.simplefilter("ignore", FutureWarning)  # torch's warnings about its own names
        program = torch.export.export(
            model, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
        )
        program = program.run_decompositions(decompositions(compiler, for_gpu=target is not None))
        exported = _Export(program, compiler, Path(folder), list(kwargs or {}), target)
        with contextlib.nullcontext() if target is None else compat.on_demand.gpu_capability_as(target):
            exported.write()
        _publish(Path(folder), Path(path))


def _gpu(name: str, compiler: CachingCompiler) -> tuple[int, int]:
    """Compute capability by the name that NVIDIA's compilers use. Raises ExportError for one that has no kernels."""
    found = re.fullmatch(r"sm_(\d{1,2})(\d)", name)
    if found is None or int(found[1]) < 8:
        raise ExportError(f"dcompile: gpu={name!r} is no NVIDIA GPU from compute capability 8.0 on, such as 'sm_90'")
    if compiler.config.own_kernels and triton_version() is None:
        raise ExportError("dcompile: Triton compiles kernels for GPUs, and is not installed: pip install triton")
    if compiler.config.max_autotune:
        raise ExportError("dcompile: max_autotune measures on a GPU; leave it out where gpu= names one")
    return int(found[1]), int(found[2])


def _publish(folder: Path, target: Path) -> None:
    """Copy the written files to the target."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".zip":
        write_archive(folder, target)
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
    folder: Path
    keywords: list[str]
    """Names of the keyword arguments, in order."""
    gpu: tuple[int, int] | None = None
    """Compute capability of the GPU that it is compiled for, or None for the CPU."""

    @property
    def device(self) -> str:
        """Type of the device that it runs on."""
        return "cpu" if self.gpu is None else "cuda"

    def write(self) -> None:
        gm = self.program.graph_module
        specs = self.program.graph_signature.input_specs
        remove_tokens(gm, sum(spec.kind == InputKind.TOKEN for spec in specs))
        inputs, arguments = self._inputs(gm)
        if self.gpu is not None:
            compat.tensors.move_graph_to_gpu(gm)
        results, changed = self._results()
        tensors = {what: self._state(what) for kind, what in inputs if kind == "tensor"}
        call = {
            "inputs": inputs,
            "arguments": arguments,
            "keywords": self.keywords,
            "given": _structure(self.program.call_spec.in_spec, "arguments"),
            "results": results,
            "returned": _structure(self.program.call_spec.out_spec, "results"),
            "changed": changed,
            "gpu": self.gpu,
        }
        write_files(self.folder, compile_inference(self.compiler, gm, self.device), tensors, call)

    def _inputs(self, gm: Any) -> tuple[list[tuple[str, Any]], list[dict[str, Any]]]:
        """Inputs of the program, in order: ("tensor", name) or ("argument", place); and requirements for arguments.

        Arguments that are not tensors become constants of the program, and leave the graph.
        """
        inputs: list[tuple[str, Any]] = []
        arguments: list[dict[str, Any]] = []
        specs = [spec for spec in self.program.graph_signature.input_specs if spec.kind != InputKind.TOKEN]
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
            raise ExportError(f"dcompile: argument {number} is on {value.device}; models are exported from the CPU")
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
        specs = self.program.graph_signature.output_specs
        for place, spec in enumerate(spec for spec in specs if spec.kind != OutputKind.TOKEN):
            if spec.kind == OutputKind.BUFFER_MUTATION:
                changed.append((place, spec.target))
            elif spec.kind != OutputKind.USER_OUTPUT:
                raise ExportError(f"dcompile: the model changes its argument {spec.target}, which an export cannot do")
            elif hasattr(spec.arg, "value"):
                results.append(("constant", spec.arg.value))
            else:
                results.append(("result", place))
        return results, changed

    def _state(self, target: str) -> torch.Tensor:
        found = self.program.state_dict.get(target)
        tensor = self.program.constants[target] if found is None else found
        return tensor.detach()  # type: ignore[no-any-return]


def _structure(spec: Any, what: str) -> str:
    try:
        return pytree.to_text(spec)
    except NotImplementedError as error:
        raise ExportError(f"dcompile: {what} of this model hold a class that has no name as text: {error}") from error
