"""What capture/ is handed from above, so that it imports no other stage of the compiler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dcompile.collectives.contract import (
    BucketRule,
    BucketSource,
    Compiler,
    ParamInfo,
    Phase,
    ShardGroup,
    ShardSource,
    ShardUnit,
)
from dcompile.ir.nodes import Bucket
from dcompile.machine_model import Figures, table_figures


class GradientBuckets(BucketSource, Protocol):
    """The bucket memory of one backward program, and what capture/ asks of it."""

    def begin(
        self, used: Iterable[int] = (), task: object = None, first: bool = True, absent: Iterable[int] = ()
    ) -> None:
        """A synced backward starts: forget the last one. `used`: parameters that earlier ones left gradients for.

        `task`: the backward that this is a part of, and whether it is the `first` part of it that reduces gradients.
        `absent`: parameters that the program has no gradient of in this call.
        """

    def mark_used(self, numbers: Iterable[int]) -> None:
        """Parameters that this rank has gradients of, whichever program had them."""

    def reduce_all(self) -> None:
        """Reduce every bucket, as a program does on its way: what .grad holds of each parameter."""

    def reduce_behind(self, numbers: Collection[int], before: Collection[int]) -> None:
        """Reduce every bucket behind a backward whose program has not: what .grad holds of `numbers`."""

    def settle_idle(self, elsewhere: Collection[int]) -> None:
        """A backward is through: parameters that it had no gradient of get what the other ranks' came to."""

    def forget(self) -> None:
        """All has been handed on."""

    def reduced(self) -> dict[int, int]:
        """Parameter number -> address of its reduced gradient, of the last synced backward."""

    def reduced_gradient(self, number: int) -> Any:
        """One parameter's reduced gradient, as a view of the bucket, of the last synced backward."""


class Peers(Protocol):
    """The other ranks of a process group, if there are any."""

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Say that this rank captures or compiles, while the context lasts: those who wait for it have patience."""

    def enter(self) -> None:
        """The model is called: raise if another rank has called the job off, or the process group is gone."""


class NoPeers:
    """No other ranks: what is planned without being run asks none."""

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Tell nobody."""
        del what
        return nullcontext()

    def enter(self) -> None:
        """Nothing can be wrong."""


def _met_by_nobody(_group: Any) -> Peers:
    return NoPeers()


def _said_by_nobody(_group: Any, _subject: str, mine: str) -> str:
    return mine


def _no_layout(_params: Any, _rule: Any) -> tuple[Bucket, ...]:
    return ()


MakeBuckets = Callable[[tuple[Bucket, ...], Mapping[int, Callable[[], Any]], Any, dict[Any, Any]], GradientBuckets]
"""(buckets, parameter number -> weak reference, process group, what a model's programs share) -> memory."""


Line = tuple[str, str]
"""(what is compared, where it comes from: for people, as paths differ between machines)."""


class ShardedParameters(Protocol):
    """The sharded parameters of one model, and what capture/ asks of them."""

    def source(
        self,
        buckets: tuple[Bucket, ...],
        phase: Phase,
        accumulates: bool = False,
        later: Collection[int] = (),
        absent: Collection[int] = (),
    ) -> ShardSource:
        """What one call of a program exchanges through; `accumulates` if its gradients are added to .grad.

        `later`: units whose gradients are kept for another program of the same backward to add its own to.
        `absent`: units that the program has no gradient of in this call.
        """

    def may_lack(self, units: Iterable[int]) -> None:
        """A backward runs that may have no gradient of these units: ranks say which there are, when it is through."""

    def save_memory(self, reason: str) -> None:
        """Keep nothing that could be made again, where no option says otherwise. `reason` is for the receipt."""

    def forget_parts(self) -> None:
        """The first graph of a call with gradients is going to run."""

    def give_back(self) -> None:
        """Leave FSDP the gradients that are still to be reduced."""

    def copied(self, group: str) -> tuple[bool, str]:
        """Whether gathers of a group are copies from the other ranks' memory; or why not, where they could have been.

        Every rank asks first at the same point, before it compiles anything.
        """

    def flush(self) -> None:
        """A backward is through: reduce gradients of earlier ones that it did not reach."""

    def reduce_behind(self, full: Mapping[int, torch.Tensor]) -> None:
        """Reduce gradients of whole units that no program has; every rank has some of the same units."""


MakeShards = Callable[[Mapping[int, ShardUnit], Mapping[str, ShardGroup]], ShardedParameters]
"""(unit number -> unit, group name -> group) -> what exchanges them."""


def figures_from_table(device: Any, _group: Any) -> Figures:
    """What the table says of a device."""
    return table_figures(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")


@dataclass(frozen=True)
class Services:
    """Compiler, bucket memory, agreement between ranks, and who is told about the first compiled step."""

    compiler: Compiler
    make_buckets: MakeBuckets
    agree: Callable[..., None]
    """(process group, what is compared, this rank's lines, each a text or a `Line`; what to do if a line of the model
    is meant to differ): all ranks come, and all raise if some differ."""
    average: Callable[[Any, list[Any], str], None]
    """(process group, tensors, wire): average each over the ranks, in place, with DDP's arithmetic."""
    first_step: Callable[[Any], None]
    make_shards: MakeShards
    meet: Callable[[Any], Peers] = _met_by_nobody
    """(process group or None) -> the line to its other ranks; the compiler shares graphs with them."""
    figures: Callable[[Any, Any], Figures] = figures_from_table
    """(device, process group or None) -> what the machine can do; the same on every rank of the group."""
    said_by_any: Callable[[Any, str, str], str] = _said_by_nobody
    """(process group, what it is about, what this rank says or ""): all ranks come, and hear what one of them says."""
    renew: Callable[[], Services] | None = None
    """The same services once more, for a module inside that is compiled by itself."""
    all_idle: Callable[[Sequence[ParamInfo], BucketRule], tuple[Bucket, ...]] = _no_layout
    """(parameters, rule) -> the buckets of a program that has no gradient of any."""
    needs_data: bool = True
    """Whether programs read memory, which fake tensors lack: what is called with such is then left to eager."""
