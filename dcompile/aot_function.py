"""Compile one Dynamo graph into bytes, for torch.compile(f, backend="dcompile", fullgraph=True).aot_compile(...)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dcompile import compat
from dcompile.aot_training import check_devices, compile_training, describe_argument, device_of
from dcompile.capture.graph_pass import GraphRequest, run_passes
from dcompile.capture.services import Services
from dcompile.compiler import CachingCompiler
from dcompile.config import Config
from dcompile.errors import ExportError
from dcompile.export_files import archive, check_writable, compile_inference, decompositions, remove_tokens
from dcompile.runtime.program.aot_callable import AheadOfTimeProgram, AheadOfTimeTraining


class AheadOfTimeBackend:
    """Backend for torch's `aot_compile`, which calls it with one graph and saves the result."""

    compiler_name = "dcompile"

    def __init__(self, config: Config, services: Services) -> None:
        self._config, self._services = check_writable(config), services

    def __call__(self, gm: Any, example_inputs: Sequence[Any]) -> AheadOfTimeProgram | AheadOfTimeTraining:
        """Compile a graph: forward, and backward if it needs one. Raises ExportError for what cannot be written."""
        if torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in example_inputs):
            return compile_training(gm, example_inputs, self._config, self._services)
        compiler = CachingCompiler(self._config)
        run_passes(compiler.graph_passes().dynamo, gm, GraphRequest(self._config, "aot"), "dynamo")
        on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in example_inputs)
        graph, signature = compat.aot.export_graph(gm, example_inputs, decompositions(compiler, for_gpu=on_gpu))
        remove_tokens(graph, len(signature.input_tokens))
        call, tensors = _call_of(gm, graph, signature)
        program = compile_inference(compiler, graph, device_of(graph))
        check_devices(program, tensors)
        return AheadOfTimeProgram(archive(program, tensors, call))


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
            arguments.append(describe_argument(node.meta["val"], len(arguments)))
    given = [node.name for node in graph.graph.find_nodes(op="placeholder") if node.name not in held]
    if signature.buffers_to_mutate or signature.parameters_to_mutate:
        raise ExportError("dcompile: the graph changes a tensor that it holds; pass it as an argument")
    written = signature.user_inputs_to_mutate
    changed = [(place, given.index(name)) for place, name in enumerate(written.values())]
    call = {"inputs": inputs, "arguments": arguments, "changed": changed, "results": len(written)}
    return call, {name: state[name].detach() for name in held.values()}
