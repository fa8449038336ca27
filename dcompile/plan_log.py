"""Log lines about a planned and a built graph, on the channels `overlap`, `memory` and `kernels`.

Lines are built only where they are logged: some of them need an analysis of the whole program.
"""

from __future__ import annotations

from collections.abc import Iterable
from logging import DEBUG, INFO

from dcompile.codegen.emit.target import Built
from dcompile.codegen.schedule.memory.memory_summary import memory_headline, memory_lines
from dcompile.codegen.schedule.order.overlap_summary import overlap_lines
from dcompile.collectives.contract import Request
from dcompile.config import Config
from dcompile.ir.nodes import Collective, Program
from dcompile.logs import is_logged, log


def log_plan(config: Config, program: Program, request: Request) -> None:
    """Log decisions about collectives and memory."""
    name = program.name
    if any(isinstance(step, Collective) for step in program.steps) and is_logged(config, "overlap", DEBUG):
        _log_all(config, "overlap", name, overlap_lines(program, request.figures, dict(request.groups)))
    if is_logged(config, "memory", INFO):
        log(config, "memory", INFO, f"{name}: {memory_headline(program)}")
    if is_logged(config, "memory", DEBUG):
        _log_all(config, "memory", name, memory_lines(program))


def log_build(config: Config, name: str, built: Built, seconds: float) -> None:
    """Log which kernels of a program were compiled, and which were in the cache."""
    if built.compiled:
        waited = f"built {len(built.compiled)} kernels, waited {seconds:.2f} s for compilers"
        log(config, "kernels", DEBUG, f"{name}: {waited}: {', '.join(sorted(built.compiled))}")
    if built.cached:
        names = ", ".join(sorted(built.cached))
        log(config, "kernels", DEBUG, f"{name}: {len(built.cached)} kernels in the cache: {names}")


def _log_all(config: Config, channel: str, name: str, lines: Iterable[str]) -> None:
    for line in lines:
        log(config, channel, DEBUG, f"{name}: {line}")
