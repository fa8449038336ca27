"""What a receipt says of a model's training: gradients that are not finite, and replicas that have drifted apart.

It is found out when somebody asks for the receipt, from what is there: `.grad`, and what programs with an update have
measured anyway. Steps do nothing for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch

from dcompile import compat
from dcompile.capture.compiled_model import CompiledModel
from dcompile.capture.train_step.pending_gradient import PendingGradient
from dcompile.logs import rank, report

MAX_NAMED = 8
"""Parameters that a line names."""


def health_notes(models: Iterable[CompiledModel | None]) -> tuple[str, ...]:
    """Lines about the newest step of models; each line is also logged once as a warning.

    It waits for what the device computes, and runs no collective: ranks may call it at different times, or not.
    """
    lines = list[str]()
    for model in models:
        if model is None:
            continue
        found = list(dict.fromkeys(_not_finite(model)))
        own = [_about_gradients(found)] if found else []
        for line in own:
            if line not in model.warned:
                model.warned.add(line)
                report(logging.WARNING, f"rank {rank()}: {line}")
        lines += [*own, *model.sync.health()]  # which has logged a drift
    return tuple(lines)


def _about_gradients(names: list[str]) -> str:
    named, more = ", ".join(names[:MAX_NAMED]), len(names) - MAX_NAMED
    return f"gradients that are infinite or no number: {named}" + (f" and {more} more" if more > 0 else "")


def _not_finite(model: CompiledModel) -> Iterator[str]:
    """Names of parameters whose newest gradient is not finite on this rank; gradients that are pending stay so."""
    module = model.thing()
    if not isinstance(module, torch.nn.Module):
        module = getattr(module, "__self__", None)
    if not isinstance(module, torch.nn.Module):
        return
    named = list(module.named_parameters())
    held = [(name, gradient) for name, parameter in named if (gradient := _held(parameter)) is not None]
    with torch.no_grad():
        sound = [gradient.isfinite().all() for _, gradient in held]
    # those of one device are read at once
    for device in {flag.device for flag in sound}:
        here = [(name, flag) for (name, _), flag in zip(held, sound, strict=True) if flag.device == device]
        read = torch.stack([flag for _, flag in here]).tolist()
        yield from (name for (name, _), good in zip(here, read, strict=True) if not good)
    measured = {id(parameter) for parameter in (model.step.unsound() if model.step is not None else ())}
    yield from (name for name, parameter in named if id(parameter) in measured)


def _held(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's part of a gradient that is in memory."""
    gradient = parameter.grad
    if type(gradient) is PendingGradient:
        gradient = gradient.computed
    if gradient is None or gradient.is_meta or not gradient.numel():
        return None
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return compat.tensors.local_part(gradient)
