"""Run regions as ONNX Runtime sessions on the CPU, through torch.onnx's exporter.

torch removed its own backend `onnxrt` with its old exporter. Inputs are read, and results written, in torch's memory.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile.kernel_backends.exported import converting, export_region, require_cpu, try_once

TYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
"""Dtypes that NumPy has, with NumPy's names, as ONNX Runtime's bindings require."""


def compile_region(gm: Any, example_inputs: Sequence[Any]) -> Callable[..., list[torch.Tensor]]:
    """Compile a region into a function that runs one session. Raises if the exporter has no translation."""
    import numpy as np
    import onnxruntime as ort  # type: ignore[import-not-found, import-untyped, unused-ignore]

    require_cpu(example_inputs)
    program = export_region(gm, example_inputs)
    with converting(), contextlib.redirect_stdout(io.StringIO()):
        exported = torch.onnx.export(program, dynamo=True, verbose=False)
    assert exported is not None, "torch.onnx returns a program where it is given no file"
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        exported.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names, outs = [value.name for value in session.get_inputs()], [value.name for value in session.get_outputs()]
    fakes = [node.meta["val"] for node in gm.graph.output_node().args[0]]
    if len(names) != len(example_inputs) or len(outs) != len(fakes):
        raise RuntimeError(f"the exporter kept {len(names)} of {len(example_inputs)} inputs, {len(outs)} outputs")
    layouts = [(tuple(fake.shape), fake.dtype) for fake in fakes]
    element = {dtype: getattr(np, name if name != "bool" else "bool_") for dtype, name in TYPES.items()}

    def place(tensor: torch.Tensor) -> tuple[str, int, Any, list[int], int]:
        return "cpu", 0, element[tensor.dtype], list(tensor.shape), tensor.data_ptr()

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        binding = session.io_binding()
        held = [value.contiguous() for value in values]
        results = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in layouts]
        for name, value in zip(names, held, strict=True):
            binding.bind_input(name, *place(value))
        for name, result in zip(outs, results, strict=True):
            binding.bind_output(name, *place(result))
        session.run_with_iobinding(binding)
        return results

    try_once(run, example_inputs)
    return run
