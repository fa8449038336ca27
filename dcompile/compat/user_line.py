"""The user's line among the frames that torch notes on a traced node."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_OURS = f"{Path(__file__).parents[1]}/"
_BETWEEN = "torch/utils/_device.py"
"""What each operation goes through under `torch.set_default_device` and `with torch.device(...)`."""


def user_line(node: Any) -> str:
    """`model.py:88` of an FX node; nothing where the model is torch's own and only our call of it is left."""
    return _last_frame(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=4096)
def _last_frame(trace: str) -> str:
    frames = [frame for frame in _FRAME.findall(trace) if not frame[0].startswith(_OURS)]
    frames = [(path, line) for path, line in frames if not path.endswith(_BETWEEN)]
    return f"{frames[-1][0].rpartition('/')[2]}:{frames[-1][1]}" if frames else ""
