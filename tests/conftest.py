"""What all tests share: `--update-golden`, and no setting of the developer's own shell."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the stored texts; then review the diff")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether stored texts are to be rewritten."""
    return bool(request.config.getoption("--update-golden"))


def pytest_configure() -> None:
    """Tests see default settings, with the verifier on, whatever DCOMPILE_... the shell exports."""
    for name in [name for name in os.environ if name.startswith("DCOMPILE_")]:
        del os.environ[name]
    os.environ["DCOMPILE_VERIFY"] = "1"
