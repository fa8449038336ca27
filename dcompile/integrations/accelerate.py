"""The door for Hugging Face Accelerate: `Accelerator(dynamo_plugin=DcompilePlugin(...))`.

Accelerate checks a plugin's backend against its own enumeration, which knows no third-party name, and its `to_kwargs`
drops every field that equals the class's default. The plugin therefore says itself what `torch.compile` is to get.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from dcompile.config import Config
from dcompile.errors import OptionError

try:
    from accelerate.utils import TorchDynamoPlugin  # type: ignore[import-untyped]
except ImportError as error:
    message = "dcompile.integrations.accelerate needs Accelerate 1.10 or newer: pip install 'dcompile[accelerate]'"
    raise ImportError(message) from error

BACKEND = "dcompile"


@dataclass
class DcompilePlugin(TorchDynamoPlugin):  # type: ignore[misc]  # Accelerate ships no types
    """`torch.compile(backend="dcompile")` for what `Accelerator.prepare` returns.

    `mode`, `fullgraph`, `dynamic`, `options` and `disable` mean what they mean to torch.compile. The fields below are
    options of dcompile by name; one that stays None is left out. The ACCELERATE_DYNAMO_* variables are not read:
    `accelerate launch` always sets them, to the values of a user who asked for nothing (`dynamic=False` among them).
    """

    backend: str = BACKEND
    fullgraph: bool = False
    use_regional_compilation: bool = False
    kernels: Any = field(default=None, metadata={"help": "Option `kernels`: a name, or a callable."})
    matmul: Literal["auto", "aten", "own"] | None = field(default=None, metadata={"help": "Option `matmul`."})
    activation_memory_budget: float | None = field(
        default=None, metadata={"help": "Option `activation_memory_budget`."}
    )
    recompute: Literal["registers", "memory"] | None = field(default=None, metadata={"help": "Option `recompute`."})
    chunked_loss: int | None = field(default=None, metadata={"help": "Option `chunked_loss`."})
    layers_once: bool | None = field(default=None, metadata={"help": "Option `layers_once`."})
    overlap_mb: int | None = field(default=None, metadata={"help": "Option `overlap_mb`."})
    figures: Literal["table", "measured"] | None = field(default=None, metadata={"help": "Option `figures`."})
    gathers: Literal["auto", "collective"] | None = field(default=None, metadata={"help": "Option `gathers`."})
    shard_copies: Literal["auto", "kept", "gather"] | None = field(
        default=None, metadata={"help": "Option `shard_copies`."}
    )
    share_artifacts: bool | None = field(default=None, metadata={"help": "Option `share_artifacts`."})
    autocast_experts: bool | None = field(default=None, metadata={"help": "Option `autocast_experts`."})
    late_sizes: bool | None = field(default=None, metadata={"help": "Option `late_sizes`."})
    distributed: Literal["auto", "stock"] | None = field(default=None, metadata={"help": "Option `distributed`."})
    receipt: bool | None = field(default=None, metadata={"help": "Option `receipt`."})
    log: str | None = field(default=None, metadata={"help": "Option `log`."})
    dump: str | None = field(default=None, metadata={"help": "Option `dump`."})
    verify: bool | None = field(default=None, metadata={"help": "Option `verify`."})
    cache_dir: str | None = field(default=None, metadata={"help": "Option `cache_dir`."})
    compile_timeout_s: int | None = field(default=None, metadata={"help": "Option `compile_timeout_s`."})

    def __post_init__(self) -> None:
        if self.backend != BACKEND:
            raise OptionError(
                f"DcompilePlugin: backend={self.backend!r}; for others use accelerate's TorchDynamoPlugin"
            )
        options = self._all_options()
        Config.make(None, options)  # a bad option is an error here, in the user's script, not at the first step

    def to_dict(self) -> dict[str, Any]:
        """All fields, as Accelerate logs them."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of torch.compile. torch refuses `mode` beside `options`, so the mode travels as an option."""
        return {
            "backend": self.backend,
            "fullgraph": self.fullgraph,
            "dynamic": self.dynamic,
            "options": self._all_options(),
            "disable": self.disable,
        }

    def _all_options(self) -> dict[str, Any]:
        """`options`, then the typed fields that are set; the same option given twice is a mistake."""
        if not isinstance(self.options, dict | None):
            raise OptionError(f"DcompilePlugin: options must be a dict, not {type(self.options).__name__}")
        inherited = {f.name for f in dataclasses.fields(TorchDynamoPlugin)}
        own = [f.name for f in dataclasses.fields(self) if f.name not in inherited]
        typed = {name: getattr(self, name) for name in ("mode", *own) if getattr(self, name) is not None}
        given = dict(self.options or {})
        if twice := sorted(given.keys() & typed.keys()):
            raise OptionError(f"DcompilePlugin: {twice[0]!r} is given both as a field and in options")
        return {**given, **typed}
