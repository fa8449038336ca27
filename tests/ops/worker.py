"""A process that runs cases: one line of JSON in, one out. What crashes here costs one group of cases."""

from __future__ import annotations

import json
import os
import sys

import torch

from tests.device import compute_exactly, device
from tests.ops.cases import Case
from tests.ops.check import run


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what operators print does not belong among the answers
    torch.set_num_threads(1)
    compute_exactly()
    for line in sys.stdin:
        request = json.loads(line)
        if os.environ.get("OPS_CRASH_AT") in request["cases"]:
            os.abort()  # for the test of what a crash costs
        try:
            if os.environ.get("OPS_MISSING_AT") in request["cases"]:
                raise ModuleNotFoundError("No module named 'planted'")  # for the test of an incomplete environment
            found: object = run(list(map(Case.parse, request["cases"])), request["limit"])
            if device() == "cuda":
                torch.cuda.synchronize()  # raises what ended the device for this process: the cases are asked anew
        except ImportError as error:
            found = {"missing": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
