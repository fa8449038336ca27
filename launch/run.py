"""Run torchrun with a short error: python launch/run.py --standalone --nproc-per-node 2 launch/train.py

Arguments are torchrun's. If a rank fails, torchrun itself prints forty lines below the relevant error; here it is one.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence

from common import USER_ERROR, tell
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
