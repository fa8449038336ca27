"""End training on SIGINT or SIGTERM: after the step in progress, on all ranks together, with a checkpoint."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist
from common import World, join_world, leave_world
from errors import clear_errors

GRACE_SECONDS = 25.0
"""Time for the step and the checkpoint. torchrun kills processes 30 s after it has sent them a signal."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """The first signal that asked this process to stop, 0 if none has.

    Ranks get Ctrl-C twice: a terminal sends it to torchrun and to all ranks, and torchrun forwards it.
    """

    def __init__(self) -> None:
        self.signal = 0

    def request(self, number: int) -> None:
        self.signal = self.signal or number

    def agreed(self) -> int:
        """Return a signal that some rank has got, equal on all ranks; 0 if none. Every rank calls it after a step."""
        asked = torch.tensor(self.signal)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return int(asked)


def catch_signals(grace_seconds: float = GRACE_SECONDS) -> Interruption:
    """Record SIGINT and SIGTERM instead of ending at once, but end `grace_seconds` later in any case.

    The Python handler runs only when the main thread is back in Python, which never happens in a collective without its
    peers. The interpreter also writes the signal's number to a pipe at once, where a thread waits and ends the process.
    """
    interruption = Interruption()

    def note(number: int, frame: FrameType | None) -> None:
        interruption.request(number)

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def watch() -> None:
        while (number := os.read(read_end, 1)[0]) not in SIGNALS:
            pass
        time.sleep(grace_seconds)
        os._exit(128 + number)

    for number in SIGNALS:
        signal.signal(number, note)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
    return interruption


def run_training(train: Callable[[argparse.Namespace, World, Interruption], int], args: argparse.Namespace) -> None:
    """Run one rank's training with these signal handlers; exit with its status if that is not 0."""
    interruption = catch_signals()
    with clear_errors():
        world = join_world(args.device)
        status = train(args, world, interruption)
    leave_world()
    if status:
        raise SystemExit(status)
