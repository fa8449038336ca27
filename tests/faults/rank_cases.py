"""What the tests of faults between ranks run on each rank. Cases that survive use a process group of their own."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import dcompile
from benchmarks.common import worst_of
from dcompile import compat
from dcompile.capture.adapters.ddp import DdpAdapter
from dcompile.capture.entry import find_model
from dcompile.compiler.driver import Pipeline
from dcompile.errors import DcompileError
from dcompile.runtime.coordination import heartbeat, wait_policy
from dcompile.runtime.coordination.artifact_sharing import ArtifactSharing
from tests.distributed.models import NormedOnce, SyncNorm


class Mlp(nn.Module):
    """Two equal layers, so that their order can be mistaken, and a flag that changes what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, 40, bias=False) for width in (12, 40, 40))

    def forward(self, x: torch.Tensor, twice: bool = False, scale: float = 1.0) -> torch.Tensor:
        x = torch.relu(self.b(torch.relu(self.a(x))))
        if twice:
            x = torch.tanh(x) * 2
        return self.c(x * scale)


class Talking(Mlp):
    """Says something before its layers run, on the second rank alone: a graph break there, and the same calls."""

    def forward(self, x: torch.Tensor, twice: bool = False, scale: float = 1.0) -> torch.Tensor:
        if is_second():
            torch._dynamo.graph_break()
        return super().forward(x, twice, scale)


class Swapped(Mlp):
    """The same parameters, registered in another order."""

    def __init__(self) -> None:
        super().__init__()
        del self.b
        self.b = nn.Linear(40, 40, bias=False)


def device() -> torch.device:
    """Where this pair of ranks computes."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def model_of(kind: type[nn.Module] = Mlp, seconds: float = 60, wrap: str = "ddp", **options: Any) -> Any:
    """A compiled model, in DDP or `fully_shard` ("fsdp2"; "kept" gathers once), in a process group of its own.

    With ATen's kernels, unless told otherwise: what ranks exchange is the same, and takes half as long to compile.
    """
    torch.manual_seed(3)
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    module = kind().to(device())
    if wrap != "ddp":
        how = {"mesh": DeviceMesh.from_group(group, device().type), "reshard_after_forward": wrap == "fsdp2"}
        fully_shard(module.b, **how)
        model: Any = fully_shard(module, **how)
    else:
        model = DDP(module, process_group=group)
    return dcompile.compile(model, options={"receipt": False, "kernels": "aten", **options})


def line_of(model: Any) -> heartbeat.PeerCoordinator:
    """The line to the other ranks of a model that has run."""
    found = find_model(model)
    line = heartbeat.peers_of(found.adapter.group) if found is not None else None
    assert line is not None
    return line


def step(model: Any, rows: int = 8, on_the_way: Any = None, **more: Any) -> float:
    """One synced backward; a checksum of the gradients, of what this rank holds of them.

    `on_the_way` is called in the backward, before the compiled part of it.
    """
    torch.manual_seed(dist.get_rank())
    for parameter in model.parameters():
        parameter.grad = None
    result = model(torch.randn(rows, 12).to(device()), **more)
    if on_the_way is not None:
        result.register_hook(on_the_way)
    result.square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return sum(float(getattr(grad, "_local_tensor", grad).double().sum()) for grad in grads)


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


def other_branch(wrap: str = "ddp") -> Any:
    model = model_of(wrap=wrap)
    return raised(lambda: step(model, twice=is_second()))


def breaks_on_one_rank(wrap: str = "ddp") -> tuple[str, int]:
    """(the error of two steps, if any, graph breaks)."""
    model = model_of(Talking, wrap=wrap)
    error, *_ = raised(lambda: [step(model) for _ in range(2)])
    return error, dcompile.receipt(model).graph_breaks


def left_to_ddp_on_one_rank() -> Any:
    model = model_of()
    if is_second():
        model.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
    return raised(lambda: step(model))


def another_plan_later() -> Any:
    """Buckets of another size on one rank, from the second step on: it will not run what the others run."""
    model = model_of()
    step(model)
    if is_second():
        found = find_model(model)
        assert found is not None and isinstance(found.adapter, DdpAdapter)
        found.adapter._rule = (4000, 4000), ""
    return raised(lambda: step(model, rows=5 if is_second() else 8))


# --- right in the end -------------------------------------------------------------------------------------------------


def guards_miss_on_one_rank() -> Any:
    """Other batch sizes, then a flag and a number that the graph is made for, on rank 1 alone; against stock DDP."""
    model = model_of()
    torch.manual_seed(3)
    stock = DDP(Mlp(), process_group=model.process_group)
    found = []
    for more in ({}, {"rows": 5}, {"rows": 3}, {"twice": True}, {"scale": 0.5}, {}):
        mine = more if is_second() else {}
        expected = step(stock, **mine)
        found.append(abs(step(model, **mine) - expected) / max(abs(expected), 1e-3))
    return worst_of(found), dcompile.receipt(model).eligible


def slow_compile_on_one_rank(each: float, wrap: str = "ddp") -> Any:
    """Compiling takes longer than the process group's time limit, while rank 0 waits in a collective."""
    model = model_of(seconds=1.5, wrap=wrap)
    step(model)
    stock = Pipeline.begin

    def slow(*arguments: Any) -> Any:
        time.sleep(each)
        return stock(*arguments)

    Pipeline.begin = slow  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        found = step(model, rows=6 if is_second() else 8)
    finally:
        Pipeline.begin = stock  # type: ignore[method-assign]
    return found, time.monotonic() - began


def stalls(wrap: str = "ddp", limit_s: float = 1.5, lock: bool = False) -> Any:
    """Longer than the group's time limit, in a backward, without compiling. `lock`: with the interpreter's lock."""
    model = model_of(seconds=limit_s, wrap=wrap)
    step(model)
    if not is_second():
        usual = wait_policy.STALE_S
        wait_policy.STALE_S = 0.5 if lock else usual
        found = raised(lambda: step(model))
        wait_policy.STALE_S = usual
        return found

    def stall(_: Any) -> None:
        if lock:
            ctypes.PyDLL(None).usleep(int(1e6 * (limit_s + 1)))
        else:
            time.sleep(limit_s + 1)

    raised(lambda: step(model, on_the_way=stall))
    return "", "", 0.0


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
    ddp = DDP(model.module, process_group=dist.new_group())
    again = dcompile.compile(ddp, options={"receipt": False, "kernels": "aten"})
    step(again)
    return found, dcompile.receipt(again).eligible


def recast_between_steps() -> Any:
    """One layer in another dtype, behind a first step."""
    model = model_of()
    step(model)
    model.module.c.double()
    model.module.c.register_forward_pre_hook(lambda _, given: (given[0].double(),))
    return raised(lambda: step(model))


def called_off_meanwhile(wrap: str = "ddp", **options: Any) -> Any:
    """Rank 1 calls the job off while rank 0 is in a step's collectives, or in a replay of them."""
    model = model_of(wrap=wrap, **{"kernels": "auto"} | options)
    for _ in range(4):
        step(model)
    line = line_of(model)
    if is_second():
        time.sleep(0.5)
        return raised(lambda: line.call_off("dcompile: rank 1 has had enough"))
    return raised(lambda: step(model))


def ends_after_steps(wrap: str, **options: Any) -> Any:
    """Seconds that destroy_process_group takes behind steps; how many were replays; collectives of each step."""
    model = model_of(wrap=wrap, **options)
    counts = [0]
    for _ in range(6):
        step(model)
        counts.append(line_of(model).started)
    group = line_of(model)._group()
    began = time.monotonic()
    dist.destroy_process_group(group)
    took = time.monotonic() - began
    return took, dcompile.receipt(model).replays, [b - a for a, b in itertools.pairwise(counts)]


# --- artifacts --------------------------------------------------------------------------------------------------------


def shared(folder: str, joint: bool = False, **options: Any) -> dict[str, Any]:
    """Training with a cache directory for each rank, or, if `joint`, with one for both."""
    cache = Path(folder) if joint else Path(folder) / f"rank{dist.get_rank()}"
    model = model_of(verify=False, kernels="auto", cache_dir=str(cache), **options)
    began = time.monotonic()
    gradients = step(model)
    took = time.monotonic() - began
    receipt = dcompile.receipt(model)
    names = ("built", "cache_hits", "graphs_cached", "graphs_received", "kernels_received", "kernels",
             "traces_cached", "traces_uncacheable")  # fmt: skip
    found = {name: getattr(receipt, name) for name in names}
    return found | {"gradients": gradients, "notes": receipt.notes, "took": took}


def rank_0_cannot_compile(folder: str) -> Any:
    """Rank 0 comes first, fails at its first try, and compiles at the second.

    It sends what it has compiled then only after rank 1 has asked, and heard of the failure.
    """
    failing = [True] if dist.get_rank() == 0 else []
    stock, give, receive = Pipeline.begin, ArtifactSharing.give, ArtifactSharing.receive
    store = compat.groups.group_store(dist.group.WORLD)

    def giving(*arguments: Any) -> Any:
        store.wait([f"asked {folder}"], timedelta(seconds=30))
        return give(*arguments)

    def receiving(*arguments: Any) -> Any:
        found = receive(*arguments)
        store.set(f"asked {folder}", "")
        return found

    def compile(*arguments: Any) -> Any:
        if failing:
            failing.pop()
            raise DcompileError("no luck")
        return stock(*arguments)

    cache = Path(folder) / f"rank{dist.get_rank()}"
    model = model_of(verify=False, kernels="auto", matmul="aten", cache_dir=str(cache))
    Pipeline.begin = compile  # type: ignore[method-assign]
    try:
        if dist.get_rank() == 0:
            found = raised(lambda: step(model))
            torch._dynamo.reset()
            assert "no luck" in found[1], found
        dist.barrier()
        if dist.get_rank() == 0:
            ArtifactSharing.give = giving  # type: ignore[method-assign]
        else:
            ArtifactSharing.receive = receiving  # type: ignore[method-assign]
        step(model)
    finally:
        Pipeline.begin = stock  # type: ignore[method-assign]
        ArtifactSharing.give, ArtifactSharing.receive = give, receive  # type: ignore[method-assign]
    return dcompile.receipt(model).notes, dcompile.receipt(model).built


# --- these end the processes ------------------------------------------------------------------------------------------


def killed_in_backward(wrap: str = "ddp", said: str = "", died: str = "", **options: Any) -> Any:
    """Rank 1 dies between two collectives, and writes to the file `died` when.

    `said`: a file for what rank 0 says, if it has no time to raise it.
    """
    if said and not is_second():
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
        wait_policy.STALE_S = 4.0
    model = model_of(wrap=wrap, **options)
    for _ in range(4):  # with CUDA graphs, the last of them are replays
        step(model)
    step(model, on_the_way=(lambda _: _die(died)) if is_second() else None)
    return None


def _die(died: str) -> None:
    if died:
        Path(died).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_compiling() -> Any:
    wait_policy.STALE_S = 1.5
    model = model_of()
    if is_second():
        Pipeline.begin = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    step(model)
    return None


def leaves_a_sync_batch_norm() -> Any:
    """Rank 1 raises before its second forward, in which rank 0 gathers statistics."""
    ddp = DDP(NormedOnce(SyncNorm), broadcast_buffers=False)
    model = dcompile.compile(ddp, options={"receipt": False, "kernels": "aten"})
    for number in range(2):
        if number and is_second():
            raise ValueError("mine")
        model(torch.randn(4, 3, 6, 6)).square().mean().backward()
    return None


def raises_in_backward() -> Any:
    """Rank 1's own exception, behind its first all-reduce; its script ends the process group on the way out."""
    model = model_of()
    step(model)

    def fail(_: Any) -> None:
        raise ValueError("mine")

    if is_second():
        next(iter(model.module.a.parameters())).register_post_accumulate_grad_hook(fail)
    try:
        for _ in range(2):
            step(model)
    except ValueError:
        line_of(model).end()
        raise
    return None
