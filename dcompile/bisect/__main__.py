"""Find what is wrong in a training script: `python -m dcompile.bisect train.py`, or `torchrun -m dcompile.bisect ...`.

The script runs as it is, in this process, until its optimizer has stepped. Each program of each model that it compiles
is compared with ATen's evaluation of the same graph, on the inputs that the script gives it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dcompile.api import SERVICES, ordinary_services
from dcompile.bisect.recording import CallLog, CheckingCompiler
from dcompile.bisect.search import CALLS, Bisection, find_in_programs
from dcompile.capture.services import Services
from dcompile.config import Config
from dcompile.logs import rank
from dcompile.precompile.job import run_steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script and print what was found. Return 1 if something is wrong, and 2 if the script does not exist."""
    options = _parser().parse_args(arguments)
    if not Path(options.script).is_file():
        sys.stderr.write(f"dcompile: there is no script {options.script}; give its path before its arguments\n")
        return 2
    log = CallLog(calls=CALLS)

    def services(config: Config) -> Services:
        return ordinary_services(config, CheckingCompiler(config, log))

    token = SERVICES.set(services)
    try:
        run_steps(options.script, options.arguments, options.steps)
    finally:  # also if what is wrong has ended the script
        SERVICES.reset(token)
        found = Bisection(find_in_programs(log), log.checked, log.unchecked)
        if found or rank() == 0:
            sys.stdout.write(f"rank {rank()}: {found}\n" if rank() else f"{found}\n")
        if found.finding is not None and found.finding.repro is not None:
            path = found.finding.repro.save(Path(options.output) / f"rank{rank()}")
            sys.stdout.write(f"python {path} shows it\n")
    return int(bool(found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dcompile.bisect", description=__doc__)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps to take (default: 2)")
    parser.add_argument("--output", default="dcompile_bisect", help="folder for a script that shows the difference")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
