"""Flags shared by launch scripts: a name has the same meaning in each. Nothing here imports torch, which takes seconds.

Each script parses its flags above its other imports, so that `--help` and a wrong flag are answered at once.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn

from errors import leave_the_word_to_rank_0

ROUTES = ("manual", "dtensor", "hf")
"""The code that splits a model: launch/tensor_parallel.py, torch's parallelize_module, or transformers."""

BACKENDS = ("eager", "inductor", "dcompile")
CHECKPOINT_INTERVAL = 50
"""Default steps between checkpoints: `make train` writes one before its end, and a day's run loses minutes at most."""


class Parser(argparse.ArgumentParser):
    """Parser of a script's flags, named as users type the script. Of the ranks of a job, rank 0 alone speaks."""

    def __init__(self, script: str, description: str | None) -> None:
        name = f"launch/{Path(script).name}"
        super().__init__(prog=name, description=description, formatter_class=_Formatter)

    def error(self, message: str) -> NoReturn:
        leave_the_word_to_rank_0()
        super().error(message)

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help with defaults, where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, []) and action.default is not False
        return super()._get_help_string(action) if has_default else action.help


def positive(text: str) -> int:
    """Parse a count: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def not_negative(text: str) -> int:
    """Parse a count of at least 0, where 0 means never or none."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def add_model_flags(parser: argparse.ArgumentParser, config: str) -> None:
    """Add flags of the model and device: --config, --device, --seed."""
    add = parser.add_argument
    add("--config", default=config, help="a config.json, or a name from launch/configs, such as llama_160m")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto is cuda where there is a GPU")
    add("--seed", type=int, default=0, help="of parameters, batches and sampling: equal seeds repeat a run")


def add_wrapper_flags(parser: argparse.ArgumentParser, sharded_on: str = "") -> None:
    """Add flags of data parallelism: --wrap, --bucket-cap-mb. `sharded_on`: what it takes to shard, if anything."""
    only = f" ({sharded_on})" if sharded_on else ""
    add = parser.add_argument
    add("--wrap", choices=("ddp", "fsdp"), default="ddp",
        help=f"each rank holds all parameters, or a share of each{only}")  # fmt: skip
    add("--bucket-cap-mb", type=float, default=25, help="size of DDP's gradient buckets")


def add_compile_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of the compiler: --backend and the arguments of torch.compile."""
    add = parser.add_argument
    add("--backend", choices=BACKENDS, default="dcompile", help="what compiles the model")
    add("--compile.mode", dest="compile_mode", metavar="MODE", help="mode of torch.compile, such as max-autotune")
    add("--compile.fullgraph", dest="compile_fullgraph", action="store_true", help="a graph break is an error")
    add("--compile.options", dest="compile_options", metavar="K=V", action="append", default=[],
        help="an option of the backend, such as max_autotune=true; repeatable")  # fmt: skip


def add_training_flags(parser: argparse.ArgumentParser, output_dir: str) -> None:
    """Add flags of training: steps, batches, optimizer, data, and output."""
    add = parser.add_argument
    add("--steps", type=positive, default=60, help="optimizer steps in all")
    add("--batch-size", type=positive, default=4, help="sequences per rank and micro-step")
    add("--seq-len", type=positive, default=256, help="bytes per sequence")
    add("--grad-accum", type=positive, default=1, help="micro-steps per optimizer step")
    add("--lr", type=float, default=1e-3, help="learning rate after warm-up")
    add("--warmup-steps", type=not_negative, default=10, help="steps over which the learning rate rises")
    add("--clip-norm", type=float, default=1.0, help="largest gradient norm; 0 clips nothing")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16 computes in it, parameters stay fp32")
    add("--data", metavar="PATH", help="text file or a folder of them, such as docs; without it Python's own library")
    add("--max-data-mb", type=positive, default=64, help="text beyond this is not read")
    add("--log-freq", type=positive, default=10, help="steps between log lines where there is no terminal")
    add("--eval-freq", type=not_negative, default=0, help="steps between evaluations on held-out text; 0: at the end")
    add("--output-dir", type=Path, default=Path(output_dir), help="metrics, loss curve, checkpoints, trained model")
    add("--checkpoint-interval", type=not_negative, default=CHECKPOINT_INTERVAL,
        help="steps between checkpoints; 0: at the end and on SIGINT or SIGTERM only")  # fmt: skip
    add("--resume", default="none", metavar="{auto,none,PATH}",
        help="auto: from the newest checkpoint, if any; PATH: from one, such as out/train/step-000050")  # fmt: skip
