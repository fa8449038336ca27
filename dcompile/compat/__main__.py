"""Print every patch of torch, with what applies to the installed version: `python -m dcompile.compat`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dcompile.compat.patches.registry import describe

PRICES = Path(__file__).parents[2] / "docs/internals/prices.json"
"""What patches gain, as `tools/price_list.py` measured it: part of a checkout, not of an installation."""

if __name__ == "__main__":
    rows = json.loads(PRICES.read_text()) if PRICES.exists() else {}
    sys.stdout.write("\n".join((*describe({name: row.get("gain", {}) for name, row in rows.items()}), "")))
