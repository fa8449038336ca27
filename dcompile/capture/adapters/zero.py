"""ZeRO of DeepSpeed: adapters, and strategies by which programs reduce its gradients and gather its parameters.

Stage 0 has DDP's buckets: all-reduced gradients become `.grad`. In stages 1 and 2 the optimizer stores its parameters
end to end in flat groups, and each rank updates a part of each. A unit is some adjacent parameters of a group. Their
gradients are written end to end, and a reduction sums each rank's part on that rank. Stage 3 is like FSDP2: virtual
parameters replace sharded ones while a compiled call runs.

DeepSpeed's step finds the gradients as DeepSpeed itself would have left them. So clipping, loss scales, optimizers and
checkpoints remain its own.

The engine calls one function at the end of each backward, however the backward was started. dcompile replaces that
function. The replacement also reduces gradients from outside the compiled graphs, and passes gradients to the
optimizer.

Adapters come first: stage 0 and what all share, stage 3, then the partition of stages 1 and 2. Strategies follow.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import torch
from torch.distributed import ReduceOp

from dcompile import compat
from dcompile.capture.adapters.eager_regions import EagerRegionMonitor
from dcompile.capture.adapters.fsdp_common import ShardedAdapter, present
from dcompile.capture.adapters.grad_field import MergedGradients, differs
from dcompile.capture.adapters.gradient_sync import BackwardCall, GradientSync
from dcompile.capture.adapters.plain import PlainAdapter, known_number, new_subject
from dcompile.capture.adapters.sharded_sync import ShardedSync
from dcompile.capture.call_state import Invocation
from dcompile.capture.services import GradientBuckets, ShardedParameters
from dcompile.collectives.contract import BucketRule, GradientReduction, ParamInfo, Shard
from dcompile.errors import DcompileError
from dcompile.ir.buffers import Bucket

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
    cast = None

    def __init__(self, adapter: Zero3Adapter, parameter: Any, name: str, group: str) -> None:
        self._adapter = weakref.ref(adapter)
        self._param = weakref.ref(parameter)
        self.name, self.group = name, group
        self.virtual = compat.deepspeed.virtual_parameter(parameter)
        self.added = False
        """Whether the parameter has a gradient of this step."""

    made = None
    sent: tuple[()] = ()

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
        compat.deepspeed.add_gradient(present(self._adapter).engine, self.param, gradient, not self.added)
        self.added = True

    def take_back(self, gradient: torch.Tensor) -> None:
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
        self._modules = compat.deepspeed.ShownModules(engine, {id(unit.param): unit.virtual for unit in units})

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
        compat.deepspeed.unsilence(self.engine)
        compat.deepspeed.hide_hooks(self.engine, hidden)


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
    cast = None

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
        self._passed_on: set[int] = set()
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
        cap = min(CAP_BYTES, compat.deepspeed.bucket_elements(engine) * itemsize)
        for flat in reversed(compat.deepspeed.flat_groups(engine)):
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
        if known is not None and index in self._passed_on and not compat.deepspeed.holds(engine, index, known):
            known = None
        if known is None:
            self._passed_on.discard(index)
            group = compat.deepspeed.flat_groups(engine)[index]
            known = self._partitions[index] = compat.deepspeed.new_partition(engine, group, self._rank)
        flat: torch.Tensor = known.flat_partition
        return flat

    def hand_over(self) -> None:
        """Pass a step's complete gradients to the optimizer."""
        for group in compat.deepspeed.flat_groups(self.engine):
            self.partition(group.index)
            compat.deepspeed.hand_over(self.engine, group.index, self._partitions[group.index])
            self._passed_on.add(group.index)


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


OUTSIDE = "gradients from outside the compiled graphs are reduced at the end of the backward"


def zero_sync(engine: Any, zero: str, stock: bool) -> GradientSync:
    """Return the strategy of a DeepSpeed engine's model, by the options `zero` and `distributed`."""
    stage = compat.deepspeed.stage_of(engine)
    if reasons := reasons_against(engine, zero, stock):
        if stage == 3 and hasattr(engine.optimizer, "parameter_offload"):
            compat.deepspeed.hide_hooks(engine, hidden)
        return GradientSync(ZeroStockAdapter(stage, reasons))
    if stage == 0:
        return ZeroReplicatedSync(ZeroReplicatedAdapter(engine))
    if stage == 3:
        return Zero3Sync(Zero3Adapter(engine))
    return ZeroPartitionSync(ZeroPartitionAdapter(engine, stage))


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a bound method for the engine that does not keep the compiled model alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is None:
            raise DcompileError(
                "dcompile: the compiled model of this DeepSpeed engine is gone; compile the engine again"
            )
        found()

    return call


def _refuse_coalescing(engine: Any) -> None:
    if compat.deepspeed.is_coalescing(engine):
        raise DcompileError(
            "dcompile: engine.coalesce_grad_reduction() has DeepSpeed reduce gradients itself; compile the engine with "
            "options={'zero': 'off'}, or leave it out: gradients are reduced during the backward anyway"
        )


# --- stage 0 ----------------------------------------------------------------------------------------------------------


class ZeroReplicatedSync(GradientSync):
    """Strategy of stage 0: the backward that ends a step all-reduces buckets, to which it adds what `.grad` holds."""

    def __init__(self, adapter: ZeroReplicatedAdapter) -> None:
        super().__init__(adapter)
        self._adapter = adapter
        self._reduced: list[GradientBuckets] = []
        """Buckets of each program of the backward in progress, in the order in which the programs ran."""
        self._absent: dict[int, GradientBuckets] = {}
        """Parameter without a gradient in such a program, as this rank's losses do not depend on it -> its buckets."""
        self._merged: dict[int, MergedGradients] = {}
        """Number of each backward of this step -> what its programs have reduced."""

    def take_over(self) -> tuple[ShardedParameters | None, EagerRegionMonitor | None]:
        compat.deepspeed.take_reduction(self._adapter.engine, _weakly(self._end_backward))
        return None, None

    def run_backward(self, call: BackwardCall) -> list[Any]:
        """Run a program that reduces, or does not: DeepSpeed decides in the backward."""
        graph, buckets = call.graph, call.buckets
        if buckets is None:
            return super().run_backward(call)
        reduces = compat.deepspeed.reduces(self._adapter.engine) and graph.accumulates()
        if reduces:
            graph.agree("backward")
            absent = call.absent()
            buckets.begin((), compat.autograd.backward_task(), not self._reduced, absent)
            self._reduced.append(buckets)
            self._absent.update(dict.fromkeys(absent, buckets))
        results = call.run(call.args, buckets=buckets, sync=reduces)
        if reduces:
            merged = self._merged.setdefault(compat.autograd.backward_task(), MergedGradients())
            merged.add(buckets.last_run(), results, graph.grads)
        return results

    def accumulates(self, numbers: Iterable[int]) -> bool:
        found = (self._adapter.refs[number]() for number in numbers)
        return any(parameter is not None and compat.autograd.will_accumulate(parameter) for parameter in found)

    def make_buckets(self, buckets: tuple[Bucket, ...]) -> GradientBuckets:
        adapter = self._adapter
        return self.model.services.make_buckets(buckets, adapter.refs, adapter.group, self.model.shared_buckets)

    def _end_backward(self) -> None:
        """Where DeepSpeed would reduce: average what no program has reduced, and fill missing gradients."""
        adapter = self._adapter
        reduced, self._reduced = self._reduced, []
        absent, self._absent = self._absent, {}
        merged, self._merged = self._merged, {}
        if not compat.deepspeed.reduces(adapter.engine):
            return
        known = {number for buckets in reduced for number in buckets.reduced()}
        rest: dict[int, torch.Tensor] = {}
        for number, reference in adapter.refs.items():
            parameter: Any = reference()
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.grad is None and number in absent:  # other ranks may have one
                parameter.grad = absent[number].reduced_gradient(number)
            elif parameter.grad is None:  # as DeepSpeed, so that an optimizer applies weight decay
                parameter.grad = torch.zeros_like(parameter)
            elif number not in known:
                rest[number] = parameter.grad
        if len(merged) == 1:  # of several backwards, the programs of later ones have added what .grad held
            (found,) = merged.values()
            outside = dict(found.outside(functools.partial(differs, adapter.refs), but=absent))
            for number, gradient in sorted(outside.items()):
                parameter = adapter.refs[number]()
                rest[number] = parameter.grad - gradient
                parameter.grad = gradient + rest[number]
        self._average(rest, known)
        for buckets in reduced:
            buckets.forget()

    def _average(self, rest: dict[int, torch.Tensor], known: Collection[int]) -> None:
        """Average these gradients over the ranks; of `known` parameters they are only a part of `.grad`."""
        if not rest:
            return
        adapter = self._adapter
        adapter.note(f"{OUTSIDE}: {', '.join(adapter.name_of(number) for number in rest)}")
        before = {number: rest[number].clone() for number in rest if number in known}
        self.model.services.average(adapter.group, list(rest.values()), "")
        for number, own in before.items():
            parameter: Any = adapter.refs[number]()
            parameter.grad += rest[number] - own


# --- stages 1 to 3 ----------------------------------------------------------------------------------------------------


class ZeroSync(ShardedSync):
    """Base class of the strategies of stages 1 to 3: the end of a backward."""

    _zero: ZeroAdapter

    def __init__(self, adapter: ZeroAdapter) -> None:
        super().__init__(adapter)
        self._zero = adapter

    def run_backward(self, call: BackwardCall) -> list[Any]:
        if self._zero.eligible:
            _refuse_coalescing(self._zero.engine)
        return super().run_backward(call)

    def _take_engine(self) -> None:
        engine = self._zero.engine
        compat.deepspeed.silence(engine)
        compat.deepspeed.take_reduction(engine, _weakly(self._end_backward))

    def _reduce_rest(self) -> None:
        """Reduce gradients of earlier backwards that this one did not reach, and those from outside the graphs."""
        shards = self.shards
        assert shards is not None, "what is taken over has shards"
        shards.flush()
        found = {number: p.grad for number, p in self._zero.trainable() if p.grad is not None}
        if not found:
            return
        infos = self._zero.param_infos()
        self._zero.note(f"{OUTSIDE}: {', '.join(infos[number].fqn for number in sorted(found))}")
        shards.reduce_behind(self._zero.unit_gradients(found))
        for _, parameter in self._zero.trainable():
            parameter.grad = None

    def _end_backward(self) -> None:
        """Finish a backward, where DeepSpeed would reduce gradients."""
        raise NotImplementedError


class ZeroPartitionSync(ZeroSync):
    """Strategy of stages 1 and 2: forwards use whole parameters, backwards reduce to this rank's part of each group."""

    def __init__(self, adapter: ZeroPartitionAdapter) -> None:
        super().__init__(adapter)
        self._partition = adapter

    @property
    def sharded(self) -> ShardedAdapter | None:  # type: ignore[override]
        """None: parameters are not sharded."""
        return None

    @property
    def scatters(self) -> bool:
        return True

    def take_over(self) -> tuple[ShardedParameters | None, EagerRegionMonitor | None]:
        self._take_engine()
        return self.model.services.make_shards(self._zero.units, self._zero.groups), None

    def check_result(self, result: Any) -> None:
        """Accept a returned parameter: its gradients from outside the graphs are reduced after the backward."""

    def _end_backward(self) -> None:
        engine = self._zero.engine
        if not compat.deepspeed.reduces(engine):
            return
        self._reduce_rest()
        if compat.deepspeed.ends_step(engine):
            self._partition.hand_over()


class Zero3Sync(ZeroSync):
    """Strategy of stage 3: programs gather parameters, and reduce gradients to shards."""

    def __init__(self, adapter: Zero3Adapter) -> None:
        super().__init__(adapter)
        self._shards = adapter

    def take_over(self) -> tuple[ShardedParameters | None, EagerRegionMonitor | None]:
        if self._zero.eligible:
            self._take_engine()
        return super().take_over()

    def begin_call(self, call: Invocation) -> None:
        super().begin_call(call)
        if self._zero.eligible and torch.is_grad_enabled() and compat.deepspeed.begins_step(self._zero.engine):
            self._shards.begin_step()

    def _end_backward(self) -> None:
        self._reduce_rest()
        compat.deepspeed.end_backward(self._zero.engine)
