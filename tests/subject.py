"""The backend that end-to-end tests run. TEST_BACKEND=inductor or aot_eager shows if a failure is the test's own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.device import compute_exactly

BACKEND = os.environ.get("TEST_BACKEND", "dcompile")
IS_DCOMPILE = BACKEND == "dcompile"
ROOT = Path(__file__).parent.parent


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Compile as a new process would, under a fixed seed; with one thread, for tests share the machine."""
    torch.compiler.reset()
    torch.manual_seed(0)
    compute_exactly()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.compiler.reset()


def run(*command: str, timeout: int = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root as a user would, with one thread a process."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, timeout=timeout, capture_output=True, text=True)


def torchrun(
    ranks: int, *command: str, timeout: int = 120, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun on this machine's CPU."""
    launcher = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return run(*launcher, *command, timeout=timeout, **environment)
