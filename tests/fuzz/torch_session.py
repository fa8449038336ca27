"""Runs of a random torch program: everything that a user can see after each step, and where two runs differ."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, TorchRuntimeError
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class TorchProgram:
    """A module and what is done with it, as text: lines of Python."""

    inputs: tuple[str, ...]
    """How a, b and c are made of a size N."""
    forward: tuple[str, ...]
    results: tuple[str, ...]
    steps: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((*self.inputs, "", self.source(), "", *self.steps))

    def source(self) -> str:
        """The module's text."""
        lines = [line for statement in self.forward for line in statement.split("\n")]
        body = "".join(f"        {line}\n" for line in (*lines, f"return [{', '.join(self.results)}]"))
        return f"class Model(Base):\n    def forward(self, a, b, c):\n{body}"


class Triple(torch.autograd.Function):
    """Twice its argument forward, three times backward; and the argument is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 + x * 0


class Pair(torch.autograd.Function):
    """Two results, of which one looks at an argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, y)
        return x.view_as(x), x * y

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor, two: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        return (one + two * y).sum_to_size(x.shape), (two * x).sum_to_size(y.shape)


class Dirty(torch.autograd.Function):
    """Changes its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Base(nn.Module):
    """Parameters and buffers for any forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(leaf(101, (3, 4), torch.float32))
        self.b = nn.Parameter(leaf(102, (4,), torch.float32))
        self.m = nn.Parameter(leaf(103, (4, 4), torch.float32))
        self.lin = nn.Linear(4, 4)
        self.lin.load_state_dict({"weight": leaf(104, (4, 4), torch.float32), "bias": leaf(105, (4,), torch.float32)})
        self.register_buffer("n", leaf(106, (4,), torch.float32))
        self.register_buffer("count", torch.tensor(1))
        self.drops = False


def leaf(seed: int, shape: tuple[int, ...], dtype: torch.dtype, grad: bool = False) -> torch.Tensor:
    """A tensor of known values, on the default device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
    values = values.to(torch.get_default_device())
    if not dtype.is_floating_point:
        return values > 0 if dtype == torch.bool else (values * 5).to(dtype)
    return values.to(dtype).requires_grad_(grad)


def loss(results: list[Any], mask: int = -1) -> torch.Tensor:
    """A sum in which each element of the results that `mask` names has another weight."""
    total = torch.zeros((), dtype=torch.float64)
    for place, x in enumerate(results):
        if isinstance(x, torch.Tensor) and x.requires_grad and mask >> place & 1:
            total = total + (x.double() * torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).view(x.shape)).sum()
    return total


def gradients(total: torch.Tensor, inputs: tuple[Any, ...], module: nn.Module) -> list[Any]:
    """Those of all that has one, by a call that adds to no `.grad`."""
    wanted = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
    return list(torch.autograd.grad(total, wanted, allow_unused=True, retain_graph=True))


def hook(x: torch.Tensor) -> None:
    """Double the gradient of what is no view: torch 2.13 ends with a segmentation fault for some of those."""
    assert not x._is_view()
    x.register_hook(lambda grad: grad * 2)


def descend(module: nn.Module) -> None:
    """A step of an optimizer."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.01)


def in_thread(run: Callable[[], Any]) -> Any:
    """The same in another thread, which has the same default device."""
    device = torch.get_default_device()
    found: list[Any] = []
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            with device if device.type != "cpu" else contextlib.nullcontext():
                found.append(run())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def call(model: Callable[..., Any], *args: Any) -> list[Any]:
    """The results in a flat list."""
    return tree_leaves(model(*args))


WORDS: dict[str, Any] = {
    "torch": torch, "F": F, "Base": Base, "leaf": leaf, "loss": loss, "gradients": gradients, "descend": descend,
    "hook": hook, "in_thread": in_thread, "call": call, "Triple": Triple, "Pair": Pair, "Dirty": Dirty,
    "checkpoint": checkpoint,
}  # fmt: skip

Seen = Mapping[str, Any]
"""What it is -> what was seen of it after a step."""
Versions = dict[int, tuple["weakref.ref[torch.Tensor]", int]]


def runs(program: TorchProgram) -> bool:
    """Whether eager mode runs all of it."""
    return "error" not in session(program, lambda module: module, looks=False)[-1]


def session(
    program: TorchProgram, compiled: Callable[[nn.Module], Callable[..., Any]], drops: bool = False, looks: bool = True
) -> list[Seen]:
    """What is seen after each step on the default device; the last one may be an error."""
    scope: dict[str, Any] = dict(WORDS)
    exec(compile(_for_device(program.source()), "<program>", "exec"), scope)
    module = scope["module"] = scope["Model"]()
    module.drops = drops
    scope["model"] = compiled(module)
    scope["saved"] = {name: value.clone() for name, value in module.state_dict().items()}
    found: list[Seen] = []
    versions: Versions = {}
    try:
        for line in ("N = 3", *program.inputs, *program.steps):
            torch.manual_seed(0)
            anew = program.inputs if found and line.startswith("N = ") else ()
            exec(_for_device("\n".join((line, *anew))), scope)
            found.append(dict((*_seen(scope), *_changed(scope, versions))) if looks else {})
    except Exception as error:
        found.append({"error": error_text(error)})
    return found


def error_text(error: BaseException) -> str:
    """The type of what was raised, and what it says."""
    return f"{type(_unwrapped(error)).__name__}: {str(error)[:300]}"


def _unwrapped(error: BaseException) -> BaseException:
    """What was raised, where Dynamo says so by an error of its own."""
    while isinstance(error, BackendCompilerFailed | TorchRuntimeError | InternalTorchDynamoError):
        inner = getattr(error, "inner_exception", None) or error.__cause__
        if inner is None:
            break
        error = inner
    return error


def _for_device(text: str) -> str:
    return text.replace("autocast('cpu'", f"autocast('{torch.get_default_device().type}'")


def _tensors(scope: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(scope):
        value = scope[name]
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list):
            yield from ((f"{name}[{n}]", x) for n, x in enumerate(value) if isinstance(x, torch.Tensor))
    module = scope["module"]
    yield from ((f"module.{name}", value) for name, value in module.named_parameters())
    yield from ((f"module.{name}", value) for name, value in module.named_buffers())


def _changed(scope: Mapping[str, Any], versions: Versions) -> Iterator[tuple[str, bool]]:
    """Which tensors count a change since the last step."""
    for name, x in _tensors(scope):
        if not x.is_inference():
            known = versions.get(id(x))
            if known is not None and known[0]() is x:
                yield f"{name} changes", known[1] != x._version
            versions[id(x)] = weakref.ref(x), x._version  # held, its memory would not be given out again


def _seen(scope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    tensors = list(_tensors(scope))
    for name in sorted(scope):
        if name[0] in "rg" and name[1:].isdigit():
            yield f"{name} holds", [type(x).__name__ if isinstance(x, torch.Tensor) else x for x in scope[name]]
    for name, x in tensors:
        strides = zip(x.shape, x.stride(), strict=True)
        yield f"{name} lies", [stride for size, stride in strides if size > 1 and x.numel()]
    tensors += [(f"{name}.grad", x.grad) for name, x in tensors if x.is_leaf and isinstance(x.grad, torch.Tensor)]
    for number, (name, x) in enumerate(tensors):
        yield f"{name} is", (x.device.type, x.dtype, tuple(x.shape), x.requires_grad, x.is_leaf, x.is_inference())
        yield name, x.detach().clone(memory_format=torch.contiguous_format)
        for other, y in tensors[:number]:
            yield f"{name} and {other}", _relation(x, y)


def _relation(x: torch.Tensor, y: torch.Tensor) -> str:
    if x is y:
        return "one tensor"
    if x.numel() and y.numel() and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():
        return f"{x.data_ptr() - y.data_ptr()} bytes apart"
    return "apart"


def differences(want: list[Seen], got: list[Seen], rougher: float = 1) -> dict[tuple[int, str], str]:
    """(step, what) -> how the second run differs. `rougher`: than each dtype's tolerance."""
    found: dict[tuple[int, str], str] = {}
    for step, (one, two) in enumerate(zip(want, got, strict=False)):
        if "error" in one or "error" in two:
            text, want_text = two.get("error", "no error"), one.get("error", "no error")
            if error_type(text) != error_type(want_text):
                found[step, "error"] = f"{text}, not {want_text}"
            break
        for key in (*one, *(key for key in two if key not in one)):
            text = _difference(one.get(key), two.get(key), rougher)
            if text is not None:
                found[step, key] = text
    return found


def error_type(text: str) -> str:
    """The type that a step's error begins with; messages may say the same in other words."""
    return text.partition(":")[0]


def kind_of(what: str) -> str:
    """Sharing, layout, error or value: what sort of thing a difference is in."""
    if what == "error":
        return what
    if " and " in what:
        return "sharing"
    return what.rpartition(" ")[2] if what.endswith((" is", " lies", " holds", " changes")) else "value"


def _difference(one: Any, two: Any, rougher: float) -> str | None:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        if one.dtype != two.dtype or one.shape != two.shape or one.device != two.device:
            return None  # said by what it is
        tolerance = rougher * TOLERANCE.get(one.dtype, 0.0)
        scale = max(1.0, float(one.abs().max())) if one.numel() and one.dtype.is_floating_point else 1.0
        if torch.allclose(one, two, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            return None
        return f"{two.tolist()}, not {one.tolist()}"[:600]
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        return f"{type(two).__name__}, not {type(one).__name__}"
    return None if one == two else f"{two}, not {one}"
