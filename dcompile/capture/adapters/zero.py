"""A module inside a DeepSpeed engine: ZeRO's gradients are reduced, and its parameters gathered, inside the programs.

Stage 0 has DDP's buckets: all-reduced gradients become `.grad`. In stages 1 and 2 the optimizer's parameters lie end to
end in flat groups, of which each rank updates a part. Some parameters in a row are a unit: their gradients are written
end to end, and each rank's part of them is summed up there. Stage 3 is as FSDP2: virtual parameters stand for sharded
ones while a compiled call runs.

What DeepSpeed's step reads is what DeepSpeed itself would have left there, so that clipping, loss scales, optimizers
and checkpoints are its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any, Literal

import torch
from torch.distributed import ReduceOp

from dcompile import compat
from dcompile.capture.adapters.fsdp_common import ShardedAdapter, present
from dcompile.capture.adapters.plain import PlainAdapter, known_number, new_subject
from dcompile.collectives.contract import BucketRule, GradientReduction, ParamInfo

FIRST_BYTES, CAP_BYTES = 1 << 20, 25 << 20
"""Sizes of buckets, as DDP's: the first one, of the last layers, is small, so that communication starts early."""


class ZeroStockAdapter(PlainAdapter):
    """ZeRO's collectives are left to DeepSpeed: the model is compiled as on its own, between the engine's hooks."""

    eligible = False

    def __init__(self, stage: int, reasons: Iterable[str]) -> None:
        self.name = f"zero{stage}"
        self.reasons = tuple(reasons)


def reasons_against(engine: Any, zero: str, stock: bool) -> list[str]:
    """Why ZeRO's collectives are left to DeepSpeed; the same on every rank of a job."""
    if zero == "off":
        return ["option zero='off'; options={'zero': 'graph'} takes ZeRO's collectives into the graph"]
    if stock:
        return ["option distributed='stock'"]
    if missing := compat.deepspeed.missing_names(engine):
        return [f"this DeepSpeed lacks {', '.join(missing)}"]
    return compat.deepspeed.objections(engine)


def dtype_name(dtype: torch.dtype) -> str:
    """As plans name it."""
    return str(dtype).removeprefix("torch.")


def names_of(engine: Any) -> dict[int, str]:
    """Identity of a parameter -> its name, in the order of the module."""
    return {id(parameter): name for name, parameter in engine.module.named_parameters()}


# --- stage 0 ----------------------------------------------------------------------------------------------------------


class ZeroReplicatedAdapter(PlainAdapter):
    """Stage 0: gradients are all-reduced in DDP's buckets, at the end of a step."""

    name = "zero0"
    synchronizes = True

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self.notes = ()
        self._group = compat.deepspeed.process_group(engine)
        self._compared: set[tuple[str, ...]] = set()
        parameters = list(engine.module.named_parameters())
        self.refs = {number: weakref.ref(parameter) for number, (_, parameter) in enumerate(parameters)}
        self._numbers = {id(parameter): number for number, (_, parameter) in enumerate(parameters)}
        self._infos = tuple(
            ParamInfo(number, name, tuple(p.shape), dtype_name(p.dtype), p.device.type)
            for number, (name, p) in enumerate(parameters)
        )
        wire = engine.communication_data_type
        self._wire = dtype_name(wire) if any(p.dtype != wire for _, p in parameters) else ""

    @property
    def engine(self) -> Any:
        """The engine; it is there while its module runs."""
        return present(self._engine)

    @property
    def group(self) -> Any:
        return self._group

    def number_of(self, parameter: Any) -> int | None:
        return known_number(self._numbers, self.refs, parameter)

    def param_infos(self) -> tuple[ParamInfo, ...]:
        return self._infos

    def exchanged(self, used: Collection[int]) -> tuple[ParamInfo, ...]:
        return tuple(info for info in self._infos if info.number in used)

    def subject_of(self, plan: tuple[str, ...]) -> str | None:
        return new_subject(self._compared, plan, "collectives of a ZeRO 0 model,")

    def process_groups(self) -> list[Any]:
        return [self._group]

    def communicators(self) -> dict[str, Any]:
        return {"ddp": self._group}

    def bucket_rule(self) -> BucketRule:
        return BucketRule(FIRST_BYTES, CAP_BYTES, (), self._wire)

    def note(self, text: str) -> None:
        """A line for the receipt."""
        if text not in self.notes:
            self.notes = (*self.notes, text)

    def name_of(self, number: int) -> str:
        """Of a parameter."""
        return self._infos[number].fqn


# --- what stages 1 to 3 share -----------------------------------------------------------------------------------------


class ZeroGroup:
    """Units of one process group; see `collectives.contract.ShardGroup`."""

    def __init__(self, engine: Any, name: str, group: Any) -> None:
        self._engine = weakref.ref(engine)
        self.name = name
        self._group = group

    def gather_group(self) -> Any:
        return self._group

    def part_group(self) -> Any:
        return None

    def scatter_group(self) -> Any:
        return self._group

    def replica_group(self) -> Any:
        return None

    def wants(self) -> Literal["nothing", "shards", "all"]:
        """As DeepSpeed, asked in the backward."""
        return "all" if compat.deepspeed.reduces(present(self._engine)) else "nothing"

    def reduction(self, dtype: torch.dtype) -> GradientReduction:
        """As DeepSpeed: divided by the number of ranks, then summed up."""
        del dtype
        return GradientReduction(float(self._group.size()), None, ReduceOp.SUM, ReduceOp.SUM)


class ZeroAdapter(ShardedAdapter):
    """What the adapters of stages 1 to 3 share: all units of one process group."""

    way_to_differ = "A model that is meant to differ by its rank needs options={'zero': 'off'}."

    def __init__(self, engine: Any, stage: int) -> None:
        super().__init__()
        self.name = f"zero{stage}"
        self._engine = weakref.ref(engine)
        self._restored = False

    @property
    def engine(self) -> Any:
        """The engine; it is there while its module runs."""
        return present(self._engine)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.engine.device)

    def note(self, text: str) -> None:
        """A line for the receipt."""
        if text not in self.notes:
            self.notes = (*self.notes, text)

    def trainable(self) -> Iterable[tuple[int, Any]]:
        """(number, parameter) of those that have gradients."""
        raise NotImplementedError

    def unit_gradients(self, gradients: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradients of parameters, by number, as whole units."""
        whole: dict[int, torch.Tensor] = {}
        for number, gradient in sorted(gradients.items()):
            info = self._infos[number]
            shard = info.shard
            assert shard is not None, "every parameter of a ZeRO model has a unit"
            if shard.unit not in whole:
                dtype = getattr(torch, shard.reduce_dtype)
                whole[shard.unit] = torch.zeros(shard.numel, dtype=dtype, device=gradient.device)
            whole[shard.unit][shard.offset : shard.offset + gradient.numel()] = gradient.reshape(-1)
        return whole
