"""Run PyTorch's own tests with dcompile in the place of its compilers, and write docs/lab/peer-suites.md.

    python -m tests.peers --pytorch DIR [--suite fsdp2|ddp|dtensor|dynamo|inductor] [-k PART] [--output FILE]

DIR is a checkout of PyTorch, of the installed version; only its test files are read. Exit status 1 if a test fails that
passes with stock PyTorch and with aot_eager.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.peers.report import Outcome, page
from tests.peers.session import ROOT, Session, outcomes
from tests.peers.suites import SUITES, Suite, files_of, selected


def run_suite(suite: Suite, arguments: argparse.Namespace, folder: Path) -> list[Outcome]:
    """All selected tests of one suite, told line by line."""
    found = []
    for file in files_of(suite, arguments.pytorch):
        try:
            tests = Session(suite, "stock", arguments.deadline, folder).tests_in(file)
        except RuntimeError as error:
            print(f"{suite.name} {file.name}: {error}", flush=True)
            continue
        for outcome in outcomes(suite, file, selected(tests, suite, arguments.keys), arguments.deadline, folder):
            print(f"{suite.name} {outcome.test}: {outcome.verdict} {outcome.runs['dcompile'].text}", flush=True)
            found.append(outcome)
    return found


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pytorch", type=Path, required=True, help="a checkout of PyTorch")
    parser.add_argument("--suite", choices=SUITES, action="append", help="which tests; fsdp2 and ddp by default")
    parser.add_argument("-k", dest="keys", action="append", default=[], help="part of a test's name, or a pattern")
    parser.add_argument("--deadline", type=float, default=300, help="seconds that one test may take")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/lab/peer-suites.md", help="the page to write")
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        names = arguments.suite or ["fsdp2", "ddp"]
        suites = {suite: run_suite(SUITES[suite], arguments, Path(name)) for suite in names}
    made_with = ", ".join([f"torch {torch.__version__} on {platform.machine()}", *(f"-k {k}" for k in arguments.keys)])
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(page(suites, made_with))
    return int(any(outcome.verdict == "own" for found in suites.values() for outcome in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
