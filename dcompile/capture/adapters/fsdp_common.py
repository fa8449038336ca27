"""Base class of the adapters of sharded parameters: virtual parameters, their numbers, comparisons between ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from dcompile import compat
from dcompile.capture.adapters.plain import PlainAdapter, new_subject
from dcompile.collectives.contract import ParamInfo, ShardGroup, ShardUnit
from dcompile.errors import DcompileError


class FallBackToStock(DcompileError):
    """The call cannot run with virtual parameters; it restarts with FSDP's own hooks."""


def present(reference: Callable[[], Any]) -> Any:
    """Return the target of a weak reference into the user's model. Raises DcompileError if it is gone."""
    found = reference()
    if found is None:
        raise DcompileError(
            "dcompile: the sharded model is gone; keep it for as long as you run what was compiled of it"
        )
    return found


class UnshardedGroup:
    """Stand-in for a process group of one rank, which has all of an unsharded parameter: collectives are copies."""

    def size(self) -> int:
        return 1

    def allgather_into_tensor_coalesced(self, outputs: list[Any], inputs: list[Any], options: Any) -> UnshardedGroup:
        return self._copied(outputs, inputs, options)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Any], inputs: list[Any], options: Any) -> UnshardedGroup:
        return self._copied(outputs, inputs, options)

    def _copied(self, outputs: list[Any], inputs: list[Any], options: Any) -> UnshardedGroup:
        for output, given in zip(outputs, inputs, strict=True):
            output.copy_(given)
        return self

    def wait(self) -> None:
        """Return at once: the copy is done."""


class VirtualParameter(Protocol):
    """A sharded parameter, and the virtual one that replaces it while graphs are traced."""

    @property
    def virtual(self) -> torch.nn.Parameter:
        """A parameter of the full shape without memory: the programs' input, and the leaf of autograd's graph."""

    @property
    def shown(self) -> torch.nn.Parameter:
        """The parameter that modules have in the sharded one's place: `virtual`, or one computed from it."""

    @property
    def made(self) -> Callable[..., Any] | None:
        """The function that computes `shown` from `virtual`, and from `sent`; None if they are the same."""

    @property
    def sent(self) -> tuple[torch.Tensor, ...]:
        """What `made` takes besides `virtual`, which then only gets the gradient; mostly empty.

        The first is a parameter without memory for what programs gather, in the dtype that is sent.
        """


class ShardedAdapter(PlainAdapter):
    """State of the takeover of one compiled module's sharded parameters."""

    serves_wrapper = True
    synchronizes = True
    compares_in_forward = True
    way_to_differ = "A model that is meant to differ by its rank needs options={'distributed': 'stock'}."

    def __init__(self) -> None:
        self._compared: set[tuple[str, ...]] = set()
        self._numbers: dict[int, int] = {}
        """Identity of a virtual parameter, or of the one that modules show in its place -> its number."""
        self._params: Sequence[VirtualParameter] = ()
        """Parameters, by number."""
        self._infos: tuple[ParamInfo, ...] = ()
        self.notes = ()
        self.reasons = ()
        self.units: dict[int, ShardUnit] = {}
        self.groups: dict[str, ShardGroup] = {}

    @property
    def eligible(self) -> bool:  # type: ignore[override]
        return not self.reasons

    def number_of(self, parameter: Any) -> int | None:
        number = self._numbers.get(id(parameter))
        if number is None:
            return None
        known = self._params[number]
        return number if any(parameter is p for p in (known.shown, known.virtual, *known.sent)) else None

    def param_infos(self) -> tuple[ParamInfo, ...]:
        return self._infos

    def virtual(self, number: int) -> torch.nn.Parameter:
        """Return the virtual parameter that replaces a sharded one while graphs are traced."""
        return self._params[number].virtual

    def made_of(self, number: int) -> Callable[..., Any] | None:
        """Return the function from a virtual parameter to the one that modules show; None if they are the same."""
        return self._params[number].made

    def sent_of(self, number: int) -> tuple[torch.Tensor, ...]:
        """Return what `made_of` takes besides the virtual parameter; see `VirtualParameter`."""
        return self._params[number].sent

    def arriving(self, number: int) -> torch.Tensor:
        """Return the parameter without memory in whose place programs gather."""
        known = self._params[number]
        return known.sent[0] if known.sent else known.virtual

    def stand_ins(self, number: int) -> tuple[torch.Tensor, ...]:
        """Return all tensors that replace a parameter: the virtual one, and the one that modules show."""
        known = self._params[number]
        return (known.virtual,) if known.shown is known.virtual else (known.virtual, known.shown)

    def setting(self) -> str:
        """Adopt the wrapper's settings that programs depend on, and return them as text: each has variants of its own.

        It is the same for equal settings, and empty if programs depend on none.
        """
        return ""

    def wants_stock(self) -> str:
        """Return what the user has asked for since that only FSDP itself does; empty if nothing."""
        return ""

    # --- calls of several graphs, with eager code in between

    device = torch.device("cpu")
    """The device on which the model computes."""

    def objection_to_parts(self) -> str:
        """Return why a call must be one graph; empty if it need not."""
        return "a part of the model is not compiled (graph break), where parameters would be missing"

    def owners(self) -> Iterable[torch.nn.Module]:
        """Return the modules that directly own sharded parameters."""
        return ()

    def gathers_under_way(self) -> tuple[Any, ...]:
        """Return, for each group, the state of FSDP's own all-gather: in flight or done."""
        return ()

    def shard_again(self) -> None:
        """Free the parameters that FSDP itself has gathered during a call."""

    def shown_by_another(self) -> bool:
        """Do modules show virtual parameters of another compiled model, inside whose call this one runs?"""
        return False

    def note_eager(self, reason: str) -> None:
        """Note that a call runs eagerly, with FSDP's own hooks; later calls may be compiled."""
        self.eager_reason = reason
        self.note(f"some calls run eagerly, with FSDP's own hooks: {reason}")

    def refuse_in_result(self, result: Any) -> None:
        """Raise FallBackToStock if a parameter itself is among a model's results."""
        if not self.eligible:
            return
        numbers = (self.number_of(leaf) for leaf in compat.tensors.leaves(result))
        if names := sorted(self._infos[number].fqn for number in numbers if number is not None):
            raise FallBackToStock(f"the model returns or changes a parameter in its forward: {', '.join(names)}")

    def restore(self, reason: str) -> None:
        """Fall back to FSDP's own hooks from now on."""
        self.reasons = (reason,)
        self.note(f"falls back to stock FSDP for parameters and gradients: {reason}")
        self._numbers = {}

    def subject_of(self, plan: tuple[str, ...]) -> str | None:
        """See `new_subject`."""
        return new_subject(self._compared, plan, "sharded collectives of a model,")

    def communicators(self) -> dict[str, Any]:
        """Return group name -> process group of its all-gathers; unsharded groups have that of their replicas."""
        found = {name: (entry.gather_group(), entry.replica_group()) for name, entry in self.groups.items()}
        real = torch.distributed.ProcessGroup
        return {name: shards if isinstance(shards, real) else replicas for name, (shards, replicas) in found.items()}

    @property
    def group(self) -> Any:
        """The first process group, or None: its ranks capture the same graphs, and share compiled programs."""
        groups = self.process_groups()
        return groups[0] if groups else None

    def replicas(self) -> dict[str, int]:
        """Return group name -> number of ranks with the same shards, for groups with replicas."""
        found = {name: entry.replica_group() for name, entry in self.groups.items()}
        return {name: group.size() for name, group in found.items() if group is not None}

    def replicated(self, group: str) -> list[tuple[str, torch.Tensor]]:
        """Return name and shard of each parameter of a group: the ranks of its replicas hold the same."""
        shards = ((info.fqn, info.shard, self.owner(number)()) for number, info in enumerate(self._infos))
        return [
            (name, parameter)
            for name, shard, parameter in shards
            if parameter is not None and shard is not None and self.units[shard.unit].group == group
        ]

    def process_groups(self) -> list[Any]:
        """Return all process groups of the programs' collectives, each once."""
        entries = self.groups.values()
        found = {id(group): group for entry in entries for group in (entry.gather_group(), entry.replica_group())}
        return [group for group in found.values() if isinstance(group, torch.distributed.ProcessGroup)]

    def gradients_of_wrapper(self) -> dict[int, torch.Tensor]:
        """Take the gradients of whole units that the wrapper keeps from eager backwards that did not reduce them."""
        return {}

    def unit_gradients(self, gradients: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return gradients of whole units, by unit, from gradients of parameters, by number; zeros elsewhere."""
        whole: dict[int, torch.Tensor] = {}
        for number, gradient in sorted(gradients.items()):
            info = self._infos[number]
            shard = info.shard
            assert shard is not None, "every parameter of a sharded model has a unit"
            if shard.unit not in whole:
                dtype = getattr(torch, shard.reduce_dtype)
                whole[shard.unit] = torch.zeros(shard.numel, dtype=dtype, device=gradient.device)
            whole[shard.unit][shard.offset : shard.offset + gradient.numel()] = gradient.reshape(-1)
        return whole

    def part_of_unit(self, number: int, whole: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return a parameter's gradient from those of whole units."""
        info = self._infos[number]
        assert info.shard is not None, "every parameter of a sharded model has a unit"
        own = whole[info.shard.unit][info.shard.offset :][: math.prod(info.shape)]
        return own.view(info.shape).to(getattr(torch, info.dtype))

    # --- programs of the same model

    def owner(self, number: int) -> Callable[[], Any]:
        """Return a function for the parameter that the optimizer has; it returns None if there is none."""
        return lambda: None

    def trained(self) -> set[int]:
        """Return the numbers of parameters with gradients."""
        return {number for number, param in enumerate(self._params) if param.virtual.requires_grad}

    def why_updates_apart(self) -> str:
        """Return why the optimizer's update cannot run in a backward's program; empty if it can."""
        return f"{self.name} shards parameters"

    def ranks_of_norm(self) -> str:
        """Return the name of the process group over which parameters are sharded; empty for none."""
        return ""

    def reducing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backwards reduce gradients, whatever the wrapper's settings are now."""
        return contextlib.nullcontext()

    def order(self) -> tuple[Any, Callable[[], Any]] | None:
        """Return what all parts of the sharded model have in common, and a function for its forward or backward.

        The function returns the identity of the one that runs now. None if programs start no gathers of others.
        """
        return None

    # --- calls ---

    def stays_visible(self, number: int) -> bool:
        """Do modules show this parameter with its values between a forward that gathers it and the backward?"""
        return False

    def take_gathered(self, gathered: Mapping[int, torch.Tensor]) -> None:
        """Take parameters that a forward has gathered, to show them after the call."""

    def show_sharded(self) -> None:
        """Show sharded parameters again, as a backward begins."""

    def gradients_outside(self) -> dict[int, torch.Tensor]:
        """Take the gradients of whole units that code outside of the graphs has added to visible parameters."""
        return {}

    def prepare(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Do what FSDP's root does before its forward, except gathering; return the converted arguments."""
        return args, kwargs

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Show virtual parameters in place of sharded ones, and disable FSDP's hooks, while a compiled call runs."""
        raise NotImplementedError
