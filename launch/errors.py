"""Errors of launch scripts: one line for each job, not for each rank. Nothing here imports torch, so it is quick."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

USER_ERROR = 2
"""Exit status of a script after a UserError, and after wrong flags."""

PATIENCE_SECONDS = 20.0
"""Time for which other ranks leave the word to rank 0. On a busy machine it took six seconds to exit."""


class UserError(Exception):
    """An error that the user can correct; it is printed without a traceback."""


def tell(text: str, stream: TextIO | None) -> None:
    """Print a line. An absent, closed or full stream never ends the run."""
    with contextlib.suppress(Exception):
        print(text, file=stream, flush=True)


def leave_the_word_to_rank_0() -> None:
    """Wait on other ranks of torchrun: rank 0 nearly always has the same error, and torchrun ends all when it exits.

    An error of this rank alone, as on a host without the data, is said after the wait.
    """
    if os.environ.get("RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's, which a script may have taken to end a step first
        time.sleep(PATIENCE_SECONDS)


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Print a UserError as one line, once for all ranks that raise it, and exit with status 2.

    Under torchrun the line also goes into its error file, so that torchrun's summary ends with it.
    """
    try:
        yield
    except UserError as error:
        leave_the_word_to_rank_0()
        tell(f"error (rank {os.environ.get('RANK', '0')}): {error}", sys.stderr)
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            text = {
                "message": str(error),
                "extraInfo": {"py_callstack": str(error), "timestamp": str(int(time.time()))},
            }
            with contextlib.suppress(OSError):
                Path(path).write_text(json.dumps({"message": text}))
        raise SystemExit(USER_ERROR) from None
