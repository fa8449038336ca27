"""The door for Hugging Face's Trainer: `compile_trainer(Trainer(...)).train()`.

`TrainingArguments(torch_compile_backend=...)` takes only backends that Accelerate's enumeration has. But Trainer leaves
wrapping to Accelerate, which asks its plugin when training begins: behind DistributedDataParallel, where there is one.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from dcompile.errors import OptionError
from dcompile.integrations.accelerate import DcompilePlugin

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
    # Trainer asks an unwrapped model for its class, and shifts the labels that it smooths if that is a causal language
    # model. Accelerate leaves torch.compile's wrapper on, whose class is another: the loss would be a wrong one
    # (transformers 5.23; with torch_compile=True it is).
    given.accelerator.unwrap_model = functools.partial(given.accelerator.unwrap_model, keep_torch_compile=False)
    return trainer
