"""Workers that live long and are fed over pipes; one that crashes or hangs is replaced by another of the nursery."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

from tests import nursery
from tests.ops.cases import Case, grouped
from tests.ops.worker import serve as serve_cases

TIMEOUT_S = 120
"""CPU time for each case; most groups of cases take a second together."""
STARTED_AFTER = 60
"""Groups of cases after which a worker is replaced: Dynamo and loaded kernels take memory that nobody gives back."""


class Worker:
    """One process; `ask` starts it when there is none."""

    def __init__(self, environment: dict[str, str], starting: Lock) -> None:
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.starting = starting
        """Held while a process starts, which changes this process's environment."""
        self.process: Any = None
        self.pipe: Any = None
        self.asked = 0

    def ask(self, cases: Sequence[Case], limit: int | None, timeout: float) -> list[dict[str, Any]]:
        """An answer for each of some cases that one graph may hold; what a crash or a time-out hits is asked alone."""
        answers = self._ask(cases, limit, timeout * len(cases))
        if isinstance(answers, list):
            return answers
        if len(cases) > 1:
            return [answer for case in cases for answer in self.ask([case], limit, timeout)]
        return [{"case": str(case), "status": "fail", "detail": f"the process {answers}"} for case in cases]

    def _ask(self, cases: Sequence[Case], limit: int | None, timeout: float) -> list[dict[str, Any]] | str:
        """The answers, or what happened to the process."""
        if self.process is None or self.asked >= STARTED_AFTER:
            self.stop()
            self._start()
        self.asked += 1
        try:
            self.pipe.send((list(map(str, cases)), limit))
            if self._wait(timeout):
                found: list[dict[str, Any]] | str = self.pipe.recv()
                if isinstance(found, str):
                    raise RuntimeError(f"the sweep cannot run here, at {cases[0]}: {found}")
                return found
            what = f"took more than {timeout:.0f} s"
        except (EOFError, ConnectionError):
            self.process.join(5)
            what = f"crashed with status {self.process.exitcode}"
        self.stop()
        return what

    def _wait(self, timeout: float) -> bool:
        """Whether it answers within `timeout` seconds of its own CPU time: wall time measures who else runs."""
        until, begun = time.monotonic() + 8 * timeout, _cpu_seconds(self.process.pid)
        while True:
            if self.pipe.poll(1):
                return True
            if time.monotonic() > until or _cpu_seconds(self.process.pid) - begun > timeout:
                return False

    def _start(self) -> None:
        self.asked = 0
        context: Any = nursery.context()
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=serve_cases, args=(there, self.environment), daemon=True)
        with self.starting, nursery.starting():
            self.process.start()
        there.close()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process and of the children it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run_all(
    cases: Iterable[Case], jobs: int, *, limit: int | None = None, timeout: float = TIMEOUT_S,
    until: float | None = None, environment: dict[str, str] | None = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Answers, as they come. After the time `until` (of time.monotonic) no further case is begun."""
    waiting: SimpleQueue[tuple[Case, ...] | None] = SimpleQueue()
    answers: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    starting = Lock()
    for group in (*grouped(cases), *[None] * jobs):
        waiting.put(group)

    def serve() -> None:
        worker = Worker(environment or {}, starting)
        try:
            while (group := waiting.get()) is not None and (until is None or time.monotonic() < until):
                for answer in worker.ask(group, limit, timeout):
                    answers.put(answer)
        finally:
            worker.stop()
            answers.put(None)

    with ThreadPoolExecutor(jobs) as threads:
        running = [threads.submit(serve) for _ in range(jobs)]
        for _ in range(jobs):
            yield from iter(answers.get, None)
        for server in running:
            server.result()  # raises what went wrong outside the cases
