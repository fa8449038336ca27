"""`dcompile-launch`: `accelerate launch` with the backend "dcompile", registered in itself and in the started script.

`dcompile-launch --dynamo_backend dcompile --num_processes 2 train.py` needs no change of the script, nor of a YAML file
with `dynamo_backend: DCOMPILE`. All arguments are those of `accelerate launch`.
"""

from __future__ import annotations

from typing import Any

import dcompile.integrations.accelerate  # noqa: F401  registers the name
from dcompile.integrations.accelerate import BACKEND

RUNNER = "dcompile.integrations.run_script"


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    from accelerate.commands.config import config_utils  # type: ignore[import-untyped]

    if BACKEND.upper() not in config_utils.DYNAMO_BACKENDS:
        config_utils.DYNAMO_BACKENDS.append(BACKEND.upper())
    from accelerate.commands.launch import launch_command, launch_command_parser  # type: ignore[import-untyped]

    launch_command(through_script(launch_command_parser().parse_args(arguments)))


def through_script(parsed: Any) -> Any:
    """Change arguments of `accelerate launch` so that each process registers the name before the user's script runs."""
    if not parsed.no_python:  # without Python, the started program registers the name itself
        kind = ["-m"] if parsed.module else []
        parsed.training_script_args = [*kind, parsed.training_script, *parsed.training_script_args]
        parsed.training_script, parsed.module = RUNNER, True
    return parsed


if __name__ == "__main__":
    main()
