"""Integration with Hugging Face's Trainer and TRL's: `TrainingArguments(torch_compile_backend="dcompile")`.

Importing this module registers that name with Accelerate. `compile_trainer(Trainer(...))` also takes options, of which
TrainingArguments has only the mode. Trainer leaves wrapping to Accelerate. Accelerate compiles when training begins,
inside DistributedDataParallel if there is one.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, TypeVar

from dcompile import logs
from dcompile.errors import OptionError
from dcompile.integrations.requirements import require, too_old

require("transformers", __name__)

from transformers import TrainerCallback  # noqa: E402

from dcompile.integrations.accelerate import DcompilePlugin, join_step  # noqa: E402

for _package in ("trl", "peft"):  # they need no integration module
    if _warning := too_old(_package):
        logs.report(logging.WARNING, _warning)

Trainer = TypeVar("Trainer")


def compile_trainer(
    trainer: Trainer,
    plugin: DcompilePlugin | None = None,
    *,
    loss_only: bool = False,
    step: bool = False,
    **options: Any,
) -> Trainer:
    """Configure a transformers.Trainer to compile its model with dcompile, and return the trainer.

    Call it before training, with a `plugin` or with its fields by name (`mode="max-autotune"`, `receipt=False`).
    `loss_only`: while it trains, the model returns its loss and no logits, which then need not exist as a whole.
    `step`: clipping and the optimizer's update run in the backward's program (docs/guide/train-step.md). Raises
    OptionError for a bad option, or if the trainer compiles already (`torch_compile=True` in its arguments).
    """
    given: Any = trainer
    if given.args.torch_compile:
        raise OptionError("compile_trainer: the trainer compiles already; leave torch_compile out of TrainingArguments")
    if plugin is not None and options:
        raise OptionError(f"compile_trainer: give {next(iter(options))!r} to the plugin, or no plugin")
    given.accelerator.state.dynamo_plugin = plugin if plugin is not None else DcompilePlugin(**options)
    if loss_only:
        _return_loss_only(given.model)
    if step:
        given.add_callback(_JoinStep())
    return trainer


class _JoinStep(TrainerCallback):
    """Gives the compiled model its optimizer, which the trainer makes when training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Do so before the first step."""
        join_step(given["model"], given["optimizer"])


def _return_loss_only(model: Any) -> None:
    """Make a model return only its loss while it trains, where it computes one."""
    forward = model.forward

    @functools.wraps(forward)
    def forward_for_loss(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        if model.training and isinstance(outputs, dict) and outputs.get("loss") is not None:
            return type(outputs)(loss=outputs["loss"])
        is_loss_first = model.training and isinstance(outputs, tuple) and kwargs.get("labels") is not None
        return outputs[:1] if is_loss_first else outputs

    model.forward = forward_for_loss
