"""Integration with Hugging Face Accelerate: the backend's name, and `Accelerator(dynamo_plugin=DcompilePlugin(...))`.

Importing this module registers the name "dcompile" with Accelerate, whose list of backends is closed. From then on,
`Accelerator(dynamo_backend="dcompile")`, ACCELERATE_DYNAMO_BACKEND and `TrainingArguments(torch_compile_backend=...)`
accept it. `dcompile-launch` registers it for the command line of `accelerate launch`.

Either way, models are compiled in place. `prepare` returns the module itself, or its DDP wrapper, and names in
checkpoints are the model's own.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dcompile import logs
from dcompile.capture.entry import give_optimizer
from dcompile.config import Config, option_types
from dcompile.errors import OptionError
from dcompile.integrations.requirements import require

require("accelerate", __name__)

import accelerate.accelerator  # type: ignore[import-untyped]  # noqa: E402
import torch  # noqa: E402
from accelerate.utils import DynamoBackend, TorchDynamoPlugin  # type: ignore[import-untyped]  # noqa: E402

BACKEND = "dcompile"
REGIONAL = (
    "use_regional_compilation: the model is compiled as a whole, of which layers that repeat are traced once "
    "(option layers_once)"
)

_Options: Any = dataclasses.make_dataclass(
    "_Options",
    [
        (name, kind | None, field(default=None, metadata={"help": f"Option `{option}`. {text}"}))
        for name, (option, kind, text) in option_types().items()
        if name != "in_place"
    ],
)
"""Field for each option of dcompile; None leaves the option out."""


@dataclass
class DcompilePlugin(_Options, TorchDynamoPlugin):  # type: ignore[misc]  # Accelerate ships no types
    """Settings of `torch.compile(backend="dcompile")` for models that `Accelerator.prepare` compiles in place.

    `mode`, `fullgraph`, `dynamic`, `options` and `disable` are those of torch.compile. Each option of dcompile is a
    field by name (dots are underscores, docs/guide/settings.md); None leaves it out.

    The ACCELERATE_DYNAMO_* variables are not read. `accelerate launch` always sets them, to the defaults of a user who
    requested nothing (`dynamic=False` among them). Raises OptionError for a bad option.
    """

    backend: str = BACKEND
    fullgraph: bool = False
    use_regional_compilation: bool = False

    def __post_init__(self) -> None:
        if str(self.backend).lower() != BACKEND:
            raise OptionError(
                f"DcompilePlugin: backend={self.backend!r}; for others use accelerate's TorchDynamoPlugin"
            )
        self.backend = BACKEND
        options = self._all_options()
        Config.make(None, options)  # raises for a bad option here, in the user's script, not at the first step

    def to_dict(self) -> dict[str, Any]:
        """All fields, as Accelerate logs them."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments of torch.compile."""
        return _arguments(self, self.dynamic, self._all_options())

    def _all_options(self) -> dict[str, Any]:
        """Merge `options` with the typed fields that are set. Raises OptionError for an option that is given twice."""
        if not isinstance(self.options, dict | None):
            raise OptionError(f"DcompilePlugin: options must be a dict, not {type(self.options).__name__}")
        names = {"mode": "mode"} | {name: option for name, (option, *_) in option_types().items() if name != "in_place"}
        typed = {option: getattr(self, name) for name, option in names.items() if getattr(self, name) is not None}
        given = dict(self.options or {})
        if twice := sorted(given.keys() & typed.keys()):
            raise OptionError(f"DcompilePlugin: {twice[0]!r} is given both as a field and in options")
        return {**given, **typed}


def join_step(model: Any, optimizer: Any) -> None:
    """Let the updates of an optimizer run in the programs of a model that `Accelerator.prepare` has compiled.

    Call it with what `prepare` returned, before the first step. Raises DcompileError if the model is not compiled.
    """
    give_optimizer(model, getattr(optimizer, "optimizer", optimizer))


def register() -> None:
    """Register the backend's name with Accelerate, for compilation in place. Importing this module does so once."""
    if BACKEND.upper() not in DynamoBackend._value2member_map_:
        _add_member(DynamoBackend, BACKEND.upper())
    _wrap(TorchDynamoPlugin, "to_kwargs", _to_kwargs)
    for name in _REGIONAL:
        if hasattr(accelerate.accelerator, name):  # the third since Accelerate 1.6, the second since 1.13
            _wrap(accelerate.accelerator, name, _whole_model)


def _add_member(kind: Any, name: str) -> None:
    """Add a member to a closed enumeration of strings."""
    member = str.__new__(kind, name)
    member._name_ = member._value_ = name
    member.__objclass__ = kind
    member._sort_order_ = len(kind._member_names_)
    kind._member_map_[name] = kind._value2member_map_[name] = member
    kind._member_names_.append(name)
    type.__setattr__(kind, name, member)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by `around(original, ...)`, once."""
    original = getattr(owner, name)
    if getattr(original, "_dcompile", False):
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    call._dcompile = True  # type: ignore[attr-defined]
    setattr(owner, name, call)


def _to_kwargs(original: Callable[..., Any], plugin: Any) -> Any:
    """Make arguments for Accelerate's own plugin with this backend.

    torch refuses `mode` with `options`, so the mode becomes an option. `accelerate launch` sets
    ACCELERATE_DYNAMO_USE_DYNAMIC to False if the user requests nothing. That value is left out.
    """
    if getattr(plugin.backend, "value", "") != BACKEND.upper():
        return original(plugin)
    nobody_asked = os.environ.get("ACCELERATE_DYNAMO_USE_DYNAMIC", "").lower() in ("0", "false", "no")
    dynamic = None if nobody_asked and plugin.dynamic is False else plugin.dynamic
    options = {**({} if plugin.mode in (None, "default") else {"mode": plugin.mode}), **(plugin.options or {})}
    return _arguments(plugin, dynamic, options)


def _arguments(plugin: Any, dynamic: bool | None, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of torch.compile for a plugin."""
    return {
        "backend": BACKEND,
        "fullgraph": plugin.fullgraph,
        "dynamic": dynamic,
        "options": {**options, "in_place": True},
        "disable": plugin.disable,
    }


def _whole_model(original: Callable[..., Any], module: Any, **arguments: Any) -> Any:
    """Replace Accelerate's regional compilation: compiling each region alone would leave DDP and FSDP around them."""
    if arguments.get("backend") != BACKEND:
        return original(module, **arguments)
    logs.report(logging.INFO, REGIONAL)
    return torch.compile(module, **arguments)


_REGIONAL = ("compile_regions", "compile_regions_fsdp2", "compile_regions_deepspeed")
register()
