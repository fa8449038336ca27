"""What the two-rank tests run on each rank; every function here is one case and returns plain data."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import dcompile
from benchmarks.common import worst_of
from dcompile import compat
from dcompile.capture.entry import find_model
from dcompile.capture.passes.dynamo.chunked_cross_entropy import match
from dcompile.capture.passes.dynamo.chunked_cross_entropy.match import LossPlan
from dcompile.compat.layer_calls import frame as layer_frames
from tests.distributed import models
from tests.distributed.models import batch, loss_of
from tests.distributed.training import Training, across_ranks, compare, largest_difference

ATEN = {"kernels": "aten"}
GRAPHS = {"kernels": "aten", "triton.cudagraphs": True}
MAKE = {
    "mlp": models.Mlp,
    "two": models.Two,
    "shared": models.SharedOverBreak,
    "tied_break": models.TiedOverBreak,
    "layers": lambda: models.BrokenLayers(2),
    "classes": models.Classes,
    "classes_tied": lambda: models.Classes(tied=True),
    "norm": models.NormUnused,
    "sync_norm": lambda: models.Normed(torch.nn.SyncBatchNorm, bias=False),
    "outside": models.UsedOutside,
    "branching": models.Branching,
    "tasks": models.Tasks,
    "layer_norm": lambda: torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)),
    "mlp_bf16": lambda: models.Mlp().bfloat16(),
    "lora": models.Lora,
    "deep": models.deep_decoder,
    "llama": models.llama,
    "llama_tied": lambda: models.llama(tied=True),
    "llama_one": lambda: models.llama(layers=1),
    "llama_one_tied": lambda: models.llama(tied=True, layers=1),
}
"""By name. Tracing a layer of Llama takes each rank two seconds: "one" is for what is not between layers."""


def make(name: str) -> Any:
    torch.manual_seed(7)
    return MAKE[name]().to(device())


def device() -> torch.device:
    """Where this pair of ranks computes."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def wrap(module: Any, order: str, options: dict[str, Any] | None, **ddp: Any) -> tuple[Any, Any]:
    """(what to call, its DDP module), compiled in one of the orders a user may choose."""
    options = options if options is not None else ATEN
    if order == "compile(ddp)":
        wrapped = DDP(module, **ddp)
        return dcompile.compile(wrapped, options=dict(options)), wrapped
    if order == "ddp(compile)":
        wrapped = DDP(dcompile.compile(module, options=dict(options)), **ddp)
        return wrapped, wrapped
    if order == "torch.compile(ddp)":
        wrapped = DDP(module, **ddp)
        return torch.compile(wrapped, backend="dcompile", options=dict(options)), wrapped
    if order == "ddp(torch.compile)":
        wrapped = DDP(torch.compile(module, backend="dcompile", options=dict(options)), **ddp)
        return wrapped, wrapped
    assert order == "ddp.compile", order
    wrapped = DDP(module, **ddp)
    wrapped.compile(backend="dcompile", options=dict(options))
    return wrapped, wrapped


def against_stock(
    name: str,
    order: str = "compile(ddp)",
    accumulate: bool = False,
    options: dict[str, Any] | None = None,
    hook: str = "",
    group: str = "",
    steps: int = 3,
    **ddp: Any,
) -> dict[str, Any]:
    """The same training with stock eager DDP and with dcompile: largest differences, and the receipt.

    `hook`: a communication hook of torch's. `group`: "all" or "half", a process group of its own.
    """
    ranks = group_of(group) if group else None
    stock = DDP(make(name), process_group=ranks, **ddp)
    call, wrapped = wrap(make(name), order, options, process_group=ranks, **ddp)
    if hook:
        for each in (stock, wrapped):
            register(each, ranks, getattr(default_hooks, hook))
    found = compare(Training(stock, stock, accumulate), Training(call, wrapped, accumulate), ranks, steps)
    found["receipt"] = dcompile.receipt(call)
    if hook and dist.get_world_size(ranks) > 2:
        found["scatter"] = scatter(name, hook, ranks, accumulate, steps, **ddp)
    return found


@contextlib.contextmanager
def chunks_of_rows(chunks: int = 3) -> Iterator[None]:
    """Around compiling: losses are in chunks of rows, though the cost model would leave small ones whole."""
    with mock.patch.object(match, "choose_plan", lambda *_: LossPlan("rows", chunks, 0, 0.0, "forced")):
        yield


def in_chunks_of_rows(**how: Any) -> dict[str, Any]:
    """`against_stock` of a model that returns its loss, in chunks of rows."""
    with chunks_of_rows():
        return against_stock(**how)


def with_copied_layers(train: Callable[..., dict[str, Any]] | None = None, **how: Any) -> dict[str, Any]:
    """`train`, `against_stock` if nothing else is said, and how many calls of layers Dynamo copied."""
    own, frames = layer_frames.FrameCalls, list[layer_frames.FrameCalls]()

    def watched() -> layer_frames.FrameCalls:
        frames.append(own())
        return frames[-1]

    with mock.patch.object(layer_frames, "FrameCalls", watched):
        found = (train or against_stock)(**how)
    return found | {"copies": sum(frame.copies for frame in frames)}


def against_stock_sync_norm() -> dict[str, Any]:
    """SyncBatchNorm, which has kernels on GPUs alone; products and convolutions in whole float32."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        return against_stock("sync_norm")
    finally:
        torch.backends.cudnn.allow_tf32 = before


SIZES_MB = (0.0002, 0.0003, 0.0005, 0.0008, 0.001, 0.002, 0.005, 0.05)
"""Sizes of buckets. Few of them say little: a 16-bit parameter is rounded the same way in most."""


def scatter(name: str, hook: str, ranks: Any, accumulate: bool, steps: int, **ddp: Any) -> float:
    """How far stock is from itself with other buckets, in losses, relative: the most of eight.

    More than two gradients are added in an order that depends on where in its bucket each lies, and rounded to the
    hook's 16 bits each time.
    """

    def trained(**more: Any) -> list[float]:
        model = DDP(make(name), process_group=ranks, **ddp | more)
        register(model, ranks, getattr(default_hooks, hook))
        training = Training(model, model, accumulate)
        training.loss(50).backward()  # DDP's first backward has one bucket, whatever was asked for
        training.run(steps)
        training.run(1, first=10)
        return training.losses

    usual = trained()
    others = [trained(bucket_cap_mb=size) for size in SIZES_MB]
    return worst_of(abs(a - b) / abs(a) for other in others for a, b in zip(usual, other, strict=True))


def register(ddp: Any, state: Any, hook: Any) -> None:
    """register_comm_hook, less DDP's check that bfloat16 goes over NCCL: Gloo has learnt it since."""
    with mock.patch.object(DDP, "_check_comm_hook"):
        ddp.register_comm_hook(state, hook)


@functools.cache
def group_of(ranks: Literal["all", "half"]) -> Any:
    """A process group beside the default one: of all ranks, or of this rank's half of them."""
    world = dist.get_world_size()
    size = world if ranks == "all" else world // 2
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return groups[dist.get_rank() // size]


# --- one thing at a time: each case runs the same steps under stock DDP and under dcompile, and compares gradients


def pair(name: str = "two", order: str = "compile(ddp)", options: dict[str, Any] | None = None, **ddp: Any) -> Any:
    """(stock DDP, what to call, its DDP module), with equal parameters."""
    if _in_turn and (name, order, options, ddp) == ("two", "compile(ddp)", None, {}):
        for each in (_in_turn[0], _in_turn[2]):
            each.module.load_state_dict(make(name).state_dict())
            each.zero_grad()
        return _in_turn
    return DDP(make(name), **ddp), *wrap(make(name), order, options, **ddp)


_in_turn: tuple[Any, Any, Any] | tuple[()] = ()
"""What `pair` returns to the cases of `in_turn`."""


def in_turn(cases: tuple[str, ...]) -> dict[str, Any]:
    """What each case finds, one behind the other with one pair of models: what all of them trace is traced once."""
    global _in_turn
    _in_turn = pair()
    try:
        return {case: globals()[case]() for case in cases}
    finally:
        _in_turn = ()


def inputs(step: int = 0) -> torch.Tensor:
    return batch(models.Mlp(), dist.get_rank(), step)["x"].to(device())


def gradients(ddp: Any) -> dict[str, Any]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in ddp.module.named_parameters()}


def same_as_stock(steps: Callable[[Any, Any], None], **how: Any) -> dict[str, Any]:
    """Run `steps(call, ddp)` both ways: largest difference of gradients, to stock and to rank 0, and the receipt."""
    stock, call, ddp = pair(**how)
    steps(stock, stock)
    steps(call, ddp)
    return {
        "grad": largest_difference(gradients(stock), gradients(ddp)),
        "ranks": across_ranks(gradients(ddp)),
        "receipt": dcompile.receipt(call),
    }


def backward(call: Any, step: int = 0) -> None:
    loss_of(call(inputs(step))).backward()


def comm_hook() -> dict[str, Any]:
    def steps(call: Any, ddp: Any) -> None:
        ddp.register_comm_hook(None, halve)
        for step in range(2):
            backward(call, step)

    return same_as_stock(steps)


def halve(_state, bucket):
    """Not what DDP does, so that a hook left out would show."""
    work = dist.all_reduce(bucket.buffer().mul_(0.25), async_op=True).get_future()
    return work.then(lambda future: future.value()[0])


def known_hook(kind: str) -> dict[str, Any]:
    """Hooks of the reducer's own, and wrapped ones: two compiled steps, and one behind a fallback, which keeps them."""
    eligible: list[bool] = []

    def steps(call: Any, ddp: Any) -> None:
        if kind == "wrapped":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
        else:
            ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
        for step in range(2):
            backward(call, step)
        if call is not ddp or find_model(call) is not None:
            eligible.append(dcompile.receipt(call).eligible)
        with torch.compiler.set_stance("force_eager"):
            backward(call, 2)

    return {**same_as_stock(steps), "eligible": eligible}


def comm_hook_after_a_step(builtin: bool) -> dict[str, Any]:
    def steps(call: Any, ddp: Any) -> None:
        backward(call)
        ddp.zero_grad()
        if builtin:
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        else:
            ddp.register_comm_hook(None, halve)
        for step in range(3):
            backward(call, step)

    return same_as_stock(steps)


def interleaved() -> dict[str, Any]:
    """Two forwards, one of them under no_sync, then their backwards: each reduces as its own forward said.

    Stock DDP keeps one flag for both, so the expected values are put together by hand.
    """
    reference, (_, call, ddp) = make("two"), pair()
    backward(call)  # compile and take over first
    ddp.zero_grad()
    found = []
    for first in (True, False):
        losses = {}
        losses["sync"] = loss_of(call(inputs(1)))
        with ddp.no_sync():
            losses["local"] = loss_of(call(inputs(2)))
        for name in ("sync", "local") if first else ("local", "sync"):
            losses[name].backward()
        found.append(gradients(ddp))
        ddp.zero_grad()
    synced, local = by_hand(reference, 1), by_hand(reference, 2)
    mean = average(synced)
    # sync first: the mean, then this rank's own added. local first: what has accumulated is reduced with the rest.
    expected = [
        {n: mean[n] + local[n] for n in mean},
        average({n: synced[n] + local[n] for n in mean}),
    ]
    return {"grad": max(largest_difference(a, b) for a, b in zip(expected, found, strict=True))}


def by_hand(module: Any, step: int) -> dict[str, torch.Tensor]:
    module.zero_grad()
    loss_of(module(inputs(step))).backward()
    return {n: p.grad.clone() for n, p in module.named_parameters()}


def average(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = {n: v.clone() for n, v in values.items()}
    for value in result.values():
        dist.all_reduce(value.div_(dist.get_world_size()))
    return result


def two_synced_backwards() -> dict[str, Any]:
    def steps(call: Any, _ddp: Any) -> None:
        for step in range(3):
            backward(call, step)

    return same_as_stock(steps)


def zeroed_not_dropped() -> dict[str, Any]:
    def steps(call: Any, ddp: Any) -> None:
        for step in range(3):
            ddp.zero_grad(set_to_none=False)
            backward(call, step)

    return same_as_stock(steps)


def gradients_kept() -> dict[str, Any]:
    """A user keeps every step's gradients: none of them may change afterwards."""
    _, call, ddp = pair()
    kept, copies = [], []
    for step in range(5):
        ddp.zero_grad()
        backward(call, step)
        kept.append([p.grad for p in ddp.parameters()])
        copies.append([p.grad.clone() for p in ddp.parameters()])
    same = all(torch.equal(a, b) for k, c in zip(kept, copies, strict=True) for a, b in zip(k, c, strict=True))
    one_storage = len({p.grad.untyped_storage().data_ptr() for p in ddp.parameters()}) == 1
    return {"unchanged": same, "one storage": one_storage, "different": not torch.equal(kept[0][0], kept[1][0])}


def retained_graph() -> dict[str, Any]:
    """Both backwards reduce. (Stock DDP reduces the first alone: then ranks differ from there on.)"""
    _, call, ddp = pair()
    loss = loss_of(call(inputs()))
    loss.backward(retain_graph=True)
    loss.backward()
    expected = {n: 2 * g for n, g in average(by_hand(make("two"), 0)).items()}
    return {
        "grad": largest_difference(expected, gradients(ddp)), "ranks": across_ranks(gradients(ddp)),
        "receipt": dcompile.receipt(call),
    }  # fmt: skip


def autograd_grad() -> dict[str, Any]:
    """torch.autograd.grad reduces nothing and leaves .grad alone, as under DDP."""
    _, call, ddp = pair()
    backward(call)
    before = gradients(ddp)
    found = torch.autograd.grad(loss_of(call(inputs(1))), list(ddp.parameters()))
    local = by_hand(make("two"), 1)
    return {
        "grad": largest_difference(before, gradients(ddp)),
        "found": worst_of((a - b).abs().max().item() for a, b in zip(found, local.values(), strict=True)),
    }


def hooks_and_clipping() -> dict[str, Any]:
    counts = {}

    def steps(call: Any, ddp: Any) -> None:
        fired = []
        for parameter in ddp.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad is not None))
        backward(call)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        counts[call is ddp and not counts] = len(fired), all(fired)

    result = same_as_stock(steps)
    return result | {"fired": list(counts.values())}


def gradient_hooks(how: str) -> dict[str, Any]:
    """Hooks get the gradient of their rank alone, before it is added to .grad and reduced; one rank may have others."""

    def steps(call: Any, ddp: Any) -> None:
        seen, (weight, bias, *_) = [], ddp.parameters()
        for step in range(4):
            if step == (1 if how == "late" else 0):
                if how == "after":
                    weight.register_post_accumulate_grad_hook(lambda p: clamp_and_tell(p.grad, seen))
                elif how != "one rank" or dist.get_rank():
                    handle = weight.register_hook(lambda grad: seen.append(grad.clone()) or grad.clamp(-1e-3, 1e-3))
            with ddp.no_sync() if step == 1 else contextlib.nullcontext():
                backward(call, step)
            if step == 2 and how == "late":
                handle.remove()
        gradients_seen.append([*seen, bias.grad])

    gradients_seen: list[list[Any]] = []
    found = same_as_stock(steps)
    stock, ours = gradients_seen
    return found | {"seen": worst_of((a - b).abs().max().item() for a, b in zip(stock, ours, strict=True))}


def clamp_and_tell(gradient: torch.Tensor, seen: list[torch.Tensor]) -> None:
    seen.append(gradient.clone())
    gradient.clamp_(-1e-3, 1e-3)


def used_outside_the_module() -> dict[str, Any]:
    """The loss uses a parameter of the module directly: DDP reduces that part as well."""

    def steps(call: Any, ddp: Any) -> None:
        inner = getattr(ddp.module, "_orig_mod", ddp.module)
        for step in range(2):
            x = inputs(step)
            (loss_of(call(x)) + torch.tanh(x @ inner.a.weight.t()).sum()).backward()

    return same_as_stock(steps)


def used_outside_beside_forwards() -> dict[str, Any]:
    """A backward of three forwards and of a parameter's own term, which it reaches after, between or before them."""

    def steps(call: Any, ddp: Any) -> None:
        inner = getattr(ddp.module, "_orig_mod", ddp.module)
        for place in range(4):
            terms = [lambda step=step: loss_of(call(inputs(step))) for step in (0, 1, 2)]
            terms.insert(place, lambda: torch.tanh(inputs(3) @ inner.a.weight.t()).sum())
            sum(term() for term in terms).backward()

    return same_as_stock(steps)


class WithScale(torch.nn.Module):
    """A module with a parameter that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def used_only_outside(behind: bool) -> dict[str, Any]:
    """A parameter is used only by a loss: behind the module, or in a term of its own, which backward reaches last."""
    torch.manual_seed(0)
    stock, ddp = (DDP(WithScale()) for _ in range(2))
    ddp.module.load_state_dict(stock.module.state_dict())
    dcompile.compile(ddp, options=dict(ATEN))
    worst = 0.0
    for step in range(3):
        for model in (stock, ddp):
            model.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            scale = model.module.scale
            term = torch.tanh(x * scale).sum()
            (loss_of(model(x) * scale) if behind else term + loss_of(model(x))).backward()
        worst = max(worst, largest_difference(gradients(stock), gradients(ddp)), across_ranks(gradients(ddp)))
    return {"grad": worst, "receipt": dcompile.receipt(ddp)}


def used_outside_in_channels_last() -> dict[str, Any]:
    """The same of a weight that is not contiguous, so that autograd would copy its gradient."""
    torch.manual_seed(0)
    stock, ddp = (DDP(torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)) for _ in range(2))
    ddp.module.load_state_dict(stock.module.state_dict())
    dcompile.compile(ddp, options=dict(ATEN))
    for model in (stock, ddp):
        x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        (loss_of(model(x)) + loss_of(model(x * 2)) + (model.module.weight * x[0, 0, 0, 0]).sum()).backward()
    worst = largest_difference(gradients(stock), gradients(ddp))
    return {"grad": worst, "ranks": across_ranks(gradients(ddp))}


def a_later_branch_is_not_eligible() -> dict[str, Any]:
    """The first steps are taken over; then the model takes a branch that runs a layer eagerly."""
    module, twin = models.SometimesOutside(), models.SometimesOutside()
    twin.load_state_dict(module.state_dict())
    torch.manual_seed(3)
    stock = DDP(twin)
    module.load_state_dict(stock.module.state_dict())
    ddp = dcompile.compile(DDP(module), options=dict(ATEN))
    worst, eligible = 0.0, []
    for step in range(5):
        for model in (stock, ddp):
            model.zero_grad()
            loss_of(model(inputs(step), outside=step in (2, 3))).backward()
        worst = max(worst, largest_difference(gradients(stock), gradients(ddp)), across_ranks(gradients(ddp)))
        eligible.append(dcompile.receipt(ddp).eligible)
    receipt = dcompile.receipt(ddp)
    return {"grad": worst, "eligible": eligible, "reasons": receipt.reasons, "notes": receipt.notes}


def a_later_forward_is_eager(static_graph: bool) -> dict[str, Any]:
    """Compilation is switched off after two steps: gradients must still be reduced."""
    stock, ddp, _ = pair(static_graph=static_graph)
    worst = 0.0
    for step in range(5):
        stock.zero_grad()
        ddp.zero_grad()
        backward(stock, step)
        with torch.compiler.set_stance("force_eager" if step >= 2 else "default"):
            backward(ddp, step)
        worst = max(worst, largest_difference(gradients(stock), gradients(ddp)), across_ranks(gradients(ddp)))
    receipt = dcompile.receipt(ddp)
    return {"grad": worst, "eligible": receipt.eligible, "notes": receipt.notes}


def never_compiled(static_graph: bool) -> dict[str, Any]:
    """Compilation is off from the start."""
    stock, ddp, _ = pair(static_graph=static_graph)
    for step in range(3):
        backward(stock, step)
        with torch.compiler.set_stance("force_eager"):
            backward(ddp, step)
    return {"grad": largest_difference(gradients(stock), gradients(ddp)), "ranks": across_ranks(gradients(ddp))}


def first_step_without_sync() -> dict[str, Any]:
    def steps(call: Any, ddp: Any) -> None:
        with ddp.no_sync():
            backward(call, 1)
        backward(call, 2)

    return same_as_stock(steps)


def first_call_in_inference_mode(sync: bool) -> dict[str, Any]:
    """A model is evaluated before it is trained. `sync`: whether the first step reduces."""

    def steps(call: Any, ddp: Any) -> None:
        with torch.inference_mode():
            call(inputs(0))
        with contextlib.nullcontext() if sync else ddp.no_sync():
            backward(call, 1)
        backward(call, 2)

    return same_as_stock(steps)


def accumulated_where_the_last_step_does_not_reach() -> dict[str, Any]:
    """A parameter gets a gradient under no_sync only; DDP reduces it at the next synced backward."""

    def steps(call: Any, ddp: Any) -> None:
        with ddp.no_sync():
            loss_of(call(inputs(1), short=False)).backward()
        loss_of(call(inputs(2), short=True)).backward()

    return same_as_stock(steps, name="branching", find_unused_parameters=True)


def part_of_a_larger_function() -> dict[str, Any]:
    """The DDP module is compiled and taken over; a function that is compiled, too, calls it before and after."""

    def larger(call: Any, x: torch.Tensor) -> torch.Tensor:
        return loss_of(torch.tanh(call(2 * x)))

    compiled = torch.compile(larger, backend="aot_eager")
    stock, call, ddp = pair()
    worst = []
    for step, with_it in enumerate((True, False, True)):
        for module in (stock, call):
            module.zero_grad()
            (compiled if with_it and module is call else larger)(module, inputs(step)).backward()
        worst += [largest_difference(gradients(stock), gradients(ddp)), across_ranks(gradients(ddp))]
    return {"grad": worst_of(worst), "receipt": dcompile.receipt(call)}


def joined(before: int) -> dict[str, Any]:
    """Uneven inputs: the Join context manager needs DDP's own reducer, on ranks without any input too."""
    from torch.distributed.algorithms.join import Join

    def steps(call: Any, ddp: Any) -> None:
        for step in range(before):
            backward(call, step)
        with Join([ddp], divide_by_initial_world_size=not before):
            for step in range(2 * dist.get_rank()):
                ddp.zero_grad()
                backward(call, step)
        backward(call, 5)

    return same_as_stock(steps)


def alone_first(who: int, how: str, folder: str, **ddp: Any) -> dict[str, Any]:
    """One rank runs the model alone before all train; nothing is in a cache yet, and each rank has its own."""

    def steps(call: Any, ddp: Any) -> None:
        if dist.get_rank() == who:
            alone(call, ddp, how)
            if how != "under no_sync":  # which may be kept for a reduction to come
                ddp.zero_grad()
        dist.barrier()
        for step in range(2):
            backward(call, step)

    cache = str(Path(folder) / f"rank{dist.get_rank()}")
    began = time.monotonic()
    found = same_as_stock(steps, options={**ATEN, "verify": False, "cache_dir": cache}, **ddp)
    return found | {"took": time.monotonic() - began}


def alone(call: Any, ddp: Any, how: str) -> None:
    """What DDP lets one rank do by itself: nothing of it reduces a gradient."""
    x = inputs()[:3]
    if how == "score":
        with torch.no_grad():
            call(x)
    elif how == "dry run":
        call(x)
    elif how == "under no_sync":
        with ddp.no_sync():
            loss_of(call(x)).backward()
    else:
        assert how == "gradient of an input", how
        x.requires_grad_()
        torch.autograd.grad(loss_of(call(x)), x)


def two_models_in_other_orders() -> dict[str, Any]:
    """One rank calls the second of two models first, alone."""
    both = [wrap(make(name), "compile(ddp)", None) for name in ("two", "mlp")]
    stock = DDP(make("two"))
    if dist.get_rank() == 1:
        with torch.no_grad():
            both[1][0](inputs())
    dist.barrier()
    for call in (stock, both[0][0]):
        backward(call)
    loss_of(both[1][0](inputs())).backward()
    return {
        "grad": largest_difference(gradients(stock), gradients(both[0][1])),
        "eligible": [dcompile.receipt(call).eligible for call, _ in both],
    }


def recompiles_with_guard_collectives() -> dict[str, Any]:
    """One rank alone needs another graph; torch's collective has every rank compile one."""
    function = dcompile.compile(lambda x: x.sin().sum(), options=dict(ATEN))
    numbers, right = [], []
    before = torch.compiler.set_enable_guard_collectives(True)
    try:
        for size in (10, 10, 10 if dist.get_rank() == 0 else 12, 10):
            x = torch.randn(size)
            right.append(torch.equal(function(x), x.sin().sum()))
            numbers.append(len(function._dcompile_entry.model.graphs))
    finally:
        after = torch.compiler.set_enable_guard_collectives(False)
    function(x)
    return {"before": before, "after": after, "right": all(right), "graphs": numbers}


def ranks_take_other_branches() -> dict[str, Any]:
    """A layer that only rank 0 uses."""
    ddp = dcompile.compile(DDP(models.Branching()), options=dict(ATEN))
    loss_of(ddp(inputs(), short=dist.get_rank() == 1)).backward()
    return {}


TASKS = {
    "by turns": ([(0,), (1,), (1,), (0,)], [(1,), (0,), (1,), (1,)]),
    "late": ([(0,), (0,), (0,), (0,), (1,)], [(0,), (0,), (1, "break"), (2, "eager"), (1, "off")]),
    "hooked": ([(0,), (1,), (0,), (0, "hook"), (0,)], [(0,), (1,), (1,), (1, "hook"), (1,)]),
    "broken": ([(0,), (1,), (0,)], [(1, "break"), (0,), (2,)]),
    "outside": ([(0,), (1,), (0,)], [(0, "eager"), (0,), (1,)]),
    "several": ([(0, "break"), (1, "break"), (1,), (0, "break")], [(1, "break"), (1, "break"), (0, "break"), (1,)]),
}
"""What each rank does in each step: the task, and how; "off": without compiling."""


def other_parameters(plan: str, accumulate: bool = False, hook: bool = False, **ddp: Any) -> dict[str, Any]:
    """Ranks use different parameters; with momentum, whose parameters move even where a gradient is zeros, not None.

    `hook`: one rank has a communication hook that does what DDP does anyway.
    """
    stock, call, wrapped = pair("tasks", **{"find_unused_parameters": True} | ddp)
    if hook and dist.get_rank() == 1:
        wrapped.register_comm_hook(None, lambda _, bucket: default_hooks.allreduce_hook(dist.group.WORLD, bucket))
    worst, same = [], []
    trainings = [
        (each, each_ddp, torch.optim.SGD(each_ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))
        for each, each_ddp in ((stock, stock), (call, wrapped))
    ]
    steps = TASKS[plan][dist.get_rank()]
    for step, what in enumerate(steps):
        for each, each_ddp, optimizer in trainings:
            optimizer.zero_grad()
            if accumulate:
                with each_ddp.no_sync():
                    use(each, step + 50, *steps[step - 1])
            use(each, step, *what)
        worst += [largest_difference(gradients(stock), gradients(wrapped)), across_ranks(gradients(wrapped))]
        for _, _, optimizer in trainings:
            optimizer.step()
        same.append(all(map(torch.equal, stock.parameters(), wrapped.parameters())))
    missing = [name for name, gradient in gradients(wrapped).items() if gradient is None]
    found = find_model(wrapped)
    assert found is not None
    storages = sum(map(len, found.shared_buckets.storages.values()))
    return {
        "grad": worst_of(worst), "same": all(same), "none": missing, "storages": storages,
        "receipt": dcompile.receipt(call),
    }  # fmt: skip


def use(call: Any, step: int, task: int, how: str = "") -> None:
    if how == "hook":
        call.module.trunk.weight.register_hook(lambda gradient: 4 * gradient)
        call.module.heads[0].weight.register_hook(lambda gradient: 4 * gradient)
    with torch.compiler.set_stance("force_eager" if how == "off" else "default"):
        loss_of(call(inputs(step), task, how)).backward()


def two_tasks_in_one_backward() -> dict[str, Any]:
    """In another order on each rank, the second time with gradients that have stayed.

    Stock DDP wants a backward for each forward, so the expected values are put together by hand.
    """
    reference, call, ddp = make("tasks"), *wrap(make("tasks"), "compile(ddp)", None, find_unused_parameters=True)
    tasks = (0, 1) if dist.get_rank() else (1, 0)
    for module in (reference, call):
        for step in range(2):
            torch.stack([loss_of(module(inputs(10 * step + task), task)) for task in tasks]).sum().backward()
    used = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    expected = dict.fromkeys(gradients(ddp)) | average(used)
    return {"grad": largest_difference(expected, gradients(ddp))}


def static_parameters() -> dict[str, Any]:
    def steps(call: Any, ddp: Any) -> None:
        for step in range(2):
            ddp.zero_grad()
            use(call, step, dist.get_rank())

    return same_as_stock(steps, name="tasks", static_graph=True)


def plans_that_differ() -> None:
    """Ranks may use other parameters, but not put them into other buckets."""
    size = 25 if dist.get_rank() else 0.0005
    ddp = dcompile.compile(DDP(make("tasks"), find_unused_parameters=True, bucket_cap_mb=size), options=dict(ATEN))
    use(ddp, 0, dist.get_rank())


def mixed_precision() -> dict[str, Any]:
    """autocast around DDP, and a gradient scaler: gradients stay float32."""

    def steps(call: Any, ddp: Any) -> None:
        scaler = torch.amp.GradScaler(device().type)
        for step in range(2):
            with torch.autocast(device().type, dtype=torch.bfloat16):
                loss = loss_of(call(inputs(step)))
            scaler.scale(loss).backward()

    return same_as_stock(steps)


def checkpointed(reentrant: bool) -> dict[str, Any]:
    """Gradient checkpointing of every block."""
    MAKE["checkpointed"] = functools.partial(models.checkpointed_decoder, reentrant)

    def steps(call: Any, ddp: Any) -> None:
        inner = getattr(ddp.module, "_orig_mod", ddp.module)
        for step in range(2):
            tokens = batch(inner, dist.get_rank(), step)["tokens"].to(device())
            loss_of(call(tokens)).backward()

    return same_as_stock(steps, name="checkpointed")


def uneven_batches() -> dict[str, Any]:
    """One rank meets another batch size, and compiles anew alone."""

    def steps(call: Any, ddp: Any) -> None:
        for step in range(4):
            ddp.zero_grad()
            x = inputs(step)
            loss_of(call(x[: 8 - 3 * dist.get_rank()] if step == 2 else x)).backward()

    return same_as_stock(steps)


def empty_batches() -> dict[str, Any]:
    """Each rank has no rows in one of the steps; LayerNorm's decomposition in torch returns plain zeros there."""

    def steps(call: Any, _ddp: Any) -> None:
        for step in range(3):
            call(inputs(step)[: 0 if step == 1 + dist.get_rank() else 8]).square().sum().backward()

    return same_as_stock(steps, name="layer_norm", options={"kernels": "auto"}, bucket_cap_mb=0.0005)


def stock_by_option() -> dict[str, Any]:
    def steps(call: Any, _ddp: Any) -> None:
        for step in range(2):
            backward(call, step)

    return same_as_stock(steps, options=ATEN | {"distributed": "stock"}, static_graph=True)


def compiled_parts() -> dict[str, Any]:
    """Only a part of the module is compiled: DDP's reducer serves it like any other part."""
    stock, ddp = DDP(make("two")), DDP(make("two"))
    part = dcompile.compile(ddp.module.b, options=dict(ATEN))
    for step in range(2):
        backward(stock, step)
        backward(ddp, step)
    return {
        "grad": largest_difference(gradients(stock), gradients(ddp)),
        "adapter": dcompile.receipt(part).adapter,
    }


def state_and_copies() -> dict[str, Any]:
    stock, call, ddp = pair()
    keys = list(stock.state_dict()) == list(ddp.state_dict())
    backward(call)
    keys = keys and list(stock.state_dict()) == list(ddp.state_dict())
    twin = copy.deepcopy(ddp.module)
    same = torch.equal(twin(inputs()), ddp.module(inputs()))
    stock.load_state_dict(ddp.state_dict())
    return {"keys": keys, "copy": same, "clean": twin._compiled_call_impl is None}


def new_parameters() -> dict[str, Any]:
    """load_state_dict(assign=True) puts other parameter objects into the module; stock DDP would lose them."""
    _, call, ddp = pair()
    backward(call)
    ddp.load_state_dict({k: v.clone() for k, v in ddp.state_dict().items()}, assign=True)
    backward(call, 1)
    expected = average(by_hand(make("two"), 1))
    found = {n: p.grad.clone() for n, p in ddp.module.named_parameters()}
    return {"grad": largest_difference(expected, found)}


def wrapped_again() -> dict[str, Any]:
    """A second DDP around the same compiled module."""
    module = dcompile.compile(make("two"), options=dict(ATEN))
    backward(module)  # alone, before any DDP
    first = DDP(module)
    first.zero_grad()
    backward(first)
    del first
    second, stock = DDP(module), DDP(make("two"))
    for call in (stock, second):
        call.zero_grad()
        backward(call, 3)
    return {
        "grad": largest_difference(gradients(stock), gradients(second)),
        "eligible": dcompile.receipt(second).eligible,
    }


def called_past_ddp() -> dict[str, Any]:
    """ddp.module(x) reduces nothing, compiled or not."""

    def steps(call: Any, ddp: Any) -> None:
        backward(call)
        ddp.zero_grad()
        backward(ddp.module, 1)

    result = same_as_stock(steps)
    return {"grad": result["grad"]}


def whole_graph() -> dict[str, Any]:
    """torch.compile(ddp, fullgraph=True), which stock DDP does not allow."""
    stock, ddp = DDP(make("two")), DDP(make("two"))
    call = torch.compile(ddp, backend="dcompile", fullgraph=True, options=dict(ATEN))
    backward(stock)
    backward(call)
    return {
        "grad": largest_difference(gradients(stock), gradients(ddp)),
        "type": type(call).__name__,
        "receipts": len({str(dcompile.receipt(thing)) for thing in (call, ddp, ddp.module)}),
        "receipt": dcompile.receipt(call),
    }


def raises_on_one_rank() -> dict[str, Any]:
    """An exception in forward on rank 1 in the second step."""
    _, call, _ddp = pair()
    backward(call)
    if dist.get_rank() == 1:
        raise ValueError("mine")
    backward(call, 1)
    return {}


def train_from_cache() -> dict[str, Any]:
    """Training with our kernels and buckets small enough for several: what it came to, in full precision."""
    call, ddp = wrap(make("mlp"), "compile(ddp)", {"kernels": "auto"}, bucket_cap_mb=0.001)
    training = Training(call, ddp)
    training.run(3)
    receipt = dcompile.receipt(ddp)
    return {
        "gradients": {name: gradient.double().sum().item().hex() for name, gradient in training.gradients().items()},
        "eligible": receipt.eligible,
        "collectives": receipt.collectives,
        "built": receipt.built,
        "graphs_cached": receipt.graphs_cached,
    }


def nothing() -> None:
    """To have everything imported."""


def hangs() -> None:
    """For the harness's own test: rank 1 never answers."""
    import time

    while dist.get_rank() == 1:
        time.sleep(1)


def dies_while_it_writes_to_the_store() -> bool:
    """For the harness's own test, too: rank 1 is cut off in the middle of what rank 0 is not to wait for."""
    import os
    import threading
    import time

    store = compat.groups.group_store(dist.group.WORLD)
    text = "x" * (4 << 20)  # torchrun's kind of store takes 8 MiB at most
    if dist.get_rank() == 1:
        threading.Timer(0.1, os._exit, (1,)).start()
        while True:
            store.set("large", text)
    time.sleep(0.3)
    return bool(store.check(["never written"]))


def sync_norm(options: dict[str, Any], rows: tuple[int, ...], norms: int = 2) -> dict[str, Any]:
    """SyncBatchNorm against BatchNorm over all ranks' batches at once; `rows` is the size of each rank's batch.

    Stock SyncBatchNorm has no kernels on CPUs; this is what it stands for. Losses of ranks are averaged, as by DDP.
    """
    rank, model = dist.get_rank(), models.Normed if norms == 2 else models.NormedOnce
    torch.manual_seed(7)
    reference = model()
    torch.manual_seed(7)
    ddp = dcompile.compile(DDP(model(models.SyncNorm)), options=dict(options))
    worst: dict[str, Any] = {"loss": 0, "grad": 0, "buffer": 0}
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randn(n, 3, 6, 6, generator=generator) for n in rows]
        outputs = reference(torch.cat(batches)).split(rows)
        losses = [output.pow(2).sum() for output in outputs]
        reference.zero_grad()
        ddp.zero_grad()
        torch.stack(losses).mean().backward()
        loss = ddp(batches[rank]).pow(2).sum()
        loss.backward()
        expected = {n: p.grad for n, p in reference.named_parameters()}
        buffers = dict(reference.named_buffers()), dict(ddp.module.named_buffers())
        for what, difference in (
            ("loss", abs(loss.item() - losses[rank].item()) / max(abs(losses[rank].item()), 1)),
            ("grad", largest_difference(expected, gradients(ddp))),
            ("buffer", largest_difference(*buffers)),
        ):
            worst[what] = worst_of((worst[what], difference))
    if all(rows):  # explaining traces anew, which one case is enough for
        dcompile.explain(ddp, batches[rank])
    found = find_model(ddp)
    assert found is not None
    plans = {kind: found.graphs[0].plan(kind) for kind in ("forward", "backward")}
    return worst | {"plans": plans, "ranks": across_ranks(gradients(ddp)), "receipt": dcompile.receipt(ddp)}
