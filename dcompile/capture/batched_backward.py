"""Stock fallback for a batch of gradients: `autograd.grad(..., is_grads_batched=True)`, `jacobian(vectorize=True)`.

Autograd then passes tensors of torch.func's `vmap`, which represent a batch and have no memory that a kernel could
read. Every operator of ATen supports them, so the uncompiled graph runs operator by operator.
"""

from __future__ import annotations

from typing import Any

import torch

from dcompile.capture.passes.joint.absent_gradients import tangents, zeros_for
from dcompile.errors import DcompileError

NOTE = "a backward of batched gradients (is_grads_batched, vectorize) ran operator by operator, without our kernels"
COUNTED = "backward of batched gradients"


def run_batched(backward: Any, args: list[Any], sharded: bool) -> list[Any]:
    """Compute a backward's results with ATen; `args` is emptied, as by a program. Raises DcompileError if `sharded`."""
    if sharded:
        raise DcompileError(
            "dcompile: gradients of a batch (is_grads_batched=True, vectorize=True) through a model whose parameters "
            "FSDP shards; take the gradients one by one, or call the model before it is compiled"
        )
    given, places = list(args), tangents(backward)
    args.clear()
    for place in places:
        if given[place] is None:
            given[place] = zeros_for(backward, place)
    return list(torch.fx.Interpreter(backward).run(*given))
