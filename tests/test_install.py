"""Which versions `tools/install.sh` asks pip for: pins survive a second extra, and a torch that was there stays."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.job import ROOT

INTERPRETER = """#!/usr/bin/env bash
# A Python of which the test says what it has installed: files named after packages, beside it, with their versions.
here=$(cd "$(dirname "$0")" && pwd)
case "$1 $2" in
"-m venv")
    folder="${@: -1}"
    mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python"
    case "$*" in *--system-site-packages*) cp "$here"/*.installed "$folder/bin/" ;; esac ;;
"-m pip")
    echo "$*" >> "$here/pip.log"
    while [ "$1" != -c ]; do shift; done
    cp "$2" "$here/asked.$(wc -l < "$here/pip.log")"
    grep -q '^torch==' "$2" && sed -n 's/^torch==//p' "$2" > "$here/torch.installed"
    case "$*" in *" torch=="*) echo "${@: -1}" | sed 's/^torch==//' > "$here/torch.installed" ;; esac
    case "$*" in *"[test]") sed -n 's/^triton==//p' "$2" > "$here/triton.installed" ;; esac ;;
"- triton") cat "$here/triton.installed" 2> /dev/null ;;
"- ") [ -e "$here/torch.installed" ] && echo "$(cat "$here/torch.installed") $here" ;;
*) exit 1 ;; # no network
esac
exit 0
"""


def versions(constraints: Path) -> dict[str, str]:
    """Versions by package, as a file of constraints pins them."""
    return dict(line.split("==") for line in constraints.read_text().splitlines() if "==" in line)


PINS = versions(ROOT / "constraints.txt")


@pytest.fixture
def installed(tmp_path):
    """Install an extra for a Python that has these packages; the versions that pip was held to, call by call."""
    (tmp_path / "system").mkdir()
    python, venv = tmp_path / "system" / "python", tmp_path / "venv"
    python.write_text(INTERPRETER)
    python.chmod(0o755)

    def install(extra: str, wanted: str = "", **packages: str) -> tuple[list[dict[str, str]], str]:
        for name, version in packages.items():
            (python.parent / f"{name}.installed").write_text(version)
        command = ["bash", "tools/install.sh", str(python), str(venv), extra, "http://127.0.0.1:9", wanted]
        output = subprocess.run(command, cwd=ROOT, text=True, check=True, capture_output=True).stdout
        asked = sorted((venv / "bin").glob("asked.*"), key=lambda path: int(path.suffix[1:]))
        return [versions(path) for path in asked], output

    yield install
    shutil.rmtree(venv, ignore_errors=True)


def test_pins_survive_a_second_extra(installed):
    (first,), output = installed("train")
    assert first == PINS and len(output.splitlines()) == 1
    _, second = installed("test")[0]
    assert second == PINS


def test_a_torch_that_was_there_stays_and_so_does_its_triton(installed):
    (asked,), _ = installed("test", torch="2.11.0+cu130", triton="3.6.0")
    assert asked == {**PINS, "torch": "2.11.0+cu130", "triton": "3.6.0"}
    _, again = installed("train")[0]
    assert again == asked


@pytest.mark.parametrize(
    ("known_to_pip", "pinned"), [("2.13.0", "2.13.0"), ("2.13.0+cpu", "2.13.0+cpu"), (None, "2.13.0+cu130")]
)
def test_a_torch_is_pinned_as_pip_knows_it(tmp_path: Path, known_to_pip: str | None, pinned: str) -> None:
    """Wheels of the package index have no build in their version, though torch itself tells it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "2.13.0+cu130"')
    if known_to_pip:
        (tmp_path / "torch.dist-info").mkdir()
        (tmp_path / "torch.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {known_to_pip}\n")
    python = tmp_path / "python"  # without the packages of this environment
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    function = re.search(r"^usable_torch\(\).*?^}", (ROOT / "tools/install.sh").read_text(), re.MULTILINE | re.DOTALL)
    assert function is not None
    command = ["bash", "-c", f'{function[0]}\nusable_torch "$0"', str(python)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    output = subprocess.run(command, env=environment, text=True, check=True, capture_output=True).stdout
    assert output.split() == [pinned, str(tmp_path)]


def test_a_torch_without_triton_gets_the_pinned_one(installed):
    (asked,), _ = installed("test", torch="2.15.0+cpu")
    assert asked == {**PINS, "torch": "2.15.0+cpu"}


def test_a_torch_can_be_named(installed):
    (bare, rest), output = installed("test", "2.15.0")
    assert {"torch", "triton"} & bare.keys() == set()
    assert rest == {**PINS, "torch": "2.15.0"} and "torch 2.15.0" in output


def test_pip_says_nothing_where_all_goes_well(installed, tmp_path: Path):
    installed("train")
    assert " install -q " in f" {(tmp_path / 'venv' / 'bin' / 'pip.log').read_text()}"
