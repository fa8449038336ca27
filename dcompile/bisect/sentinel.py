"""The sentinel: a running job checks one call of each program in every period, by ATen, and replaces one that is wrong.

Which call of a period it is follows from the program's name and the number of its period, so that all ranks check the
same one. A check copies what the program may change of its inputs, runs it, and compares: see `recording`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from random import Random

from dcompile.bisect.recording import CallLog, WrongCall
from dcompile.bisect.repro import find_in_call
from dcompile.collectives.contract import Executable, ProgramReport
from dcompile.config import Config
from dcompile.errors import WrongResultError
from dcompile.logs import rank, report

DIRECTORY = "dcompile_sentinel"
"""Directory for scripts that repeat a miss, relative to the working directory, if nothing is dumped."""
REPLACED = "program that the sentinel found wrong, run by ATen's kernels"
"""Name of the receipt's count."""


class Sentinel(CallLog):
    """Checks of one model's programs while it trains. `config.sentinel` is the period, in calls of a program."""

    fresh = False

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config
        self._replaced: set[str] = set()
        self._next: dict[tuple[str, bool], int] = {}
        """(program, whether it reduces gradients) -> number of the call to check in this period."""

    def due(self, name: str, reduces: bool) -> bool:
        """Whether this call is checked. Those that reduce gradients are counted apart: all ranks make as many."""
        kind, period = (name, reduces), self._config.sentinel
        call = self.seen[kind]
        self.seen[kind] = call + 1
        if call % period == 0:
            self._next[kind] = call + Random(f"{name} {call // period}").randrange(period)
        return call == self._next[kind]

    def leave(self, name: str, why: str, report: ProgramReport) -> None:
        """Check a program no more, and say so in the receipt."""
        super().leave(name, why, report)
        report.notes.append(f"sentinel: {name} is not checked: {why}")

    def missed(
        self, name: str, wrong: WrongCall | None, run: Executable, on_aten: Callable[[], Executable]
    ) -> Executable:
        """Report a miss of this rank, or of another one (None), and return the program to run from now on.

        Raises WrongResultError with `on_miss="stop"`, for a program that is wrong on ATen's kernels as well (then a
        collective is, or what a program is given), and if ATen's program would reduce other buckets.
        """
        said = "wrong on another rank" if wrong is None else self._report(name, wrong)
        call = sum(self.seen[name, reduces] for reduces in (False, True))
        said = f"sentinel: {name} in call {call}: {said}"
        if self._config.on_miss == "stop":
            raise WrongResultError(f"dcompile: {said}; on_miss='stop' ends the job here")
        if name in self._replaced:
            raise WrongResultError(f"dcompile: {said}; it was running on ATen's kernels, so no kernel is at fault")
        self._replaced.add(name)
        replacement = on_aten()
        if [b.exchanged for b in replacement.buckets] != [b.exchanged for b in run.buckets]:
            raise WrongResultError(
                f"dcompile: {said}; with ATen's kernels it would reduce other buckets, so it ends here"
            )
        report(logging.WARNING, f"rank {rank()}: {said}; it runs on ATen's kernels from now on")
        run.report.notes.append(said)
        run.report.fallbacks[REPLACED] = 1
        return replacement

    def _report(self, name: str, wrong: WrongCall) -> str:
        """Find the place, write a script that repeats the miss, and describe both."""
        try:
            finding = find_in_call(wrong, runs=False)
        except Exception as error:  # the job goes on, whatever the search fails at
            failed = f"searching for the place failed: {type(error).__name__}: {error}"
            return f"{wrong.result}: {wrong.miss}; {failed}"
        place = finding.place
        said = f"{place.kind} {place.name}: {place.result}: {place.miss}"
        if finding.repro is None:
            return said
        directory = Path(self._config.dump or DIRECTORY) / f"rank{rank()}" / name
        return f"{said}; {finding.repro.save(directory)} has its inputs"
