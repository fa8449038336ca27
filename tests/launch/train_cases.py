"""What tests/launch/test_train.py runs on two ranks that are up already."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

import train
from common import World
from interruption import catch_signals

from tests.small_llama import SmallLlama


def stopped_by_a_signal(arguments: list[str], rank: int, step: int) -> tuple[int, str]:
    """launch/train.py, with SIGTERM for `rank` during `step`: exit status, and what is printed."""
    world = World(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    stock = train.training_step

    def training_step(model: Any, wrapped: Any, optimizer: Any, text: Any, now: int, args: Any, world: Any) -> Any:
        if (world.rank, now) == (rank, step):
            os.kill(os.getpid(), signal.SIGTERM)
        return stock(model, wrapped, optimizer, text, now, args, world)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with (
            mock.patch.object(train, "training_step", training_step),
            mock.patch.object(train, "LlamaForCausalLM", SmallLlama),
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            status = train.train(train.parse_arguments(arguments), world, catch_signals(grace_seconds=1000))
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
    return status, printed.getvalue()
