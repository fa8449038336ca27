"""Run the first steps of a training script as one rank of a job, without the other ranks."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from dcompile.precompile.absent_rank import ValueReadError, rank_of_job
from dcompile.precompile.build_only import BuildLog


class StepsDone(BaseException):
    """Raised when the script has taken its steps. It is no Exception, since scripts catch those."""


def run_script(
    script: str, arguments: Sequence[str], *, world_size: int, rank: int, fake: bool, path: str | None, steps: int
) -> BuildLog:
    """Run a script as Python does, until its optimizers have stepped `steps` times, or it ends by itself.

    With `fake`, the run ends where the script reads a value, if it has run a backward by then. Raises PrecompileError
    if it has not, and for code that needs other ranks. Errors of the script itself are raised, too.
    """
    log = BuildLog()
    try:
        with rank_of_job(world_size, rank, fake=fake, path=path, log=log):
            run_steps(script, arguments, steps)
    except ValueReadError as error:
        if not any("backward" in program.name for program in log.programs):
            raise
        log.notes.append(f"the script was left where it reads a value: {error.where}")
    return log


def run_steps(script: str, arguments: Sequence[str], steps: int) -> None:
    """Run a script as Python does, until its optimizers have stepped `steps` times, or it ends by itself."""
    taken = 0

    def count(*_: Any) -> None:
        nonlocal taken
        taken += 1
        if taken >= steps:
            raise StepsDone

    argv, folder = sys.argv, sys.path[0]
    hook = register_optimizer_step_post_hook(count)
    try:
        sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")
    except StepsDone:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        hook.remove()
        sys.argv, sys.path[0] = argv, folder
