"""Adapter of ZeRO 3: programs gather parameters, and reduce their gradients to shards, as for FSDP2."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.adapters.fsdp_common import present
from dcompile.capture.adapters.zero import ZeroAdapter, ZeroGroup, dtype_name
from dcompile.collectives.contract import ParamInfo, Shard
from dcompile.errors import DcompileError


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
