"""Tests in child processes under a deadline each: what they recorded, read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.peers.report import WITHOUT_US, Outcome, Run, fails_as_well
from tests.peers.suites import Suite

ROOT = Path(__file__).parents[2]
IMPORT_SECONDS = 180
"""Longest time for a child to import torch and the test file, on a busy machine."""


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a child and every process that it started."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


@dataclass(frozen=True)
class Found:
    """What one test came to in one child: its run, and what its ranks recorded."""

    run: Run
    receipts: tuple[Mapping[str, Any], ...] = ()
    watches: tuple[str, ...] = ()


class Session:
    """A suite's files under one backend."""

    def __init__(self, suite: Suite, backend: str, deadline_seconds: float, folder: Path) -> None:
        self.suite = suite
        self.backend = backend
        self.deadline_seconds = deadline_seconds
        self.folder = folder

    def _environment(self, records: Path) -> dict[str, str]:
        (self.folder / "barrier").touch()  # test_distributed_spawn.py looks for it
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(self.deadline_seconds)),
            "TEMP_DIR": str(self.folder),
            "INIT_METHOD": f"file://{self.folder}/shared_init_file",  # ranks name the class by it
            "PEERS_BACKEND": "dcompile" if self.backend == "aten_kernels" else self.backend,
            **({"DCOMPILE_KERNELS": "aten"} if self.backend == "aten_kernels" else {}),
            "PEERS_ROOTS": " ".join(self.suite.roots),
            "PEERS_RECORDS": str(records),
            **self.suite.environment,
        }

    @contextmanager
    def _child(self, records: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "tests.peers.child", *arguments]
        with (self.folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment(records),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            yield process
        finally:
            end(process)

    def tests_in(self, file: Path) -> list[str]:
        """Ids of the tests in a file. Raises RuntimeError if it cannot be imported."""
        records = _new_records(self.folder)
        with self._child(records, "list", str(file)) as process:
            try:
                process.wait(IMPORT_SECONDS)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{file.name} was not imported in {IMPORT_SECONDS} s") from None
        found = [record["tests"] for record in _read(records)]
        if not found:
            raise RuntimeError(f"{file.name} cannot be imported; see {self.folder / 'output.txt'}")
        return [str(test) for test in found[0]]

    def run(self, file: Path, tests: Sequence[str]) -> dict[str, Found]:
        """What each test came to. Past the deadline a test's child is killed, and another goes on behind it."""
        left, done = list(tests), {}
        while left:
            found = self._run_some(file, left)
            done.update(found)
            left = [test for test in left if test not in found]
        return done

    def _run_some(self, file: Path, tests: list[str]) -> dict[str, Found]:
        records = _new_records(self.folder)
        began, known, late = time.monotonic(), 0, False
        with self._child(records, "run", str(file), *tests) as process:
            while process.poll() is None and not late:
                time.sleep(0.2)
                marks = sum(record["kind"] in ("begin", "end") for record in _read(records))
                if marks > known:
                    began, known = time.monotonic(), marks
                late = time.monotonic() - began > (self.deadline_seconds if known else IMPORT_SECONDS)
        return results(_read(records), tests, late)


def results(records: Sequence[Mapping[str, Any]], tests: Sequence[str], late: bool) -> dict[str, Found]:
    """What records say of the tests that have begun; one that has not ended was late, or ended its process."""
    receipts: dict[str, list[Mapping[str, Any]]] = {}
    watches: dict[str, dict[str, None]] = {}
    runs: dict[str, Run] = {}
    for record in records:
        test = record.get("test", "")
        match record["kind"]:
            case "begin":
                runs[test] = Run("deadline") if late else Run("failed", "the process ended")
            case "end":
                runs[test] = Run(record["status"], last_error(record["text"]))
            case "receipt":
                receipts.setdefault(_plain(test), []).append(record)
            case "watches":
                watches.setdefault(_plain(test), {})[record["what"]] = None
    if not runs and tests:  # not even begun
        runs[tests[0]] = Run("deadline") if late else Run("failed", "the file could not be imported")
    return {
        test: Found(run, tuple(receipts.get(_plain(test), ())), tuple(watches.get(_plain(test), ())))
        for test, run in runs.items()
    }


def _plain(test: str) -> str:
    """An id without its module, which is another one in ranks."""
    return ".".join(test.split(".")[-2:])


def last_error(text: str) -> str:
    """The last line of a traceback that says what is wrong; the reason of a skip as it is."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if ("Error" in line or "Exception" in line) and not line.startswith("File ")]
    inner = [line for line in named if not line.startswith(("RuntimeError: Process", "#"))]  # "#5": a frame in C++
    differences = [f" {line}" for line in lines if line.startswith("Greatest absolute difference")]
    return (inner or named or lines or [""])[-1][:300] + "".join(differences[-1:])


def outcomes(
    suite: Suite, file: Path, tests: Sequence[str], deadline_seconds: float, folder: Path
) -> Iterator[Outcome]:
    """Run tests with dcompile; those that fail with other backends as well, until one does.

    Only where numbers are not close are inductor and ATen's kernels asked: inductor's kernels round otherwise than
    eager's, as ours do. ATen's, between the same collectives, do not.
    """
    with_ours = Session(suite, "dcompile", deadline_seconds, folder).run(file, tests)
    runs = {test: {"dcompile": found.run} for test, found in with_ours.items()}
    for backend in (*WITHOUT_US, "aten_kernels", "left_to_torch"):
        failing = [test for test in tests if _is_open(runs[test])]
        if backend in ("inductor", "aten_kernels"):
            failing = [test for test in failing if "not close" in runs[test]["dcompile"].text]
        if backend == "left_to_torch":
            failing = [test for test in failing if with_ours[test].watches]
        if failing:
            for test, found in Session(suite, backend, deadline_seconds, folder).run(file, failing).items():
                runs[test][backend] = found.run
    for test in tests:
        yield Outcome(test, runs[test], with_ours[test].receipts, with_ours[test].watches)


def _is_open(runs: Mapping[str, Run]) -> bool:
    """Whether a test that fails with dcompile may still be found to fail without it."""
    rounds = runs.get("aten_kernels") == Run("passed")
    failed = runs["dcompile"].status in ("failed", "deadline")
    return failed and not rounds and not any(fails_as_well(runs, backend) for backend in WITHOUT_US)


def _new_records(folder: Path) -> Path:
    handle, name = tempfile.mkstemp(suffix=".jsonl", dir=folder)
    os.close(handle)
    return Path(name)


def _read(records: Path) -> list[dict[str, Any]]:
    whole = [line for line in records.read_text().split("\n")[:-1] if line]
    return [json.loads(line) for line in whole]
