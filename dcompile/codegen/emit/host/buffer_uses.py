"""Find the views and the last use of each buffer, for the host program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dcompile.codegen.emit.target import KernelSource
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Collective, Extern, Loop, Program, View


def all_views(program: Program) -> Iterator[View]:
    for step in program.steps:
        call = step.call if isinstance(step, Collective) else step
        if isinstance(call, Extern):
            yield from call.views
    yield from (output for output in program.outputs if isinstance(output, View))


def known_bytes(buffer: Buffer) -> int:
    """Return the size of a buffer, or 0 where it is symbolic."""
    return buffer.nbytes if isinstance(buffer.extent, int) else 0


def last_uses(program: Program, calls: Iterable[KernelSource], hosts: Mapping[str, str]) -> dict[str, int]:
    """Return the last step that touches each buffer, or another buffer in its memory.

    A kernel may include the work of earlier loops, so it touches all of its arguments.
    """
    given = iter(calls)
    touched = (
        (position, step.reads | step.writes | frozenset(next(given).arguments if isinstance(step, Loop) else ()))
        for position, step in enumerate(program.steps)
    )
    return {n: at for at, names in touched for n in sorted(names.union(hosts[n] for n in names if n in hosts))}
