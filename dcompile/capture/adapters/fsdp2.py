"""Adapter of FSDP2 (`fully_shard`): programs gather the module's parameters and reduce their gradients.

While a compiled call runs, modules show virtual parameters in place of the sharded ones. These have the full shape and
no memory. Tracing sees them, and programs gather into memory of their own. FSDP's hooks are disabled meanwhile.
Traceable hooks replace those that convert inputs and outputs (MixedPrecisionPolicy). Outside of such calls the module
is as FSDP left it: sharded DTensors with hooks. So optimizers, checkpoints and direct calls of submodules work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import PackedSequence

from dcompile import compat
from dcompile.capture.adapters.fsdp_common import ShardedAdapter, UnshardedGroup, present
from dcompile.collectives.contract import GradientReduction, ParamInfo, ScaledCast, Shard
from dcompile.errors import DcompileError


class ShardedParameterUnit:
    """A parameter as a unit; see `collectives.contract.ShardUnit`."""

    parts: tuple[int, ...] = ()

    def __init__(self, param: Any, number: int, group: str) -> None:
        self.reference: Callable[[], Any] = weakref.ref(param)
        self.name = compat.fsdp2.full_name(param, number)
        self.group = group
        self.offloaded = compat.fsdp2.is_offloaded(param)
        self._arrival: Any = None
        """Event of a gradient's copy to CPU memory, if one is in flight."""
        self.virtual = compat.fsdp2.virtual_parameter(param)
        self.cast = _scaled_cast(param, self.reference)
        arrives = compat.fsdp2.arriving_parameter(param)
        self.sent = () if arrives is None or self.cast is None else (arrives, self.cast.scale)
        self.shown = compat.fsdp2.shown_parameter(param, self.virtual, self.sent)
        self.made = compat.fsdp2.made_of_gathered(param)

    @property
    def param(self) -> Any:
        """FSDP's state of the parameter."""
        return present(self.reference)

    @property
    def dtype(self) -> torch.dtype:
        return self.virtual.dtype

    def data(self) -> torch.Tensor:
        return compat.fsdp2.shard_data(self.param)

    def stored(self) -> torch.Tensor:
        return compat.fsdp2.stored_shard(self.param)

    def address(self) -> int:
        return compat.fsdp2.shard_address(self.param)

    def commit(self, gradient: torch.Tensor) -> None:
        self._arrival = compat.fsdp2.add_gradient(self.param, gradient)

    def take_back(self, gradient: torch.Tensor) -> None:
        compat.fsdp2.keep_gradient(self.param, gradient[: self.virtual.numel()].view(self.virtual.shape))

    def settle(self) -> None:
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None


def _scaled_cast(param: Any, reference: Callable[[], Any]) -> ScaledCast | None:
    gather = compat.shard_extensions.scaled_gather(param)
    if gather is None:
        return None

    def given() -> torch.Tensor | None:
        return compat.shard_extensions.given_scale(present(reference))

    scale = torch.ones((), dtype=torch.float32, device=param.device)
    return ScaledCast(gather.dtype, scale, given, compat.shard_extensions.scales_of)


class FsdpParameterGroup:
    """The parameters of one `fully_shard` call; see `collectives.contract.ShardGroup`."""

    def __init__(self, group: Any, name: str, parts: bool) -> None:
        self._group = weakref.ref(group)
        self.name = name
        self._parts = parts
        self.alone = None if compat.fsdp2.is_sharded(group.mesh_info) else UnshardedGroup()
        """Stand-in for the process group of shards if every rank has all parameters, else None."""

    @property
    def group(self) -> Any:
        """FSDP's state of the group."""
        return present(self._group)

    def gather_group(self) -> Any:
        return self.alone or compat.fsdp2.gather_group(self.group)

    def part_group(self) -> Any:
        return compat.fsdp2.part_group(self.group) if self._parts else None

    def scatter_group(self) -> Any:
        return self.alone or compat.fsdp2.scatter_group(self.group)

    def replica_group(self) -> Any:
        return compat.fsdp2.replica_group(self.group)

    def wants(self) -> Literal["nothing", "shards", "all"]:
        """Return what to reduce over in the backward that runs now, by FSDP's settings.

        They are those of set_requires_gradient_sync and set_requires_all_reduce.
        """
        if not self.group.reduce_grads:
            return "nothing"
        return "all" if self.group.all_reduce_grads else "shards"

    def reduction(self, dtype: torch.dtype) -> GradientReduction:
        replicas = self.replica_group()
        return reduction(
            shards=self.scatter_group().size(),
            replicas=1 if replicas is None else replicas.size(),
            dtype=dtype,
            factor=self.group.gradient_divide_factor,
            sums_only=compat.fsdp2.sums_only(self.group),
        )


@functools.cache
def reduction(
    *, shards: int, replicas: int, dtype: torch.dtype, factor: float | None, sums_only: bool
) -> GradientReduction:
    """Return FSDP2's averaging of gradients over `shards` times `replicas` ranks; `factor` is the user's divisor.

    Against overflow, float16 is divided by about the root of the divisor before the sum, and by the rest after it.
    """
    from torch.distributed import ReduceOp

    ranks = shards * replicas
    small = dtype not in (torch.float32, torch.bfloat16)
    # If each rank has all of the parameter, FSDP2 divides by `factor` where a reduce-scatter would be, in addition to
    # its other divisions.
    alone = factor if shards == 1 else None
    if not small and not sums_only:
        if alone is not None:
            return GradientReduction(alone, None, ReduceOp.SUM, ReduceOp.SUM)
        if factor is None:
            average = ReduceOp.SUM if ranks == 1 else ReduceOp.AVG
            return GradientReduction(None, None, average, average)
        scaled = ReduceOp.AVG if factor == shards else compat.groups.multiplied_sum(1 / factor)
        return GradientReduction(None, None, scaled, ReduceOp.SUM)
    divisor = float(ranks) if factor is None else factor
    if not small:
        return GradientReduction(alone, divisor, ReduceOp.SUM, ReduceOp.SUM)
    before = 1.0
    while divisor % before == 0 and divisor / before > before:
        before *= 2
    return GradientReduction(before * (alone or 1.0), divisor / before, ReduceOp.SUM, ReduceOp.SUM)


class Fsdp2Adapter(ShardedAdapter):
    """State of the takeover of the `fully_shard` calls on one compiled module and those inside it.

    It has only weak references to them, since compiled code, which Dynamo may keep for any time, refers to it.
    """

    name = "fsdp2"
    carries_sync = True

    def __init__(self, states: list[Any], stock: bool, parts: bool = True, bitwise: bool = False) -> None:
        """Take over, unless there are objections.

        `bitwise`: whether gradients must have stock's bits, which parts of a sum from several graphs would not.
        `parts`: whether forwards may reshard to fewer ranks (reshard_after_forward=N), and may be captured in several
        graphs. It is False with CUDA graphs.
        """
        super().__init__()
        self._parts, self._bitwise = parts, bitwise
        self._states = [weakref.ref(state) for state in states]
        missing = compat.fsdp2.missing_names(states)
        reasons = [f"this torch lacks {', '.join(missing)}"] if missing else []
        if not missing:
            compat.fsdp2.initialize(states)
            reasons = compat.fsdp2.objections(states)
            self.eager = compat.fsdp2.runs_in_threads(states)
            compat.fsdp2.keep_versions(states)
        self.reasons = tuple([*reasons, "option distributed='stock'"] if stock else reasons)
        self._units: list[ShardedParameterUnit] = []
        self._groups: list[FsdpParameterGroup] = []
        self._hooks: list[tuple[Callable[[], Any], int, Callable[..., Any]]] = []
        """(weak reference to a table of hooks, key in it, hook in compiled calls)"""
        if not self.reasons:
            self._take_over()
        self._params = self._units
        self._numbers = {
            id(p): number for number, unit in enumerate(self._units) for p in (unit.virtual, unit.shown, *unit.sent)
        }
        self._reshards = tuple(compat.fsdp2.reshards(entry.group) for entry in self._groups)
        self._setting = _setting_text(self._reshards)
        self._gathered: dict[int, torch.Tensor] = {}
        """Parameters that the forwards of the call in progress have gathered, to be shown after it."""
        self._visible: list[FsdpParameterGroup] = []
        """Groups that modules show with values after a call."""

    def _take_over(self) -> None:
        infos = []
        for state in map(present, self._states):
            for group in compat.fsdp2.groups_of(state):
                entry = FsdpParameterGroup(group, f"fsdp{len(self._groups)}", self._parts)
                for param in group.fsdp_params:
                    unit = ShardedParameterUnit(param, len(self._units), entry.name)
                    infos.append(self._info(unit, entry, len(self._units), len(self._groups)))
                    self._units.append(unit)
                self._groups.append(entry)
                if compat.fsdp2.reshards_partly(group) and not self._parts:
                    self.notes = ("reshard_after_forward=N: with CUDA graphs, backwards gather over all ranks",)
            before, after = compat.fsdp2.hook_places(state)
            cast_in, cast_out = _before(compat.fsdp2.input_cast(state)), _after(compat.fsdp2.output_cast(state))
            self._hooks += [(weakref.ref(table), key, cast_in) for table, key in before]
            self._hooks += [(weakref.ref(table), key, cast_out) for table, key in after]
        self._infos = tuple(infos)
        self.units = dict(enumerate(self._units))
        self.groups = {entry.name: entry for entry in self._groups}
        # as in FSDP, the largest setting of any group holds for all
        self.reductions = max((compat.fsdp2.reductions(entry.group) for entry in self._groups), default=1)
        if self._groups and all(entry.alone for entry in self._groups):
            self.name = "replicate"

    @staticmethod
    def _info(unit: ShardedParameterUnit, entry: FsdpParameterGroup, number: int, together: int) -> ParamInfo:
        virtual, group = unit.virtual, entry.group
        padded = unit.param.padded_sharded_param_size.numel() * entry.gather_group().size()
        shard = Shard(
            unit=number,
            together=together,
            offset=0,
            numel=padded,
            reduce_dtype=_name(compat.fsdp2.reduce_dtype(unit.param)),
            reshard=bool(compat.fsdp2.reshards(group)),
            sent_dtype="" if unit.cast is None else _name(unit.cast.dtype),
        )
        shape, dtype, device = tuple(virtual.shape), _name(virtual.dtype), virtual.device.type
        return ParamInfo(number, unit.name, shape, dtype, device, "sharded", entry.name, shard)

    def setting(self) -> str:
        """Adopt the setting reshard_after_forward of each group, which may change between calls, and return all."""
        found = tuple(compat.fsdp2.reshards(entry.group) for entry in self._groups)
        if found != self._reshards:
            self._reshards = found
            self._infos = tuple(_resharded(info, found) for info in self._infos)
            self._setting = _setting_text(found)
        return self._setting

    def likeness(self) -> tuple[Any, ...] | None:
        """Return all that programs depend on, but for names, and for settings that `setting` returns."""
        if not self._units or any(unit.made is not None for unit in self._units):  # a DTensor is made of a certain one
            return None
        whole = (True,) * len(self._groups)
        infos = tuple(dataclasses.replace(_resharded(info, whole), fqn="") for info in self._infos)
        places = tuple((unit.offloaded, unit.virtual.device) for unit in self._units)
        groups = tuple(
            (entry.name, *map(id, (entry.gather_group(), entry.part_group(), entry.replica_group())))
            for entry in self._groups
            if not entry.alone
        )
        return self.name, infos, places, groups, len(self._groups), self.reductions

    def restore(self, reason: str) -> None:
        self.show_sharded()
        for number, whole in self.gradients_outside().items():
            self._units[number].take_back(whole)
        super().restore(reason)

    def wants_stock(self) -> str:
        """Return what the user has asked for since that only FSDP's own hooks do; empty if nothing."""
        return "; ".join(compat.fsdp2.asked_for([present(state) for state in self._states]))

    # --- calls ---

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._units[0].virtual.device if self._units else torch.device("cpu")

    def order(self) -> tuple[Any, Callable[[], Any]] | None:
        if not self._parts or any(entry.alone for entry in self._groups):  # CUDA graphs start no gathers one by one
            return None
        if not compat.on_demand.tell_forwards_apart():
            return None
        context = compat.fsdp2.context_of(present(self._states[0]))
        reference = weakref.ref(context)
        return context, lambda: compat.fsdp2.current_pass(present(reference))

    def owner(self, number: int) -> Callable[[], Any]:
        reference = self._units[number].reference
        return lambda: getattr(reference(), "sharded_param", None)

    def why_updates_apart(self) -> str:
        units = [self._units[number] for number in self.trained()]
        if any(unit.offloaded for unit in units):
            return "shards are kept in CPU memory"
        if any(unit.made is not None for unit in units):
            return "parameters are made of what is gathered: by tensor parallelism, another dimension, or extensions"
        if len(self._shard_groups()) > 1:
            return "parameters are sharded over several process groups"
        return ""

    def ranks_of_norm(self) -> str:
        (group,) = self._shard_groups()
        return "" if group is None else str(group.group_name)

    def _shard_groups(self) -> set[Any]:
        """Return the process groups over which trained parameters are sharded; None for parameters that are not."""
        names = {self._units[number].group for number in self.trained()}
        found = (entry for entry in self._groups if entry.name in names)
        return {None if entry.alone else entry.scatter_group() for entry in found}

    def reducing(self) -> contextlib.AbstractContextManager[None]:
        return compat.fsdp2.reducing([entry.group for entry in self._groups])

    def objection_to_parts(self) -> str:
        if not self._parts:
            return "a part of the model is not compiled (graph break), which is not supported with CUDA graphs"
        if self._bitwise:
            return (
                "a part of the model is not compiled (graph break), and numerics='bitwise' adds no parts of gradients"
            )
        if any(compat.tensors.is_wrapper(unit.shown) for unit in self._units):
            return "a part of the model is not compiled (graph break), where parameters are tensors of a subclass"
        return ""

    def owners(self) -> Iterable[torch.nn.Module]:
        modules = (module for unit in self._units for module in compat.fsdp2.owners(unit.param))
        return {id(module): module for module in modules}.values()

    def gathers_under_way(self) -> tuple[Any, ...]:
        return tuple(compat.fsdp2.gather_under_way(entry.group) for entry in self._groups)

    def shard_again(self) -> None:
        for entry in self._groups:
            compat.fsdp2.end_gather(entry.group)

    def stays_visible(self, number: int) -> bool:
        """Do modules show this parameter with its values between a forward that gathers it and the backward?

        A replay's memory belongs to its recording. A parameter that is made of the gathered one is no leaf of the
        graph that leads to it.
        """
        unit = self._units[number]
        return self._parts and all(other.made is None for other in self._units if other.group == unit.group)

    def take_gathered(self, gathered: Mapping[int, torch.Tensor]) -> None:
        self._gathered.update(gathered)

    def _show_gathered(self) -> None:
        """Show groups as FSDP does after a forward that does not reshard, if the call has gathered all of a group."""
        gathered, self._gathered = self._gathered, {}
        names = {self._units[number].group for number in gathered}
        for entry in (entry for entry in self._groups if entry.name in names):
            units = {number: unit for number, unit in enumerate(self._units) if unit.group == entry.name}
            if gathered.keys() >= units.keys():
                for number, unit in units.items():
                    compat.fsdp2.lend_memory(unit.param, unit.virtual, gathered[number])
                compat.fsdp2.to_unsharded(entry.group)
                self._visible.append(entry)

    def show_sharded(self) -> None:
        visible, self._visible = self._visible, []
        for group in (entry.group for entry in visible):
            if any(map(compat.fsdp2.has_lent_memory, group.fsdp_params)):
                compat.fsdp2.to_sharded(group)

    def gradients_outside(self) -> dict[int, torch.Tensor]:
        found = {number: unit.virtual.grad for number, unit in enumerate(self._units)}
        for unit in self._units:
            unit.virtual.grad = None
        return self.unit_gradients({number: gradient for number, gradient in found.items() if gradient is not None})

    def gradients_of_wrapper(self) -> dict[int, torch.Tensor]:
        if any(compat.fsdp2.keeps_partial_sums(entry.group) for entry in self._groups):
            raise DcompileError(
                "dcompile: gradients of a step that ran eagerly are left, summed up among some ranks only "
                "(set_requires_all_reduce); run the next step eagerly, too, or compile before the first one"
            )
        found = {number: compat.fsdp2.take_gradient(unit.param) for number, unit in enumerate(self._units)}
        return self.unit_gradients({number: gradient for number, gradient in found.items() if gradient is not None})

    def shown_by_another(self) -> bool:
        shown = compat.fsdp2.visible_parameter(self._units[0].param) if self._units else None
        return compat.fsdp2.is_stand_in(shown) and self.number_of(shown) is None

    def prepare(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Do what FSDP's root does before its forward, except gathering; return arguments on the device."""
        root = present(self._states[0])
        for text in compat.fsdp2.superseded([present(state) for state in self._states]):
            self.note(text)
        if not compat.fsdp2.is_root(root):
            return args, kwargs  # the root around this module has done it
        compat.fsdp2.wait_for_optimizer(root)
        return compat.fsdp2.inputs_to_device(root, args, kwargs)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Show virtual parameters in place of sharded ones, and replace FSDP's hooks, while a compiled call runs."""
        self.show_sharded()
        ended = [compat.fsdp2.end_gather(entry.group) for entry in self._groups]
        if any(ended):
            self.note("parameters that were gathered before a call, by hand (unshard) or eagerly, are gathered again")
        params = [unit.param for unit in self._units]
        before = list(map(compat.fsdp2.visible_parameter, params))
        inside = bool(before) and before[0] is self._units[0].shown
        places = [(present(table), key, hook) for table, key, hook in self._hooks]
        hooks = [table[key] for table, key, _ in places]
        try:
            for unit, param in zip(self._units, params, strict=True):
                wanted = param.sharded_param.requires_grad
                if unit.virtual.requires_grad != wanted:
                    unit.virtual.requires_grad_(wanted)
                    unit.shown.requires_grad_(wanted)
                compat.fsdp2.show(param, unit.shown)
            for table, key, hook in places:
                table[key] = hook
            with compat.fsdp2.compiled_forward(present(self._states[0])):
                yield
        except BaseException:
            self._gathered.clear()
            raise
        finally:
            for param, parameter in zip(params, before, strict=True):
                compat.fsdp2.show(param, parameter)
            for (table, key, _), hook in zip(places, hooks, strict=True):
                table[key] = hook
        if self._gathered and not inside:  # a call within a call of the same module
            self._show_gathered()


def _setting_text(reshards: tuple[Any, ...]) -> str:
    return f"reshard {' '.join(map(str, reshards))}"


def _resharded(info: ParamInfo, settings: tuple[Any, ...]) -> ParamInfo:
    """Return a parameter with its group's setting of reshard_after_forward."""
    assert info.shard is not None, "FSDP2 shards every parameter that it has"
    return dataclasses.replace(info, shard=dataclasses.replace(info.shard, reshard=bool(settings[info.shard.together])))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- hooks that can be traced -----------------------------------------------------------------------------------------


@functools.cache
def _before(dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return a hook before a forward that converts its floating-point inputs to `dtype`: one for all modules.

    Layers with the same hooks are captured once.
    """

    def cast_inputs(module: Any, args: Any, kwargs: Any) -> Any:
        return None if dtype is None else (convert_floats(args, dtype), convert_floats(kwargs, dtype))

    return cast_inputs


@functools.cache
def _after(dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return a hook after a forward that converts its floating-point outputs to `dtype`."""

    def cast_output(module: Any, args: Any, output: Any) -> Any:
        return None if dtype is None else convert_floats(output, dtype)

    return cast_output


_NO_CONTAINERS = (bool, int, float, complex, str, bytes, type, range, slice, enum.Enum, torch.dtype, torch.device)
_NO_DATACLASSES = (dict, OrderedDict, defaultdict)
"""Types that are not tested for being a dataclass: Dynamo of torch 2.11 cannot trace that test on them or on classes.
"""


def convert_floats(value: Any, dtype: torch.dtype) -> Any:
    """Convert floating-point tensors in sequences, sets, mappings and dataclasses, as FSDP does.

    As there, packed sequences stay as they are, and subclasses of dict become plain dicts unless they are ordered.
    Dynamo traces this function, so its tests are on the value itself, not on its class.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if torch.is_floating_point(value) and value.dtype != dtype else value
    if value is None or isinstance(value, _NO_CONTAINERS):
        return value
    if isinstance(value, dict):
        return _converted_mapping(value, dtype)
    if isinstance(value, tuple):
        return _converted_tuple(value, dtype)
    if isinstance(value, list | set):
        return type(value)([convert_floats(item, dtype) for item in value])
    return _converted_fields(value, dtype) if hasattr(value, "__dataclass_fields__") else value


def _converted_mapping(value: dict[Any, Any], dtype: torch.dtype) -> Any:
    # outputs of transformers are dataclasses as well as dicts
    if type(value) not in _NO_DATACLASSES and hasattr(value, "__dataclass_fields__"):
        return type(value)(**{name: convert_floats(item, dtype) for name, item in value.items()})
    items = {name: convert_floats(item, dtype) for name, item in value.items()}
    return type(value)(items) if isinstance(value, OrderedDict) else items


def _converted_tuple(value: tuple[Any, ...], dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Size | PackedSequence):
        return value
    items = [convert_floats(item, dtype) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _converted_fields(value: Any, dtype: torch.dtype) -> Any:
    names = [field.name for field in dataclasses.fields(value)]
    return dataclasses.replace(value, **{name: convert_floats(getattr(value, name), dtype) for name in names})
