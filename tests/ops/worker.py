"""A process that runs cases, as they come through a pipe. What crashes here costs one group of cases."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from tests import nursery
from tests.device import compute_exactly, device, seed_cpu_alone
from tests.ops.cases import Case
from tests.ops.check import run
from tests.poison import poisoned


def serve(pipe: Any, environment: dict[str, str]) -> None:
    """Until the pipe is closed: take cases and a limit, give answers, or in one line what is missing here."""
    nursery.born(environment)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)  # what operators print
    warnings.simplefilter("ignore")
    compute_exactly()
    seed_cpu_alone()
    with poisoned():  # fresh pages hold zeros, which would be right for much that is not written at all
        while True:
            try:
                names, limit = pipe.recv()
            except EOFError:
                return
            pipe.send(_answer(names, limit))


def _answer(names: list[str], limit: int | None) -> list[dict[str, Any]] | str:
    if os.environ.get("OPS_CRASH_AT") in names:
        os.abort()  # for the test of what a crash costs
    try:
        if os.environ.get("OPS_MISSING_AT") in names:
            raise ModuleNotFoundError("No module named 'planted'")  # for the test of an incomplete environment
        found = run(list(map(Case.parse, names)), limit)
        if device() == "cuda":
            torch.cuda.synchronize()  # raises what ended the device for this process: the cases are asked anew
        return found
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
