"""The compiler that builds kernels, for losses in chunks."""

import pytest


@pytest.fixture
def real(monkeypatch):
    """The compiler that builds kernels."""
    from dcompile.compiler.caching import CachingCompiler

    monkeypatch.setattr("dcompile.api.CachingCompiler", CachingCompiler)
