"""Print every patch of torch, with what applies to the installed version: `python -m dcompile.compat`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dcompile.compat.patches.registry import describe

PRICES = Path(__file__).parents[2] / "docs/internals/prices.json"
"""Measured gains by name, written by `tools/price_list.py`; a checkout has them, an installation has not."""


def read_prices() -> dict[str, str]:
    """Return name of a patch -> what it gains, as text."""
    rows = json.loads(PRICES.read_text()) if PRICES.exists() else {}
    gains = {name: row["gain"] for name, row in rows.items() if "gain" in row}
    return {name: ", ".join(f"{case} {gain:+.1%}" for case, gain in found.items()) for name, found in gains.items()}


if __name__ == "__main__":
    sys.stdout.write("\n".join((*describe(read_prices()), "")))
