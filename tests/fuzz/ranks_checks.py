"""Random training scripts on two Gloo ranks, against stock PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tests.distributed.harness import Ranks, RanksFailed
from tests.fuzz.ranks_random import random_ranks_program
from tests.fuzz.ranks_session import RanksProgram

DEADLINE_S = 120


class RanksCheck:
    """Keeps a pair of processes; whoever runs it stops them."""

    name, size = "training scripts on two ranks", 5

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()

    def case(self, seed: int, size: int | None = None) -> RanksProgram:
        return random_ranks_program(seed, self.size if size is None else size)

    def run(self, cases: Sequence[RanksProgram]) -> list[str | None]:
        return [self.difference(program) for program in cases]

    def difference(self, program: RanksProgram) -> str | None:
        """What the first rank that sees any sees otherwise than with stock PyTorch."""
        try:
            found = self.ranks.run("tests.fuzz.ranks_session:difference", DEADLINE_S, program=program)
        except RanksFailed as failure:
            return f"failed: {failure}"
        text = next((text for text in found if text is not None), None)
        if text is not None and text.startswith("error:"):
            self.ranks.stop()  # ranks may be out of step
        return text

    def shrink(self, program: RanksProgram, fails: Callable[[RanksProgram], bool]) -> RanksProgram:
        """With as little as will do: each part goes without which the rest still fails."""
        while (smaller := next(filter(fails, _smaller(program)), None)) is not None:
            program = smaller
        return program


def _smaller(program: RanksProgram) -> Iterator[RanksProgram]:
    """The program without one of its steps, lines or settings."""
    for name, last in (("steps", 0), ("forward", 1), ("layers", 0)):
        lines = getattr(program, name)
        for place in reversed(range(len(lines) - last)):
            yield replace(program, **{name: (*lines[:place], *lines[place + 1 :])})
    if program.forward[-1] != "return x":
        yield replace(program, forward=(*program.forward[:-1], "return x"))
    for name in ("wrap", "way"):
        text = getattr(program, name)
        for found in re.finditer(r", (?!backend|options)\w+=(\([^)]*\)|\{[^}]*\}|[^,()]+)", text):
            yield replace(program, **{name: text[: found.start()] + text[found.end() :]})
