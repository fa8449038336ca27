"""Run torchrun with a short error: python launch/run.py --standalone --nproc-per-node 2 launch/train.py

Arguments are torchrun's. If a rank fails, torchrun itself prints forty lines below the relevant error; here it is one.
"""

from __future__ import annotations

import sys

USAGE = """usage: python launch/run.py [options of torchrun] SCRIPT [flags of the script]

Run a script in several processes, as torchrun does. If one fails, its error is the last line.

On one machine:   python launch/run.py --standalone --nproc-per-node 2 launch/train.py --backend dcompile
On each of two:   python launch/run.py --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \\
                      --rdzv-endpoint first-host:29500 launch/train.py --backend dcompile

  --nproc-per-node N   processes on this machine: one for each GPU, or the number of CPU cores to share
  --standalone         all processes are on this machine
  --max-restarts N     start anew so often after a failure; the script's --resume auto goes on from its checkpoint

`python launch/run.py SCRIPT --help` has the script's flags, `torchrun --help` all options.
"""

if __name__ == "__main__" and sys.argv[1:] in ([], ["-h"], ["--help"]):
    sys.stdout.write(USAGE)  # here, since the imports below take seconds
    raise SystemExit(0 if sys.argv[1:] else 2)

import logging
import signal
from collections.abc import Callable, Sequence

from errors import USER_ERROR, tell
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun


def describe(rank: int, failure: ProcessFailure) -> str:
    """Describe the first failure: its rank, process and cause."""
    number = -failure.exitcode
    cause = f"was killed by {signal.Signals(number).name}" if number > 0 else f"exited with status {failure.exitcode}"
    return f"launch: rank {rank} (process {failure.pid}) failed first: it {cause}"


def main(argv: Sequence[str] | None = None, run: Callable[[list[str]], object] = torchrun) -> None:
    """Run torchrun; exit with the status of the rank that failed first. A script's error is printed once."""
    for part in ("api", "errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{part}").setLevel(logging.CRITICAL)
    try:
        run(list(sys.argv[1:] if argv is None else argv))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != USER_ERROR:
            tell(describe(rank, failure), sys.stderr)
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode) from None
    except SignalException as stop:
        raise SystemExit(128 + stop.sigval) from None


if __name__ == "__main__":
    main()
