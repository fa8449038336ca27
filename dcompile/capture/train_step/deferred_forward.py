"""A forward that waits in `train_step`: what it needs, its pending results, and running it after all.

`loss_fn` calls the model, and the step follows. If `loss_fn` returns the model's own loss untouched, nothing has to run
before the step, in which forward, backward and update are one program. So the model returns results without memory. Any
use of one, but for its shape and dtype, runs the forward as it always ran, with autograd.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from dcompile import compat
from dcompile.capture.train_step.deferred_backward import LateBackward, changes_of
from dcompile.capture.train_step.pending_gradient import METADATA, PendingTensor
from dcompile.compat import pytree
from dcompile.device_traits import HOST
from dcompile.errors import DcompileError

READ = "loss_fn computes with the model's results: let the model return its loss, and loss_fn return that"
OTHER = "loss_fn returns another tensor than the model's one loss"
UNSEEN = "the first step shows whether loss_fn returns the model's loss as it is"
SCALED = "a GradScaler scales the loss and unscales gradients"
NOT_CALLED = "no compiled graph of the model ran in loss_fn, or one that has no gradients"
CHANGED = (
    "dcompile: loss_fn has changed a parameter, or an input of the model, after it called the model, whose forward "
    "runs in the step; change it before that call, or after the step"
)
LOST = "dcompile: this result of the model was not computed, since the step that it belongs to was given up"
_KNOWN = METADATA - {getattr(torch.Tensor, name).__get__ for name in ("grad_fn", "is_leaf", "_version")}
"""What can be asked of a result before it is computed."""


class LateForward(Protocol):
    """A graph's forward that can run later, alone, or as one program with backward and update."""

    returned: int | None
    """Position of the result that `loss_fn` has returned as it is; None if it is not known to have done so."""

    @property
    def loss(self) -> int:
        """Position of the one result that backwards begin at."""

    def why_not_waiting(self, args: Sequence[Any]) -> str:
        """Return why it runs at once with these arguments; empty if it can wait."""

    def begin(self) -> torch.Tensor | None:
        """Record that the forward runs in the current call; return its token."""

    @property
    def results(self) -> Sequence[tuple[torch.Tensor, bool]]:
        """A fake tensor like each result, and whether that requires a gradient."""

    def run(self, compiled: Callable[..., Sequence[Any]], args: Sequence[Any], token: Any) -> list[Any]:
        """Run the forward by itself, as it would have run in the call that `begin` has recorded."""

    def whole(self, kept: tuple[int, ...], share: float, token: Any) -> LateBackward:
        """Return the forward with its backward as one graph, whose gradients are those of `share` times the loss.

        After the gradients, it returns the results at positions `kept`.
        """


class PendingResult(PendingTensor):
    """A result of a forward that waits."""

    source: DeferredForward
    place: int

    @staticmethod
    def __new__(cls: Any, like: torch.Tensor, learns: bool, source: DeferredForward, place: int) -> PendingResult:
        """Make the result at one position. `like`: its shape, dtype and device; `learns`: whether it has a gradient."""
        made: PendingResult = compat.tensors.without_memory(cls, like, learns=learns)
        made.source, made.place, made.is_sharded = source, place, False
        if learns:  # C++ code takes it without asking its class, such as the `apply` of a user's autograd function
            compat.autograd.set_only_hook(made, partial(source.pass_on, place))
        return made

    def value(self) -> torch.Tensor:
        """Return the result, computed if need be."""
        return self.source.results()[self.place]  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _KNOWN:
            args, kwargs = _computed((args, kwargs or {}))
            return func(*args, **kwargs)
        with compat.tensors.as_plain():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = _computed((args, kwargs or {}))
        return func(*args, **kwargs)


def _compute(arguments: Any) -> Any:
    return pytree.map_only(PendingTensor, lambda pending: pending.value(), arguments)


_computed = compat.dynamo.no_dynamo(_compute, "a forward of train_step that runs by itself")
"""Replace pending tensors among arguments by computed ones."""


@dataclass(eq=False)
class DeferredForward:
    """One forward that waits."""

    forward: LateForward
    compiled: Callable[..., Sequence[Any]]
    """What runs it by itself."""
    args: list[Any]
    token: Any
    settle: Callable[[str], None]
    """Run it now, for this reason."""
    pending: list[weakref.ref[PendingResult]] = field(default_factory=list)
    kept: tuple[int, ...] = ()
    """Positions of results that somebody has."""
    found: list[Any] | None = None
    """Its results, once it has run."""
    marks: Any = None
    """Versions and addresses of its arguments, when it was to run."""

    def show(self) -> list[PendingResult]:
        """Return results for the caller of the model."""
        self.marks = changes_of(self.args)
        shown = [PendingResult(like, learns, self, place) for place, (like, learns) in enumerate(self.forward.results)]
        self.pending = [*map(weakref.ref, shown)]
        return shown

    def results(self) -> list[Any]:
        """Return its results, computed if need be."""
        if self.found is None:
            self.settle(READ)
        if self.found is None:
            raise DcompileError(LOST)
        return self.found

    def pass_on(self, place: int, gradient: torch.Tensor) -> None:
        """Inside a backward: give the gradient of a pending result to the computed one."""
        torch.autograd.backward(self.results()[place], gradient)

    def kept_as_one(self, share: float) -> LateBackward:
        """Return forward and backward as one graph, which returns the results that somebody still has."""
        self.kept = tuple(place for place, pending in enumerate(self.pending) if pending() is not None)
        return self.forward.whole(self.kept, share, self.token)

    def give(self, results: list[Any]) -> None:
        """Take the results that are kept from the end of a program's, which writes its memory again."""
        found = [None] * len(self.pending)
        self.found = found
        with torch.no_grad():
            for place, value in zip(reversed(self.kept), reversed(results), strict=False):
                found[place] = value.clone()

    def run_alone(self) -> None:
        """Run it by itself, with autograd."""
        if changes_of(self.args) != self.marks:
            raise DcompileError(CHANGED)
        args, self.args = self.args, []
        with compat.autograd.record_autograd():
            self.found = self.forward.run(self.compiled, args, self.token)


class WaitingForwards:
    """Lets forwards of one model wait for the steps of `train_step`, and counts those that could not."""

    def __init__(self) -> None:
        self.waiting: DeferredForward | None = None
        self.reason = NOT_CALLED
        """Why the forward of the newest `loss_fn` has not waited."""
        self.separate: Counter[str] = Counter()
        """Why forwards ran before their steps -> number of steps."""
        self.may_wait = False
        """Whether the next forward may wait."""
        self._newest: tuple[LateForward, list[weakref.ref[Any]]] | None = None
        """The newest forward that might have waited, and its results."""

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let one forward wait that runs in this context."""
        self.may_wait, self.reason, self._newest = True, NOT_CALLED, None
        try:
            yield
        finally:
            self.may_wait = False

    def defer(self, forward: LateForward, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Return pending results of a forward; None if it must run now."""
        self.may_wait = False
        self.reason = forward.why_not_waiting(args)
        if not self.reason and forward.returned is None:
            self.reason = UNSEEN
        elif not self.reason and forward.returned != forward.loss:
            self.reason = READ
        if self.reason:
            return None
        self.waiting = waiting = DeferredForward(forward, compiled, [*args], forward.begin(), self.settle)
        return waiting.show()

    def note_results(self, forward: LateForward, results: Sequence[Any]) -> None:
        """Note that a forward has run by itself, until it is known what `loss_fn` makes of its results."""
        tensors = [x if isinstance(x, torch.Tensor) else torch.empty((), device=HOST) for x in results]
        self._newest = forward, [*map(weakref.ref, tensors)]

    def has_returned(self, loss: torch.Tensor) -> None:
        """Note what `loss_fn` has returned in a step whose forward ran by itself."""
        if self._newest is not None:
            (forward, results), self._newest = self._newest, None
            found = next((place for place, result in enumerate(results) if result() is loss), -1)
            forward.returned = found

    def settle(self, reason: str) -> None:
        """Run a forward that waits by itself."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            self.reason = reason
            waiting.run_alone()

    def drop(self) -> None:
        """Forget a forward that waits, and whose results nobody wants."""
        self.waiting = None
