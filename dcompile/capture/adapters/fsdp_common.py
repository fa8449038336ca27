"""What the adapters of sharded parameters share: virtual parameters, their numbers, and comparisons between ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from dcompile import compat
from dcompile.capture.adapters.plain import PlainAdapter, new_subject
from dcompile.collectives.contract import ParamInfo, ShardGroup, ShardUnit
from dcompile.errors import DcompileError


class FallBackToStock(DcompileError):
    """The call cannot run with virtual parameters: it starts again with FSDP's own hooks."""


def present(reference: Callable[[], Any]) -> Any:
    """What a weak reference into the user's model leads to."""
    found = reference()
    if found is None:
        raise DcompileError(
            "dcompile: the sharded model is gone; keep it for as long as you run what was compiled of it"
        )
    return found


class UnshardedGroup:
    """The one rank that has all of an unsharded parameter, where a process group would be."""

    def size(self) -> int:
        return 1

    def allgather_into_tensor_coalesced(self, outputs: list[Any], inputs: list[Any], options: Any) -> UnshardedGroup:
        return self._copied(outputs, inputs, options)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Any], inputs: list[Any], options: Any) -> UnshardedGroup:
        return self._copied(outputs, inputs, options)

    def _copied(self, outputs: list[Any], inputs: list[Any], options: Any) -> UnshardedGroup:
        del options
        for output, given in zip(outputs, inputs, strict=True):
            output.copy_(given)
        return self

    def wait(self) -> None:
        """It is done already."""


class VirtualParameter(Protocol):
    """A parameter, and what stands for it while it is traced."""

    @property
    def virtual(self) -> torch.nn.Parameter:
        """Of the full shape, without memory: what programs take, and what autograd's graph leads to."""

    @property
    def shown(self) -> torch.nn.Parameter:
        """What modules have in the parameter's place: `virtual`, unless something is to be made of it first."""

    @property
    def made(self) -> Callable[[Any], Any] | None:
        """What makes `shown` out of `virtual`, where they differ."""


class ShardedAdapter(PlainAdapter):
    """State of the takeover of one compiled module's sharded parameters."""

    synchronizes = True
    compares_in_forward = True
    way_to_differ = "A model that is meant to differ by its rank needs options={'distributed': 'stock'}."

    def __init__(self) -> None:
        self._compared: set[tuple[str, ...]] = set()
        self._numbers: dict[int, int] = {}
        """Identity of a virtual parameter, or of what modules show in its place -> its number."""
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
        return number if parameter is known.shown or parameter is known.virtual else None

    def param_infos(self) -> tuple[ParamInfo, ...]:
        return self._infos

    def virtual(self, number: int) -> torch.nn.Parameter:
        """What stands for a parameter while it is traced."""
        return self._params[number].virtual

    def made_of(self, number: int) -> Callable[[Any], Any] | None:
        """What makes the parameter that modules show out of the virtual one; None where that is itself."""
        return self._params[number].made

    def stand_ins(self, number: int) -> tuple[torch.Tensor, ...]:
        """Whatever stands for a parameter."""
        known = self._params[number]
        return (known.virtual,) if known.shown is known.virtual else (known.virtual, known.shown)

    def outdated(self) -> bool:
        """Whether a setting that plans depend on has changed."""
        return False

    def wants_stock(self) -> str:
        """What has been asked for since that only FSDP itself does; empty if nothing."""
        return ""

    # --- calls of several graphs, with eager code in between

    device = torch.device("cpu")
    """Where the model computes."""

    def objection_to_parts(self) -> str:
        """Why all of a call has to be one graph; empty if it has not."""
        return "a part of the model is not compiled (graph break), where parameters would be missing"

    def owners(self) -> Iterable[torch.nn.Module]:
        """Modules that have parameters in their own hands."""
        return ()

    def gathers_under_way(self) -> tuple[Any, ...]:
        """What FSDP itself gathers, or has gathered."""
        return ()

    def shard_again(self) -> None:
        """Undo what FSDP itself has gathered during a call."""

    def shown_by_another(self) -> bool:
        """Whether the call of another compiled model, inside which this one runs, shows its own stand-ins."""
        return False

    def note_eager(self, reason: str) -> None:
        """A call runs eagerly, with FSDP's own hooks; later ones may be compiled."""
        note = f"some calls run eagerly, with FSDP's own hooks: {reason}"
        if note not in self.notes:
            self.notes = (*self.notes, note)

    def refuse_in_result(self, result: Any) -> None:
        """Raises FallBackToStock if a parameter itself is among a model's results."""
        if not self.eligible:
            return
        numbers = (self.number_of(leaf) for leaf in compat.tensors.leaves(result))
        if names := sorted(self._infos[number].fqn for number in numbers if number is not None):
            raise FallBackToStock(f"the model returns or changes a parameter in its forward: {', '.join(names)}")

    def restore(self, reason: str) -> None:
        """Leave everything to FSDP from now on."""
        self.reasons = (reason,)
        self.notes = (*self.notes, f"falls back to stock FSDP for parameters and gradients: {reason}")
        self._numbers = {}

    def subject_of(self, plan: tuple[str, ...]) -> str | None:
        """See `new_subject`."""
        return new_subject(self._compared, plan, "sharded collectives of a model,")

    def communicators(self) -> dict[str, Any]:
        """Name of each group in plans -> what it gathers over; what is not sharded, only copied, has its replicas."""
        found = {name: (entry.gather_group(), entry.replica_group()) for name, entry in self.groups.items()}
        real = torch.distributed.ProcessGroup
        return {name: shards if isinstance(shards, real) else replicas for name, (shards, replicas) in found.items()}

    @property
    def group(self) -> Any:
        """The group that parameters are gathered over: its ranks capture the same, and share what is compiled."""
        groups = self.process_groups()
        return groups[0] if groups else None

    def replicas(self) -> dict[str, int]:
        """Name of each group in plans -> how many ranks hold the same shards, where there are several."""
        found = {name: entry.replica_group() for name, entry in self.groups.items()}
        return {name: group.size() for name, group in found.items() if group is not None}

    def process_groups(self) -> list[Any]:
        """All process groups that the programs communicate over, each once."""
        entries = self.groups.values()
        found = {id(group): group for entry in entries for group in (entry.gather_group(), entry.replica_group())}
        return [group for group in found.values() if isinstance(group, torch.distributed.ProcessGroup)]

    # --- calls ---

    def prepare(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What FSDP's root does before its forward, beside gathering."""
        return args, kwargs

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """While a compiled call runs: virtual parameters in place of sharded ones, FSDP's own work at rest."""
        raise NotImplementedError
