"""Build and load kernels.cpp: hand-written kernels, with dcompile's C++ library and flags."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "kernels.cpp"


@cache
def library() -> ctypes.CDLL:
    """Load the hand-written kernels, linked with the OpenMP that torch has loaded."""
    from dcompile.codegen.emit.cpp.compile import find_compiler, openmp_library
    from dcompile.codegen.emit.cpp.library.base import PRELUDE

    compiler = find_compiler(60)
    text = PRELUDE + SOURCE.read_text()
    command = [*compiler.command, *compiler.flags, "-x", "c++", "-", "-x", "none", *filter(None, [openmp_library()])]
    digest = hashlib.sha256("\0".join((*command, text)).encode()).hexdigest()[:24]
    output = Path(tempfile.gettempdir()) / f"dcompile-plain-{digest}" / "kernels.so"
    if not output.is_file():
        output.parent.mkdir(exist_ok=True)
        subprocess.run([*command, "-lm", "-o", str(output)], input=text, text=True, check=True)
    return ctypes.CDLL(str(output))


def call(name: str, dtype: str, *arguments: Any) -> None:
    """Run a kernel: tensors of `dtype` by address, integers as int64, other numbers as float32."""
    getattr(library(), f"{name}_{dtype}")(*map(_argument, arguments))


def _argument(value: Any) -> Any:
    match value:
        case int():
            return ctypes.c_int64(value)
        case float():
            return ctypes.c_float(value)
        case list():  # a table of tensors
            return (ctypes.c_void_p * len(value))(*(tensor.data_ptr() for tensor in value))
        case _:
            return ctypes.c_void_p(value.data_ptr())
