"""What a wheel and a source archive hold, and that the package works from the wheel's files alone."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.job import ROOT

pytest.importorskip("setuptools", minversion="77")  # what pyproject.toml asks for
BUILD = "from setuptools import build_meta as b; print(b.build_wheel('dist')); print(b.build_sdist('dist'))"
USE = """
import dcompile, torch
assert dcompile.__file__.startswith({folder!r}), dcompile.__file__
x = torch.randn(4, 8)
layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
torch.testing.assert_close(torch.compile(layer, backend="dcompile")(x), layer(x))
print("works")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder of the wheel and the archive, made from the files of a checkout."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "dcompile", source / "dcompile", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "tools", source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-W", "ignore", "-c", BUILD]
    made = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    return source / "dist"


def sources() -> set[str]:
    """Files of the package in the checkout."""
    found = (path for path in (ROOT / "dcompile").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(ROOT)) for path in found}


def test_a_wheel_holds_the_whole_package_and_nothing_else(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        points = wheel.read(f"{info}/entry_points.txt").decode()
    assert {name for name in names if not name.startswith(info)} == sources()
    assert {"dcompile/py.typed", "dcompile/include/dcompile/runner.h", f"{info}/licenses/LICENSE"} <= names
    assert "dcompile = dcompile.backend:dcompile_backend" in points.split("[torch_dynamo_backends]")[1]
    assert "dcompile-launch = dcompile.integrations.launch:main" in points.split("[console_scripts]")[1]


def test_a_source_archive_has_no_tests(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {str(Path(*Path(found.name).parts[1:])) for found in archive if found.isfile()}
    assert sources() | {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_a_wheel_is_all_that_torch_compile_needs(built, tmp_path):
    folder = tmp_path / "site"
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", USE.format(folder=str(folder))]
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    assert made.stdout.endswith("works\n")
