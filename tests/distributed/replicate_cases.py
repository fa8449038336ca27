"""What the tests of `replicate` run on each rank: "ddp" is the one that hides a DDP, "fsdp" FSDP2's machinery."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.distributed._composable import replicate as replicate_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy

import dcompile
from tests.distributed.cases import MAKE, device, halve, largest_difference
from tests.distributed.fsdp_cases import FsdpTraining, backward, blocks, compiled, full, gradients, parameters
from tests.distributed.training import compare

Kind = Literal["ddp", "fsdp"]


def make(kind: Kind, name: str = "two", precision: str = "", **how: Any) -> Any:
    """A replicated module; with FSDP2's machinery its blocks have groups of their own."""
    torch.manual_seed(7)
    module: Any = MAKE[name]().to(device())
    if kind == "ddp":
        return replicate_ddp(module, **how)
    if precision:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=getattr(torch, precision), reduce_dtype=torch.float32)
    for block in blocks(module):
        replicate_fsdp(block, **how)
    return replicate_fsdp(module, **how)


class ReplicateTraining(FsdpTraining):
    """Both kinds are told alike not to reduce; checkpoints hold the module's own names."""

    def state(self) -> dict[str, Any]:
        model = {name: full(value) for name, value in self.wrapped.state_dict().items()}
        return {"model": model, "optimizer": {}}

    def load(self, state: Any) -> None:
        with torch.no_grad():
            for name, value in self.wrapped.state_dict().items():
                (value.to_local() if hasattr(value, "to_local") else value).copy_(state["model"][name])


def against_stock(
    kind: Kind, name: str = "two", order: str = "compile", accumulate: bool = False, **how: Any
) -> dict[str, Any]:
    """The same training with eager `replicate` and with dcompile: largest differences, names, and the receipt."""
    stock, module = make(kind, name, **how), make(kind, name, **how)
    call = compiled(module, order, fullgraph=True)
    trainings = ReplicateTraining(stock, stock, accumulate), ReplicateTraining(call, module, accumulate)
    found = compare(*trainings, steps=2)
    names = list(MAKE[name]().state_dict())
    return found | {"receipt": dcompile.receipt(module), "names": list(module.state_dict()) == names}


def settings(kind: Kind) -> dict[str, Any]:
    """Steps that do not reduce, evaluation, a divisor, and hooks on the module: as without a compiler."""
    found = {}
    for who in ("stock", "ours"):
        module = make(kind)
        seen: list[str] = []
        module.register_forward_hook(lambda *_, seen=seen: seen.append("after"))
        if who == "ours":
            dcompile.compile(module, options={"kernels": "aten"})
        if kind == "fsdp":
            module.set_gradient_divide_factor(3.0)
        module.set_requires_gradient_sync(False)
        backward(module, module, 0)
        module.set_requires_gradient_sync(True)
        backward(module, module, 1)
        with torch.no_grad():
            backward_free = module(torch.ones(2, 12, device=device()))
        backward(module, module, 2)
        found[who] = (gradients(module), parameters(module), {"out": backward_free}, seen)
    different = [largest_difference(a, b) for a, b in zip(found["stock"][:3], found["ours"][:3], strict=True)]
    return {"different": different, "hooks": (found["stock"][3], found["ours"][3]), "receipt": dcompile.receipt(module)}


def hooked() -> dict[str, Any]:
    """A communication hook of the user's, which the hidden DDP's own reducer has to call."""
    found = []
    for ours in (False, True):
        module = make("ddp")
        module.register_comm_hook(None, halve)
        if ours:
            dcompile.compile(module, options={"kernels": "aten"})
        for step in range(2):
            backward(module, module, step)
        found.append(gradients(module))
    return {"grad": largest_difference(*found), "receipt": dcompile.receipt(module)}


def raises() -> dict[str, Any]:
    """A forward that raises: the next one starts as if it had not been, with replicate's hooks where they were."""
    module = dcompile.compile(make("ddp"), options={"kernels": "aten"})
    backward(module, module, 0)
    try:
        module(torch.ones(2, 5, device=device()))
    except Exception as error:
        name = type(error).__name__
    hooks = [hook.__name__ for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())]
    active = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    backward(module, module, 1)
    return {"raised": name, "hooks": hooks, "active": active is not None, "receipt": dcompile.receipt(module)}


def explained() -> dict[str, Any]:
    """explain of either kind, before and after the first step."""
    found: dict[str, Any] = {}
    x = torch.ones(2, 12, device=device())
    for kind in ("ddp", "fsdp"):
        module = make(kind)
        first = dcompile.explain(module, x)
        backward(module, module, 0)
        report = dcompile.explain(module, x)
        found[f"{kind} before"] = (first.adapter, any("replicate() gets its DDP" in note for note in first.notes))
        found[kind] = (report.adapter, len(report.breaks), "reduced inside the compiled backward" in str(report))
    return found
