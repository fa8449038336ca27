"""FlexAttention's kernels in Triton's interpreter: a process of its own, as `interpreted_cases` is.

python -m tests.codegen.emit.interpreted_flex: a line of JSON, from the name of each case to what is wrong, or "".
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from tests.codegen.emit import flex, interpreted


def problem(case: flex.Case) -> str:
    """Which results are further from float64's than rounding explains; empty if none."""
    lowered, inputs = case.lowered()
    if lowered.declined:
        return f"declined: {lowered.declined}"
    named = dict(zip(lowered.program.inputs, map(_array, inputs), strict=True))
    results = interpreted.run(lowered.program, named, flex.sizes_of(lowered.program, inputs))
    wrong = []
    names = ("out", "log", "largest", "q", "k", "v", *(f"c{number}" for number in range(len(case.reads) * case.trains)))
    for name, found, exact in zip(names, results, case.exact(), strict=True):
        given, true = torch.from_numpy(np.asarray(found)).double(), exact
        given, true = given.nan_to_num(neginf=-9e9), true.nan_to_num(neginf=-9e9)
        limit = (2e-2 if case.dtype == torch.bfloat16 else 3e-3) * max(1.0, float(true[true > -1e9].abs().max()))
        if not (given - true).abs().max() <= limit:
            wrong.append(f"{name} is off by {(given - true).abs().max():.2e}, of {limit:.2e}")
    return "; ".join(wrong)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


if __name__ == "__main__":
    names = sys.argv[1:] or [*flex.CASES]
    sys.stdout.write(json.dumps({name: problem(flex.CASES[name]) for name in names}) + "\n")
