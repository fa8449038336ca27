"""One recorded run of a compiled program: where its inputs must lie, what it writes, and how it runs again.

A recording replays kernels on the addresses it was made with. So each tensor among the inputs is `fixed` (parameters,
and what another recording handed over: it must lie where it lay) or has a slot of its own, refilled before each replay.
Results lie in memory of the pool at addresses that never change. Each replay hands out new tensors over them, and the
number of holders of their storage tells whether the caller still has one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dcompile import compat
from dcompile.runtime.program.arena import copy_elements, over

COPY_BYTES = 1 << 16
"""Results up to this size are handed out as copies: losses and metrics, which callers keep over many steps."""


@dataclass(eq=False, slots=True)
class ResultRetention:
    """Whether the user of a program was found to keep its results: copies are handed out from there on."""

    found: bool = False


class ResultMemory:
    """One storage that results lie in, and a template of each result over it.

    `owned` while the allocator knows that it is taken. That ends when a later recording takes the memory over: it frees
    the memory as it goes, and from then on only the tree's rule keeps others off.
    """

    def __init__(self, storage: torch.UntypedStorage, pool: int, pinned: bool = False) -> None:
        self.owned = True
        self.pool = pool
        self.kept: ResultRetention | None = None
        """Of memory with results that users see: whether they keep them."""
        self.pinned = pinned
        """Whether it is a slot, which is filled from outside and cannot be taken over."""
        self.address, self.nbytes, self.device = storage.data_ptr(), storage.nbytes(), storage.device
        self._storage = storage
        self._templates: list[torch.Tensor] = []
        self._base, self._rank = 0, (False, -1)
        """What the others look at: the largest of them, of those that were no views if there are some.

        AOTAutograd makes views of what is no view for the user, who may change those in place, and none of a view's.
        Where all were views, the caller gets none but views: `requires_grad_()` on one is not to be another's.
        """
        self._whole = False
        """Whether a copy takes all of the storage: for results that lie together in it, or with gaps.

        Little storage as a whole, too, around which `as_strided` may look in the next graph, as in eager mode.
        """
        self._own = (0, 0)

    def add(self, like: torch.Tensor) -> int:
        """Make a template like this tensor, which lies in this memory; its number."""
        template = self._over(like.dtype, like.shape, like.stride(), int(like.storage_offset()))
        gaps = torch.empty_like(template).stride() != template.stride()
        part = self.nbytes <= COPY_BYTES and compat.storage_offsets.is_part(template)
        self._whole = self._whole or bool(self._templates) or gaps or part
        self._templates.append(template)
        if (rank := (not like._is_view(), template.nbytes)) > self._rank:
            self._base, self._rank = len(self._templates) - 1, rank
        return len(self._templates) - 1

    def _over(self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=self.device).set_(self._storage, offset, shape, strides)

    def settle(self) -> None:
        """From here on, holders beyond those of this moment are the caller's."""
        self._own = self._holders()

    def _holders(self) -> tuple[int, int]:
        # Python code shares one storage object, which counts once: its own reference count tells of the others
        return compat.tensors.storage_holders(self._storage), sys.getrefcount(self._storage)

    @property
    def live(self) -> bool:
        """Whether the caller still holds a tensor over it."""
        return self._holders() != self._own

    @property
    def holders(self) -> int:
        """Tensors of the caller over it."""
        count, references = self._holders()
        return count - self._own[0] + references - self._own[1]

    def hand_out(self, template: int, given: Given, copies: bool, looks: bool) -> torch.Tensor:
        """A tensor for the caller, or a copy; `given` holds what this call's other results in this memory look at.

        As in a call without a recording, one tensor counts the changes of all that lie together, and what the user
        sees of it, who `looks`, is a view: `v.requires_grad_()` is known to a part of `v` then.
        """
        base = given.get((self, copies))
        if base is None:
            base = given[self, copies] = self._copy() if copies else self._seen()
        like = self._templates[template]
        was_no_view, _ = self._rank
        if template == self._base and (was_no_view or not looks) and base.shape == like.shape:
            return base
        if like.dtype != base.dtype:
            return over(base, like.dtype, like.shape, like.stride(), int(like.storage_offset()) * like.itemsize)
        look = base.as_strided(like.shape, like.stride(), like.storage_offset())
        return look if looks else look.detach()  # a view would hold what it looks at

    def _seen(self) -> torch.Tensor:
        """The largest result; where it begins inside the memory, all of that, as in a call without a recording.

        Of symbolic sizes, torch cannot trace what looks at a tensor that begins inside, next to that one, if it has
        traced them otherwise before: "sources must not be empty for symbol".
        """
        tensor = self._templates[self._base]
        if not tensor.storage_offset():
            return tensor.detach()
        return self._over(tensor.dtype, (self.nbytes // tensor.itemsize,), (1,), 0)

    def _copy(self) -> torch.Tensor:
        """Of the largest result: in as much memory as there is here, if others lie there."""
        tensor = self._templates[self._base]
        if not self._whole:
            return tensor.clone()
        memory = self._over(torch.uint8, (self.nbytes,), (1,), 0).clone()
        if not tensor.storage_offset():
            return over(memory, tensor.dtype, tensor.shape, tensor.stride(), 0)
        return over(memory, tensor.dtype, (self.nbytes // tensor.itemsize,), (1,), 0)

    def give_up(self) -> None:
        """Let the allocator have the memory once nobody else holds it. The address stays known."""
        self.owned = False
        old = self._templates
        self._storage = compat.tensors.storage_at(self.address, self.nbytes, self.device)
        self._templates = [self._over(t.dtype, t.shape, t.stride(), int(t.storage_offset())) for t in old]
        del old
        self.settle()


Given = dict[tuple[ResultMemory, bool], torch.Tensor]
"""(memory, whether copies of it) -> what this call has handed out."""


@dataclass(frozen=True, slots=True)
class CopiedInput:
    """A copied input: its position, and the tensor that the recording reads instead."""

    position: int
    tensor: torch.Tensor
    mutated: bool

    def fill(self, args: Sequence[Any]) -> None:
        """Copy the input of this call to where the recording reads it."""
        copy_elements(self.tensor, args[self.position])

    def copy_back(self, args: Sequence[Any]) -> None:
        """Copy what the program left there to the caller's tensor."""
        if self.mutated:
            copy_elements(args[self.position], self.tensor)


@dataclass(frozen=True, slots=True)
class RecordedResult:
    """One result: a `value` that is no tensor; a look at an `input` or `bucket`; `memory`, itself or as a copy; or an
    earlier one `again`: what looks at it, and what counts its changes, go by the tensor."""

    kind: Literal["value", "input", "bucket", "memory", "copy", "again"]
    source: Any
    """The value; the input's position; the bucket's name; the `ResultMemory`; or the earlier result's position."""
    template: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0
    """Of a look at an input or bucket: in elements, from where that begins."""
    kept: ResultRetention | None = None

    def of(self, args: Sequence[Any], buckets: Mapping[str, Any], given: Given, earlier: list[Any]) -> Any:
        """What the caller gets, behind `earlier` results; `given` as in `ResultMemory.hand_out`."""
        match self.kind:
            case "again":
                return earlier[self.source]
            case "value":
                return self.source
            case "memory":
                kept = self.kept
                return self.source.hand_out(self.template, given, kept is not None and kept.found, kept is not None)
            case "copy":
                return self.source.hand_out(self.template, given, True, True)
            case "input":
                tensor = args[self.source]
                if self.offset == 0 and tensor.shape == self.shape and tensor.stride() == self.strides:
                    return tensor
                return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)
            case "bucket":
                return buckets[self.source].flat.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True, eq=False, slots=True)
class Recording:
    """See the module. `tolerates` was alive when it was made: all else of its pool may lie where this one writes."""

    replay: Callable[[], None]
    fixed: list[int]
    addresses: list[int]
    """Of all inputs; only those of the fixed ones count."""
    slots: tuple[CopiedInput, ...]
    results: tuple[RecordedResult, ...]
    memories: tuple[ResultMemory, ...]
    pool: int
    tolerates: frozenset[ResultMemory]
    lie: Callable[..., bool] | None = None
    """Of a backward: whether the fixed inputs have the layouts that they had: a new `.data` may lie there, too."""
    collectives: Mapping[Any, list[str]] = field(default_factory=dict)
    """Process group -> labels of the model's own collectives that are part of it, in order."""

    def fits(self, args: list[Any]) -> bool:
        """Whether the inputs lie where this recording reads them."""
        if not compat.tensors.addresses_are(args, self.addresses, self.fixed):
            return False
        return self.lie is None or self.lie(*[args[place] for place in self.fixed])

    def run(self, args: list[Any], buckets: Mapping[str, Any]) -> list[Any]:
        """Replay with these inputs and this memory of gradient buckets; `args` is emptied."""
        for slot in self.slots:
            slot.fill(args)
        self.replay()
        for slot in self.slots:
            slot.copy_back(args)
        given: Given = {}
        results: list[Any] = []
        for result in self.results:
            results.append(result.of(args, buckets, given, results))  # each looks at those before it
        args.clear()
        return results
