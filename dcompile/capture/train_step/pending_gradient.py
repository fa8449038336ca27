"""Gradients of a backward that has not run yet: what `.grad` holds between `loss.backward()` and `optimizer.step()`.

A backward can run together with the update only if nothing reads or changes a gradient in between. So `.grad` gets a
tensor without memory. What is done with it runs the backward first, and then happens to the real gradient. Three things
do not: asking for shape or dtype; the 2-norm; and multiplication by one factor, which the update does as it reads the
gradient. `clip_grad_norm_` takes the norm of each gradient, that of the norms, and multiplies by a number that follows
from it. This much is kept as `PendingScalar`s: if they still are pending when the step begins, the one program of
backward and update clips, too. So is what `GradScaler.unscale_` does: the number to which it writes whether a gradient
is infinite becomes a `PendingFlag`. This is lazy evaluation, as in LazyTensor (Suhan et al., 2021).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from dcompile import compat
from dcompile.compat import pytree

aten = torch.ops.aten
_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_sparse", "requires_grad", "is_leaf",
    "grad_fn", "_version",
)  # fmt: skip
_METHODS = ("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "is_contiguous")
METADATA = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(torch.Tensor, name) for name in _METHODS),
    )
)
"""What can be asked of a gradient before it is computed."""


OF_DTENSORS = frozenset(
    ("to_local", "full_tensor", "redistribute", "placements", "device_mesh", "_local_tensor", "_spec")
)
"""Attributes that gradients of sharded parameters have once they are computed."""


class _Holder:
    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = object()

    def count(self) -> int:
        return sys.getrefcount(self.held)


HELD = _Holder().count()
"""References to an object that one attribute holds, as counted there."""


class GradientSource(Protocol):
    """Where pending gradients come from."""

    def value(self, gradient: PendingGradient) -> torch.Tensor:
        """Compute a gradient now, and show it in its parameter's `.grad`. Raises DcompileError if an update used it."""

    def is_consumed(self, gradient: PendingGradient) -> bool:
        """Has an update used the gradient, so that it has no value?"""

    def norm(self, gradient: PendingGradient) -> torch.Tensor:
        """Compute a gradient's 2-norm now, without its factor."""

    def total(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the norm of sharded gradients, from those of each, over all ranks."""

    def unscale(self, gradients: Sequence[PendingGradient], found: torch.Tensor, inverse: torch.Tensor) -> bool:
        """Keep for later what GradScaler does to gradients; False if it must be done now."""

    def may_step(self, flag: PendingFlag) -> bool:
        """Answer GradScaler, which asks whether to step: will the step's program look for infinities?"""

    def check(self, flag: PendingFlag) -> None:
        """Find out now whether gradients are finite, on all ranks."""


class PendingTensor(torch.Tensor):
    """A tensor without memory whose value is computed at its first use."""

    def value(self) -> torch.Tensor:
        """Return the tensor, computed if need be."""
        raise NotImplementedError

    is_sharded: bool
    """Whether the gradient, or those that the number follows from, are DTensors once they are computed."""

    def __getattr__(self, name: str) -> Any:
        if name in OF_DTENSORS and self.is_sharded:
            return getattr(self.value(), name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LATER:
            result = LATER[func](*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if func not in METADATA:
            args, kwargs = _values((args, kwargs or {}))
        with compat.tensors.as_plain():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is aten.detach.default:  # as `.grad` is set or copied
            return args[0]
        if (understood := LATER.get(func)) is not None and not kwargs:
            result = understood(*args)
            if result is not NotImplemented:
                return result
        args, kwargs = _values((args, kwargs or {}))
        return func(*args, **kwargs)


class PendingGradient(PendingTensor):
    """A gradient that `source` computes at the first use of its value; it has its parameter's shape and layout."""

    source: GradientSource
    parameter: Callable[[], Any]
    """Weak reference to the parameter."""
    computed: torch.Tensor | None
    """The gradient without its factor, once a backward has run without the update."""
    computed_norm: torch.Tensor | None
    factor: torch.Tensor | None
    """What the gradient is to be multiplied by: a number in memory, pending or not."""
    own_norm: PendingScalar | None
    """Its norm, as a pending number, which is used again with the gradient unless somebody holds it."""

    @staticmethod
    def __new__(cls: Any, parameter: torch.Tensor, source: GradientSource) -> PendingGradient:
        """Make the gradient of one parameter."""
        made: PendingGradient = compat.tensors.without_memory(cls, parameter)
        made.parameter, made.source, made.own_norm = weakref.ref(parameter), source, None
        made.is_sharded = compat.tensors.is_dtensor(parameter)
        return made.renewed()

    def renewed(self) -> PendingGradient:
        """Return it as a gradient that is not computed."""
        self.computed = self.computed_norm = self.factor = None
        if self.own_norm is not None and self.own_norm.computed is not None:
            self.own_norm = None
        return self

    @property
    def own_references(self) -> int:
        """Number of references to it that it holds itself, by its norm; -1, which fits none, if that is held."""
        if self.own_norm is None:
            return 0
        return -1 if self.is_norm_held() else len(self.own_norm.gradients)

    def is_norm_held(self) -> bool:
        """Does anything but this object hold its pending norm?"""
        return self.own_norm is not None and sys.getrefcount(self.own_norm) > HELD

    def value(self) -> torch.Tensor:
        """Compute the gradient."""
        return self.source.value(self)


class PendingScalar(PendingTensor):
    """A number, or vector of numbers, on the way from gradients to the factor that clips them."""

    compute: Callable[[PendingScalar], torch.Tensor]
    """Compute its value, from the tensor itself: a closure over it, or over its gradient, would be a cycle."""
    computed: torch.Tensor | None
    gradients: tuple[PendingGradient, ...]
    """Those whose norms it holds, or whose common norm it follows from."""
    step: str
    """What it is: "norm", "norms", "total", "sum" (total and a number), "quotient", or "factor"."""
    number: tuple[float, ...]
    """Numbers that led to it: what is added to the norm, then the largest norm."""
    place: torch.device
    of: PendingScalar | None
    """What it was computed from, from the common norm on."""
    norms: tuple[PendingScalar, ...] = ()
    """What a vector of norms consists of."""

    @staticmethod
    def __new__(
        cls: Any,
        step: str,
        gradients: Sequence[PendingGradient],
        compute: Callable[[PendingScalar], torch.Tensor],
        number: tuple[float, ...] = (),
        of: PendingScalar | None = None,
    ) -> PendingScalar:
        """Make one; `compute` returns its value."""
        shape, place = (len(gradients),) if step == "norms" else (), gradients[0].device
        like = torch.empty(shape, dtype=gradients[0].dtype, device="meta")
        made: PendingScalar = compat.tensors.without_memory(cls, like, place)
        made.step, made.gradients, made.compute, made.number = step, tuple(gradients), compute, number
        made.computed, made.of, made.place, made.is_sharded = None, of, place, gradients[0].is_sharded
        return made

    def __getattr__(self, name: str) -> Any:
        if name == "full_tensor" and self.is_sharded and self.step not in ("norm", "norms"):
            return lambda: self  # a common norm is that of all ranks
        return super().__getattr__(name)

    def give_total(self, norm: torch.Tensor) -> None:
        """Tell the norm that this factor follows from, which a program has computed."""
        if self.step == "total":
            self.computed = norm
            self.forget()
        elif self.of is not None:
            self.of.give_total(norm)

    def forget(self) -> None:
        """Hold no gradients any more, since the value is known."""
        self.gradients, self.of, self.norms, self.compute = (), None, (), _never

    def to(self, *target: Any, **more: Any) -> Any:  # a method, as torch asks a class's own function seven times slower
        """Return it on a device: itself on its own one."""
        if not more and len(target) == 1 and isinstance(target[0], torch.device) and target[0] == self.place:
            return self
        return super().to(*target, **more)

    def value(self) -> torch.Tensor:
        """Compute the number."""
        if self.computed is None:
            self.computed = self.compute(self)
            self.forget()
        return self.computed


class PendingFlag(PendingTensor):
    """A number in memory of a device, made by GradScaler, that will be 1 if a gradient is infinite or no number.

    It becomes a plain tensor, as it was before, once it is known.
    """

    source: GradientSource
    is_sharded = False

    @staticmethod
    def of(found: torch.Tensor, source: GradientSource) -> PendingFlag:
        """Let a plain tensor be one: GradScaler keeps the same object for `update()`."""
        found.__class__ = PendingFlag
        assert isinstance(found, PendingFlag)
        found.source = source
        return found

    def known(self) -> torch.Tensor:
        """Return it as a plain tensor, whose memory has the value."""
        if type(self) is PendingFlag:
            del self.source
            self.__class__ = torch.Tensor  # type: ignore[assignment]
        return self

    def value(self) -> torch.Tensor:
        """Find out, on all ranks."""
        if type(self) is PendingFlag:  # no question has answered it
            self.source.check(self)
        return PendingFlag.known(self)

    def item(self) -> Any:
        """Return the number; to GradScaler's step 0 without waiting, if the step's program looks for infinities."""
        return 0.0 if self.source.may_step(self) else PendingFlag.value(self).item()

    def to(self, *target: Any, **more: Any) -> Any:
        """Return it on a device: itself on its own one."""
        return self if target == (self.device,) else super().to(*target, **more)

    def __radd__(self, number: Any) -> Any:  # as the sum of one flag, which GradScaler gives to fused optimizers
        return self if isinstance(number, int) and not number else super().__radd__(number)


def clipping(gradients: Sequence[PendingGradient], largest: float) -> tuple[PendingScalar, PendingScalar]:
    """Return the norm of all gradients, and the factor that clips them, as clip_grad_norm_ computes them."""
    total = _norm(_stack([_norm(x) for x in gradients]))
    return total, _clamp(_divided(_add(total, 1e-6), float(largest)), max=1.0)


def _norm_of(pending: PendingScalar) -> torch.Tensor:
    (gradient,) = pending.gradients
    return gradient.source.norm(gradient)


def _never(_: PendingScalar) -> torch.Tensor:
    raise AssertionError("a number is computed once")


def _values(arguments: Any) -> Any:
    """Replace pending tensors among arguments by real ones."""
    return pytree.map_only(PendingTensor, lambda pending: pending.value(), arguments)


def _later(of: PendingScalar, step: str, compute: Callable[[torch.Tensor], torch.Tensor], *number: float) -> Any:
    if of.computed is not None:
        return NotImplemented
    return PendingScalar(step, of.gradients, lambda _: compute(of.value()), (*of.number, *number), of)


def _norm(x: Any, order: float = 2, *others: Any, **more: Any) -> Any:
    if order != 2 or any(others) or more:
        return NotImplemented
    if isinstance(x, PendingScalar):
        return _total(x) if x.step == "norms" else NotImplemented
    if x.factor is not None:
        return NotImplemented
    if x.own_norm is None:
        x.own_norm = PendingScalar("norm", (x,), _norm_of)
    return x.own_norm


def _total(x: PendingScalar) -> Any:
    if not x.is_sharded or x.computed is not None:
        return _later(x, "total", torch.linalg.vector_norm)
    source, norms = x.gradients[0].source, x.norms
    return PendingScalar("total", x.gradients, lambda _: source.total([norm.value() for norm in norms]), x.number, x)


def _norms(gradients: Sequence[Any], order: float = 2, *others: Any, **more: Any) -> Any:
    if not all(isinstance(gradient, PendingGradient) for gradient in gradients):
        return NotImplemented
    found = [_norm(gradient, order, *others, **more) for gradient in gradients]
    return NotImplemented if any(norm is NotImplemented for norm in found) else found


def _stack(norms: Sequence[Any], *others: Any, **more: Any) -> Any:
    if (
        others
        or more
        or not all(isinstance(norm, PendingScalar) and norm.gradients and norm.step == "norm" for norm in norms)
    ):
        return NotImplemented
    gradients = [norm.gradients[0] for norm in norms]
    made = PendingScalar("norms", gradients, lambda _: torch.stack([norm.value() for norm in norms]))
    made.norms = tuple(norms)
    return made


def _add(x: Any, number: Any, **more: Any) -> Any:
    if more or not isinstance(x, PendingScalar) or x.step != "total" or not isinstance(number, float):
        return NotImplemented
    return _later(x, "sum", lambda total: total + number, number)


def _divided(x: Any, number: Any) -> Any:
    if not isinstance(x, PendingScalar) or x.step != "sum" or not isinstance(number, float):
        return NotImplemented
    return _later(x, "quotient", lambda total: number / total, number)


def _clamp(x: Any, *limits: Any, **more: Any) -> Any:
    if limits or more != {"max": 1.0} or not isinstance(x, PendingScalar) or x.step != "quotient":
        return NotImplemented
    return _later(x, "factor", lambda quotient: torch.clamp(quotient, max=1.0))


def _zero(gradient: Any) -> Any:
    """Set a consumed gradient to zeros, as zero_grad(set_to_none=False) does."""
    parameter = gradient.parameter()
    if parameter is None or parameter.grad is not gradient or not gradient.source.is_consumed(gradient):
        return NotImplemented
    parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _zero_all(gradients: Sequence[Any]) -> Any:
    for gradient in gradients:
        if not isinstance(gradient, PendingGradient) or _zero(gradient) is NotImplemented:
            gradient.zero_()
    return None


def _stays_constant(gradient: Any, requires_grad: bool = True) -> Any:
    return NotImplemented if requires_grad else gradient


def _multiply(gradient: Any, factor: Any) -> Any:
    if not isinstance(gradient, PendingGradient) or gradient.factor is not None:
        return NotImplemented
    if isinstance(factor, PendingScalar):
        known = factor.step == "factor"
    else:  # the factor may follow from the gradients
        plain = isinstance(factor, torch.Tensor) and factor.ndim == 0 and factor.device == gradient.device
        plain = plain and not compat.tensors.is_dtensor(factor)
        known = plain and gradient.computed is not None
    if not known:
        return NotImplemented
    gradient.factor = factor
    return gradient


def _multiply_all(gradients: Sequence[Any], factor: Any) -> Any:
    if not all(isinstance(gradient, PendingGradient) and gradient.factor is None for gradient in gradients):
        return NotImplemented
    results = [_multiply(gradient, factor) for gradient in gradients]
    return NotImplemented if any(result is NotImplemented for result in results) else None


def _unscale(gradients: Sequence[Any], found: Any, inverse: torch.Tensor) -> Any:
    if not all(type(gradient) is PendingGradient for gradient in gradients):
        return NotImplemented
    return None if gradients[0].source.unscale(gradients, found, inverse) else NotImplemented


_LISTS = compat.tensors.lazy_functions()
LATER: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _norm,
    aten.linalg_vector_norm.default: _norm,
    _LISTS["norms"]: _norms,
    torch.stack: _stack,
    torch.Tensor.add: _add,
    torch.Tensor.__add__: _add,
    torch.Tensor.__rdiv__: _divided,
    torch.Tensor.__rtruediv__: _divided,
    torch.clamp: _clamp,
    torch.Tensor.zero_: _zero,
    _LISTS["zero"]: _zero_all,
    torch.Tensor.requires_grad_: _stays_constant,
    torch.Tensor.mul_: _multiply,
    aten.mul_.Tensor: _multiply,
    _LISTS["multiply"]: _multiply_all,
    _LISTS["unscale"]: _unscale,
}
"""Functions and operations that need no value yet; NotImplemented where these arguments do."""
