"""Capture is tested on a compiler that runs each graph as it is; on GPUs, with the kernels that come of it."""

import pytest
import torch

from tests.capture.double import InterpreterCompiler


@pytest.fixture(autouse=True)
def compilers(request, monkeypatch):
    """Every compiler that a compile call made, in order; none for a test on a GPU, which wants kernels."""
    made = []
    monkeypatch.setenv("DCOMPILE_RECEIPT", "0")
    torch._dynamo.reset()
    if request.node.get_closest_marker("gpu"):
        return made

    def make(config):
        made.append(InterpreterCompiler(config))
        return made[-1]

    monkeypatch.setattr("dcompile.api.CachingCompiler", make)
    return made
