"""Recurrent layers (LSTM, GRU, RNN) as torch operators: one library call forward, and one backward.

`torch.ops.dcompile_rnn.forward` takes the arguments of torch's functions (`torch.lstm`), and their name as `kind`. It
returns the output, the last hidden state, the last cell state (empty except for an LSTM) and the generator's state
(empty without dropout). AOTAutograd would decompose torch's functions into time steps. `backward` recomputes the
forward to differentiate it, because a library's intermediate results are private.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dcompile import compat
from dcompile.operators.own_operators import Functions, define_operators

NAMESPACE = "dcompile_rnn"
KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_ARGUMENTS = (
    "str kind, Tensor input, Tensor[] hidden, Tensor[] weights, bool has_biases, int layers, float dropout, "
    "bool train, bool bidirectional, bool batch_first"
)
_STATE_BYTES = 5056
"""Bytes of the CPU generator's state."""


def _call(
    kind: str, value: torch.Tensor, hidden: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *how: Any
) -> tuple[torch.Tensor, ...]:
    function: Any = getattr(torch, kind)
    results: tuple[torch.Tensor, ...] = function(value, hidden if kind == "lstm" else hidden[0], weights, *how)
    return results


def forward(
    kind: str, value: torch.Tensor, hidden: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *how: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, hidden state, cell state, previous state of the generator), with the layouts of `_shapes`.

    `how`: the operator's arguments from `has_biases` on.
    """
    _, _, dropout, train, *_ = how
    state = torch.get_rng_state() if dropout and train else torch.empty(0, dtype=torch.uint8, device="cpu")
    output, last, *cell = _call(kind, value, hidden, weights, *how)
    shown = _shapes(kind, value, hidden, weights, *how)
    laid = [_as(real, like) for real, like in zip((output, last, *cell), shown, strict=False)]
    return laid[0], laid[1], laid[2] if cell else shown[2], state


def _as(real: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return real if real.stride() == like.stride() else like.copy_(real)


def _shapes(
    kind: str, value: torch.Tensor, hidden: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *how: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fake implementation of `forward`: stored in time order, whichever dimension comes first, as eager's."""
    _, _, dropout, train, bidirectional, batch_first = how
    steps, batch = (value.shape[1], value.shape[0]) if batch_first else (value.shape[0], value.shape[1])
    width = hidden[0].shape[-1] * (2 if bidirectional else 1)
    output = value.new_empty((steps, batch, width))
    cell = hidden[1].new_empty(hidden[1].shape) if kind == "lstm" else value.new_empty(0)
    state = torch.empty(_STATE_BYTES if dropout and train else 0, dtype=torch.uint8, device="cpu")
    return output.transpose(0, 1) if batch_first else output, hidden[0].new_empty(hidden[0].shape), cell, state


def backward(
    gradients: Sequence[torch.Tensor],
    state: torch.Tensor,
    kind: str,
    value: torch.Tensor,
    hidden: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    *how: Any,
) -> list[torch.Tensor]:
    """Gradients of the input, of each hidden state and of each weight."""
    count = len(hidden)
    with torch.random.fork_rng(devices=[]), compat.autograd.record_autograd():
        if state.numel():
            torch.set_rng_state(state)
        leaves = [tensor.detach().requires_grad_() for tensor in (value, *hidden, *weights)]
        results = _call(kind, leaves[0], leaves[1 : 1 + count], leaves[1 + count :], *how)
        found = torch.autograd.grad(results, leaves, gradients[: len(results)])
    return [gradient.contiguous() for gradient in found]


def _backward_shapes(
    gradients: Any, state: Any, kind: str, value: torch.Tensor, hidden: Any, weights: Any, *how: Any
) -> list[torch.Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (value, *hidden, *weights)]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    kind, value, hidden, weights, *how = inputs
    ctx.kind, ctx.how, ctx.counts = kind, tuple(how), (len(hidden), len(weights))
    ctx.save_for_backward(output[3], value, *hidden, *weights)
    ctx.mark_non_differentiable(output[3])
    ctx.shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in output[:3]]


def _differentiate(ctx: Any, *gradients: Any) -> Any:
    state, value, *rest = ctx.saved_tensors
    hidden, weights = rest[: ctx.counts[0]], rest[ctx.counts[0] :]
    whole = [
        torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
        for gradient, (shape, dtype, device) in zip(gradients, ctx.shapes, strict=False)
    ]
    found = torch.ops.dcompile_rnn.backward(whole, state, ctx.kind, value, hidden, weights, *ctx.how)
    first = 1 + len(hidden)
    return (None, found[0], found[1:first], found[first:], *(None for _ in ctx.how))


def _register() -> torch.library.Library:
    schemas = (
        f"forward({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
        f"backward(Tensor[] gradients, Tensor state, {_ARGUMENTS}) -> Tensor[]",
    )
    functions: dict[str, Functions] = {"forward": (forward, _shapes), "backward": (backward, _backward_shapes)}
    library = define_operators(NAMESPACE, schemas, functions)
    torch.library.register_autograd(f"{NAMESPACE}::forward", _differentiate, setup_context=_keep, lib=library)
    return library


_LIBRARY = _register()
"""Library of the operators, which exist as long as this object."""
