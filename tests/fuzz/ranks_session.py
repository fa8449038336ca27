"""Runs of a random training script on two ranks, stock and compiled: what can be seen after each step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

import dcompile
from tests.fuzz.torch_session import Seen, differences, error_text, kind_of, leaf

WIDTH = 8
DYNAMOS = ("does not belong to this Graph", "referenced nonexistent value item")
"""A module called under a checkpoint and again outside, with symbolic sizes: an error with any backend (2.13; 2.11)."""


@dataclass(frozen=True)
class RanksProgram:
    """A model, how it is distributed and compiled, and what is done with it on every rank, as text."""

    layers: tuple[str, ...]
    """Statements of `__init__`."""
    forward: tuple[str, ...]
    wrap: str
    """An expression of `module`, the plain one."""
    way: str
    """An expression of `module`, now distributed, and `options`: what is called."""
    options: tuple[tuple[str, Any], ...]
    steps: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(
            (self.source(), f"module = {self.wrap}", f"model = {self.way}  # {dict(self.options)}", *self.steps)
        )

    def source(self) -> str:
        """The model's text."""
        lines = [f"        {line}\n" for statement in self.forward for line in statement.split("\n")]
        made = "".join(f"        {statement}\n" for statement in ("super().__init__()", *self.layers))
        return f"class Model(nn.Module):\n    def __init__(self):\n{made}    def forward(self, x):\n{''.join(lines)}"


class Scale(nn.Module):
    """One number, which no two ranks can share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Gated(nn.Module):
    """Two products of one input, of which a layer's second dimension is no multiple of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Tokens(nn.Module):
    """Adds a row of a table, chosen by the input's signs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((x.detach() > 0).sum(-1))


def fsdp2(
    module: nn.Module, blocks: tuple[str, ...] = (), mixed: Mapping[str, torch.dtype] | None = None, **how: Any
) -> Any:
    how |= {} if mixed is None else {"mp_policy": MixedPrecisionPolicy(**mixed)}
    for block in blocks:
        fully_shard(getattr(module, block), **how)
    return fully_shard(module, **how)


def fsdp1(module: nn.Module, blocks: tuple[str, ...] = (), strategy: str = "FULL_SHARD") -> Any:
    how = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True, "device_id": torch.device("cpu")}
    for block in blocks:
        setattr(module, block, FullyShardedDataParallel(getattr(module, block), **how))
    return FullyShardedDataParallel(module, **how)


def in_place(module: Any, options: dict[str, Any], **how: Any) -> Any:
    module.compile(backend="dcompile", options=options, **how)
    return module


@contextlib.contextmanager
def unsynced(module: Any) -> Iterator[None]:
    if hasattr(module, "no_sync"):
        with module.no_sync():
            yield
        return
    module.set_requires_gradient_sync(False)
    yield
    module.set_requires_gradient_sync(True)


def batch(number: int, rows: int = 4) -> torch.Tensor:
    """This rank's input."""
    return leaf(1000 + 10 * number + dist.get_rank(), (rows, WIDTH), torch.float32)


def total(results: Any) -> torch.Tensor:
    """A sum in which each element has another weight."""
    found = torch.zeros(())
    for place, x in enumerate(tree_leaves(as_tree(results))):
        if x.requires_grad:
            found = found + (x.float() * torch.linspace(0.5 + place, 1.5, x.numel()).view(x.shape)).sum()
    return found


def as_tree(results: Any) -> Any:
    return dict(results) if isinstance(results, ModelOutput) else results


@torch._dynamo.disable
def eagerly(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call that Dynamo may not look into."""
    return function(*args, **kwargs)


WORDS: dict[str, Any] = {
    "torch": torch, "F": F, "nn": nn, "dist": dist, "dcompile": dcompile, "checkpoint": checkpoint,
    "ModelOutput": ModelOutput, "Scale": Scale, "Gated": Gated, "Tokens": Tokens, "ddp": DistributedDataParallel,
    "fsdp1": fsdp1, "fsdp2": fsdp2, "in_place": in_place, "unsynced": unsynced, "x": batch, "total": total,
    "eagerly": eagerly,
}  # fmt: skip


def difference(program: RanksProgram) -> str | None:
    """What this rank sees otherwise with dcompile than with stock PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = session(program, stock=True)
        got = session(program, stock=False)
    for (step, what), text in differences(want, got, 500 if "bfloat16" in str(program) else 1).items():
        if what == "error" and (not text.endswith(", not no error") or any(said in text for said in DYNAMOS)):
            break  # stock PyTorch cannot do it, or Dynamo cannot trace it
        return f"{kind_of(what)}: step {step}: {what}: {text}"
    return None


def session(program: RanksProgram, stock: bool) -> list[Seen]:
    """What is seen after each step; the last may be an error."""
    scope: dict[str, Any] = dict(WORDS)
    exec(compile(program.source(), "<model>", "exec"), scope)
    torch.manual_seed(7)
    module = scope["Model"]()
    module = scope["module"] = eval(program.wrap, scope | {"module": module})
    options = {"receipt": False, "verify": True, **dict(program.options)}
    scope["model"] = module if stock else eval(program.way, scope | {"options": options})
    scope["opt"] = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    scope["saved"] = {name: value.detach().clone() for name, value in module.state_dict().items()}
    found: list[Seen] = []
    try:
        for line in program.steps:
            scope.pop("r", None)
            exec(line, scope)
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()  # stock keeps whole parameters after a forward alone
            found.append(dict(_seen(module, scope.get("r"))))
    except Exception as error:
        found.append({"error": error_text(error)})
    return found


def _seen(module: Any, results: Any) -> Iterator[tuple[str, Any]]:
    for number, x in enumerate(tree_leaves(as_tree(results))):
        if isinstance(x, torch.Tensor):
            yield f"r[{number}] is", (x.dtype, tuple(x.shape), x.requires_grad)
            yield f"r[{number}]", x.detach().clone()
    with _whole(module):
        for name, parameter in module.named_parameters():
            yield from _of_parameter(name.replace("_orig_mod.", ""), parameter)
    for name, buffer in module.named_buffers():
        yield name.replace("_orig_mod.", ""), buffer.clone()


def _whole(module: Any) -> contextlib.AbstractContextManager[None]:
    """FSDP1 shows parts, or what they are parts of, as its last call has left it."""
    if isinstance(module, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(module, writeback=False, with_grads=True)
    return contextlib.nullcontext()


def _of_parameter(name: str, parameter: torch.Tensor) -> Iterator[tuple[str, Any]]:
    for what, x in ((name, parameter), (f"{name}.grad", parameter.grad)):
        local = x.to_local() if isinstance(x, DTensor) else x
        yield f"{what} is", None if x is None else (type(x).__name__, local.dtype, tuple(local.shape), x.requires_grad)
        yield what, None if local is None else local.detach().clone()
