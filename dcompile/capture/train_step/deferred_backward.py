"""A backward that waits: what it needs, the pending gradients that show it, and running it after all."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dcompile import compat
from dcompile.capture.train_step.pending_gradient import PendingFlag, PendingGradient, PendingScalar
from dcompile.capture.train_step.step_graph import LeafGradient, with_norms
from dcompile.collectives.contract import Executable
from dcompile.errors import DcompileError

WITH_UPDATES, WITH_NORMS, UPDATE, NORM, WHOLE = "step", "norms", "update", "norm", "whole_step"
"""Names of programs: a backward with updates, a backward with norms of gradients, updates alone, the norm of all, and
forward, backward and updates."""


CHANGED = (
    "dcompile: a parameter, or another tensor that the backward reads, was changed between loss.backward() and the "
    "optimizer's step, in which the backward runs; change it before the forward or after the step, or compile without "
    "optimizer="
)


class LateBackward(Protocol):
    """A graph's backward that can run later, alone or with more."""

    name: str
    """Name of its program with updates."""

    @property
    def gm(self) -> Any:
        """The backward's graph."""

    @property
    def leaves(self) -> Sequence[tuple[int, Callable[[], Any]]]:
        """(position among the results, weak reference to the parameter) of each gradient."""

    @property
    def numbers(self) -> Mapping[int, int]:
        """Position among the results -> number in the plan of each gradient that ranks reduce."""

    @property
    def owners(self) -> Sequence[Callable[[], Any]]:
        """What the optimizer has for each leaf: the parameter itself, or the sharded one; None if it is gone."""

    @property
    def dtypes(self) -> Mapping[int, torch.dtype]:
        """Position among the results -> dtype in which the gradient of a sharded parameter is reduced."""

    @property
    def ranks(self) -> str:
        """Name of the process group over which parameters are sharded; empty if they are not."""

    def begin_waiting(self) -> None:
        """Do what a backward that runs does first: modules show sharded parameters again."""

    def reducing(self) -> AbstractContextManager[None]:
        """Return a context in which it reduces gradients, whatever was set since it was to run."""

    def waits(self, args: Sequence[Any]) -> bool:
        """Can the backward wait, with these arguments?"""

    def why_alone(self) -> str:
        """Return why it always runs at once; empty if it can wait."""

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """Return the program's inputs."""

    def take(self, args: list[Any]) -> tuple[int, list[Any]]:
        """Return the token among a backward's arguments, and the program's inputs; empty the arguments."""

    def run(self, args: list[Any]) -> list[Any]:
        """Run the backward by itself, inside a backward of autograd."""

    def build(self, gm: Any, name: str) -> Executable:
        """Compile a graph that begins with the backward."""

    def build_apart(self, gm: Any, name: str) -> Executable:
        """Compile a graph of updates alone, or of a norm."""

    def run_joined(self, program: Executable, token: int, inputs: list[Any]) -> list[Any]:
        """Run a program of `build`, which empties its inputs. Inside a backward of autograd if ranks reduce."""


class _Replay(torch.autograd.Function):
    """A node of autograd that runs a backward which has waited: hooks and reductions then see an ordinary one."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Sequence[Any]], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return None, *ctx.run()


@dataclass(eq=False)
class Unscaling:
    """What GradScaler does to the gradients of a backward that waits."""

    found: PendingFlag
    """Whether one is infinite or no number. It is known on this rank first, then agreed if gradients are sharded."""
    inverse: torch.Tensor
    """What gradients are multiplied by: a number in memory."""
    scaler: Any
    optimizer: int
    """Identity of the optimizer, by which the scaler knows what it has done."""
    gradients: list[PendingGradient] = field(default_factory=list)
    is_checked: bool = False
    """Whether GradScaler now makes the step, and leaves the check to it."""

    def apply(self) -> None:
        """Unscale computed gradients, and look for infinities among those of this rank."""
        computed = [g.computed for g in self.gradients if g.computed is not None]
        with torch.no_grad(), compat.tensors.as_plain():
            for dtype in {gradient.dtype for gradient in computed}:
                own = [compat.tensors.local_part(gradient) for gradient in computed if gradient.dtype == dtype]
                compat.grad_scaler.unscale(own, self.found, self.inverse)


@dataclass(eq=False)
class DeferredBackward:
    """One backward that waits. Its gradients are shown once the backward of autograd ends."""

    backward: LateBackward
    args: list[Any]
    leaves: list[torch.nn.Parameter]
    """What autograd takes for parameters."""
    parameters: list[torch.nn.Parameter]
    """Those of the optimizer, which have `.grad`."""
    gradients: list[PendingGradient]
    before: list[torch.Tensor | None]
    """What `.grad` held when the backward began."""
    norms: dict[Any, Executable] = field(default_factory=dict)
    """Programs with norms, which all backwards of a graph share."""
    marks: tuple[list[int], list[int]] | None = None
    """Versions and addresses of its arguments, when the backward was to run."""
    clip: tuple[float, ...] = ()
    """What is added to the norm, and the largest norm, if gradients that nobody sees are clipped."""
    changed: str = CHANGED
    """What to say if one of them is another when it runs."""
    is_shown: bool = False
    """Whether `.grad` has shown the pending gradients."""
    unscaling: Unscaling | None = None
    """What GradScaler has done to them since."""
    plan: Any = None
    """Members of its step, their numbers, the program of both, and where that finds parameters."""

    def __post_init__(self) -> None:
        if self.marks is None:
            self.marks = self._marks()

    def _marks(self) -> tuple[list[int], list[int]]:
        """Return versions and addresses of what the backward reads: arguments, and shards that it gathers."""
        more = map(compat.tensors.local_part, self.parameters) if self.is_sharded else ()
        return changes_of([*self.args, *more])

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded, so that each rank has and updates a part of them."""
        return bool(self.backward.dtypes)

    def check_arguments(self) -> None:
        """Raise DcompileError if a tensor that the backward reads was changed since it was to run."""
        if self._marks() != self.marks:
            self.forget_unscaling()
            raise DcompileError(self.changed)

    def forget_unscaling(self) -> None:
        """Let GradScaler start anew with later gradients: it will find none here."""
        if self.unscaling is not None:
            compat.grad_scaler.forget(self.unscaling.scaler, self.unscaling.optimizer)

    def norms_are_held(self) -> bool:
        """Has somebody asked for norms of gradients, which must be those of now?"""
        return any(gradient.is_norm_held() for gradient in self.gradients)

    def is_undisturbed(self) -> bool:
        """Has code outside the graph added no gradient, until the end of the backward?"""
        if self.is_sharded and any(leaf.grad is not None for leaf in self.leaves):
            return False
        return all(p.grad is old for p, old in zip(self.parameters, self.before, strict=True))

    def show(self) -> None:
        """Show the pending gradients."""
        self.is_shown = True
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient

    @property
    def is_scaled(self) -> bool:
        """Whether gradients are to be multiplied."""
        return any(gradient.factor is not None for gradient in self.gradients)

    def clipping(self) -> PendingScalar | str | None:
        """Return the factor that clips all gradients, None without factors; else why the update cannot scale them."""
        if not self.is_scaled:
            return None
        factor = self.gradients[0].factor
        if any(gradient.factor is not factor for gradient in self.gradients) or not isinstance(factor, PendingScalar):
            return "gradients are multiplied by several factors"
        if len(factor.gradients) != len(self.gradients) or {*map(id, factor.gradients)} != {*map(id, self.gradients)}:
            return "the norm is not that of all gradients"
        return factor

    @property
    def accumulated(self) -> list[bool]:
        """Whether a program adds a gradient of earlier micro-batches, for each parameter."""
        adds = self._adds
        return [adds and old is not None for old in self.before]

    def leaf_gradients(self) -> list[LeafGradient]:
        """Return where its gradients are, in the order of its parameters."""
        numbers, dtypes, found = self.backward.numbers, self.backward.dtypes, []
        for (place, _), parameter, adds in zip(self.backward.leaves, self.parameters, self.accumulated, strict=True):
            own = compat.tensors.local_part(parameter)
            shard = (tuple(own.shape), dtypes[place], own.dtype) if self.is_sharded else None
            found.append(LeafGradient(place, numbers.get(place), adds, shard))
        return found

    @property
    def _adds(self) -> bool:
        """Whether a program adds gradients of earlier micro-batches, as all-reduces do themselves."""
        return self.is_sharded or not self.backward.numbers

    def earlier(self, parameters: Sequence[torch.nn.Parameter] = ()) -> list[torch.Tensor]:
        """Return the gradients of earlier micro-batches that a program adds, in the order of these parameters."""
        if not self._adds:
            return []
        held = {id(p): old for p, old in zip(self.parameters, self.before, strict=True) if old is not None}
        found = [held[id(p)] for p in parameters or self.parameters if id(p) in held]
        return [compat.tensors.local_part(old).contiguous() for old in found] if self.is_sharded else found

    def run_alone(self, stay_pending: bool = False) -> None:
        """Run the backward by itself."""
        self.check_arguments()
        places = [place for place, _ in self.backward.leaves]

        def run() -> tuple[Any, ...]:
            return _taken(self.backward.run(self.args), places)

        self._replay(run, self.before, stay_pending)
        if self.unscaling is not None:
            self.unscaling.apply()

    def run_with_norms(self) -> None:
        """Run the backward, and compute the norm of each gradient. Gradients stay pending."""
        if self.is_sharded or self.unscaling is not None:  # the norm of a rank's part, as of any DTensor
            self.run_alone(stay_pending=True)
            norms = [torch.linalg.vector_norm(gradient.computed) for gradient in self.gradients]
        else:
            norms = self._run_beside_norms()
        for gradient, norm in zip(self.gradients, norms, strict=True):
            gradient.computed_norm = norm
            if gradient.own_norm is not None:
                gradient.own_norm.computed, gradient.own_norm = norm, None

    def _run_beside_norms(self) -> list[torch.Tensor]:
        backward, leaves = self.backward, self.leaf_gradients()
        key = backward, tuple(self.accumulated)
        if key not in self.norms:
            self.norms[key] = backward.build(with_norms(backward.gm, leaves), WITH_NORMS)
        self.check_arguments()
        token, inputs = backward.take(self.args)
        inputs += self.earlier()
        norms = list[torch.Tensor]()

        def run() -> tuple[Any, ...]:
            results = backward.run_joined(self.norms[key], token, inputs)
            norms.extend(results[len(results) - len(leaves) :])
            return _taken(results, [leaf.place for leaf in leaves])

        added = [None if leaf.accumulated else old for leaf, old in zip(leaves, self.before, strict=True)]
        self._replay(run, added, stay_pending=True)
        return norms

    def _replay(
        self, run: Callable[[], tuple[Any, ...]], before: Sequence[torch.Tensor | None], stay_pending: bool
    ) -> None:
        """Run inside a backward of autograd, and put the gradients that it adds behind the pending ones.

        A gradient that the user has set, or removed, since it was shown, stays as it is.
        """
        replaced = {}
        for at, (parameter, gradient, start) in enumerate(zip(self.parameters, self.gradients, before, strict=True)):
            if self.is_shown:
                if parameter.grad is not gradient:
                    replaced[at] = parameter.grad
                parameter.grad = start
        try:
            self.run_inside(run)
        except BaseException:
            for at, kept in replaced.items():
                self.parameters[at].grad = kept
            self.forget_unscaling()
            raise
        for at, (parameter, gradient) in enumerate(zip(self.parameters, self.gradients, strict=True)):
            gradient.computed = parameter.grad
            if at in replaced:
                parameter.grad = replaced[at]
            elif stay_pending:
                parameter.grad = gradient
        self.args.clear()

    def run_inside(self, run: Callable[[], tuple[Any, ...]], count: int | None = None) -> None:
        """Run a function inside a backward of autograd, which adds what it returns to the parameters' `.grad`.

        `count`: number of the parameters that it is about, the first ones; all without it.
        """
        with self.backward.reducing(), compat.autograd.record_autograd():
            _Replay.apply(run, *self.leaves[:count]).backward()  # type: ignore[no-untyped-call]


def changes_of(read: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return versions and addresses of the tensors among these values, which tell of changes."""
    tensors = [x for x in read if isinstance(x, torch.Tensor)]
    try:
        versions = list(map(operator.attrgetter("_version"), tensors))
    except RuntimeError:  # those of inference mode have none
        versions = [x._version for x in tensors if not x.is_inference()]
    return versions, list(map(torch.Tensor.data_ptr, tensors))


def _taken(results: list[Any], places: Sequence[int]) -> tuple[Any, ...]:
    """Take results out of their list: autograd copies a gradient to which others refer."""
    taken = tuple(results[place] for place in places)
    results.clear()
    return taken
