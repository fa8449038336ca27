"""Workers that live long and are fed over pipes; one that crashes or hangs is replaced."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.ops.cases import LIMIT, Case

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 120
STARTED_AFTER = 150
"""Cases after which a worker is replaced: Dynamo and loaded kernels take memory that nobody gives back."""


class Worker:
    """One process; `ask` starts it when there is none."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
        self.process: subprocess.Popen[str] | None = None
        self.asked = 0

    def ask(self, case: Case, limit: int, timeout: float) -> dict[str, Any]:
        if self.process is None or self.asked >= STARTED_AFTER:
            self.stop()
            self._start()
        self.asked += 1
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"case": str(case), "limit": limit}) + "\n")
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], timeout)
            answer = self.process.stdout.readline() if ready else ""
        except BrokenPipeError:
            ready, answer = [True], ""
        if answer:
            return json.loads(answer)  # type: ignore[no-any-return]
        what = f"crashed with status {self.process.wait(5)}" if ready else f"took more than {timeout:.0f} s"
        self.stop()
        return {"case": str(case), "status": "fail", "detail": f"the process {what}"}

    def _start(self) -> None:
        self.asked = 0
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.ops.worker"],
            cwd=ROOT, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
            self.process = None


def run_all(
    cases: Iterable[Case], jobs: int, *, limit: int = LIMIT, timeout: float = TIMEOUT_S, until: float | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Answers, as they come. After the time `until` (of time.monotonic) no further case is begun."""
    waiting: SimpleQueue[Case | None] = SimpleQueue()
    answers: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    for case in (*cases, *[None] * jobs):
        waiting.put(case)

    def serve() -> None:
        worker = Worker(environment or {})
        try:
            while (case := waiting.get()) is not None and (until is None or time.monotonic() < until):
                answers.put(worker.ask(case, limit, timeout))
        finally:
            worker.stop()
            answers.put(None)

    with ThreadPoolExecutor(jobs) as threads:
        for _ in range(jobs):
            threads.submit(serve)
        for _ in range(jobs):
            yield from iter(answers.get, None)
