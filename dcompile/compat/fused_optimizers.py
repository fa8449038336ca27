"""Fused optimizers as operations on lists of tensors, which Dynamo traces in place of torch's functions.

torch hides `_fused_adam`, `_fused_sgd` and `_fused_adagrad` from Dynamo, as it has kernels for them. So a compiled step
of an optimizer with `fused=True` would compile nothing. The arithmetic here is that of torch's kernels: 16-bit tensors
are computed in float32 and rounded once. That makes an element cheaper than the many roundings of `foreach=True`
(`docs/lab/gpu-training.md`). Each function has the signature of torch's function, and updates the same tensors in
place. This module imports torch, so it is imported only where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = list[torch.Tensor]
Some = list[torch.Tensor] | tuple[torch.Tensor, ...]
Number = float | torch.Tensor


def adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    state_steps: Tensors,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    *,
    amsgrad: bool,
    beta1: Number,
    beta2: Number,
    lr: Number,
    weight_decay: float,
    eps: float,
    maximize: bool,
    decoupled_weight_decay: bool,
    **_: Any,
) -> None:
    """Adam and AdamW (Kingma and Ba, 2015; Loshchilov and Hutter, 2019)."""
    if not params:
        return
    steps = _counted(state_steps, found_inf)
    taken, values, old = _gradients(grads, grad_scale, found_inf, maximize), _wide(params), _wide(exp_avgs)
    if weight_decay and decoupled_weight_decay:
        values = torch._foreach_sub(values, _times(values, lr, weight_decay))
    elif weight_decay:
        taken = torch._foreach_add(taken, values, alpha=weight_decay)
    first = torch._foreach_add(torch._foreach_mul(old, beta1), torch._foreach_mul(taken, 1 - beta1))
    squares = torch._foreach_mul(torch._foreach_mul(taken, 1 - beta2), taken)
    second = torch._foreach_add(torch._foreach_mul(_wide(exp_avg_sqs), beta2), squares)
    largest = torch._foreach_maximum(_wide(max_exp_avg_sqs), second) if amsgrad else second
    # float64 as in the kernels: 1 - 0.999 in float32 has a relative error of 1.6e-5
    sizes = [_on_device_of(step, lr) / (1 - beta1**step) for step in steps]
    roots = torch._foreach_div(torch._foreach_sqrt(largest), [(1 - beta2**step).sqrt() for step in steps])
    changes = torch._foreach_div(torch._foreach_mul(first, sizes), torch._foreach_add(roots, eps))
    _write(params, torch._foreach_sub(values, changes), found_inf)
    _write(exp_avgs, first, found_inf)
    _write(exp_avg_sqs, second, found_inf)
    if amsgrad:
        _write(max_exp_avg_sqs, largest, found_inf)


def sgd(
    params: Tensors,
    grads: Tensors,
    momentum_buffer_list: list[torch.Tensor | None],
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    *,
    weight_decay: float,
    momentum: float,
    lr: Number,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    **_: Any,
) -> None:
    """Stochastic gradient descent with momentum, as in torch.optim.SGD; the first step creates the momentum buffers."""
    if not params:
        return
    taken, values = _gradients(grads, grad_scale, found_inf, maximize), _wide(params)
    if weight_decay:
        taken = torch._foreach_add(taken, values, alpha=weight_decay)
    if momentum:
        kept = [buffer for buffer in momentum_buffer_list if buffer is not None]
        if kept:
            moving: Some = torch._foreach_add(torch._foreach_mul(_wide(kept), momentum), taken, alpha=1 - dampening)
        else:
            moving = taken
            for place, grad in enumerate(grads):
                momentum_buffer_list[place] = torch.zeros_like(grad)
        _write([buffer for buffer in momentum_buffer_list if buffer is not None], moving, found_inf)
        taken = torch._foreach_add(taken, moving, alpha=momentum) if nesterov else moving
    _write(params, torch._foreach_sub(values, _times(taken, lr)), found_inf)


def adagrad(
    params: Tensors,
    grads: Tensors,
    state_sums: Tensors,
    state_steps: Tensors,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    *,
    lr: Number,
    weight_decay: float,
    lr_decay: float,
    eps: float,
    maximize: bool,
    **_: Any,
) -> None:
    """Adagrad (Duchi, Hazan and Singer, 2011)."""
    if not params:
        return
    steps = _counted(state_steps, found_inf)
    taken, values = _gradients(grads, grad_scale, found_inf, maximize), _wide(params)
    if weight_decay:
        taken = torch._foreach_add(taken, values, alpha=weight_decay)
    sums = torch._foreach_add(_wide(state_sums), torch._foreach_mul(taken, taken))
    sizes = [_on_device_of(step, lr) / (1 + (step - 1) * lr_decay) for step in steps]
    changes = torch._foreach_div(torch._foreach_mul(taken, sizes), torch._foreach_add(torch._foreach_sqrt(sums), eps))
    _write(params, torch._foreach_sub(values, changes), found_inf)
    _write(state_sums, sums, found_inf)


STAND_INS: dict[str, Callable[..., None]] = {"_fused_adam": adam, "_fused_sgd": sgd, "_fused_adagrad": adagrad}
"""Replacements by the name of torch's function, in the module of its optimizer."""


def _counted(steps: Tensors, found_inf: torch.Tensor | None) -> Tensors:
    """Increment the step counts, unless GradScaler found an infinite gradient. Return them as float64."""
    if found_inf is None:
        torch._foreach_add_(steps, 1)
    else:
        for step in steps:
            step.add_(1 - found_inf.to(step.device).reshape(()))
    return [step.to(torch.float64) for step in steps]


def _gradients(grads: Tensors, scale: torch.Tensor | None, found_inf: torch.Tensor | None, maximize: bool) -> Some:
    """Gradients as the update uses them.

    Gradients divided by GradScaler's factor are written back, as the kernels do.
    """
    taken: Some = _wide(grads)
    if scale is not None:
        taken = [grad / scale.to(grad.device) for grad in taken]
        _write(grads, taken, found_inf)
    return torch._foreach_neg(taken) if maximize else taken


def _wide(tensors: Some) -> Some:
    return [x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in tensors]


def _times(tensors: Some, lr: Number, factor: float = 1.0) -> Some:
    """Multiply tensors by the learning rate, which may be a tensor."""
    if not isinstance(lr, torch.Tensor):
        return torch._foreach_mul(tensors, lr * factor)
    return torch._foreach_mul(tensors, [lr.to(x.device) * factor for x in tensors])


def _on_device_of(x: torch.Tensor, number: Number) -> Number:
    """Move a tensor with a number to the device of `x`."""
    return number.to(x.device) if isinstance(number, torch.Tensor) else number


def _write(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor], found_inf: torch.Tensor | None) -> None:
    """Write each value to its target, unless GradScaler has found an infinite gradient."""
    for target, value in zip(targets, values, strict=True):
        if found_inf is not None:
            value = torch.where(found_inf.to(target.device) == 1, target, value)
        target.copy_(value)
