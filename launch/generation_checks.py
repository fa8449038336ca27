"""Checks of --check: equal tokens to one process, one decode graph, and the number of all-reduces in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from common import World, gather
from decoding import Generated
from errors import UserError


class Checks:
    """Checks while decoding: it refuses a second graph, and counts the all-reduces that a step performs."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self.all_reduces = 0

    @contextlib.contextmanager
    def __call__(self, call: int) -> Iterator[None]:
        if call == 0:  # this call compiles, into one graph because of fullgraph=True
            yield
        elif call == 1:
            with self._no_new_graph(), torch.profiler.profile(acc_events=True) as profile:
                yield
            names = [event.name for event in profile.events()]
            self.all_reduces = sum(name in ("gloo:all_reduce", "nccl:all_reduce") for name in names)
        else:
            with self._no_new_graph():
                yield

    def _no_new_graph(self) -> contextlib.AbstractContextManager[Any]:
        return torch.compiler.set_stance("fail_on_recompile") if self.compiled else contextlib.nullcontext()


def check_ranks_agree(tokens: list[list[int]], world: World) -> None:
    """Raise UserError on all ranks if one chose other tokens: otherwise ranks would diverge silently."""
    first, *others = gather(tokens, world)
    for rank, chosen in enumerate(others, 1):
        if chosen != first:
            raise UserError(f"rank {rank} chose other tokens than rank 0: are GPUs and software the same everywhere?")


def check(generated: Generated, expected: Generated, checks: Checks, layers: int, exact: bool, world: World) -> str:
    """Raise unless the ranks generated one process's tokens with two all-reduces a layer; return a line that says so.

    `exact`: whether more all-reduces are an error, too.
    """
    wanted = 2 * layers if world.size > 1 else 0
    for rank, tokens in enumerate(gather(generated.tokens, world)):
        if tokens != expected.tokens:
            raise UserError(f"--check: rank {rank} generated {tokens}, a single eager process {expected.tokens}")
    if checks.all_reduces < wanted or (exact and checks.all_reduces != wanted):
        raise UserError(f"--check: {checks.all_reduces} all-reduces in a decode step instead of {wanted}")
    graphs = "1 decode graph, 0 recompiles" if checks.compiled else "not compiled"
    return f"check: tokens equal a single process's, {graphs}, {checks.all_reduces} all-reduces a decode step"
