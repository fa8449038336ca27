"""The door for Hugging Face's Trainer and TRL's: `TrainingArguments(torch_compile_backend="dcompile")`.

Importing this module is what makes Accelerate know that name. `compile_trainer(Trainer(...))` takes options as well,
of which TrainingArguments has only the mode. Trainer leaves wrapping to Accelerate, which compiles when training
begins: behind DistributedDataParallel, where there is one.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from dcompile import logs
from dcompile.errors import OptionError
from dcompile.integrations.requirements import require, too_old

require("transformers", __name__, "train")

from dcompile.integrations.accelerate import DcompilePlugin  # noqa: E402

for _package in ("trl", "peft"):  # they work without a door of their own
    if _warning := too_old(_package):
        logs.report(logging.WARNING, _warning)

Trainer = TypeVar("Trainer")


def compile_trainer(trainer: Trainer, plugin: DcompilePlugin | None = None, **options: Any) -> Trainer:
    """Let a transformers.Trainer compile with dcompile what it trains and evaluates; returns the trainer.

    To be called before training, with a `plugin` or the fields of one by name (`mode="max-autotune"`, `receipt=False`).
    Raises OptionError for a bad option, or where the trainer compiles already (`torch_compile=True` in its arguments).
    """
    given: Any = trainer
    if given.args.torch_compile:
        raise OptionError("compile_trainer: the trainer compiles already; leave torch_compile out of TrainingArguments")
    if plugin is not None and options:
        raise OptionError(f"compile_trainer: give {next(iter(options))!r} to the plugin, or no plugin")
    given.accelerator.state.dynamo_plugin = plugin if plugin is not None else DcompilePlugin(**options)
    return trainer
