"""Run a script, or a module after `-m`, as Python does, with the backend "dcompile" registered with Accelerate."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import dcompile.integrations.accelerate  # noqa: F401  registers the name


def main() -> None:
    """Run `python -m dcompile.integrations.run_script [-m] NAME [argument ...]`."""
    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2:] if is_module else sys.argv[1:]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
