"""Converts 8-bit floats in Triton's interpreter: a process of its own, as `interpreted_cases` is.

python -m tests.codegen.emit.interpreted_float8: a line of JSON, from the name of each program to what is wrong, or "".
"""

from __future__ import annotations

import json
import sys

import numpy as np

from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Program
from tests.codegen.emit import float8, interpreted


def problem(program: Program, inputs: dict[str, np.ndarray]) -> str:
    """Where a kernel gives other bits than the program means; empty if nowhere."""
    try:
        results = interpreted.run(program, inputs)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-400:]}"
    return "".join(map(float8.differs, interpret(program, inputs), results))


if __name__ == "__main__":
    found = {name: problem(*case) for name, case in float8.programs(every=7).items()}
    sys.stdout.write(json.dumps(found) + "\n")
