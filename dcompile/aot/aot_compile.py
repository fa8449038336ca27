"""Compile one Dynamo graph into bytes, for torch.compile(f, backend="dcompile", fullgraph=True).aot_compile(...)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dcompile import compat
from dcompile.aot.export_files import (
    WritableProgram,
    archive,
    check_writable,
    compile_inference,
    compile_writable,
    decompositions,
    remove_tokens,
)
from dcompile.capture.aliasing.input_memory import return_input_views
from dcompile.capture.aliasing.output_views import OutputRequest, plan_outputs, results_without_gradients
from dcompile.capture.captured_graph import Boxed, CapturedGraph, CaptureMode
from dcompile.capture.compiled_model import CompiledModel, Settings
from dcompile.capture.graph_programs import remove_opaque_objects
from dcompile.capture.joint_graph import donated_positions, saved_positions
from dcompile.capture.passes.joint.absent_gradients import tangents
from dcompile.capture.passes.run_passes import GraphRequest, run_passes
from dcompile.capture.services import Services
from dcompile.collectives.contract import Request
from dcompile.compiler.caching import CachingCompiler
from dcompile.config import Config
from dcompile.device_traits import main_device
from dcompile.errors import ExportError
from dcompile.runtime.program.aot_callable import (
    AheadOfTimeProgram,
    AheadOfTimeTraining,
    BackwardProgram,
    ForwardProgram,
)


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


def compile_training(gm: Any, example_inputs: Sequence[Any], config: Config, services: Services) -> AheadOfTimeTraining:
    """Compile forward and backward of a graph. Raises ExportError for what cannot be written."""
    model = CompiledModel(Settings(config), services)
    return AheadOfTimeTraining(_compile(CapturedGraph(model, example_inputs, SAVED), gm, example_inputs))


def _compile(graph: CapturedGraph, gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph. The result has AOTAutograd's record of it (`compat.aot_bundle`)."""
    own = [name for held in (gm.named_parameters(), gm.named_buffers()) for name, _ in held]
    if own:
        raise ExportError(f"dcompile: the graph holds tensors ({', '.join(own)}); pass them as arguments")
    example_inputs = compat.dynamo.take_full_numbers(gm, example_inputs)
    graph.examine(gm, example_inputs)
    with compat.aot_bundle.recording_programs():
        compiled = graph.trace_anew(gm, example_inputs)
    if results_without_gradients(gm, graph.results.learning):
        raise ExportError("dcompile: the function returns a view made under torch.no_grad(); return a copy")
    if not compat.aot_bundle.is_recorded(compiled):
        raise ExportError("dcompile: this torch keeps no record of the graph, which saving it needs")
    return compiled


class WrittenPrograms:
    """Programs that are written: they run with nothing but what AOTAutograd's record and files hold."""

    def __init__(self, graph: CapturedGraph) -> None:
        self._graph = graph

    def inference(self, gm: Any) -> Boxed:
        """Raise ExportError: there is nothing to train."""
        raise ExportError("dcompile: no result of the function needs a gradient; compile it under torch.no_grad()")

    def forward(self, gm: Any) -> Boxed:
        """Write the forward. Raises ExportError for what a file cannot hold."""
        if remove_opaque_objects(gm).inputs:
            raise ExportError("dcompile: DTensors cannot be saved; compile the function for local tensors")
        return_input_views(gm, compat.aot_metadata.looks_at_inputs())
        results = self._graph.facts.results
        views, constant = compat.aot_metadata.take_views(), compat.aot_metadata.constant_results()
        rows = self._graph.model.services.compiler.graph_passes().outputs
        steps = [
            (step.__name__, plan)
            for step, plan in plan_outputs(rows, gm, OutputRequest(results, views, constant), "forward")
        ]
        if any(name == "view_as_dtypes" for name, _ in steps):
            raise ExportError("dcompile: the function returns a view of a result as another dtype; return a copy")
        arguments = [describe_argument(value, number) for number, value in enumerate(_inputs(gm))]
        call = {"arguments": arguments, "steps": [(name, _listed(plan)) for name, plan in steps]}
        return ForwardProgram(self._write(gm, Request("forward", "forward", results=results), call))

    def backward(self, gm: Any) -> Boxed:
        """Write the backward."""
        request = Request("backward", "backward", donated=donated_positions(gm), saved=saved_positions(gm))
        return BackwardProgram(self._write(gm, request, {"tangents": list(tangents(gm))}))

    def _write(self, gm: Any, request: Request, call: dict[str, Any]) -> bytes:
        compiler = self._graph.model.services.compiler
        assert isinstance(compiler, CachingCompiler), "programs are written by the compiler itself"
        inputs = [("argument", number) for number in range(len(_inputs(gm)))]
        program = compile_writable(compiler, gm, request, device_of(gm))
        check_devices(program, {})
        return archive(program, {}, {"inputs": inputs, **call})


SAVED = CaptureMode(WrittenPrograms, needs_data=False, is_saved=True)


def _inputs(gm: Any) -> list[Any]:
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def _listed(plan: Any) -> Any:
    """Plan of a step on results as JSON has it: pairs in place of a mapping."""
    return list(plan.items()) if isinstance(plan, dict) else plan


def device_of(gm: Any) -> str:
    """Type of the device that a graph is compiled for: that of its values which are not on the host, if there are any.

    Raises ExportError for a device without kernels.
    """
    values = (node.meta.get("val") for node in gm.graph.nodes)
    found = main_device(value.device.type for value in values if isinstance(value, torch.Tensor))
    if found not in ("cpu", "cuda"):
        raise ExportError(f"dcompile: aot_compile compiles for CPUs and CUDA GPUs, not for {found}")
    return found


def check_devices(program: WritableProgram, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ExportError unless tensors of a graph are on the program's device, where loading puts them."""
    wanted, held = program.made.graph.device, {**tensors, **program.made.constants}
    others = {name: value.device.type for name, value in held.items() if value.device.type != wanted}
    if others:
        raise ExportError(
            f"dcompile: the graph runs on {wanted} and holds {', '.join(others)} on {', '.join({*others.values()})}; "
            "pass such a tensor as an argument"
        )


def describe_argument(value: Any, number: int) -> dict[str, Any]:
    """Describe the requirements for an argument. Kernels rely on these, and users can disable Dynamo's guards."""
    if not isinstance(value, torch.Tensor):
        return {"number": True}
    if value.layout != torch.strided:
        raise ExportError(f"dcompile: argument {number} is {value.layout}; aot_compile compiles for strided tensors")
    shape = [size if isinstance(size, int) else (str(size), 0, None) for size in value.shape]
    fixed = all(isinstance(stride, int) for stride in value.stride())
    if not fixed and not value.is_contiguous():
        raise ExportError(f"dcompile: argument {number} has symbolic sizes and is not contiguous")
    strides, dtype = [*value.stride()] if fixed else None, str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": shape, "strides": strides, "device": value.device.type}
