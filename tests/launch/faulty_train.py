"""launch/train.py on a small model, with a fault in step 8 of rank 1: FAULT=die (first attempt only), sleep, or nan."""

import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

import torch
import train
from interruption import catch_signals

from tests.small_llama import SmallLlama

FAULT = os.environ.get("FAULT", "none")

stock_step, stock_batch = train.training_step, train.batch
now = {"step": 0}


def remember(model: Any, wrapped: Any, optimizer: Any, text: Any, step: int, args: Any, world: Any) -> Any:
    now["step"] = step
    return stock_step(model, wrapped, optimizer, text, step, args, world)


def faulty_batch(tokens: Any, size: int, seq_len: int, key: tuple[int, ...]) -> torch.Tensor:
    if (now["step"], os.environ["RANK"]) == (8, "1"):
        if FAULT == "die" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "sleep":
            print(f"process {os.getpid()}, rank 1, sleeps", flush=True)
            time.sleep(1000)
    return stock_batch(tokens, size, seq_len, key)


def poisoned(model: Any, args: tuple[Any, ...], output: Any) -> Any:
    if (now["step"], os.environ["RANK"]) == (8, "1") and FAULT == "nan":
        output.loss = output.loss * math.nan
    return output


def build(*args: Any) -> Any:
    model = stock_build(*args)
    model.register_forward_hook(poisoned)
    return model


stock_build = train.build_model
train.LlamaForCausalLM = SmallLlama
train.training_step, train.batch = remember, faulty_batch
train.catch_signals = lambda: catch_signals(grace_seconds=2)
if FAULT == "nan":
    train.build_model = build
train.main()
