"""Run regions as OpenVINO models on the CPU, converted from torch.export's program.

OpenVINO's own backend for torch.compile silently runs operations without a conversion in torch. Here they are a
refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile.kernel_backends.exported import converting, export_region, require_cpu, try_once


def compile_region(gm: Any, example_inputs: Sequence[Any]) -> Callable[..., list[torch.Tensor]]:
    """Compile a region into a function that runs one request. Raises if an operation has no conversion."""
    import openvino as ov  # type: ignore[import-not-found, import-untyped, unused-ignore]

    require_cpu(example_inputs)
    program = export_region(gm, example_inputs)
    with converting():
        model = ov.convert_model(program)
    fakes = [node.meta["val"] for node in gm.graph.output_node().args[0]]
    if len(model.inputs) != len(example_inputs) or len(model.outputs) != len(fakes):
        raise RuntimeError(f"the converter kept {len(model.inputs)} of {len(example_inputs)} inputs")
    # keep float32: by default, processors with bfloat16 units compute in that
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = ov.Core().compile_model(model, "CPU", hints)
    layouts = [(tuple(fake.shape), fake.dtype) for fake in fakes]

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        request = compiled.create_infer_request()
        held = [value.detach().contiguous() for value in values]
        results = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in layouts]
        for place, value in enumerate(held):
            request.set_input_tensor(place, ov.Tensor(value.numpy(), shared_memory=True))
        for place, result in enumerate(results):
            request.set_output_tensor(place, ov.Tensor(result.numpy(), shared_memory=True))
        request.infer()
        return results

    try_once(run, example_inputs)
    return run
