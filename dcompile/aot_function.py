"""Compile one Dynamo graph into bytes, for torch.compile(f, backend="dcompile", fullgraph=True).aot_compile(...)."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.graph_pass import GraphRequest, run_passes
from dcompile.compiler import CachingCompiler
from dcompile.config import Config
from dcompile.errors import ExportError
from dcompile.export_files import compile_inference, decompositions, remove_tokens, write_archive, write_files
from dcompile.runtime.program.aot_callable import AheadOfTimeProgram


class AheadOfTimeBackend:
    """Backend for torch's `aot_compile`, which calls it with one graph and saves the result."""

    compiler_name = "dcompile"

    def __init__(self, config: Config) -> None:
        self._compiler = CachingCompiler(config)

    def __call__(self, gm: Any, example_inputs: Sequence[Any]) -> AheadOfTimeProgram:
        """Compile a graph for inference on CPUs. Raises ExportError for training and unwritable programs."""
        if torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in example_inputs):
            raise ExportError("dcompile: aot_compile compiles for inference; call it under torch.no_grad()")
        compiler = self._compiler
        request = GraphRequest(compiler.config, "aot")
        run_passes(compiler.graph_passes().dynamo, gm, request, "dynamo")
        graph, signature = compat.aot.export_graph(gm, example_inputs, decompositions(compiler))
        remove_tokens(graph, len(signature.input_tokens))
        call, tensors = _call_of(gm, graph, signature)
        with tempfile.TemporaryDirectory(prefix="dcompile-aot-") as name:
            write_files(Path(name), compile_inference(compiler, graph), tensors, call)
            write_archive(Path(name), data := io.BytesIO())
            return AheadOfTimeProgram(data.getvalue())


def _call_of(gm: Any, graph: Any, signature: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Describe the program's call, and return the tensors that the graph's module holds."""
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    state = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    inputs: list[tuple[str, Any]] = []
    arguments: list[dict[str, Any]] = []
    for node in graph.graph.find_nodes(op="placeholder"):
        if node.name in held:
            inputs.append(("tensor", held[node.name]))
        else:
            inputs.append(("argument", len(arguments)))
            arguments.append(_argument(node.meta["val"], len(arguments)))
    given = [node.name for node in graph.graph.find_nodes(op="placeholder") if node.name not in held]
    if signature.buffers_to_mutate or signature.parameters_to_mutate:
        raise ExportError("dcompile: the graph changes a tensor that it holds; pass it as an argument")
    written = signature.user_inputs_to_mutate
    changed = [(place, given.index(name)) for place, name in enumerate(written.values())]
    call = {"inputs": inputs, "arguments": arguments, "changed": changed, "results": len(written)}
    return call, {name: state[name].detach() for name in held.values()}


def _argument(value: Any, number: int) -> dict[str, Any]:
    """Describe the requirements for an argument. Kernels rely on these, and users can disable Dynamo's guards."""
    if not isinstance(value, torch.Tensor):
        return {"number": True}
    if value.device.type != "cpu" or value.layout != torch.strided:
        raise ExportError(f"dcompile: argument {number} is on {value.device}; aot_compile compiles for the CPU")
    shape = [size if isinstance(size, int) else (str(size), 0, None) for size in value.shape]
    fixed = all(isinstance(stride, int) for stride in value.stride())
    if not fixed and not value.is_contiguous():
        raise ExportError(f"dcompile: argument {number} has symbolic sizes and is not contiguous")
    strides = [*value.stride()] if fixed else None
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": shape, "strides": strides}
