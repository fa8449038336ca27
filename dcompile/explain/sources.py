"""Lines of the user's program from which operations and graph breaks come."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

_FRAME = re.compile(r'  File "([^"]+)", line (\d+), in ([^\n]*)\n(?:    ([^\n]*))?')


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of source."""

    path: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        resumed = re.fullmatch(r"torch_dynamo_resume_in_(.*)_at_\d+", self.function)
        return f"{self.path}:{self.line} in {resumed[1] if resumed else self.function}: {self.code}"


@cache
def _torchs() -> str:
    return f"{Path(torch.__file__).parent}/"


@cache
def _ours() -> str:
    return f"{Path(__file__).parents[1]}/"


def innermost(frames: Iterable[SourceLine]) -> SourceLine | None:
    """Last frame outside of torch and dcompile; else torch's last; None if all are dcompile's."""
    found: SourceLine | None = None
    inside: SourceLine | None = None
    for frame in frames:
        if frame.path.startswith(_torchs()):
            inside = frame
        elif not frame.path.startswith(_ours()):
            found = frame
    return found or inside


def source_of(node: torch.fx.Node) -> SourceLine | None:
    """Line that an FX node came from. For a backward's node, it is the line whose gradient the node computes."""
    trace = node.meta.get("stack_trace") or ""
    return innermost(SourceLine(path, int(line), name, code) for path, line, name, code in _FRAME.findall(f"  {trace}"))


def source_of_frames(frames: Iterable[Any]) -> SourceLine | None:
    """User's line of a stack of traceback.FrameSummary."""
    return innermost(SourceLine(f.filename, f.lineno or 0, f.name, f.line or "") for f in frames)
