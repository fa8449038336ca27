"""How long each test file takes, as the last run that was told to record it found: the longest files begin first.

`make test` with `TESTS=--record-durations` writes `tests/durations.json`. A file begun last would leave other workers
idle. `test_lifetime.py` comes before all others: it looks through all objects there are, while they are few.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
RECORD = ROOT / "durations.json"
FIRST = "test_lifetime.py"
MIN_SECONDS = 1.0
"""Shorter files are not recorded: their order does not matter."""


def sort_longest_first(items: list[pytest.Item], seconds: dict[str, float]) -> None:
    """Sort tests by the recorded time of their file, files without a record last."""
    names = {path: path.relative_to(ROOT).as_posix() for path in {item.path for item in items}}
    items.sort(key=lambda item: (names[item.path] != FIRST, -seconds.get(names[item.path], 0.0)))


def recorded() -> dict[str, float]:
    """File name relative to tests/ -> seconds of its tests in one worker."""
    return {name: float(seconds) for name, seconds in json.loads(RECORD.read_text()).items()}


class Recorder:
    """A pytest plugin that adds up the durations of all reports and writes them when the run ends."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for each phase of each test; under xdist in the controller too."""
        file = report.nodeid.partition("::")[0]
        self.seconds[file.removeprefix(f"{ROOT.name}/")] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Written by the process that has seen all reports, not by workers."""
        if not hasattr(session.config, "workerinput"):
            long = {name: round(total, 1) for name, total in self.seconds.most_common() if total >= MIN_SECONDS}
            RECORD.write_text(json.dumps(long, indent=0) + "\n")
