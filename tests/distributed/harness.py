"""Multi-rank tests: processes on Gloo (or NCCL) that stay up for many cases, each case under its own deadline.

Cases share the pair; a case that fails or overruns takes it down, and the next one starts a new pair.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from tests import nursery

HOST = "127.0.0.1"
START_S = 120
"""Longest time a pair may take to start, on a busy machine."""
STACKS_S = 1
"""For processes to have written their stacks."""
EXIT_S = 5
"""For a process that has closed its pipe to be gone."""
GROUP_TIMEOUT_S = 60
"""Time-out of collectives: a rank whose peer has failed ends after this, with an error."""


@dataclass(frozen=True)
class Outcome:
    """What a case came to on one rank: its value, or the traceback of what it raised."""

    value: Any = None
    error: str = ""
    kind: str = ""
    """Name of the exception's type."""


class RanksFailed(AssertionError):
    """A case raised on some rank, or did not end in time; the message has every rank's traceback."""


def _serve(rank: int, world: int, folder: str, port: int, backend: str, environment: dict[str, str], pipe: Any) -> None:
    """A rank's process: run cases as they are named, until told to stop."""
    nursery.born(environment)
    stacks = open(Path(folder) / f"stacks{rank}", "w")  # noqa: SIM115  open for the process's life
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(stacks, all_threads=True)  # what a fatal signal ends leaves its stacks there, too
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    if os.environ.get("DCOMPILE_TEST_DOUBLE"):
        del os.environ["DCOMPILE_TEST_DOUBLE"]
        importlib.import_module("tests.capture.double").install()

    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
    )
    pipe.send(Outcome("ready"))
    while (case := pipe.recv()) is not None:
        name, keywords = case
        try:
            module, function = name.split(":")
            torch._dynamo.reset()
            torch.manual_seed(0)
            value = getattr(importlib.import_module(module), function)(**keywords)
            pipe.send(Outcome(value))
        except BaseException as error:
            pipe.send(Outcome(None, f"rank {rank}: {traceback.format_exc()}", type(error).__name__))
            os._exit(1)  # as a script that raises: peers in a collective see the connection close
    dist.destroy_process_group()


class Ranks:
    """A pair (or more) of processes. `run` calls a function on every rank and returns what each came to."""

    def __init__(
        self, world: int = 2, environment: dict[str, str] | None = None, backend: Literal["gloo", "nccl"] = "gloo"
    ) -> None:
        self.world = world
        self._backend = backend
        self._environment = {"OMP_NUM_THREADS": "1", "DCOMPILE_VERIFY": "1", "DCOMPILE_RECEIPT": "0"} | (
            environment or {}
        )
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder = ""
        self._store: Any = None

    def run(self, case: str, deadline_s: float = 120, /, **keywords: Any) -> list[Any]:
        """Value of `module:function` on each rank. RanksFailed if any raised."""
        outcomes = self.outcomes(case, deadline_s, **keywords)
        errors = [outcome.error for outcome in outcomes if outcome.error]
        if errors:
            raise RanksFailed("\n".join((f"{case}({keywords}) failed", *errors)))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, case: str, deadline_s: float = 120, /, **keywords: Any) -> list[Outcome]:
        """What each rank came to; RanksFailed, with every rank's stacks, only if the deadline passes."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((case, keywords))
        outcomes = self._collect(f"{case}({keywords})", deadline_s)
        if any(outcome.error for outcome in outcomes):
            self.stop()  # the ranks may be out of step now
        return outcomes

    def _start(self) -> None:
        context = nursery.context()
        self._folder = tempfile.mkdtemp(prefix="ranks")
        environment = {**os.environ, **self._environment}
        # Kept by this process, as torchrun does it, whichever ranks end. Not in a file: where a rank ends while one of
        # its threads writes, the others read half an entry for ever (FileStore of torch 2.13, a hang in a run of CI)
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            here, there = context.Pipe()
            arguments = (rank, self.world, self._folder, self._store.port, self._backend, environment, there)
            process: Any = context.Process(target=_serve, args=arguments, daemon=True)
            with nursery.starting():
                process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        self._collect("starting", START_S)

    def _collect(self, what: str, deadline_s: float) -> list[Outcome]:
        end = time.monotonic() + deadline_s
        waiting = dict(enumerate(self._pipes))
        outcomes: dict[int, Outcome] = {}
        while waiting:
            ready = connection.wait(list(waiting.values()), max(end - time.monotonic(), 0))
            if not ready:
                stacks = self._dump_stacks()
                self.stop(patience_s=0)
                raise RanksFailed(f"{what}: no answer from ranks {sorted(waiting)} within {deadline_s:g} s\n{stacks}")
            for rank, pipe in list(waiting.items()):
                if pipe in ready:
                    del waiting[rank]
                    try:
                        outcomes[rank] = pipe.recv()
                    except EOFError:
                        outcomes[rank] = Outcome(None, self._death(rank), "EOFError")
        return [outcomes[rank] for rank in range(self.world)]

    def _death(self, rank: int) -> str:
        """What there is to say of a process that is gone: how it ended, and its stacks if a fatal signal did it."""
        self._processes[rank].join(EXIT_S)
        stacks = (Path(self._folder) / f"stacks{rank}").read_text()
        return f"rank {rank}: the process died (exit code {self._processes[rank].exitcode})\n{stacks}".rstrip()

    def _dump_stacks(self) -> str:
        end, files = time.monotonic() + STACKS_S, []
        for rank, process in enumerate(self._processes):
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
                files.append(Path(self._folder) / f"stacks{rank}")
        # a thread's outermost call is written last
        while time.monotonic() < end and not all("_serve" in path.read_text() for path in files):
            time.sleep(0.05)
        return "\n".join(path.read_text() for path in sorted(Path(self._folder).glob("stacks*")))

    def stop(self, patience_s: float = 3) -> None:
        """End all processes: gently, and after `patience_s` not."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it may be gone already
                pipe.send(None)
        for process in self._processes:
            process.join(patience_s)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None
