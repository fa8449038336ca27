"""Compile a training script for absent ranks: `python -m dcompile.precompile --world-size 1024 train.py`.

The script runs as one rank of the job, in this process, until its optimizer has stepped. Collectives return at once,
with this rank's own values. What it compiles goes into the kernel cache, or into the folder of --path.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from dcompile.errors import DcompileError, OptionError
from dcompile.precompile.job import folder_of, make_report, run_script


def main(arguments: Sequence[str] | None = None) -> int:
    """Precompile, and print a report. Return 1 if each start must compile something, and 2 on an error."""
    options = _parser().parse_args(arguments)
    try:
        sizes, ranks = _numbers(options.world_size, "--world-size", 1), _numbers(options.rank, "--rank", 0)
        pairs = [(size, rank) for size in sizes for rank in ranks if rank < size]
        if not pairs:
            raise OptionError(f"dcompile: --rank {options.rank}: a job of {options.world_size} ranks has none of these")
        if len(pairs) > 1:
            return max(_in_a_process_of_its_own(options, size, rank) for size, rank in pairs)
        (size, rank) = pairs[0]
        path = folder_of(options.path)
        log = run_script(
            options.script, options.arguments, world_size=size, rank=rank, fake=options.fake, path=path,
            steps=options.steps,
        )  # fmt: skip
        report = make_report(options.script, {(size, rank): log}, {}, path)
    except (DcompileError, OptionError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{report}\n")
    return 1 if report.left else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dcompile.precompile", description=__doc__)
    parser.add_argument("--world-size", required=True, help="ranks of the job; several, comma-separated")
    parser.add_argument("--rank", default="0", help="the rank to be; several, comma-separated, if they differ")
    parser.add_argument("--path", help="folder to fill in place of the cache, for DCOMPILE_PRECOMPILED")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps to take (default: 1)")
    parser.add_argument(
        "--fake", action="store_true", help="tensors without memory, nothing computed; the script reads no values"
    )
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _numbers(text: str, name: str, least: int) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdigit() and int(word) >= least for word in words):
        raise OptionError(f"dcompile: {name} {text}: give numbers from {least} on, comma-separated")
    return [int(word) for word in words]


def _in_a_process_of_its_own(options: argparse.Namespace, size: int, rank: int) -> int:
    """Precompile in a new process for each rank and world size, since a script keeps state in its modules."""
    given = ["--world-size", str(size), "--rank", str(rank), "--steps", str(options.steps)]
    given += ["--path", options.path] if options.path else []
    given += ["--fake"] if options.fake else []
    command = [sys.executable, "-m", "dcompile.precompile", *given, options.script, *options.arguments]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
