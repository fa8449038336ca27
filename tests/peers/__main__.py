"""Run PyTorch's own tests with dcompile in the place of its compilers, and write docs/lab/peer-suites.md.

    python -m tests.peers --pytorch DIR [--suite fsdp2|ddp|dtensor|dynamo|inductor] [-k PART] [--file PART]
        [--sample COUNT] [--results FILE [--new]] [--note TEXT] [--output FILE]

DIR is a checkout of PyTorch, of the installed version; only its test files are read. A suite takes hours on two cores:
with `--results`, several runs fill one page. Exit status 1 if a test fails that passes with stock PyTorch and with
aot_eager.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.peers.kept import load, save
from tests.peers.report import Outcome, page
from tests.peers.session import ROOT, Session, outcomes
from tests.peers.suites import SUITES, Suite, files_of, sampled, selected


def run_suite(suite: Suite, arguments: argparse.Namespace, folder: Path, known: Sequence[Outcome]) -> list[Outcome]:
    """All selected tests of one suite, told line by line. Those that are `known` do not run with `--new`."""
    found, done = [], {outcome.test for outcome in known} if arguments.new else set()
    for file, tests in sampled(tests_of(suite, arguments, folder), arguments.sample).items():
        wanted = [test for test in tests if test not in done]
        for outcome in outcomes(suite, file, wanted, arguments.deadline, folder):
            print(f"{suite.name} {outcome.test}: {outcome.verdict} {outcome.runs['dcompile'].text}", flush=True)
            found.append(outcome)
            if arguments.results is not None:
                save(arguments.results, suite.name, outcome)
    return found


def tests_of(suite: Suite, arguments: argparse.Namespace, folder: Path) -> dict[Path, list[str]]:
    """File -> its selected tests. Files that cannot be imported are told, and left out."""
    found = {}
    for file in files_of(suite, arguments.pytorch, arguments.files):
        try:
            tests = Session(suite, "stock", arguments.deadline, folder).tests_in(file)
        except RuntimeError as error:
            print(f"{suite.name} {file.name}: {error}", flush=True)
        else:
            found[file] = selected(tests, suite, arguments.keys)
    return found


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pytorch", type=Path, required=True, help="a checkout of PyTorch")
    parser.add_argument("--suite", choices=SUITES, action="append", help="which tests; fsdp2 and ddp by default")
    parser.add_argument("-k", dest="keys", action="append", default=[], help="part of a test's name, or a pattern")
    parser.add_argument("--file", dest="files", action="append", default=[], help="part of a test file's name")
    parser.add_argument("--sample", type=int, default=0, help="this many tests of each suite, evenly spread; 0: all")
    parser.add_argument("--results", type=Path, help="a file that keeps outcomes: the page shows all that are in it")
    parser.add_argument("--new", action="store_true", help="run only tests that --results has no outcome of")
    parser.add_argument("--note", default="", help="what the page says of the test files, such as their date")
    parser.add_argument("--deadline", type=float, default=300, help="seconds that one test may take")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/lab/peer-suites.md", help="the page to write")
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        names = arguments.suite or ["fsdp2", "ddp"]
        known = {} if arguments.results is None else load(arguments.results)
        suites = {suite: run_suite(SUITES[suite], arguments, Path(name), known.get(suite, [])) for suite in names}
    shown = suites if arguments.results is None else load(arguments.results)
    keys = [] if arguments.results else [f"-k {key}" for key in arguments.keys]
    note = [arguments.note] if arguments.note else []
    made_with = ", ".join([f"torch {torch.__version__} on {platform.machine()}", *note, *keys])
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(page(shown, made_with))
    return int(any(outcome.verdict == "own" for found in suites.values() for outcome in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
