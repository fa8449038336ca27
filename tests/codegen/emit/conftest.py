"""Kernels of all cases of a test in one file, where the test asks for it by `harness.together`."""

from __future__ import annotations

import pytest

from dcompile.codegen.emit.cpp.compile import build
from dcompile.config import Config


@pytest.fixture(scope="module")
def seen() -> set[str]:
    """Tests that had a case in this module."""
    return set()


@pytest.fixture(autouse=True)
def built_together(request: pytest.FixtureRequest, seen: set[str]) -> None:
    """Before the first case of a test, the kernels of those cases that will run: others find them in the cache."""
    name, kernels = request.node.originalname, getattr(request.function, "kernels", None)
    if kernels is None or name in seen:
        return
    from tests.codegen.emit.harness import store  # behind pytest_configure: it loads torch

    seen.add(name)
    here = [x for x in request.session.items if x.path == request.path and x.originalname == name]
    build([kernel for item in here for kernel in kernels(**item.callspec.params)], Config(), store())
