"""Updates of torch's elementwise optimizers as functions, for the program of a backward.

What changes from step to step (learning rate, bias correction) is computed by the host in float64, as torch does, and
reaches the program as numbers in memory: a scheduler causes no recompilation. Other settings of a param group are
constants of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Group: TypeAlias = Mapping[str, Any]
Values: TypeAlias = Sequence[torch.Tensor]
Updated: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class UpdateRule:
    """How one kind of optimizer updates a parameter."""

    state: Callable[[Group], tuple[str, ...]]
    """Names of the state's tensors with the parameter's shape, by the group's settings."""
    numbers: Callable[[Group, int], tuple[float, ...]]
    """Numbers of step 1, 2, ... for a group."""
    update: Callable[[Group, torch.Tensor, torch.Tensor, Values, Values], Updated]
    """(group, parameter, gradient, state, numbers as 0-dimensional tensors) -> (parameter, state...) after the step."""
    constants: tuple[str, ...]
    """Settings of a group that the program contains."""
    counts: bool = True
    """Whether the state has a count of steps."""


def _signed(group: Group, gradient: torch.Tensor) -> torch.Tensor:
    return -gradient if group["maximize"] else gradient


def _decayed(group: Group, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Add the L2 penalty's gradient."""
    decay = group["weight_decay"]
    return gradient.add(parameter, alpha=decay) if decay else gradient


def _adam_state(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def _adam_numbers(group: Group, step: int) -> tuple[float, ...]:
    (beta1, beta2), rate = group["betas"], float(group["lr"])
    return 1 - rate * group["weight_decay"], -rate / (1 - beta1**step), (1 - beta2**step) ** 0.5


def _adam(group: Group, parameter: torch.Tensor, gradient: torch.Tensor, state: Values, numbers: Values) -> Updated:
    """Adam and AdamW (Kingma and Ba, 2015; Loshchilov and Hutter, 2019)."""
    (beta1, beta2), (kept, size, root) = group["betas"], numbers
    gradient = _signed(group, gradient)
    if group["decoupled_weight_decay"]:
        parameter = parameter * kept if group["weight_decay"] else parameter
    else:
        gradient = _decayed(group, gradient, parameter)
    first = torch.lerp(state[0], gradient, 1 - beta1)
    second = torch.addcmul(state[1] * beta2, gradient, gradient, value=1 - beta2)
    largest = (torch.maximum(state[2], second),) if group["amsgrad"] else ()
    denominator = (largest[0] if largest else second).sqrt() / root + group["eps"]
    return parameter + size * first / denominator, first, second, *largest


def _sgd(group: Group, parameter: torch.Tensor, gradient: torch.Tensor, state: Values, numbers: Values) -> Updated:
    gradient, momentum = _decayed(group, _signed(group, gradient), parameter), group["momentum"]
    if not momentum:
        return (parameter + gradient * numbers[0],)
    moving = (state[0] * momentum).add(gradient, alpha=1 - group["dampening"])
    change = gradient.add(moving, alpha=momentum) if group["nesterov"] else moving
    return parameter + change * numbers[0], moving


def _adagrad(group: Group, parameter: torch.Tensor, gradient: torch.Tensor, state: Values, numbers: Values) -> Updated:
    """Adagrad (Duchi, Hazan and Singer, 2011)."""
    gradient = _decayed(group, _signed(group, gradient), parameter)
    total = torch.addcmul(state[0], gradient, gradient)
    return parameter + numbers[0] * gradient / (total.sqrt() + group["eps"]), total


def _rmsprop_state(group: Group) -> tuple[str, ...]:
    centered = ("grad_avg",) if group["centered"] else ()
    return ("square_avg", *centered, *(("momentum_buffer",) if group["momentum"] > 0 else ()))


def _rmsprop(group: Group, parameter: torch.Tensor, gradient: torch.Tensor, state: Values, numbers: Values) -> Updated:
    """RMSprop (Hinton, 2012), centered as in Graves, 2013."""
    gradient, alpha = _decayed(group, _signed(group, gradient), parameter), group["alpha"]
    squares = torch.addcmul(state[0] * alpha, gradient, gradient, value=1 - alpha)
    new, variance = [squares], squares
    if group["centered"]:
        new.append(torch.lerp(state[1], gradient, 1 - alpha))
        variance = torch.addcmul(squares, new[1], new[1], value=-1)
    root = variance.sqrt() + group["eps"]
    if not group["momentum"] > 0:
        return parameter + numbers[0] * gradient / root, *new
    moving = torch.addcdiv(state[-1] * group["momentum"], gradient, root)
    return parameter + moving * numbers[0], *new, moving


COMMON = ("weight_decay", "maximize")
ADAM = UpdateRule(_adam_state, _adam_numbers, _adam, (*COMMON, "betas", "eps", "amsgrad", "decoupled_weight_decay"))
RULES: dict[type[torch.optim.Optimizer], UpdateRule] = {
    torch.optim.AdamW: ADAM,
    torch.optim.Adam: ADAM,
    torch.optim.SGD: UpdateRule(
        lambda group: ("momentum_buffer",) if group["momentum"] else (),
        lambda group, _: (-float(group["lr"]),),
        _sgd,
        (*COMMON, "momentum", "dampening", "nesterov"),
        counts=False,
    ),
    torch.optim.Adagrad: UpdateRule(
        lambda _: ("sum",),
        lambda group, step: (-float(group["lr"]) / (1 + (step - 1) * group["lr_decay"]),),
        _adagrad,
        (*COMMON, "eps"),
    ),
    torch.optim.RMSprop: UpdateRule(
        _rmsprop_state,
        lambda group, _: (-float(group["lr"]),),
        _rmsprop,
        (*COMMON, "alpha", "eps", "centered", "momentum"),
    ),
}
"""Optimizers whose update is elementwise. Subclasses may change it, and are not among them."""


def settings_of(rule: UpdateRule, group: Group) -> tuple[Any, ...]:
    """Return the settings of a group that a program contains: others need another program."""
    found = (group.get(name, False) for name in rule.constants)
    return tuple(tuple(value) if isinstance(value, list) else value for value in found)
