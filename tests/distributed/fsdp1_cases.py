"""What the tests of FullyShardedDataParallel (FSDP1) run on each rank."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType

import dcompile
from tests.distributed import fsdp_cases, models
from tests.distributed.cases import MAKE, device
from tests.distributed.fsdp_cases import Uneven, blocks, compiled
from tests.distributed.models import batch, loss_of
from tests.distributed.training import Training, apart, compare

MODELS = MAKE | {"uneven": Uneven}


class FsdpTraining(Training):
    """Parameters are put together from all ranks. Gradients are this rank's parts, compared on each."""

    @property
    def inner(self) -> Any:
        return self.wrapped

    def batch_of(self, step: int) -> dict[str, Any]:
        plain = self.wrapped.module
        return batch(models.Mlp() if isinstance(plain, Uneven) else plain, dist.get_rank(), step)

    def gradients(self) -> dict[str, Any]:
        return {n: None if p.grad is None else p.grad.clone() for n, p in self.wrapped.named_parameters()}

    def parameters(self) -> dict[str, Any]:
        with FSDP.state_dict_type(self.wrapped, StateDictType.FULL_STATE_DICT):
            # buffers are each rank's own, as FSDP has them
            own = {name.replace("_fsdp_wrapped_module.", "") for name, _ in self.wrapped.named_buffers()}
            return {name: value.clone() for name, value in self.wrapped.state_dict().items() if name not in own}

    def state(self) -> dict[str, Any]:
        with FSDP.state_dict_type(self.wrapped, StateDictType.FULL_STATE_DICT):
            return {
                "model": self.wrapped.state_dict(),
                "optimizer": FSDP.optim_state_dict(self.wrapped, self.optimizer),
            }

    def load(self, state: dict[str, Any]) -> None:
        with FSDP.state_dict_type(self.wrapped, StateDictType.FULL_STATE_DICT):
            self.wrapped.load_state_dict(state["model"])
            found = FSDP.optim_state_dict_to_load(self.wrapped, self.optimizer, state["optimizer"])
            self.optimizer.load_state_dict(found)


def make(name: str, wrap: str = "blocks", precision: dict[str, str] | None = None, **how: Any) -> Any:
    """A module with each of its blocks in FSDP ("blocks") and around it, or only around it ("root")."""
    torch.manual_seed(7)
    module = MODELS[name]().to(device())
    if "sharding_strategy" in how:
        how["sharding_strategy"] = ShardingStrategy[how["sharding_strategy"]]
        if how["sharding_strategy"].name.startswith(("HYBRID", "_HYBRID")):
            how["process_group"] = hybrid_groups()
    if precision is not None:
        how["mixed_precision"] = MixedPrecision(**{k: getattr(torch, v) for k, v in precision.items()})
    how = {"use_orig_params": True, "device_id": device(), "sync_module_states": False} | how
    fsdp = functools.partial(FSDP, **how)
    if wrap == "blocks":
        inner = blocks(module)
        for parent in list(module.modules()):
            for key, child in list(parent.named_children()):
                if any(child is block for block in inner):
                    setattr(parent, key, fsdp(child))
    return fsdp(module)


@functools.cache
def hybrid_groups() -> tuple[Any, Any]:
    """(ranks that share one model, ranks with the same shards): two ranks to a model. With one, FSDP never reduces."""
    world = dist.get_world_size()
    shards = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    replicas = [dist.new_group(list(range(first, world, 2))) for first in range(2)]
    return shards[dist.get_rank() // 2], replicas[dist.get_rank() % 2]


def against_stock(
    name: str,
    wrap: str = "blocks",
    order: str = "compile",
    accumulate: bool = False,
    options: dict[str, Any] | None = None,
    fullgraph: bool = True,
    steps: int = 3,
    **how: Any,
) -> dict[str, Any]:
    """The same training with stock eager FSDP and with dcompile: largest differences, and the receipt."""
    stock, module = make(name, wrap, **how), make(name, wrap, **how)
    call = compiled(module, order, options, fullgraph=fullgraph)
    found = compare(FsdpTraining(stock, stock, accumulate), FsdpTraining(call, module, accumulate), steps=steps)
    if "precision" in how and dist.get_world_size() > 2:
        # how far stock is from itself with sums of 32 bits, or where other parameters share a reduction
        wide = how | {"precision": how["precision"] | {"reduce_dtype": "float32"}}
        stocks = (make(name, other, **kind) for other, kind in (("blocks", how), ("blocks", wide), ("root", how)))
        found["scatter"] = apart(FsdpTraining(each, each, accumulate) for each in stocks)
    return found | {"receipt": dcompile.receipt(call)}


def eager_by_turns(first: str) -> None:
    """A micro-batch under no_sync and one that reduces, of which the `first` runs eagerly, or the second."""
    module = make("mlp")
    call = compiled(module)
    for step in range(2):
        with torch.compiler.set_stance("force_eager" if (first == "eager") == (step == 0) else "default"):
            loss = loss_of(call(**{name: value.to(device()) for name, value in batch(models.Mlp(), 0, step).items()}))
        with module.no_sync() if step == 0 else contextlib.nullcontext():
            loss.backward()


def freed() -> dict[str, Any]:
    """As for FSDP2."""
    return fsdp_cases.freed(make)
