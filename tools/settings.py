"""Print the page of settings from `dcompile/config.py`: `python -m tools.settings`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from dcompile.config import MODES, REASON_OF, describe

INTRODUCTION = """# Settings

This page is printed by `python -m tools.settings` from `dcompile/config.py`.

Each setting is an option, `dcompile.compile(model, options={"name": value})` or the same in `torch.compile`, and an
environment variable. Options win. An unknown name raises `OptionError` (a `ValueError`, and a `RuntimeError` as in
torch.compile), which names the nearest and all valid ones.

Some options of torch.compile are accepted without effect. The list below says why, and so does the receipt. All others
are errors.

| Option | Environment | Default | Meaning |
|---|---|---|---|"""

MODES_INTRODUCTION = """
## Modes

As in torch.compile, a mode stands for a set of options, so give one or the other. Where an option has no effect, a
`note:` line of the receipt says so and why.

- `default` and `reduce-overhead` run the same program, without and with CUDA graphs.
- The two with `max-autotune` call cuBLASLt for large GEMMs that another of its algorithms computes faster.
  They use a kernel of dcompile's for GEMMs with epilogues where that is faster. On a CPU they are `default`.
- `lite` leaves every kernel to ATen.

| Mode | Options |
|---|---|"""


IGNORED_INTRODUCTION = """
## Options of TorchInductor without effect

They are accepted, so that existing calls need no edit, and noted in the receipt. None changes a value. Those that modes
of torch.compile list are noted where they differ from torch's default. None is an environment variable.
"""


def page() -> str:
    """Return the whole page."""
    rows = [f"| `{name}` | `{variable}` | `{default}` | {text} |" for name, variable, default, text in describe()]
    modes = [f"| `{mode}` | {_options(options)} |" for mode, options in MODES.items()]
    return "\n".join([INTRODUCTION, *rows, MODES_INTRODUCTION, *modes, IGNORED_INTRODUCTION, *_ignored(), ""])


def _ignored() -> list[str]:
    """Return a paragraph for each reason, with its options."""
    paragraphs = []
    for reason in dict.fromkeys(REASON_OF.values()):
        names = ", ".join(f"`{name}`" for name, other in REASON_OF.items() if other == reason)
        paragraphs.append(f"- {reason[0].upper()}{reason[1:]}: {names}")
    return paragraphs


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in options.items()) or "none"


if __name__ == "__main__":
    sys.stdout.write(page())
