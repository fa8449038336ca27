"""Programs that once failed, as files: their own text and inputs, so that no seed has to go on meaning the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from dcompile.ir.text import show
from tests.fuzz import records
from tests.fuzz.ranks_session import RanksProgram
from tests.fuzz.records import Case
from tests.fuzz.torch_session import TorchProgram

KEPT = Path(__file__).parent / "kept"
NAMES = {"TorchProgram": TorchProgram, "RanksProgram": RanksProgram, "torch": torch}
"""What the repr of a program of torch's is made of."""


def keep(check: str, seed: int, case: Case | TorchProgram | RanksProgram) -> Path:
    """Write a failing case; returns the file."""
    record: dict[str, Any] = {"check": check, "seed": seed}
    if isinstance(case, TorchProgram | RanksProgram):
        record |= {"shown": str(case), "program": repr(case)}
    else:
        record |= {"shown": show(case[0])} | records.of_case(case)
    KEPT.mkdir(exist_ok=True)
    path = KEPT / f"{re.sub(r'[^a-z]+', '_', check)}_{seed}.json"
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    path.write_text(f"{{\n{lines}\n}}\n")
    return path


def kept_case(path: Path) -> tuple[str, Any]:
    """The check that failed, and the case."""
    record = json.loads(path.read_text())
    if "inputs" in record:
        return record["check"], records.case_of(record)
    return record["check"], eval(record["program"], dict(NAMES))
