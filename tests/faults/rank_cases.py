"""What the tests of faults between ranks run on each rank. Cases that survive use a process group of their own."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dcompile
from dcompile import compat
from dcompile.errors import DcompileError
from dcompile.pipeline import Pipeline
from dcompile.runtime import waiting


class Mlp(nn.Module):
    """Two equal layers, so that their order can be mistaken, and a flag that changes what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 40), nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, twice: bool = False, scale: float = 1.0) -> torch.Tensor:
        x = torch.relu(self.b(torch.relu(self.a(x))))
        if twice:
            x = torch.tanh(x) * 2
        return self.c(x * scale)


class Swapped(Mlp):
    """The same parameters, registered in another order."""

    def __init__(self) -> None:
        super().__init__()
        del self.b
        self.b = nn.Linear(40, 40)


def model_of(kind: type[nn.Module] = Mlp, seconds: float = 60, **options: Any) -> Any:
    """A compiled DDP model in a process group of its own."""
    torch.manual_seed(3)
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    return dcompile.compile(DDP(kind(), process_group=group), options={"receipt": False, **options})


def step(model: Any, rows: int = 8, **more: Any) -> float:
    """One synced backward; a checksum of the gradients."""
    torch.manual_seed(dist.get_rank())
    for parameter in model.parameters():
        parameter.grad = None
    model(torch.randn(rows, 12), **more).square().mean().backward()
    return sum(float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None)


def raised(run: Any) -> tuple[str, str, float]:
    """(type, message, seconds) of what `run()` raises."""
    began = time.monotonic()
    try:
        run()
    except RuntimeError as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        return type(error).__name__, f"{error}\n{notes}", time.monotonic() - began
    return "", "", time.monotonic() - began


def is_second() -> bool:
    return dist.get_rank() == 1


# --- refused on all ranks ---------------------------------------------------------------------------------------------


def other_order() -> Any:
    model = model_of(Swapped if is_second() else Mlp)
    return raised(lambda: step(model))


def other_settings() -> Any:
    model = model_of(matmul="aten" if is_second() else "own")
    return raised(lambda: step(model))


def other_branch() -> Any:
    model = model_of()
    return raised(lambda: step(model, twice=is_second()))


def left_to_ddp_on_one_rank() -> Any:
    model = model_of()
    if is_second():
        model.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
    return raised(lambda: step(model))


def another_plan_later() -> Any:
    """Buckets of another size on one rank, from the second step on: it will not run what the others run."""
    model = model_of()
    step(model)
    stock = compat.ddp.bucket_bytes
    if is_second():
        compat.ddp.bucket_bytes = lambda _: (4000, 4000)
    try:
        return raised(lambda: step(model, rows=5 if is_second() else 8))
    finally:
        compat.ddp.bucket_bytes = stock


# --- right in the end -------------------------------------------------------------------------------------------------


def guards_miss_on_one_rank() -> Any:
    """Other batch sizes, then a flag and a number that the graph is made for, on rank 1 alone; against stock DDP."""
    model = model_of()
    torch.manual_seed(3)
    stock = DDP(Mlp(), process_group=model.process_group)
    worst = 0.0
    for more in ({}, {"rows": 5}, {"rows": 3}, {"twice": True}, {"scale": 0.5}, {}):
        mine = more if is_second() else {}
        expected = step(stock, **mine)
        worst = max(worst, abs(step(model, **mine) - expected) / max(abs(expected), 1e-3))
    return worst, dcompile.receipt(model).eligible


def slow_compile_on_one_rank(each: float) -> Any:
    """Compiling takes longer than the process group's time limit, while rank 0 waits in an all-reduce."""
    model = model_of(seconds=2)
    step(model)
    stock = Pipeline.compile

    def slow(*arguments: Any) -> Any:
        time.sleep(each)
        return stock(*arguments)

    Pipeline.compile = slow  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        found = step(model, rows=6 if is_second() else 8)
    finally:
        Pipeline.compile = stock  # type: ignore[method-assign]
    return found, time.monotonic() - began


def stalls() -> Any:
    """Longer than the group's time limit, without compiling."""
    model = model_of(seconds=2)
    step(model)
    if is_second():
        time.sleep(5)
        return "", "", 0.0
    return raised(lambda: step(model))


def skips_a_step() -> Any:
    """Rank 1 ends its group one step early."""
    model = model_of()
    for _ in range(3 if is_second() else 4):
        found = raised(lambda: step(model))
        if found[0]:
            return found
    return raised(lambda: dist.destroy_process_group(model.process_group))


def called_after_the_group_has_ended() -> Any:
    model = model_of()
    step(model)
    dist.destroy_process_group(model.process_group)
    found = raised(lambda: step(model))
    again = dcompile.compile(DDP(model.module, process_group=dist.new_group()), options={"receipt": False})
    step(again)
    return found, dcompile.receipt(again).eligible


# --- artifacts --------------------------------------------------------------------------------------------------------


def shared(folder: str, **options: Any) -> dict[str, Any]:
    """Training with a cache directory for each rank."""
    cache = Path(folder) / f"rank{dist.get_rank()}"
    model = model_of(verify=False, cache_dir=str(cache), **options)
    gradients = step(model)
    receipt = dcompile.receipt(model)
    names = ("built", "cache_hits", "graphs_cached", "graphs_received", "kernels_received", "kernels")
    return {"gradients": gradients, "notes": receipt.notes} | {name: getattr(receipt, name) for name in names}


def rank_0_cannot_compile(folder: str) -> Any:
    """Rank 0 fails at its first try, and compiles at the second."""
    failing = [True] if dist.get_rank() == 0 else []
    stock = Pipeline.compile

    def compile(*arguments: Any) -> Any:
        if failing:
            failing.pop()
            raise DcompileError("no luck")
        return stock(*arguments)

    cache = Path(folder) / f"rank{dist.get_rank()}"
    model = model_of(verify=False, cache_dir=str(cache))
    Pipeline.compile = compile  # type: ignore[method-assign]
    try:
        if dist.get_rank() == 0:
            found = raised(lambda: step(model))
            torch._dynamo.reset()
            assert "no luck" in found[1], found
        step(model)
    finally:
        Pipeline.compile = stock  # type: ignore[method-assign]
    return dcompile.receipt(model).notes, dcompile.receipt(model).built


# --- these end the processes ------------------------------------------------------------------------------------------


def killed_in_backward() -> Any:
    model = model_of()
    step(model)
    if is_second():
        next(iter(model.parameters())).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    for _ in range(2):  # the hook comes behind the first one's all-reduce
        step(model)
    return None


def killed_while_compiling() -> Any:
    waiting.SILENT_S = 7.0
    model = model_of()
    if is_second():
        Pipeline.compile = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    step(model)
    return None


def raises_in_backward() -> Any:
    """Rank 1's own exception, behind its first all-reduce."""
    model = model_of()
    step(model)

    def fail(_: Any) -> None:
        raise ValueError("mine")

    if is_second():
        next(iter(model.module.a.parameters())).register_post_accumulate_grad_hook(fail)
    for _ in range(2):
        step(model)
    return None
