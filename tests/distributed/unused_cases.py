"""What the two-rank tests of frozen parameters, and of results that no loss uses, run on each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import dcompile
from dcompile.capture.entry import find_model
from dcompile.runtime.communication import ddp_buckets
from dcompile.runtime.communication.work import PendingCollective
from tests.distributed.cases import ATEN, average, by_hand, gradients, inputs, make, wrap
from tests.distributed.fsdp_cases import compiled
from tests.distributed.models import Lora, loss_of
from tests.distributed.training import across_ranks, largest_difference


class Counted(Lora):
    """Frozen layers, of which one is a table of integers; one can be run eagerly."""

    def __init__(self) -> None:
        super().__init__((12, 20, 4))
        self.steps = nn.Parameter(torch.tensor([2, 3, 4, 5]), requires_grad=False)

    def forward(self, x: torch.Tensor, apart: bool = False) -> torch.Tensor:
        out = super().forward(x)
        return self.scaled(out) if apart else out * self.steps

    @torch._dynamo.disable
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.up[1](self.down[1](torch.relu(self.base[0](x.repeat(1, 3)))))


def counted() -> nn.Module:
    torch.manual_seed(7)
    return Counted()


def frozen(apart: bool = False, **ddp: Any) -> dict[str, Any]:
    """Most parameters are frozen; behind two steps, one of them is not any more.

    `apart`: one rank calls layers eagerly in the second step. Stock DDP leaves parameters alone that were frozen when
    it was made, so the expected value of the last step is put together by hand.
    """
    stock, (call, wrapped) = DDP(counted(), **ddp), wrap(counted(), "compile(ddp)", None, **ddp)
    exchanged: list[int] = []
    worst, elements = [], []

    def noted(group: Any, tensor: torch.Tensor, label: str) -> Any:
        exchanged.append(tensor.numel())
        return start_sum(group, tensor, label)

    start_sum = ddp_buckets.start_sum
    with mock.patch.object(ddp_buckets, "start_sum", noted):
        for step in range(2):
            exchanged.clear()
            for each, module in ((stock, stock), (call, wrapped)):
                module.zero_grad()
                beside = apart and step == 1 and torch.distributed.get_rank() == 1
                loss_of(each(inputs(step), apart=beside)).backward()
            elements.append(sum(exchanged))
            worst += [largest_difference(gradients(stock), gradients(wrapped)), across_ranks(gradients(wrapped))]
    for module in (stock.module, wrapped.module):
        module.base[1].weight.requires_grad_(True)
        module.zero_grad()
    loss_of(stock(inputs(3))).backward()
    loss_of(call(inputs(3))).backward()
    late = stock.module.base[1].weight.grad
    torch.distributed.all_reduce(late.div_(2))
    worst += [largest_difference(gradients(stock), gradients(wrapped)), across_ranks(gradients(wrapped))]
    trained = sum(p.numel() for n, p in wrapped.module.named_parameters() if n.startswith(("up", "down")))
    return {"grad": max(worst), "elements": elements, "trained": trained, "receipt": dcompile.receipt(call)}


def synced_by_hand(name: str = "two", first: bool = True, plan: str = "", **ddp: Any) -> dict[str, Any]:
    """Forwards under no_sync; the reducer is prepared behind the last one, as Accelerate does it, and as Lightning.

    `first`: whether that is the first step. `plan`: what rank 1 calls a model of several tasks with.
    """
    stock, (call, wrapped) = DDP(make(name), **ddp), wrap(make(name), "compile(ddp)", None, **ddp)
    for each, module in ((stock, stock), (call, wrapped)):
        if not first:
            loss_of(each(inputs(), *_task(name, ""))).backward()
            module.zero_grad()
        losses = []
        for number in range(3):
            with module.no_sync():
                result = each(inputs(10 + number), *_task(name, plan))
            losses.append(loss_of(result))
        for loss in losses[:-1]:
            loss.backward()
        module.require_backward_grad_sync = True
        module.reducer.prepare_for_backward([result] if module.find_unused_parameters else [])
        losses[-1].backward()
        with module.no_sync():  # not any longer: this adds what is this rank's own
            loss_of(each(inputs(20), *_task(name, plan))).backward()
    return {"grad": largest_difference(gradients(stock), gradients(wrapped)), "receipt": dcompile.receipt(call)}


def _task(name: str, plan: str) -> tuple[Any, ...]:
    if name != "tasks":
        return ()
    return (0, plan) if torch.distributed.get_rank() else (1,)


def wrapper_gone(steps: int) -> dict[str, Any]:
    """A function makes the wrapper and returns the loss alone, behind some steps; rank 1 keeps the wrapper."""
    kept: list[Any] = []

    def last_loss(module: nn.Module) -> torch.Tensor:
        call, wrapped = wrap(module, "torch.compile(ddp)", None)
        for step in range(steps):
            loss_of(call(inputs(step))).backward()
            wrapped.zero_grad()
        if torch.distributed.get_rank():
            kept.append(wrapped)
        return loss_of(call(inputs(5)))

    module = make("two")
    last_loss(module).backward()
    expected = average(by_hand(make("two"), 5))
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"grad": largest_difference(expected, found), "ranks": across_ranks(found)}


class Outputs(nn.Module):
    """A trunk and three heads, with a result each, and a layer that is in the second head alone."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.trunk, self.middle = nn.Linear(12, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))
        self.broken = broken

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.relu(self.trunk(x))
        if self.broken:
            torch._dynamo.graph_break()
        return tuple(head(torch.relu(self.middle(x)) if n == 1 else x) for n, head in enumerate(self.heads))


USES = {
    "none": [((0,), (0,))] * 3,
    "each": [((0,), (1,)), ((0, 1), (0,)), ((0,), (0,)), ((1,), (0, 1))],
    "later": [((0, 1), (0, 1)), ((0,), (0,)), ((1,), (1,)), ((0, 1), (0, 1))],
}
"""Which results the losses of both ranks use, step by step; nobody uses the third."""


def unused_outputs(
    uses: str, broken: bool = False, accumulate: bool = False, by_hand: bool = False, hook: bool = False, **ddp: Any
) -> dict[str, Any]:
    """Against stock DDP, or averages put together by hand, where stock takes it for an error.

    `accumulate`: every other step, here and below.
    """

    reference = _outputs(broken)
    stock = reference if by_hand else DDP(reference, **ddp)
    call, wrapped = wrap(_outputs(broken), "compile(ddp)", None, **ddp)
    rank, worst, same, used_maps = torch.distributed.get_rank(), [], [], []
    if hook:
        for module in (reference, wrapped.module):
            module.trunk.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    trainings = [
        (each, each_ddp, torch.optim.SGD(each_ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))
        for each, each_ddp in ((stock, stock), (call, wrapped))
    ]
    for step, used in enumerate(USES[uses]):
        for each, each_ddp, optimizer in trainings:
            optimizer.zero_grad()
            if accumulate and step % 2 == 0:
                with each_ddp.no_sync():
                    _loss_of_some(each(inputs(step + 50)), USES[uses][step - 1][rank]).backward()
            _loss_of_some(each(inputs(step)), used[rank]).backward()
        if by_hand:
            _average_if_any(reference)
        expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
        worst += [largest_difference(expected, gradients(wrapped)), across_ranks(gradients(wrapped))]
        used_maps.append([] if by_hand else [_used_map(ddp_module) for ddp_module in (stock, wrapped)])
        for _, _, optimizer in trainings:
            optimizer.step()
        pairs = zip(reference.parameters(), wrapped.parameters(), strict=True)
        same.append(max((a - b).abs().max().item() for a, b in pairs))
    none = [name for name, parameter in wrapped.module.named_parameters() if parameter.grad is None]
    values = {"grad": max(worst), "param": max(same), "none": none, "used": used_maps}
    return values | {"receipt": dcompile.receipt(call)}


def _used_map(ddp: Any) -> list[int]:
    """Number of ranks that used each parameter in the last step, as DDP's reducer shows it."""
    found = ddp.reducer._get_local_used_map()
    assert (found.dtype, found.device) == (torch.int32, next(ddp.parameters()).device)
    numbers: list[int] = found.tolist()
    return numbers


class Hidden(nn.Module):
    """A layer and a head: the result of each, as many models of transformers return both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer, self.head = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.layer(x))
        return hidden, self.head(hidden)


def hidden_first(**ddp: Any) -> dict[str, Any]:
    """The first loss uses the hidden state alone, and later ones the head, on one rank or both.

    Kernels are dcompile's: a GEMM that accumulates is written otherwise if its addend is zero.
    """
    stock, (call, wrapped) = DDP(Hidden(), **ddp), wrap(Hidden(), "compile(ddp)", {"receipt": False}, **ddp)
    rank, worst = torch.distributed.get_rank(), []
    for step, used in enumerate([((0,), (0,)), ((1,), (0,)), ((0, 1), (0, 1)), ((0,), (1,))]):
        for each, module in ((stock, stock), (call, wrapped)):
            module.zero_grad()
            _loss_of_some(each(inputs(step)), used[rank]).backward()
        worst += [largest_difference(gradients(stock), gradients(wrapped)), across_ranks(gradients(wrapped))]
    used_maps = [_used_map(each) for each in (stock, wrapped)]
    return {"grad": max(worst), "receipt": dcompile.receipt(call), "used": used_maps}


def parts_inside(**ddp: Any) -> dict[str, Any]:
    """Layer and head are compiled by themselves inside of DDP, which passes None for what no loss uses."""
    parts = Hidden()
    parts.layer.compile(backend="dcompile", options=dict(ATEN))
    parts.head.compile(backend="dcompile", options=dict(ATEN))
    stock, wrapped = DDP(Hidden(), **ddp), DDP(parts, **ddp)
    worst, missing = [], []
    for step, used in enumerate([(0,), (0, 1), (0,)]):
        for module in (stock, wrapped):
            module.zero_grad()
            _loss_of_some(module(inputs(step)), used).backward()
        worst.append(largest_difference(gradients(stock), gradients(wrapped)))
        missing.append(sum(found is None for found in gradients(wrapped).values()))
    return {"grad": max(worst), "missing": missing}


class Apart(nn.Module):
    """Two layers with a result each, and perhaps one that nobody uses."""

    def __init__(self, spare: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(12, 4), nn.Linear(12, 4)
        self.spare = nn.Linear(4, 4) if spare else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


def _step(ddp: Any, model: Any, kind: str, x: torch.Tensor) -> None:
    """One step; `kind`: one of `KINDS`."""
    if kind == "evaluate":
        with torch.no_grad():
            model(x)
        return
    with ddp.no_sync() if kind == "no sync" else contextlib.nullcontext():
        first, second = model(x)
        if kind == "all":
            (first * second).sum().backward()
        elif kind in ("one result", "no sync"):
            first.square().sum().backward()
        elif kind == "two losses":
            first.square().sum().backward(retain_graph=True)
            second.square().sum().backward()


KINDS = ("all", "one result", "no sync", "two losses", "evaluate", "forward")
REDUCED = ("all", "two losses", "no sync")
"""Steps behind which stock DDP has reduced all gradients that it is to reduce."""


def unfinished(plans: tuple[tuple[bool, tuple[str, ...]], ...]) -> list[dict[str, Any]]:
    """Of each plan: where stock DDP and dcompile raise what, and differences of gradients.

    A plan: whether the model has a layer that nobody uses, and the kinds of steps.
    """
    found = []
    for spare, plan in plans:
        stock, (call, wrapped) = DDP(Apart(spare)), wrap(Apart(spare), "compile(ddp)", None)
        worst, raised = [0.0], []
        for step, kind in enumerate(plan):
            assert kind in KINDS
            raised.append([_error_of(ddp, each, kind, step) for each, ddp in ((stock, stock), (call, wrapped))])
            if kind in REDUCED and not spare and raised[-1] == ["", ""]:
                worst.append(largest_difference(gradients(stock), gradients(wrapped)))
        logged = [ddp._get_ddp_logging_data() for ddp in (stock, wrapped)]
        found.append({"grad": max(worst), "raised": raised, "logged": logged, "receipt": dcompile.receipt(call)})
    return found


def _error_of(ddp: Any, model: Any, kind: str, step: int) -> str:
    """The error of a step, which DDP's logging data names as well; "" without one."""
    ddp.zero_grad()
    try:
        _step(ddp, model, kind, inputs(step))
    except RuntimeError as error:
        logged = ddp._get_ddp_logging_data()
        assert logged["has_error"] == 1 and str(error) in logged["error"]
        return str(error)
    return ""


def _loss_of_some(results: tuple[torch.Tensor, ...], used: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([loss_of(results[number]) for number in used]).sum()


def _average_if_any(module: nn.Module) -> None:
    for parameter in module.parameters():
        any_rank = torch.tensor(float(parameter.grad is not None))
        torch.distributed.all_reduce(any_rank)
        if any_rank:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.distributed.all_reduce(gradient.div_(2))
            parameter.grad = gradient


def unused_outputs_fsdp(uses: str, kind: str = "fsdp2", accumulate: bool = False, **how: Any) -> dict[str, Any]:
    """FSDP2, or FSDP1. Where ranks use other results, stock FSDP exchanges other sizes: then against averages."""
    apart = any(first != second for first, second in USES[uses])
    modules = [_sharded(kind, **how) for _ in range(2)]
    reference = _outputs() if apart else modules[0]
    call = compiled(modules[1])
    rank, worst = torch.distributed.get_rank(), []
    trainings = [
        (each, torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)) for each in (reference, call)
    ]
    for step, used in enumerate(USES[uses]):
        for each, optimizer in trainings:
            optimizer.zero_grad()
            if accumulate and step % 2 == 0:
                _syncs(each, kind, False)
                _loss_of_some(each(inputs(step + 50)), USES[uses][step - 1][rank]).backward()
                _syncs(each, kind, True)
            _loss_of_some(each(inputs(step)), used[rank]).backward()
        if apart:
            _average_if_any(reference)
        worst.append(largest_difference(_whole(reference), _whole(modules[1])))
        for _, optimizer in trainings:
            optimizer.step()
    none = [name for name, gradient in _whole(modules[1]).items() if gradient is None]
    pairs = zip(reference.parameters(), modules[1].parameters(), strict=True)
    moved = 0.0 if apart else max((_local(a) - _local(b)).abs().max().item() for a, b in pairs if _local(a).numel())
    return {"grad": max(worst), "param": moved, "none": none, "receipt": dcompile.receipt(call)}


def _outputs(broken: bool = False) -> nn.Module:
    torch.manual_seed(7)
    return Outputs(broken)


def _sharded(kind: str, broken: bool = False, **how: Any) -> Any:
    module: Any = _outputs(broken)
    if kind == "fsdp1":
        module.heads[1] = FSDP(module.heads[1], use_orig_params=True, device_id=torch.device("cpu"))
        module.heads[2] = FSDP(module.heads[2], use_orig_params=True, device_id=torch.device("cpu"))
        return FSDP(module, use_orig_params=True, device_id=torch.device("cpu"), **how)
    if replicas := how.pop("replicas", 0):
        how["mesh"] = init_device_mesh("cpu", (replicas, 2 // replicas), mesh_dim_names=("replicas", "shards"))
    fully_shard(module.heads[2], **how)
    return fully_shard(module, **how)


def _syncs(module: Any, kind: str, syncs: bool) -> None:
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(syncs)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(module: nn.Module) -> dict[str, Any]:
    """Gradients: of FSDP1 this rank's own parts."""
    found = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return {name: None if gradient is None else gradient.clone() for name, gradient in found.items()}


@contextlib.contextmanager
def _groups_used() -> Iterator[list[tuple[str, Any]]]:
    """(what was exchanged, the process group) of each collective that is started by dcompile."""
    found: list[tuple[str, Any]] = []
    begin = PendingCollective.__init__

    def noted(self: Any, group: Any, device: Any, label: str, start: Any) -> None:
        found.append((label.split()[0], group))
        begin(self, group, device, label, start)

    with mock.patch.object(PendingCollective, "__init__", noted):
        yield found


def another_process_group(before: int, **ddp: Any) -> dict[str, Any]:
    """DDP is given another process group behind some steps."""
    stock, (call, wrapped) = DDP(make("two"), **ddp), wrap(make("two"), "compile(ddp)", None, **ddp)
    group, worst, used = torch.distributed.new_group([0, 1]), [], set[Any]()
    for step in range(before + 2):
        for each, module in ((stock, stock), (call, wrapped)):
            if step == before:
                module._update_process_group(group)
            module.zero_grad()
            with _groups_used() as found:
                loss_of(each(inputs(step))).backward()
        used = {of for _, of in found}
        worst += [largest_difference(gradients(stock), gradients(wrapped)), across_ranks(gradients(wrapped))]
    return {"grad": max(worst), "used": used == {group}, "receipt": dcompile.receipt(call)}


def reduce_settings() -> dict[str, Any]:
    """FSDP2 with more reductions in flight, and between steps with a process group of their own for them."""
    modules = [_sharded("fsdp2") for _ in range(2)]
    for module in modules:
        module.set_reduce_scatter_max_input_buffers(2)
    stock, call = modules[0], compiled(modules[1])
    worst, groups = [], []
    for step in range(3):
        for each in modules:
            if step == 1:
                each.set_separate_reduce_scatter_group()
            each.zero_grad()
        _loss_of_some(stock(inputs(step)), (0, 1, 2)).backward()
        with _groups_used() as found:
            _loss_of_some(call(inputs(step)), (0, 1, 2)).backward()
        worst.append(largest_difference(_whole(stock), _whole(modules[1])))
        groups.append({kind: of.group_name for kind, of in found})
    adapter = find_model(call).adapter  # type: ignore[union-attr]
    return {"grad": max(worst), "flying": adapter.reductions, "groups": groups, "receipt": dcompile.receipt(call)}


def symmetric_memory(before: int) -> dict[str, Any]:
    """FSDP2 is asked for symmetric memory, which is NCCL's, behind some steps."""
    modules = [_sharded("fsdp2") for _ in range(2)]
    stock, call, worst = modules[0], compiled(modules[1]), []
    memory = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
    plain = DefaultAllGather.allocate
    with mock.patch(f"{memory}.symm_mem"), mock.patch(f"{memory}.SymmMemAllocMixin.allocate", plain):
        for step in range(before + 2):
            for each, module in ((stock, stock), (call, modules[1])):
                if step == before:
                    for part in (module, module.heads[2]):
                        part.set_symm_mem_for_comm()
                module.zero_grad()
                _loss_of_some(each(inputs(step)), (0, 1, 2)).backward()
            worst.append(largest_difference(_whole(stock), _whole(modules[1])))
    return {"grad": max(worst), "reasons": find_model(call).adapter.reasons}  # type: ignore[union-attr]


ALONE = {
    "first no_sync": (("local", "sync", "sync"), ("sync", "sync", "local")),
    "later no_sync": (("sync", "local", "sync"), ("sync", "sync", "local")),
    "first without gradients": (("look", "sync", "sync"), ("sync", "sync")),
    "first constant": (("constant", "sync", "sync"), ("sync", "sync")),
    "alone": (("local", "met", "sync", "sync"), ("met", "sync", "sync")),
}
"""What each rank does, step by step: as often the same as the other, but not at the same time. Where they have met, the
other one has done nothing before that."""


class Constant(nn.Module):
    """Uses its parameters, or does not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, constant: bool = False) -> torch.Tensor:
        return x * 2 if constant else self.b(torch.relu(self.a(x)))


def apart_for_a_while(plan: str) -> dict[str, Any]:
    """Ranks reduce as often, one of them later: each all-reduce pairs their steps as it does under stock DDP."""
    made = []
    for _ in range(2):
        torch.manual_seed(7)
        made.append(Constant())
    stock, (call, wrapped) = DDP(made[0], **_UNUSED), wrap(made[1], "compile(ddp)", None, **_UNUSED)
    for each, module in ((stock, stock), (call, wrapped)):
        for step, what in enumerate(ALONE[plan][torch.distributed.get_rank()]):
            if what == "met":
                torch.distributed.barrier()
                continue
            local = module.no_sync() if what == "local" else contextlib.nullcontext()
            with local, torch.set_grad_enabled(what != "look"):
                result = each(inputs(step), constant=what == "constant")
            if result.requires_grad:
                loss_of(result).backward()
        torch.distributed.barrier()
    return {"grad": largest_difference(gradients(stock), gradients(wrapped)), "receipt": dcompile.receipt(call)}


_UNUSED = {"find_unused_parameters": True}
