"""Adapters of DeepSpeed's ZeRO: programs reduce its gradients, and gather its parameters.

Stage 0 has DDP's buckets: all-reduced gradients become `.grad`. In stages 1 and 2 the optimizer stores its parameters
end to end in flat groups, and each rank updates a part of each. A unit is some adjacent parameters of a group. Their
gradients are written end to end, and a reduction sums each rank's part on that rank. Stage 3 is like FSDP2: virtual
parameters replace sharded ones while a compiled call runs.

DeepSpeed's step finds the gradients as DeepSpeed itself would have left them. So clipping, loss scales, optimizers and
checkpoints remain its own.
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
"""Bucket sizes, as DDP's: the first bucket, of the last layers, is small, so that communication starts early."""


class ZeroStockAdapter(PlainAdapter):
    """Stock fallback of ZeRO: DeepSpeed's hooks run its collectives, around graphs that have none."""

    serves_wrapper = True
    eligible = False

    def __init__(self, stage: int, reasons: Iterable[str]) -> None:
        self.name = f"zero{stage}"
        self.reasons = tuple(reasons)


def reasons_against(engine: Any, zero: str, stock: bool) -> list[str]:
    """Return why ZeRO's collectives are left to DeepSpeed; the same on every rank of a job."""
    if zero == "off":
        return ["option zero='off'; options={'zero': 'graph'} takes ZeRO's collectives into the graph"]
    if stock:
        return ["option distributed='stock'"]
    if missing := compat.deepspeed.missing_names(engine):
        return [f"this DeepSpeed lacks {', '.join(missing)}"]
    return compat.deepspeed.objections(engine)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name in plans."""
    return str(dtype).removeprefix("torch.")


def names_of(engine: Any) -> dict[int, str]:
    """Return identity of a parameter -> its name, in the module's order."""
    return {id(parameter): name for name, parameter in engine.module.named_parameters()}


# --- stage 0 ----------------------------------------------------------------------------------------------------------


class ZeroReplicatedAdapter(PlainAdapter):
    """Adapter of stage 0: gradients are all-reduced in DDP's buckets, in the backward that ends a step."""

    name = "zero0"
    serves_wrapper = True
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
        """The engine, which exists while its module runs."""
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

    def name_of(self, number: int) -> str:
        """Return a parameter's name."""
        return self._infos[number].fqn


# --- shared code of stages 1 to 3 -------------------------------------------------------------------------------------


class ZeroGroup:
    """A group of units; see `collectives.contract.ShardGroup`."""

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
        """Return what to reduce over in the backward that runs now, as DeepSpeed decides."""
        return "all" if compat.deepspeed.reduces(present(self._engine)) else "nothing"

    def reduction(self, dtype: torch.dtype) -> GradientReduction:
        """Return DeepSpeed's averaging: it divides by the number of ranks, then sums."""
        del dtype
        return GradientReduction(float(self._group.size()), None, ReduceOp.SUM, ReduceOp.SUM)


class ZeroAdapter(ShardedAdapter):
    """Base class of the adapters of stages 1 to 3."""

    way_to_differ = "A model that is meant to differ by its rank needs options={'zero': 'off'}."

    def __init__(self, engine: Any, stage: int) -> None:
        super().__init__()
        self.name = f"zero{stage}"
        self._engine = weakref.ref(engine)

    @property
    def engine(self) -> Any:
        """The engine, which exists while its module runs."""
        return present(self._engine)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.engine.device)

    def trainable(self) -> Iterable[tuple[int, Any]]:
        """Yield (number, parameter) of trainable parameters."""
        raise NotImplementedError
