"""Find the state of compiled models by what users hold: a module, a wrapper around one, or a compiled callable."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from dcompile.capture.callables import compiled_part
from dcompile.capture.compiled_model import CompiledModel
from dcompile.capture.entry import newest_entry


def find_model(thing: Any) -> CompiledModel | None:
    """Return the state of a result of compile or torch.compile, of the module inside it, or of a wrapper (DDP, Fabric).

    A wrapper is a module with exactly one compiled part. None if there is no such state.
    """
    models = find_models(thing)
    return models[0] if len(models) == 1 else None


def find_models(thing: Any) -> list[CompiledModel]:
    """Return the states of all parts of a module that are compiled by themselves, such as its layers.

    One state if the module is compiled as a whole, or for another callable. Empty if nothing was compiled.
    """
    if not isinstance(thing, Module):
        entry = getattr(thing, "_dcompile_entry", None)
        return [] if entry is None else [entry.model_run]
    root = compiled_part(thing)
    entry = newest_entry(root)
    parts = [entry] if entry is not None else [newest_entry(part) for part in root.modules()]
    return [*dict.fromkeys(part.model_run for part in parts if part is not None)]
