"""Triton's language and its interpreter, which has to be chosen before Triton is imported: TRITON_INTERPRET=1.

A fork of the nursery has imported Triton without, as torch does; so Triton's Python is imported once more.
"""

from __future__ import annotations

import importlib
import os
import re
import sys

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before this is imported"

for name in [name for name in sys.modules if re.match(r"triton($|\.(?!_C\b))", name)]:  # its C++ can be there only once
    del sys.modules[name]

tl = importlib.import_module("triton.language")
interpreter = importlib.import_module("triton.runtime.interpreter")
