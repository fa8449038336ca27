"""Find the user's line among the frames that torch stores on a traced node."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_OURS = f"{Path(__file__).parents[1]}/"


def user_line(node: Any) -> str:
    """`model.py:88` of an FX node: its last frame outside of torch and dcompile; empty if there is none.

    A node that torch alone made has torch's line.
    """
    return _last_frame(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=4096)
def _last_frame(trace: str) -> str:
    found = _FRAME.findall(trace)
    frames = [frame for frame in found if not frame[0].startswith(_OURS)]
    frames = [frame for frame in frames if not frame[0].startswith(_torchs_folder())] or frames
    return f"{frames[-1][0].rpartition('/')[2]}:{frames[-1][1]}" if frames else ""


@cache
def _torchs_folder() -> str:
    return f"{Path(torch.__file__).parent}/"
