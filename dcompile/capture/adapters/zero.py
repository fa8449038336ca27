"""Adapters of DeepSpeed's ZeRO: programs reduce its gradients, and gather its parameters.

Stage 0 has DDP's buckets: all-reduced gradients become `.grad`. In stages 1 and 2 the optimizer stores its parameters
end to end in flat groups, and each rank updates a part of each. A unit is some adjacent parameters of a group. Their
gradients are written end to end, and a reduction sums each rank's part on that rank. Stage 3 is like FSDP2: virtual
parameters replace sharded ones while a compiled call runs.

DeepSpeed's step finds the gradients as DeepSpeed itself would have left them. So clipping, loss scales, optimizers and
checkpoints remain its own.

Stage 0 and what all share come first, then stage 3, then the partition of stages 1 and 2.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import torch
from torch.distributed import ReduceOp

from dcompile import compat
from dcompile.capture.adapters.fsdp_common import ShardedAdapter, present
from dcompile.capture.adapters.plain import PlainAdapter, known_number, new_subject
from dcompile.collectives.contract import BucketRule, GradientReduction, ParamInfo, Shard
from dcompile.errors import DcompileError

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


class ZeroShard:
    """A parameter as a unit; see `collectives.contract.ShardUnit`."""

    offloaded = False
    parts: tuple[int, ...] = ()

    def __init__(self, adapter: Zero3Adapter, parameter: Any, name: str, group: str) -> None:
        self._adapter = weakref.ref(adapter)
        self._param = weakref.ref(parameter)
        self.name, self.group = name, group
        self.virtual = compat.zero.virtual_parameter(parameter)
        self.added = False
        """Whether the parameter has a gradient of this step."""

    made = None

    @property
    def shown(self) -> torch.nn.Parameter:
        """The parameter that modules have in its place: the virtual one."""
        return self.virtual

    @property
    def param(self) -> Any:
        """DeepSpeed's parameter."""
        return present(self._param)

    @property
    def dtype(self) -> torch.dtype:
        return self.virtual.dtype

    def data(self) -> torch.Tensor:
        found: torch.Tensor = self.param.ds_tensor.data
        return found.view(-1)

    stored = data

    def address(self) -> int:
        return int(self.param.ds_tensor.data_ptr())

    def commit(self, gradient: torch.Tensor) -> None:
        compat.zero.add_gradient(present(self._adapter).engine, self.param, gradient, not self.added)
        self.added = True

    def take_back(self, gradient: torch.Tensor) -> None:
        del gradient
        raise DcompileError(
            f"dcompile: a gradient of {self.name} is left over that DeepSpeed is to reduce from here on; give this "
            "engine options={'zero': 'off'}"
        )

    def settle(self) -> None:
        """Return at once: `commit` finishes its work."""


class Zero3Adapter(ZeroAdapter):
    """State of the takeover of an engine of stage 3. Layers of a list share collectives; see `layer_of`."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, 3)
        parameters = list(engine.module.named_parameters())
        together: dict[str, int] = {}
        units, infos = list[ZeroShard](), list[ParamInfo]()
        reduce_dtype = dtype_name(engine.communication_data_type)
        for number, (name, parameter) in enumerate(parameters):
            place = together.setdefault(layer_of(name), len(together))
            group = f"zero{place}"
            if group not in self.groups:
                self.groups[group] = ZeroGroup(engine, group, parameter.ds_process_group)
            unit = ZeroShard(self, parameter, name, group)
            numel = parameter.ds_tensor.numel() * parameter.ds_process_group.size()
            shard = Shard(number, place, 0, numel, reduce_dtype, reshard=True)
            shape, dtype = tuple(parameter.ds_shape), dtype_name(parameter.dtype)
            infos.append(ParamInfo(number, name, shape, dtype, self.device.type, "sharded", group, shard))
            units.append(unit)
        self._units = units
        self._params = units
        self._infos = tuple(infos)
        self.units = dict(enumerate(units))
        self._numbers = {id(unit.virtual): number for number, unit in enumerate(units)}
        self._modules = compat.zero.ShownModules(engine, {id(unit.param): unit.virtual for unit in units})

    def trainable(self) -> Iterable[tuple[int, Any]]:
        return ((number, unit.param) for number, unit in enumerate(self._units) if unit.param.requires_grad)

    def objection_to_parts(self) -> str:
        return ""

    def owners(self) -> Iterable[torch.nn.Module]:
        return self._modules.owners()

    def begin_step(self) -> None:
        """Start a step at its first micro-step: gradients so far belong to the last step."""
        for unit in self._units:
            unit.added = False

    def scope(self) -> contextlib.AbstractContextManager[None]:
        for unit in self._units:
            if unit.virtual.requires_grad != unit.param.requires_grad:
                unit.virtual.requires_grad_(unit.param.requires_grad)
        return self._modules.shown()

    def restore(self, reason: str) -> None:
        """Fall back to DeepSpeed's own hooks from now on."""
        super().restore(reason)
        self.notes = tuple(note.replace("stock FSDP", "DeepSpeed") for note in self.notes)
        compat.deepspeed.give_back_reduction(self.engine)
        compat.zero.unsilence(self.engine)
        compat.zero.hide_hooks(self.engine, hidden)


def hidden(hook: Any) -> Any:
    """Return a hook of ZeRO 3 that TorchDynamo skips: traced, each has graph breaks and recompilations of its own."""
    return compat.dynamo.no_dynamo(hook, "a hook of ZeRO 3")


_LAYER = re.compile(r"^(?:.*?\.)?\d+(?=\.)")


def layer_of(name: str) -> str:
    """Return the name of the module whose parameters are gathered together with this one.

    It is the layer, for parameters inside a list of layers, else the module that owns the parameter.
    """
    found = _LAYER.match(name)
    return found.group() if found else name.rpartition(".")[0]


class FlatRange:
    """Adjacent parameters of a flat group as a unit; see `collectives.contract.ShardUnit`."""

    offloaded = False

    def __init__(
        self, adapter: ZeroPartitionAdapter, group: str, index: int, bounds: tuple[int, int], part: int
    ) -> None:
        self._adapter = weakref.ref(adapter)
        self.group = group
        self.index, self._start = index, bounds[0]
        start, stop = bounds
        ranks = adapter.group.size()
        self.parts = tuple(max(0, min(stop, (r + 1) * part) - max(start, r * part)) for r in range(ranks))
        """Number of elements of the unit in each rank's part."""
        rank = torch.distributed.get_rank(adapter.group)
        self._offset = max(start - rank * part, 0)
        """Position of this rank's elements in its part of the flat group."""
        self.name = ""
        """Names of its parameters."""
        self.members: list[tuple[Any, int]] = []
        """(weak reference, offset within the unit) of each parameter."""

    def add(self, name: str, parameter: Any, offset: int) -> None:
        """Add the next parameter."""
        self.name = f"{self.name} {name}".lstrip()
        self.members.append((weakref.ref(parameter), offset))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of gradients: that of the parameters."""
        found: torch.dtype = present(self.members[0][0]).dtype
        return found

    def data(self) -> torch.Tensor:
        raise AssertionError("parameters of stages 1 and 2 are not gathered")

    stored = data

    def address(self) -> int:
        return 0

    def commit(self, gradient: torch.Tensor) -> None:
        """Add this rank's elements to its part of the gradients."""
        if gradient.numel():
            flat = present(self._adapter).partition(self.index)
            flat[self._offset : self._offset + gradient.numel()].add_(gradient)

    def take_back(self, gradient: torch.Tensor) -> None:
        """Add this rank's whole gradient to `.grad` of the parameters, for DeepSpeed to reduce."""
        for reference, offset in self.members:
            parameter: Any = present(reference)
            piece = gradient[offset : offset + parameter.numel()].view(parameter.shape).to(parameter.dtype)
            parameter.grad = piece.clone() if parameter.grad is None else parameter.grad + piece

    def settle(self) -> None:
        """Return at once: `commit` finishes its work."""


class ZeroPartitionAdapter(ZeroAdapter):
    """State of the takeover of an engine of stage 1 or 2: gradients are reduced to each rank's part."""

    compares_in_forward = True

    def __init__(self, engine: Any, stage: int) -> None:
        super().__init__(engine, stage)
        self._group = compat.deepspeed.process_group(engine)
        self._refs: dict[int, Callable[[], Any]] = {}
        self._partitions: dict[int, Any] = {}
        """Index of a flat group -> its gradients in the form that the optimizer takes."""
        self._handed: set[int] = set()
        self._rank = torch.distributed.get_rank(self._group)
        found = self._make_units(engine, dtype_name(engine.communication_data_type))
        # numbers follow the module's order, not that of the flat groups
        order = {name: number for number, name in enumerate(names_of(engine).values())}
        entries = sorted(found, key=lambda entry: order[entry[0].fqn])
        self._infos = tuple(
            ParamInfo(number, i.fqn, i.shape, i.dtype, i.device, i.kind, i.group, i.shard)
            for number, (i, _) in enumerate(entries)
        )
        self._refs = {number: weakref.ref(parameter) for number, (_, parameter) in enumerate(entries)}
        self._numbers = {id(parameter): number for number, (_, parameter) in enumerate(entries)}

    def _make_units(self, engine: Any, reduce_dtype: str) -> list[tuple[ParamInfo, Any]]:
        """Make units, from the last parameter of the last group to the first; return (info for plans, parameter)."""
        names, found = names_of(engine), list[tuple[ParamInfo, Any]]()
        itemsize = getattr(torch, reduce_dtype).itemsize
        cap = min(CAP_BYTES, compat.zero.bucket_elements(engine) * itemsize)
        for flat in reversed(compat.zero.flat_groups(engine)):
            for members in in_buckets(flat.places, itemsize, min(FIRST_BYTES, cap), cap):
                bounds = members[0][1], members[-1][1] + members[-1][0].numel()
                number, group = len(self.units), f"zero{len(self.groups)}"
                unit = FlatRange(self, group, flat.index, bounds, flat.part)
                self.units[number] = unit
                self.groups[group] = ZeroGroup(engine, group, self._group)
                for parameter, place in members:
                    offset, name = place - bounds[0], names[id(parameter)]
                    unit.add(name, parameter, offset)
                    shard = Shard(number, number, offset, bounds[1] - bounds[0], reduce_dtype, reshard=False, flat=True)
                    shape, dtype = tuple(parameter.shape), dtype_name(parameter.dtype)
                    info = ParamInfo(0, name, shape, dtype, parameter.device.type, "sharded", group, shard)
                    found.append((info, parameter))
        return found

    @property
    def group(self) -> Any:
        return self._group

    def number_of(self, parameter: Any) -> int | None:
        return known_number(self._numbers, self._refs, parameter)

    def made_of(self, number: int) -> Callable[[Any], Any] | None:
        del number
        return None

    def virtual(self, number: int) -> torch.nn.Parameter:
        """Return the parameter itself, which is whole."""
        found: torch.nn.Parameter = present(self._refs[number])
        return found

    def trainable(self) -> Iterable[tuple[int, Any]]:
        return ((number, present(reference)) for number, reference in self._refs.items())

    def partition(self, index: int) -> torch.Tensor:
        """Return this rank's part of a flat group's gradients, a flat tensor that `commit` adds to.

        If the optimizer's step has taken the last part, a new one is made. It has not taken it if a step has another
        backward after the one that handed gradients over.
        """
        engine, known = self.engine, self._partitions.get(index)
        if known is not None and index in self._handed and not compat.zero.holds(engine, index, known):
            known = None
        if known is None:
            self._handed.discard(index)
            group = compat.zero.flat_groups(engine)[index]
            known = self._partitions[index] = compat.zero.new_partition(engine, group, self._rank)
        flat: torch.Tensor = known.flat_partition
        return flat

    def hand_over(self) -> None:
        """Pass a step's complete gradients to the optimizer."""
        for group in compat.zero.flat_groups(self.engine):
            self.partition(group.index)
            compat.zero.hand_over(self.engine, group.index, self._partitions[group.index])
            self._handed.add(group.index)


def in_buckets(
    places: Sequence[tuple[Any, int]], itemsize: int, first_bytes: int, cap_bytes: int
) -> list[list[tuple[Any, int]]]:
    """Group adjacent parameters into buckets, the last ones first; as in DDP, a bucket closes at its size in bytes.

    `places`: (parameter, offset) in order.
    """
    buckets: list[list[tuple[Any, int]]] = []
    size, limit = 0, first_bytes
    for parameter, place in reversed(places):
        if not buckets or size >= limit:
            limit = first_bytes if not buckets else cap_bytes
            buckets.append([])
            size = 0
        buckets[-1].insert(0, (parameter, place))
        size += parameter.numel() * itemsize
    return buckets
