"""Where an FX node came from, as people look for it: module path, op, source line."""

from __future__ import annotations

import re
from functools import lru_cache

from torch.fx import Node

_FRAME_NAMES = frozenset(("L", "self", "target", "__self__", "_modules", "module", ""))
"""What Dynamo puts before the path of the module a user knows."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_OUR_CALL = "dcompile/capture/entry.py"
_BETWEEN = ("torch/utils/_device.py", "dcompile/capture/between.py")
"""Files that each of a model's calls goes through: under `torch.set_default_device` and `with torch.device(...)`, and
where FSDP2 has several graphs."""


def origin_of(node: Node) -> tuple[str, ...]:
    """`("layers.0.mlp: aten.mul.Tensor (model.py:88)",)`."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    module = ""
    if stack:
        module = _module_path(next(reversed(stack.values()))[0])
    line = _last_frame(node.meta.get("stack_trace") or "")
    text = f"{module}: {node.target}" if module else str(node.target)
    return (f"{text} ({line})",) if line else (text,)


@lru_cache(maxsize=4096)
def _module_path(path: str) -> str:
    """Dynamo's `L['self'].model.layers[0].mlp` as `model.layers.0.mlp`."""
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    path = re.sub(r"\(.*?\)", "", path)
    path = re.sub(
        r"\bforward\.__closure__\.\d+\.cell_contents\b", "", path
    )  # a wrapper's, that FSDP1's adapter puts there
    parts = [part for part in path.split(".") if part not in _FRAME_NAMES]
    return ".".join(parts)


@lru_cache(maxsize=4096)
def _last_frame(trace: str) -> str:
    """The user's line: `model.py:88`; nothing where the model is torch's own and only our call of it is left."""
    frames = [(path, line) for path, line in _FRAME.findall(trace) if not path.endswith(_BETWEEN)]
    if not frames or frames[-1][0].endswith(_OUR_CALL):
        return ""
    path, line = frames[-1]
    return f"{path.rpartition('/')[2]}:{line}"
