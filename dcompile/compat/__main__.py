"""Print every patch of torch, with what applies to the installed version: `python -m dcompile.compat`."""

from __future__ import annotations

import sys

from dcompile.compat.patches.registry import describe

if __name__ == "__main__":
    sys.stdout.write("\n".join((*describe(), "")))
