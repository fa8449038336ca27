"""Outcomes of several runs of the tool in one file of JSON lines: the newest of a test counts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tests.peers.report import Outcome, Run


def save(file: Path, suite: str, outcome: Outcome) -> None:
    """Add one outcome; equal receipts of its ranks and steps are one."""
    receipts = {json.dumps(receipt, sort_keys=True): receipt for receipt in map(dict, outcome.receipts)}
    line = dataclasses.asdict(dataclasses.replace(outcome, receipts=tuple(receipts.values())))
    with file.open("a") as lines:
        lines.write(json.dumps({"suite": suite, **line}) + "\n")


def load(file: Path) -> dict[str, list[Outcome]]:
    """Suite -> its outcomes, in the order in which tests were first run. A file that does not exist has none."""
    found: dict[str, dict[str, Outcome]] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        given = json.loads(line)
        runs = {backend: Run(**run) for backend, run in given["runs"].items()}
        outcome = Outcome(given["test"], runs, tuple(given["receipts"]), tuple(given["watches"]))
        found.setdefault(given["suite"], {})[outcome.test] = outcome
    return {suite: list(tests.values()) for suite, tests in found.items()}
