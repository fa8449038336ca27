"""Search for programs that passes or kernels get wrong, and for modules and training scripts that do otherwise.

    python -m tests.fuzz [--seconds 600] [--seed N] [--check NAME] [--device cuda]

Each failure is shrunk and written to tests/fuzz/kept/, from where the test suite runs it ever after. Exit status 1 if
there was any.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.fuzz.checks import Check, checks
from tests.fuzz.keep import keep
from tests.fuzz.ranks_checks import RanksCheck
from tests.fuzz.torch_checks import TorchCheck, torch_checks

BATCH = 12
"""Programs whose kernels are built together."""

AnyCheck = Check | TorchCheck | RanksCheck


def failure(check: AnyCheck, case: Any) -> str | None:
    """What is wrong with one program under one check; an exception is as wrong as a value."""
    try:
        return check.run([case])[0]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def search(check: AnyCheck, seeds: Sequence[int]) -> list[tuple[int, str]]:
    """Seeds that fail, each with what is wrong."""
    cases = [check.case(seed) for seed in seeds]
    try:
        found = check.run(cases)
    except Exception:  # one of them cannot be compiled: see which
        found = [failure(check, case) for case in cases]
    return [(seed, text) for seed, text in zip(seeds, found, strict=True) if text is not None]


def smallest(check: AnyCheck, seed: int, text: str) -> Any:
    """The failing program with as few loops as will do, then shrunk; it must go on failing in the same way.

    What fails no more, a script that was out of time on a busy machine, is kept whole.
    """
    kind = text.split(":")[0]

    def fails(case: Any) -> bool:
        found = failure(check, case)
        return found is not None and (found.split(":")[0] == kind or "Error" not in kind + found)

    cases = (check.case(seed, size) for size in range(1, check.size + 1))
    failing = next((case for case in cases if fails(case)), None)
    return check.case(seed) if failing is None else check.shrink(failing, fails)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of wall time")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000 * 1000, help="first seed")
    parser.add_argument("--check", default="", help="part of a check's name")
    parser.add_argument("--device", default="cpu", help="cuda: modules alone, on a GPU")
    arguments = parser.parse_args(argv)
    every: tuple[AnyCheck, ...] = (
        (*checks(), *torch_checks(), RanksCheck())
        if arguments.device == "cpu"
        else tuple(torch_checks(arguments.device))
    )
    chosen = [check for check in every if arguments.check in check.name]
    end, seed, tried, kept = time.monotonic() + arguments.seconds, arguments.seed, 0, 0
    sys.stdout.write(f"from seed {seed}: {', '.join(check.name for check in chosen)}\n")
    while time.monotonic() < end:
        seeds = range(seed, seed + BATCH)
        for check in chosen:
            for failed, text in search(check, seeds):
                sys.stdout.write(f"{check.name}: seed {failed}: {text}\n")
                sys.stdout.flush()
                sys.stdout.write(f"  kept as {keep(check.name, failed, smallest(check, failed, text))}\n")
                kept += 1
        seed, tried = seed + BATCH, tried + BATCH * len(chosen)
    sys.stdout.write(f"{tried} programs, {kept} failures\n")
    return 1 if kept else 0


if __name__ == "__main__":
    sys.exit(main())
