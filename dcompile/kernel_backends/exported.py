"""Export a region with torch.export, as the converters of other run times require."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dcompile import compat


class _Positional(torch.nn.Module):
    """Module that takes any number of inputs, in order."""

    def __init__(self, gm: Any) -> None:
        super().__init__()
        self.gm = gm

    def forward(self, *values: Any) -> Any:
        return self.gm(*values)


def export_region(gm: Any, example_inputs: Sequence[Any]) -> Any:
    """Export a graph of ATen operations as an ExportedProgram. Its inputs and outputs keep their order."""
    _reshape_views(gm)
    with compat.tensors.real_tensors(), torch.no_grad(), converting():
        return torch.export.export(_Positional(gm), tuple(_zeros(example_inputs)), strict=False)


def _zeros(example_inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Inputs with memory and with their strides, on which the meaning of views depends."""
    layouts = [(tuple(x.shape), tuple(x.stride()), x.dtype, x.device) for x in example_inputs]
    return [torch.empty_strided(s, t, dtype=dtype, device=device).zero_() for s, t, dtype, device in layouts]


def require_cpu(example_inputs: Sequence[Any]) -> None:
    """Raise RuntimeError if an input is not on the CPU: both run times read memory of the CPU."""
    devices = sorted({value.device.type for value in example_inputs} - {"cpu"})
    if devices:
        raise RuntimeError(f"tensors are on {', '.join(devices)}, and dcompile runs its sessions on the CPU")


def try_once(run: Callable[..., list[torch.Tensor]], example_inputs: Sequence[Any]) -> None:
    """Run with zeros, so that an error in a run time's first call is a refusal, too."""
    with compat.tensors.real_tensors(), torch.no_grad():
        run(*_zeros(example_inputs))


def _reshape_views(gm: Any) -> None:
    """Replace views by reshapes, which may copy: converters decompose operations, and the parts have other strides."""
    aten = torch.ops.aten
    for node in gm.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    gm.recompile()


@contextlib.contextmanager
def converting() -> Iterator[None]:
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
