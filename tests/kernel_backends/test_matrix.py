"""The table of `docs/guide/backends.md`, cell by cell: `make test-backends`."""

from __future__ import annotations

import importlib.util

import pytest

from dcompile.kernel_backends.names import NAMED
from tests.kernel_backends import matrix
from tests.kernel_backends.fakes import FAKED

pytestmark = [pytest.mark.backends, pytest.mark.usefixtures("compiled_anew")]


def skip_without(name: str) -> None:
    modules = () if name in FAKED or name not in NAMED else NAMED[name].modules
    if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed: make test-backends")


def check(name: str, column: str, found: str, update: bool) -> None:
    if update:
        matrix.record(name, column, found)
    assert matrix.recorded()[name][column] == found, "if it is as it should be: --update-golden, then print the docs"


@pytest.mark.parametrize("column", matrix.ALONE)
@pytest.mark.parametrize("name", matrix.NAMES)
def test_one_process(name: str, column: str, update_golden: bool) -> None:
    skip_without(name)
    check(name, column, matrix.alone(name, column), update_golden)


def test_a_compiler_that_takes_nothing_else_is_asked_for_all_of_a_forward() -> None:
    """Attention, norms and embeddings are in one region, so one session runs them."""
    for name in ("onnxruntime", "openvino"):
        skip_without(name)
        receipt = matrix.inference(name)
        assert (receipt.regions, receipt.kernel_calls, receipt.library_calls) == (1, 0, 0)
