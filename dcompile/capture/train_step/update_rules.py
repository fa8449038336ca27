"""Updates of torch's elementwise optimizers as functions, for the program of a backward.

What changes from step to step (learning rate, momentum, decay, bias correction) is computed by the host in float64, as
torch does, and reaches the program as numbers in memory: a scheduler causes no recompilation. Other settings of a param
group are constants of the program.
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
    constants: Callable[[Group], tuple[Any, ...]]
    """Settings of a group that the program contains; another value needs another program."""
    counts: bool = True
    """Whether the state has a count of steps."""


def _signed(group: Group, gradient: torch.Tensor) -> torch.Tensor:
    return -gradient if group["maximize"] else gradient


def _decayed(group: Group, gradient: torch.Tensor, parameter: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Add the L2 penalty's gradient."""
    return gradient + parameter * decay if group["weight_decay"] else gradient


def _adam_state(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def _adam_numbers(group: Group, step: int) -> tuple[float, ...]:
    (beta1, beta2), rate, decay = group["betas"], float(group["lr"]), group["weight_decay"]
    return (
        1 - rate * decay, decay, -rate / (1 - beta1**step), (1 - beta2**step) ** 0.5, 1 - beta1, beta2, 1 - beta2,
    )  # fmt: skip


def _adam(group: Group, parameter: torch.Tensor, gradient: torch.Tensor, state: Values, numbers: Values) -> Updated:
    """Adam and AdamW (Kingma and Ba, 2015; Loshchilov and Hutter, 2019)."""
    kept, decay, size, root, weight, beta2, weight2 = numbers
    gradient = _signed(group, gradient)
    if group["decoupled_weight_decay"]:
        parameter = parameter * kept if group["weight_decay"] else parameter
    else:
        gradient = _decayed(group, gradient, parameter, decay)
    first = torch.lerp(state[0], gradient, weight)
    second = state[1] * beta2 + weight2 * gradient * gradient
    largest = (torch.maximum(state[2], second),) if group["amsgrad"] else ()
    denominator = (largest[0] if largest else second).sqrt() / root + group["eps"]
    return parameter + size * first / denominator, first, second, *largest


def _sgd_numbers(group: Group, _: int) -> tuple[float, ...]:
    return -float(group["lr"]), group["weight_decay"], group["momentum"], 1 - group["dampening"]


def _sgd(group: Group, parameter: torch.Tensor, gradient: torch.Tensor, state: Values, numbers: Values) -> Updated:
    rate, decay, momentum, weight = numbers
    gradient = _decayed(group, _signed(group, gradient), parameter, decay)
    if not group["momentum"]:
        return (parameter + gradient * rate,)
    moving = state[0] * momentum + gradient * weight
    change = gradient + moving * momentum if group["nesterov"] else moving
    return parameter + change * rate, moving


def _adagrad_numbers(group: Group, step: int) -> tuple[float, ...]:
    return -float(group["lr"]) / (1 + (step - 1) * group["lr_decay"]), group["weight_decay"]


def _adagrad(group: Group, parameter: torch.Tensor, gradient: torch.Tensor, state: Values, numbers: Values) -> Updated:
    """Adagrad (Duchi, Hazan and Singer, 2011)."""
    gradient = _decayed(group, _signed(group, gradient), parameter, numbers[1])
    total = torch.addcmul(state[0], gradient, gradient)
    return parameter + numbers[0] * gradient / (total.sqrt() + group["eps"]), total


def _rmsprop_state(group: Group) -> tuple[str, ...]:
    centered = ("grad_avg",) if group["centered"] else ()
    return ("square_avg", *centered, *(("momentum_buffer",) if group["momentum"] > 0 else ()))


def _rmsprop_numbers(group: Group, _: int) -> tuple[float, ...]:
    alpha = group["alpha"]
    return -float(group["lr"]), group["weight_decay"], group["momentum"], alpha, 1 - alpha


def _rmsprop(group: Group, parameter: torch.Tensor, gradient: torch.Tensor, state: Values, numbers: Values) -> Updated:
    """RMSprop (Hinton, 2012), centered as in Graves, 2013."""
    rate, decay, momentum, alpha, weight = numbers
    gradient = _decayed(group, _signed(group, gradient), parameter, decay)
    squares = state[0] * alpha + weight * gradient * gradient
    new, variance = [squares], squares
    if group["centered"]:
        new.append(torch.lerp(state[1], gradient, weight))
        variance = torch.addcmul(squares, new[1], new[1], value=-1)
    root = variance.sqrt() + group["eps"]
    if not group["momentum"] > 0:
        return parameter + rate * gradient / root, *new
    moving = state[-1] * momentum + gradient / root
    return parameter + moving * rate, *new, moving


def _common(group: Group, *names: str) -> tuple[Any, ...]:
    return bool(group["weight_decay"]), group["maximize"], *map(group.__getitem__, names)


ADAM = UpdateRule(
    _adam_state,
    _adam_numbers,
    _adam,
    lambda group: _common(group, "eps", "amsgrad", "decoupled_weight_decay"),
)
RULES: dict[type[torch.optim.Optimizer], UpdateRule] = {
    torch.optim.AdamW: ADAM,
    torch.optim.Adam: ADAM,
    torch.optim.SGD: UpdateRule(
        lambda group: ("momentum_buffer",) if group["momentum"] else (),
        _sgd_numbers,
        _sgd,
        lambda group: (*_common(group, "nesterov"), bool(group["momentum"])),
        counts=False,
    ),
    torch.optim.Adagrad: UpdateRule(
        lambda _: ("sum",), _adagrad_numbers, _adagrad, lambda group: _common(group, "eps")
    ),
    torch.optim.RMSprop: UpdateRule(
        _rmsprop_state,
        _rmsprop_numbers,
        _rmsprop,
        lambda group: (*_common(group, "eps", "centered"), group["momentum"] > 0),
    ),
}
"""Optimizers whose update is elementwise. Subclasses may change it, and are not among them."""
