"""Capture is tested on a compiler that runs each graph as it is."""

import pytest
import torch

from tests.capture.double import InterpreterCompiler


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    """Every compiler that a compile call made, in order."""
    made = []

    def make(config):
        made.append(InterpreterCompiler(config))
        return made[-1]

    monkeypatch.setattr("dcompile.api.CachingCompiler", make)
    monkeypatch.setenv("DCOMPILE_RECEIPT", "0")
    torch._dynamo.reset()
    return made
