"""Settings of DDP and FSDP2 that are changed before or between steps, on each rank: under stock and under dcompile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import dcompile
from tests.distributed import cases, fsdp_cases

When = Literal["before", "between"]


def _ddp(change: Callable[[Any], None], when: When, behind: Callable[[Any], None] | None = None, **how: Any) -> Any:
    """Three steps with DDP; `change` is called before the first or the second one, `behind` after each backward."""

    def steps(call: Any, ddp: Any) -> None:
        for step in range(3):
            if step == ("before", "between").index(when):
                change(ddp)
            ddp.zero_grad()
            cases.backward(call, step)
            if behind is not None and (when == "before" or step > 0):
                behind(ddp)

    return cases.same_as_stock(steps, **how)


def process_group(when: When) -> dict[str, Any]:
    """Gradients are reduced over another group from then on, here of each rank alone."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return _ddp(lambda ddp: ddp._update_process_group(alone), when)


def finalized_by_hand(when: When) -> dict[str, Any]:
    def change(ddp: Any) -> None:
        ddp.require_manual_backward_finalization = True

    def behind(ddp: Any) -> None:
        assert ddp.should_finalize_after_backward or type(ddp.reducer).__name__ == "Reducer"
        ddp.finalize_backward()

    return _ddp(change, when, behind)


def finalized_too_early() -> str:
    """finalize_backward() inside a backward says what to do."""
    call = dcompile.compile(DDP(cases.make("two")), options=dict(cases.ATEN))
    cases.backward(call, 0)
    call.require_manual_backward_finalization = True
    result = call(cases.inputs(1))
    result.register_hook(lambda _: call.finalize_backward())
    try:
        result.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def lazy_buckets() -> dict[str, Any]:
    return _ddp(lambda ddp: None, "before", lazy_bucket_allocation=True)


def fsdp2(setting: str, values: tuple[Any, ...], when: When, final: str = "") -> dict[str, Any]:
    """Three steps with FSDP2, with a setting of the root made before the first or the second one."""

    def steps(call: Any, module: Any) -> None:
        for step in range(3):
            if step == ("before", "between").index(when):
                getattr(module, setting)(*values)
            fsdp_cases.backward(call, module, step)
            if final and (when == "before" or step > 0):
                getattr(module, final)()

    return fsdp_cases.same_as_stock(steps)


def hooked_all_reduce(when: When) -> dict[str, Any]:
    """A hook that FSDP2 calls behind its reductions."""

    def halve(gradient: torch.Tensor) -> None:
        gradient.mul_(0.5)

    return fsdp2("set_all_reduce_hook", (halve,), when)
