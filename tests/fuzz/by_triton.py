"""Runs programs of loops by Triton's interpreter, which has to be chosen before Triton is imported: in another process.

python -m tests.fuzz.by_triton answers each line, a list of cases, with a line: for each its outputs, or its error.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests import nursery
from tests.fuzz import records
from tests.fuzz.records import Case

DEADLINE = 120.0
"""Seconds for a batch of programs, which takes a few."""
MARK = "answer: "
"""What an answer begins with: libraries may print too."""


def run_triton(cases: Sequence[Case]) -> list[list[np.ndarray]]:
    """Outputs of each program. Raises RuntimeError with the first error."""
    try:
        found = _worker().ask([records.of_case(case) for case in cases])
    except (RuntimeError, BrokenPipeError):  # the next call starts another process
        _worker().stop()
        _worker.cache_clear()
        raise
    for answer in found:
        if isinstance(answer, str):
            raise RuntimeError(answer)
    return [[records.array_of(saved) for saved in answer] for answer in found]


@cache
def _worker() -> _Worker:
    return _Worker()


class _Worker:
    """A process that interprets until this one ends, or it fails."""

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [nursery.python(), "-m", "tests.fuzz.by_triton"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        atexit.register(self.stop)

    def ask(self, cases: list[records.Record]) -> list[Any]:
        """An answer for each. Raises RuntimeError where none comes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(cases).encode() + b"\n")
        self._process.stdin.flush()
        while True:
            if not select.select([self._process.stdout], [], [], DEADLINE)[0]:
                raise RuntimeError(f"Triton's interpreter did not answer within {DEADLINE:.0f} s")
            line = self._process.stdout.readline().decode()
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
            if not line:
                raise RuntimeError(f"Triton's interpreter ended with exit status {self._process.wait()}")

    def stop(self) -> None:
        """End it, and close what leads there."""
        with self._process:
            self._process.kill()


def main() -> None:
    from tests.codegen.emit import interpreted
    from tests.fuzz.checks import numbers_of

    def answer(record: records.Record) -> list[Any] | str:
        program, inputs = records.case_of(record)
        try:
            outputs = interpreted.run(program, inputs, numbers_of(program, inputs))
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[-400:]}"
        return [records.of_array(np.asarray(output)) for output in outputs]

    for line in sys.stdin:
        sys.stdout.write(MARK + json.dumps([answer(record) for record in json.loads(line)]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
