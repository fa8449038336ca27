"""What tests/launch/test_generate.py runs on two ranks."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

import generate
from common import World


def run_script(arguments: list[str]) -> str:
    """launch/generate.py with these arguments in a pair of ranks that is up already: what it prints."""
    world = World(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        generate.run(generate.parse_arguments(arguments), world)
    return printed.getvalue()
