"""Integration with Lightning: `Trainer(callbacks=[DcompileCallback()])`, and `compile(fabric.setup(...))` for Fabric.

Both compile the steps of a module as parts of it. So DDP and FSDP2 around it are taken over, whatever the name of the
strategy. Lightning's own `torch.compile(model)` compiles the same functions separately.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch.nn import Module

import dcompile
from dcompile import logs
from dcompile.api import make_services
from dcompile.capture.compiled_model import Settings
from dcompile.capture.entry import compile_method, give_optimizer
from dcompile.compat.dynamo import no_dynamo
from dcompile.config import Config
from dcompile.errors import OptionError
from dcompile.integrations.requirements import require

require("lightning", __name__)

from lightning.fabric.wrappers import _FabricModule  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from lightning.pytorch import Callback, LightningModule  # type: ignore[import-not-found, unused-ignore]  # noqa: E402
from lightning.pytorch.utilities.model_helpers import is_overridden  # type: ignore[import-not-found, unused-ignore]  # noqa: E402

FabricModule = TypeVar("FabricModule", bound=Module)

STEPS = ("predict_step", "test_step", "validation_step", "training_step")
"""Methods of a LightningModule that Trainer calls. The receipt is of the last one in this list."""
LOGGING = ("log", "log_dict")
"""Methods that steps call between their operations. They are Python of Lightning's, and run eagerly."""
SEVERAL = "the optimizer's update runs by itself: step=True needs automatic_optimization and one optimizer"
MANUAL = "training_step runs eagerly: automatic_optimization is False, so it calls backward and optimizers itself"


@dataclass
class _CompiledSteps:
    """A LightningModule whose steps are compiled, and its former attributes.

    The receipt lives as long as this object.
    """

    module: Any
    before: dict[str, Any] = field(default_factory=dict)
    stand_ins: list[Any] = field(default_factory=list)

    def replace(self, name: str, value: Any) -> None:
        """Set an attribute of the module itself, past its classes."""
        self.before[name] = vars(self.module).get(name)
        vars(self.module)[name] = value
        self.stand_ins.append(value)

    def restore(self) -> None:
        """Restore the former attributes."""
        for name, value in self.before.items():
            if value is None:
                vars(self.module).pop(name, None)
            else:
                vars(self.module)[name] = value
        self.before.clear()


class DcompileCallback(Callback):  # type: ignore[misc, unused-ignore]  # mypy does not see Lightning
    """Compile the steps of a Trainer's LightningModule: `Trainer(callbacks=[DcompileCallback(mode=...)])`.

    `mode`, `fullgraph`, `dynamic` and `options` are those of `dcompile.compile`. `step`: clipping and the optimizer's
    update run in the backward's program (docs/guide/train-step.md), where there is one optimizer. The module, its
    parameters and its checkpoints stay as they are. Raises OptionError for a bad option.
    """

    def __init__(
        self,
        mode: str | None = None,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        options: dict[str, Any] | None = None,
        step: bool = False,
    ) -> None:
        self._settings, self._step = _settings(mode, fullgraph, dynamic, options), step
        self._compiled: _CompiledSteps | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Compile the steps, before the strategy wraps the module."""
        if self._compiled is None or not self._compiled.before:
            self._compiled = _compile_steps(pl_module, self._settings)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Let the optimizer's update run in the training step's program."""
        if not self._step:
            return
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            logs.report(logging.INFO, SEVERAL)
        else:
            give_optimizer(pl_module.training_step, trainer.optimizers[0])

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore eager steps. The receipt stays available as long as this callback."""
        if self._compiled is not None:
            self._compiled.restore()


def compile(
    module: FabricModule,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    optimizer: Any = None,
) -> FabricModule:
    """Compile the module inside the result of `fabric.setup`, within DDP or FSDP2, and return that result.

    `optimizer`: as in `dcompile.compile`, from `fabric.setup` or plain. Of a LightningModule, the steps are compiled,
    too. `dcompile.receipt` takes the same object. Raises OptionError for a bad option, or for a module that Fabric has
    not set up.
    """
    if not isinstance(module, _FabricModule):
        raise OptionError(
            f"dcompile.integrations.lightning.compile: {type(module).__name__} is not from fabric.setup; "
            "use dcompile.compile for it"
        )
    inner: Any = module
    if isinstance(inner._original_module, LightningModule):
        _compile_steps(inner._original_module, _settings(mode, fullgraph, dynamic, options))
    given = {**(options or {}), **({"mode": mode} if mode is not None else {})} or None
    optimizer = getattr(optimizer, "optimizer", optimizer)
    dcompile.compile(inner._forward_module, fullgraph=fullgraph, dynamic=dynamic, options=given, optimizer=optimizer)
    return module


def _settings(mode: str | None, fullgraph: bool, dynamic: bool | None, options: dict[str, Any] | None) -> Settings:
    given = {**(options or {}), **({"mode": mode} if mode is not None else {})}
    return Settings(logs.own_dump(Config.make(None, given)), fullgraph, dynamic)


def _compile_steps(module: Any, settings: Settings) -> _CompiledSteps:
    """Compile the steps of a LightningModule, each as a part of the module."""
    compiled = _CompiledSteps(module)
    for name in STEPS:
        if name == "training_step" and not module.automatic_optimization:
            logs.report(logging.INFO, MANUAL)
        elif is_overridden(name, module, parent=LightningModule):
            compiled.replace(name, compile_method(module, name, settings, make_services(settings.config)))
    for name in LOGGING:
        compiled.replace(name, no_dynamo(getattr(module, name), "logs of a Lightning module"))
    return compiled
