"""The backend that end-to-end tests run. TEST_BACKEND=inductor or aot_eager shows if a failure is the test's own."""

import os
import subprocess
import sys
from pathlib import Path

BACKEND = os.environ.get("TEST_BACKEND", "dcompile")
IS_DCOMPILE = BACKEND == "dcompile"
ROOT = Path(__file__).parent.parent


def run(*command: str, timeout: int = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root as a user would, with one thread a process."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, timeout=timeout, capture_output=True, text=True)


def torchrun(ranks: int, *command: str, timeout: int = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun on this machine's CPU."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return run(*launcher, *command, timeout=timeout, **environment)
