"""Services that `compiler.py` passes to capture/, so that capture/ imports no other stage of the compiler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
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
    SharedBuckets,
)
from dcompile.ir.buffers import Bucket
from dcompile.machine_model import Figures, table_figures


class PlanAgreement(Protocol):
    """Comparison of lines between ranks (`runtime/coordination/agreement.py`)."""

    def __call__(self, group: Any, subject: str, lines: Sequence[Any], way_out: str = "", causes: str = "") -> None:
        """Compare this rank's lines, texts or `Line`s, with others'. All ranks call this, and all raise if some differ.

        `way_out`: advice for models that are meant to differ. `causes`: what is easily missed.
        """


class ReducedGradients(Protocol):
    """Gradients that one run of a backward program has reduced, by parameter number."""

    def __contains__(self, number: int) -> bool:
        """Whether the run has reduced a gradient of this parameter."""

    def gradient(self, number: int) -> Any:
        """Return a parameter's gradient, as its memory is now."""

    def address(self, number: int) -> int:
        """Return the address of that gradient, without making a tensor of it."""

    def lay_out(self, results: list[Any], grads: Iterable[tuple[int, int]]) -> None:
        """Give results the layout of their parameters. `grads`: (position of a result, parameter number)."""

    def hand_on(self) -> None:
        """Note that autograd gets the results now."""

    def intact(self, numbers: Iterable[int]) -> Collection[int]:
        """Return those of these parameters whose gradients autograd holds as they were returned, to be added to."""


class BucketTimes(Protocol):
    """What the buckets of one backward program tell of the last backward."""

    order: tuple[tuple[int, ...], ...]
    """Numbers of the parameters in each bucket, in the order of reduction."""
    times_ns: list[int]
    """Start of the first all-reduce, start of the last one, end of the last one; nanoseconds since the epoch."""


class GradientBuckets(BucketSource, BucketTimes, Protocol):
    """Interface of one backward program's bucket memory for capture/."""

    def begin(
        self, used: Iterable[int] = (), task: object = None, first: bool = True, absent: Iterable[int] = ()
    ) -> None:
        """Start a backward that reduces, and forget the last one. `used`: parameters with earlier gradients in `.grad`.

        `task`: number of the autograd backward. `first`: whether this is its first program that reduces gradients.
        `absent`: parameters without a gradient from the program in this call.
        """

    def mark_used(self, numbers: Iterable[int]) -> None:
        """Mark parameters for which this rank has gradients in `.grad`, from any program."""

    def reduce_behind(self, numbers: Collection[int], before: Collection[int]) -> None:
        """Reduce every bucket after a backward whose program has not, with `.grad` of the parameters `numbers`."""

    def settle_idle(self, elsewhere: Collection[int]) -> None:
        """At the end of a backward, set gradients of parameters that have one only on other ranks."""

    def last_run(self) -> ReducedGradients:
        """Return what the program has reduced in its last run."""

    def handed_on(self) -> Collection[int]:
        """Return the parameters whose gradients came from other ranks alone, in the last backward that reduced."""

    def ranks_with_gradients(self) -> dict[int, int]:
        """Return parameter number -> number of ranks with a gradient of it, in the last backward that reduced.

        Only parameters whose buckets have presence flags. On a GPU it waits for these.
        """

    def forget(self) -> None:
        """Drop references to the reduced gradients, so that their memory can be reused."""

    def reduced(self) -> dict[int, int]:
        """Return parameter number -> address of its reduced gradient, of the last backward that reduced."""

    def reduced_gradient(self, number: int) -> Any:
        """Return one parameter's reduced gradient, a view of the bucket, of the last backward that reduced."""


class Peers(Protocol):
    """The other ranks of a process group, if there are any."""

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Report, while the context lasts, that this rank captures or compiles: ranks that wait for it wait longer."""

    def enter(self) -> None:
        """Check at a call of the model: raise if another rank has aborted the job, or the process group is gone."""


class NoPeers:
    """Peers of a process without other ranks, or of a model that is only planned."""

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Report nothing."""
        return nullcontext()

    def enter(self) -> None:
        """Check nothing."""


class Replicas(Protocol):
    """Ranks that hold the same parameters."""

    def on_call(self) -> None:
        """Note a training call: in some, ranks compare digests of their parameters, for which none waits."""

    def status(self) -> str:
        """Return which parameters have drifted apart on which rank, as far as it is known; empty if none has."""


class NoReplicas:
    """What has no replicas, or is only planned."""

    def on_call(self) -> None:
        """Note nothing."""

    def status(self) -> str:
        """Return that nothing was found."""
        return ""


def _no_replicas(_group: Any, _parameters: Any) -> Replicas:
    return NoReplicas()


def _single_process(_group: Any) -> Peers:
    return NoPeers()


def _no_objection(_group: Any, _subject: str, mine: str) -> str:
    return mine


def _own_number(_group: Any, _subject: str, mine: int) -> int:
    return mine


def _no_layout(_params: Any, _rule: Any) -> tuple[Bucket, ...]:
    return ()


MakeBuckets = Callable[[tuple[Bucket, ...], Mapping[int, Callable[[], Any]], Any, SharedBuckets], GradientBuckets]
"""(buckets, parameter number -> weak reference, process group, what a model's programs share) -> buckets."""


Line = tuple[str, str]
"""(text that ranks compare, its origin for messages; origins are not compared, as paths differ between machines)."""


class ShardedParameters(Protocol):
    """Interface of one model's sharded parameters for capture/."""

    def join(self, root: Any, current: Callable[[], Any]) -> None:
        """Let programs of other parts of an FSDP2 root start this part's gathers, and the other way round.

        `root` keeps what they share. `current`: identity of the root's forward or backward that runs now.
        """

    def note(self) -> str:
        """Return a line for the receipt; empty if there is nothing to say."""

    def source(
        self,
        buckets: tuple[Bucket, ...],
        phase: Phase,
        accumulates: bool = False,
        later: Collection[int] = (),
        absent: Collection[int] = (),
        wanted: Collection[int] = (),
    ) -> ShardSource:
        """Return the source of one call's collectives. `accumulates`: whether its gradients are added to `.grad`.

        `later`: units whose gradients are kept for another program of the same backward, which adds its own.
        `absent`: units without a gradient from the program in this call. `wanted`: units whose gradients are not
        reduced, but wanted by the backward's caller; see `ShardSource.wanted`.
        """

    def may_lack(self, units: Iterable[int]) -> None:
        """Announce that this backward may have no gradient of these units; at its end ranks exchange which exist."""

    def save_memory(self, reason: str) -> None:
        """Keep no converted shards, unless an option asks for them or they exist already. `reason`: for the receipt."""

    def update_scales(self) -> None:
        """Begin a call: write the scales of shards that are cast to 8-bit floats, with one all-reduce if need be."""

    def forget_parts(self) -> None:
        """Drop parts of parameters kept by earlier calls, before the first graph of a call with gradients."""

    def take(self, full: Mapping[int, torch.Tensor]) -> None:
        """Take gradients of whole units from FSDP, which has not reduced them, and reduce them with this backward's."""

    def give_back(self, from_now_on: bool = True) -> None:
        """Leave FSDP the gradients that are not reduced yet. `from_now_on`: and those of all later backwards."""

    def copied(self, group: str) -> tuple[bool, str]:
        """Return (are a group's gathers copies from other ranks' memory, why not if that was possible).

        Every rank calls this first at the same point, before it compiles anything.
        """

    def flush(self, outside: Mapping[int, torch.Tensor] = MappingProxyType({})) -> None:
        """At the end of a backward, reduce gradients of earlier ones that it did not reach.

        `outside`: gradients of whole units that no program has computed; every rank has some of the same units.
        """

    def reduce_behind(self, full: Mapping[int, torch.Tensor]) -> None:
        """Reduce gradients of whole units that no program computes; every rank has some of the same units."""


MakeShards = Callable[[Mapping[int, ShardUnit], Mapping[str, ShardGroup]], ShardedParameters]
"""(unit number -> unit, group name -> group) -> the sharded parameters with their collectives."""


def figures_by_type(kind: str) -> Figures:
    """Return the table's figures of this machine's device of a type."""
    return table_figures(torch.cuda.get_device_name() if kind == "cuda" and torch.cuda.is_available() else kind)


def figures_from_table(device: Any, _group: Any) -> Figures:
    """Return the table's figures of a device."""
    return table_figures(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")


@dataclass(frozen=True)
class Services:
    """Compiler, bucket memory, agreement between ranks, and the report of the first compiled step."""

    compiler: Compiler
    make_buckets: MakeBuckets
    agree: PlanAgreement
    average: Callable[[Any, list[Any], str], None]
    """(process group, tensors, wire): average each over the ranks, in place, with DDP's arithmetic."""
    first_step: Callable[[Any], None]
    make_shards: MakeShards
    connect_peers: Callable[[Any], Peers] = _single_process
    """(process group or None) -> its other ranks, with which the compiler shares graphs."""
    figures: Callable[[Any, Any], Figures] = figures_from_table
    """(device, process group or None) -> the machine's figures; the same on every rank of the group."""
    any_rank_objection: Callable[[Any, str, str], str] = _no_objection
    """(process group, subject, this rank's text or "") -> one rank's text, the same on all ranks; all call this."""
    least: Callable[[Any, str, int], int] = _own_number
    """(process group or None, subject, this rank's number) -> the least number of all ranks; all call this."""
    watch_replicas: Callable[[Any, Callable[[], Sequence[tuple[str, torch.Tensor]]]], Replicas] = _no_replicas
    """(process group, function for name and memory of each parameter that its ranks hold alike) -> their watch."""
    renew: Callable[[], Services] | None = None
    """Function that makes the same services again, for a module inside that is compiled by itself."""
    all_idle: Callable[[Sequence[ParamInfo], BucketRule], tuple[Bucket, ...]] = _no_layout
    """(parameters, rule) -> the buckets of a program that has no gradient of any."""
    needs_data: bool = True
    """Whether programs read memory, which fake tensors lack: what is called with such is then left to eager."""
