"""Programs that once failed, as files: their own text and inputs, so that no seed has to go on meaning the same."""

from __future__ import annotations

import json
import re
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dcompile.ir.index
import dcompile.ir.nodes
from dcompile.ir.text import show
from tests.fuzz.checks import Case
from tests.fuzz.ranks_session import RanksProgram
from tests.fuzz.torch_session import TorchProgram

KEPT = Path(__file__).parent / "kept"
NAMES = {
    **vars(dcompile.ir.index),
    **vars(dcompile.ir.nodes),
    "inf": inf,
    "nan": nan,
    "TorchProgram": TorchProgram,
    "RanksProgram": RanksProgram,
    "torch": torch,
}
"""What the repr of a program is made of."""


def keep(check: str, seed: int, case: Case | TorchProgram | RanksProgram) -> Path:
    """Write a failing case; returns the file."""
    record: dict[str, Any] = {"check": check, "seed": seed}
    if isinstance(case, TorchProgram | RanksProgram):
        record |= {"shown": str(case), "program": repr(case)}
    else:
        program, inputs = case
        saved = {name: [str(a.dtype), list(a.shape), a.ravel().tolist()] for name, a in inputs.items()}
        record |= {"shown": show(program), "program": repr(program), "inputs": saved}
    KEPT.mkdir(exist_ok=True)
    path = KEPT / f"{re.sub(r'[^a-z]+', '_', check)}_{seed}.json"
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    path.write_text(f"{{\n{lines}\n}}\n")
    return path


def kept_case(path: Path) -> tuple[str, Any]:
    """The check that failed, and the case."""
    record = json.loads(path.read_text())
    program = eval(record["program"], dict(NAMES))
    if isinstance(program, TorchProgram | RanksProgram):
        return record["check"], program
    saved = record["inputs"].items()
    inputs = {name: np.asarray(values, dtype).reshape(shape) for name, (dtype, shape, values) in saved}
    return record["check"], (program, inputs)
