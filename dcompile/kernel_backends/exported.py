"""A region as torch.export's program, which converters of other run times take."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dcompile import compat


class _Positional(torch.nn.Module):
    """Any number of inputs, in order."""

    def __init__(self, gm: Any) -> None:
        super().__init__()
        self.gm = gm

    def forward(self, *values: Any) -> Any:
        return self.gm(*values)


def export_region(gm: Any, example_inputs: Sequence[Any]) -> Any:
    """An ExportedProgram of a graph of ATen operations. Its inputs and outputs keep their order."""
    _reshape_views(gm)
    with compat.tensors.real_tensors(), torch.no_grad(), converting():
        # with their strides, which say what a view of them is
        zeros = tuple(
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).zero_() for x in example_inputs
        )
        return torch.export.export(_Positional(gm), zeros, strict=False)


def _reshape_views(gm: Any) -> None:
    """Let views copy where they have to: converters take operations apart, and the parts have other strides."""
    aten = torch.ops.aten
    for node in gm.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    gm.recompile()


@contextlib.contextmanager
def converting() -> Iterator[None]:
    """Around a converter of others: what it warns of is not about the user's program."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
