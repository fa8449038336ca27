"""Compile regions for run times that take no FX graph but torch.export's program: ONNX Runtime and OpenVINO.

torch removed its own backend `onnxrt` with its old exporter. OpenVINO's own one silently runs operations without a
conversion in torch; here they are a refusal. Sessions run on the CPU; they read inputs, and write results, in torch's
memory.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from dcompile import compat

Session: TypeAlias = "tuple[int, int, Callable[[list[torch.Tensor], list[torch.Tensor]], None]]"
"""Number of inputs, number of results, and a function that reads the ones and writes the others."""


def compile_session(
    start: Callable[[Any], Session], gm: Any, example_inputs: Sequence[Any]
) -> Callable[..., list[torch.Tensor]]:
    """Compile a region into a function that runs one session. Raises if an operation has no translation."""
    devices = sorted({value.device.type for value in example_inputs} - {"cpu"})
    if devices:
        raise RuntimeError(f"tensors are on {', '.join(devices)}, and dcompile runs its sessions on the CPU")
    program = _export(gm, example_inputs)
    with _converting():
        inputs, outputs, run_session = start(program)
    fakes = [node.meta["val"] for node in gm.graph.output_node().args[0]]
    if inputs != len(example_inputs) or outputs != len(fakes):
        raise RuntimeError(f"the converter kept {inputs} of {len(example_inputs)} inputs, {outputs} outputs")
    layouts = [(tuple(fake.shape), fake.dtype) for fake in fakes]

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        held = [value.detach().contiguous() for value in values]
        results = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in layouts]
        run_session(held, results)
        return results

    with compat.tensors.real_tensors(), torch.no_grad():  # an error in a run time's first call is a refusal, too
        run(*_zeros(example_inputs))
    return run


def _start_onnxruntime(program: Any) -> Session:
    """Start a session of ONNX Runtime, through torch.onnx's exporter."""
    import onnxruntime as ort  # type: ignore[import-not-found, import-untyped, unused-ignore]

    with contextlib.redirect_stdout(io.StringIO()):
        exported = torch.onnx.export(program, dynamo=True, verbose=False)
    assert exported is not None, "torch.onnx returns a program where it is given no file"
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    model = exported.model_proto.SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names, outs = [value.name for value in session.get_inputs()], [value.name for value in session.get_outputs()]

    def place(tensor: torch.Tensor) -> tuple[str, int, Any, list[int], int]:
        return "cpu", 0, tensor.numpy().dtype.type, list(tensor.shape), tensor.data_ptr()

    def run(held: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        binding = session.io_binding()
        for name, value in zip(names, held, strict=True):
            binding.bind_input(name, *place(value))
        for name, result in zip(outs, results, strict=True):
            binding.bind_output(name, *place(result))
        session.run_with_iobinding(binding)

    return len(names), len(outs), run


def _start_openvino(program: Any) -> Session:
    """Compile a model of OpenVINO. Keeps float32: by default, processors with bfloat16 units compute in that."""
    import openvino as ov  # type: ignore[import-not-found, import-untyped, unused-ignore]

    model = ov.convert_model(program)
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = ov.Core().compile_model(model, "CPU", hints)

    def run(held: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        request = compiled.create_infer_request()
        for place, value in enumerate(held):
            request.set_input_tensor(place, ov.Tensor(value.numpy(), shared_memory=True))
        for place, result in enumerate(results):
            request.set_output_tensor(place, ov.Tensor(result.numpy(), shared_memory=True))
        request.infer()

    return len(model.inputs), len(model.outputs), run


SESSIONS: Mapping[str, Callable[[Any], Session]] = {"onnxruntime": _start_onnxruntime, "openvino": _start_openvino}
"""What starts a session of an exported program, by the run time's name in option `kernels`."""


class _Positional(torch.nn.Module):
    """Module that takes any number of inputs, in order."""

    def __init__(self, gm: Any) -> None:
        super().__init__()
        self.gm = gm

    def forward(self, *values: Any) -> Any:
        return self.gm(*values)


def _export(gm: Any, example_inputs: Sequence[Any]) -> Any:
    """Export a graph of ATen operations as an ExportedProgram. Its inputs and outputs keep their order.

    Views become reshapes, which may copy: converters decompose operations, and the parts have other strides.
    """
    aten = torch.ops.aten
    for node in gm.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    gm.recompile()
    with compat.tensors.real_tensors(), torch.no_grad(), _converting():
        return torch.export.export(_Positional(gm), tuple(_zeros(example_inputs)), strict=False)


def _zeros(example_inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Inputs with memory and with their strides, on which the meaning of views depends."""
    layouts = [(tuple(x.shape), tuple(x.stride()), x.dtype, x.device) for x in example_inputs]
    return [torch.empty_strided(s, t, dtype=dtype, device=device).zero_() for s, t, dtype, device in layouts]


@contextlib.contextmanager
def _converting() -> Iterator[None]:
    """Suppress warnings of a converter, which do not concern the user's program."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
