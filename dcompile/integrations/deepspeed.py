"""Integration with DeepSpeed: `compile(engine)`, after `deepspeed.initialize`.

The engine's module is compiled in place. The engine's own timers and flags run around it, outside of the graph. With
`options={"zero": "graph"}`, ZeRO's collectives become part of the compiled programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from dcompile.backend import dcompile_backend
from dcompile.config import Config
from dcompile.errors import OptionError
from dcompile.integrations.requirements import require

require("deepspeed", "dcompile.integrations.deepspeed")

import deepspeed  # noqa: E402  after the check

Engine = TypeVar("Engine")


def compile(
    engine: Engine, mode: str | None = None, options: Mapping[str, Any] | None = None, *, fullgraph: bool = False
) -> Engine:
    """Compile the module of a DeepSpeed engine in place, and return the engine.

    `mode`, `options` and `fullgraph` are those of `dcompile.compile`; here mode and options may both be given.
    `options={"zero": "graph"}` moves ZeRO's collectives into the compiled programs. Unsupported ones stay DeepSpeed's,
    and the receipt gives the reason. Raises TypeError if `engine` is not an engine. Raises OptionError for a bad
    option, or if the engine is compiled already.
    """
    if not isinstance(engine, deepspeed.DeepSpeedEngine):
        raise TypeError(
            f"dcompile: compile needs the engine that deepspeed.initialize returns first, not {type(engine).__name__}; "
            "for a model without DeepSpeed there is dcompile.compile(model)"
        )
    given: Any = engine
    if given.is_compiled:
        raise OptionError("dcompile: this DeepSpeed engine is compiled already; make a new engine to compile it again")
    if given.is_deepcompile_enabled():
        raise OptionError("dcompile: DeepCompile takes no other compiler; leave compile.deepcompile out of the config")
    chosen = {**(options or {}), **({} if mode is None else {"mode": mode})}
    Config.make(None, chosen)  # raises for a bad option here, in the user's script, not at the first step
    given.compile(backend=dcompile_backend, compile_kwargs={"options": chosen, "fullgraph": fullgraph})
    return engine
