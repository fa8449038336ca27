"""Adapter of FullyShardedDataParallel (FSDP1): programs gather flat parameters and reduce their gradients.

As for FSDP2, virtual parameters replace the sharded ones while a compiled call runs. A unit is a flat parameter. One
all-gather fills it, and each original parameter is a contiguous part of it. One reduce-scatter sums its gradients,
which are written to the same places. The wrappers' own forwards are disabled in compiled calls. Outside of these, all
is as FSDP left it, so optimizers, clip_grad_norm_ and checkpoints work.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed import ReduceOp

from dcompile import compat
from dcompile.capture.adapters.fsdp2 import convert_floats
from dcompile.capture.adapters.fsdp_common import ShardedAdapter, UnshardedGroup, present
from dcompile.collectives.contract import GradientReduction, ParamInfo, Shard
from dcompile.errors import DcompileError


class FlatParameter:
    """A flat parameter: a unit, and the only one of its group; see `collectives.contract`."""

    def __init__(self, instance: Any, number: int) -> None:
        self._instance = weakref.ref(instance)
        self.group = f"fsdp{number}"
        self.name = " ".join(compat.fsdp1.names(self.handle))
        self._alone = None if self.handle.uses_sharded_strategy else UnshardedGroup()

    @property
    def instance(self) -> Any:
        """The wrapper that it belongs to."""
        return present(self._instance)

    @property
    def handle(self) -> Any:
        """FSDP's handle of the flat parameter."""
        return compat.fsdp1.handle_of(self.instance)

    # --- a unit

    def data(self) -> torch.Tensor:
        return compat.fsdp1.shard_data(self.handle)

    def stored(self) -> torch.Tensor:
        return compat.fsdp1.stored_shard(self.handle)

    def address(self) -> int:
        address: int = self.handle.flat_param.data_ptr()
        return address

    offloaded = False
    parts: tuple[int, ...] = ()
    cast = None

    @property
    def dtype(self) -> torch.dtype:
        return compat.fsdp1.compute_dtype(self.handle)

    def commit(self, gradient: torch.Tensor) -> None:
        compat.fsdp1.add_gradient(self.handle, gradient)

    def take_back(self, gradient: torch.Tensor) -> None:
        raise DcompileError(
            "dcompile: FSDP1 is to reduce gradients itself from here on, and gradients of a step under no_sync are "
            "left; give this model options={'distributed': 'stock'}"
        )

    def settle(self) -> None:
        """Return at once: `commit` finishes its work."""

    # --- its group

    def gather_group(self) -> Any:
        return self._alone or self.instance.process_group

    def part_group(self) -> Any:
        return None

    def scatter_group(self) -> Any:
        return self._alone or self.instance.process_group

    def replica_group(self) -> Any:
        return compat.fsdp1.replica_group(self.instance)

    def wants(self) -> Literal["nothing", "shards", "all"]:
        """Return what to reduce over in the backward that runs now, as FSDP does: "nothing" under no_sync."""
        return "all" if compat.fsdp1.syncs(self.instance) else "nothing"

    def reduction(self, dtype: torch.dtype) -> GradientReduction:
        """Return FSDP1's averaging: divide by about the root of the world size before the sum, by the rest after it."""
        before, after = compat.fsdp1.divisors(self.instance)
        return GradientReduction(before, after, ReduceOp.SUM, ReduceOp.SUM)


@dataclass(frozen=True, slots=True)
class OriginalParameter:
    """An original parameter, its virtual one, and the modules and names under which it appears."""

    virtual: torch.nn.Parameter
    original: weakref.ref[torch.nn.Parameter]
    places: list[tuple[weakref.ref[torch.nn.Module], str]]
    made: None = None
    sent: tuple[()] = ()

    @property
    def shown(self) -> torch.nn.Parameter:
        return self.virtual


class Fsdp1Adapter(ShardedAdapter):
    """State of the takeover of a FullyShardedDataParallel module and those inside it.

    It has only weak references to them, since compiled code, which Dynamo may keep for any time, refers to it.
    """

    name = "fsdp1"
    breaks_at_hooks = True
    keeps_gathered = True

    def __init__(self, root: Any, instances: list[Any], stock: bool) -> None:
        super().__init__()
        self._root, self._instances = weakref.ref(root), [weakref.ref(instance) for instance in instances]
        missing = compat.fsdp1.missing_names(instances)
        if missing:
            reasons = [f"this torch lacks {', '.join(missing)}"]
        else:
            if root is instances[0]:
                compat.fsdp1.initialize(root)
            reasons = compat.fsdp1.objections(root, instances)
        self.reasons = tuple([*reasons, "option distributed='stock'"] if stock else reasons)
        self._originals: list[OriginalParameter] = []
        self._kept_as = f"_dcompile_forward_{id(self)}"
        """Attribute of each wrapper that holds its forward of compiled calls.

        That forward refers to the module, so the adapter must not hold it.
        """
        if not self.reasons:
            self._take_over()
        self._params = self._originals
        self._numbers = {id(param.virtual): number for number, param in enumerate(self._originals)}

    @property
    def eager(self) -> bool:  # type: ignore[override]
        """True unless taken over: FSDP1's own forward cannot be traced."""
        return not self.eligible

    def gradients_of_wrapper(self) -> dict[int, torch.Tensor]:
        handles = (compat.fsdp1.handle_of(present(instance)) for instance in self._instances)
        if any(handle is not None and compat.fsdp1.keeps_whole_gradient(handle) for handle in handles):
            raise DcompileError(
                "dcompile: gradients of a step under no_sync that ran eagerly are left with FSDP1; run the step that "
                "reduces them eagerly, too, or give this model options={'distributed': 'stock'}"
            )
        return {}

    def _take_over(self) -> None:
        infos: list[ParamInfo] = []
        for instance in map(present, self._instances):
            instance.__dict__[self._kept_as] = _forward(instance, cast=instance is not self._root())
            if compat.fsdp1.handle_of(instance) is None:
                continue
            flat = FlatParameter(instance, len(self.groups))
            self.units[len(self.units)] = flat
            infos += self._parameters(flat, len(self.groups), len(infos))
            self.groups[flat.group] = flat
        self._infos = tuple(infos)

    def _parameters(self, flat: FlatParameter, unit: int, first: int) -> Iterator[ParamInfo]:
        """Yield what plans contain of a flat parameter's original parameters, numbered from `first` on."""
        handle, dtype = flat.handle, compat.fsdp1.compute_dtype(flat.handle)
        numel = compat.fsdp1.whole_numel(handle, flat.gather_group().size())
        reduce_dtype, reshard = (
            _name(compat.fsdp1.reduce_dtype(handle)),
            compat.fsdp1.frees_after_forward(flat.instance),
        )
        device, originals = handle.flat_param.device, compat.fsdp1.originals(handle)
        places, offsets = compat.fsdp1.places(handle), compat.fsdp1.offsets(handle)
        for index, (fqn, shape) in enumerate(compat.fsdp1.shapes(handle)):
            tensor = torch.empty(shape, dtype=dtype, device=device)
            tensor.untyped_storage().resize_(0)
            original = originals[index]
            virtual = torch.nn.Parameter(tensor, requires_grad=original.requires_grad)
            virtual.untyped_storage().resize_(0)  # of a fake tensor it is another storage
            where_shown = [(weakref.ref(module), name) for module, name in places[index]]
            self._originals.append(OriginalParameter(virtual, weakref.ref(original), where_shown))
            shard = Shard(unit, unit, offsets[index], numel, reduce_dtype, reshard, flat=True)
            size, where = tuple(shape), device.type
            yield ParamInfo(first + index, fqn, size, _name(dtype), where, "sharded", flat.group, shard)

    # --- calls ---

    def prepare(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        moved, named = compat.fsdp1.before_forward(present(self._root), args, kwargs)
        return moved, named

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        params = [(p.virtual, [(present(module), name) for module, name in p.places]) for p in self._originals]
        shown = [[module._parameters[name] for module, name in places] for _, places in params]
        instances = list(map(present, self._instances))
        try:
            for param in self._originals:
                wanted = present(param.original).requires_grad
                if param.virtual.requires_grad != wanted:
                    param.virtual.requires_grad_(wanted)
            for virtual, places in params:
                for module, name in places:
                    module._parameters[name] = virtual
            for instance in instances:
                instance.__dict__["forward"] = instance.__dict__[self._kept_as]
            yield
        finally:
            for (_, places), before in zip(params, shown, strict=True):
                for (module, name), parameter in zip(places, before, strict=True):
                    module._parameters[name] = parameter
            for instance in instances:
                instance.__dict__.pop("forward", None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _forward(instance: Any, cast: bool) -> Callable[..., Any]:
    """Return a wrapper's traceable forward: that of the wrapped module, without FSDP's work on shards.

    `cast`: convert inputs as mixed precision requires; inputs of the root are converted already.
    """
    module = compat.fsdp1.wrapped_module(instance)
    dtype = compat.fsdp1.input_cast(instance) if cast else None

    def forward(*args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            args, kwargs = convert_floats(args, dtype), convert_floats(kwargs, dtype)
        return module(*args, **kwargs)

    return forward
