"""Numbers of the host in the trace of an optimizer's step: settings, counts of steps, and what follows from them.

The host computes them again in each step, in float64, with the operations that were recorded. What tensors are combined
with is read from a vector in the device's memory, so that a scheduler causes no recompilation. A branch, or any other
use of a number's value, is recorded as a test: the trace is for steps in which all tests have the same outcome.

Functions of `math` read a number's value, too. A user's step is traced as a copy with other global names, among which
`math` is one that adds to the tape (`FollowedFunctions`): the module itself stays as it is for all others.
"""

from __future__ import annotations

import builtins
import ctypes
import math
import operator
import struct
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from dcompile.device_traits import traits_of

Source: TypeAlias = tuple[str, int, str, int]
"""("setting", param group, name, position in a tuple or -1), or ("state", parameter, name, -1)."""
Read: TypeAlias = Callable[[Source], Any]

COMBINED = frozenset(
    f"{prefix}{name}"
    for name in ("add", "sub", "mul", "div", "truediv", "pow", "where", "eq", "gt", "lt", "ge", "le")
    for prefix in ("", "r")
)
"""Functions whose operands may be tensors without dimensions in place of numbers."""


@dataclass
class Tape:
    """The operations on numbers of one trace, in order."""

    entries: list[tuple[Callable[..., Any] | None, tuple[Any, ...], Any]] = field(default_factory=list)
    """(function, operands, outcome of a test or None). Without function, the operand is where an input comes from."""
    values: list[Any] = field(default_factory=list)
    """What the entries were in the traced step."""
    slots: dict[int, int] = field(default_factory=dict)
    """Entry -> its place in the device's vector."""

    def source(self, source: Source, value: Any) -> Number:
        """Return an input."""
        return self._enter(None, (source,), value)

    def apply(self, function: Callable[..., Any], *operands: Any) -> Number:
        """Return the result of a function of numbers."""
        return self._enter(function, operands, function(*self._given(self.values, operands)))

    def test(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Return a fact about numbers, which must be the same in each step of the trace."""
        value = function(*self._given(self.values, operands))
        self._enter(function, operands, value, value)
        return value

    def _enter(self, function: Any, operands: tuple[Any, ...], value: Any, outcome: Any = None) -> Number:
        held = tuple(Number(self, x.at) if isinstance(x, Number) else x for x in operands)  # a count changes in place
        self.entries.append((function, held, outcome))
        self.values.append(value)
        return Number(self, len(self.values) - 1)

    @staticmethod
    def _given(values: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        return [values[x.at] if isinstance(x, Number) else x for x in operands]

    def replayed(self, read: Read) -> list[Any] | None:
        """Return the entries' values for other inputs; None if a test has another outcome."""
        values: list[Any] = []
        for function, operands, outcome in self.entries:
            value = read(operands[0]) if function is None else function(*self._given(values, operands))
            if outcome is not None and value != outcome:
                return None
            values.append(value)
        return values


class Number(torch.SymFloat):
    """One entry of a tape. torch takes it where it takes a float."""

    def __init__(self, tape: Tape, at: int) -> None:
        self.tape, self.at = tape, at

    def __bool__(self) -> bool:
        return bool(self.tape.test(bool, self))

    def __float__(self) -> float:
        return float(self.tape.test(float, self))

    def __int__(self) -> int:
        return int(self.tape.test(int, self))

    def __repr__(self) -> str:
        return repr(self.tape.values[self.at])

    __hash__ = object.__hash__


class StateNumber(Number):
    """A tensor of one number in the optimizer's state, such as the count of steps, which changes in place."""

    def __init__(self, number: Number, dtype: torch.dtype) -> None:
        super().__init__(number.tape, number.at)
        self._rounded = _float32 if dtype is torch.float32 else None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """What isinstance is to find: torch's optimizers ask whether a count is a tensor."""
        return torch.Tensor

    def item(self) -> Number:
        """Return the number that it is now."""
        return Number(self.tape, self.at)

    def copy_(self, value: Any) -> StateNumber:
        """Set it, rounded to the tensor's dtype."""
        number = value if isinstance(value, Number) else self.tape.apply(float, value)
        self.at = (number if self._rounded is None else self.tape.apply(self._rounded, number)).at
        return self

    def _changed(self, function: Callable[..., Any], other: Any) -> StateNumber:
        exact = self._rounded is None or not isinstance(other, (Number, float))
        return self.copy_(
            self.tape.apply(function, self.item(), other if exact else self.tape.apply(self._rounded, other))  # type: ignore[arg-type]
        )

    def __iadd__(self, other: Any) -> StateNumber:
        return self._changed(operator.add, other)

    def __imul__(self, other: Any) -> StateNumber:
        return self._changed(operator.mul, other)

    add_, mul_, fill_ = __iadd__, __imul__, copy_


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


def _float16(value: float) -> float:
    try:
        return float(struct.unpack("e", struct.pack("e", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _bfloat16(value: float) -> float:
    """Round to the upper half of a float32, to even between two."""
    bits = ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value
    if math.isfinite(value):
        bits += 0x7FFF + (bits >> 16 & 1)
    return ctypes.c_float.from_buffer(ctypes.c_uint32(bits & 0xFFFF0000)).value


def _binary(function: Callable[..., Any], is_test: bool, is_reflected: bool = False) -> Callable[..., Any]:
    def method(self: Number, other: Any) -> Any:
        if not isinstance(other, (int, float, Number)):
            return NotImplemented
        mine = Number(self.tape, self.at)
        operands = (other, mine) if is_reflected else (mine, other)
        return (self.tape.test if is_test else self.tape.apply)(function, *operands)

    return method


def _unary(function: Callable[..., Any]) -> Callable[[Number], Number]:
    return lambda self: self.tape.apply(function, Number(self.tape, self.at))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _binary(getattr(operator, _name), is_test=False))
    setattr(Number, f"__r{_name}__", _binary(getattr(operator, _name), is_test=False, is_reflected=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _binary(getattr(operator, _name), is_test=True))
for _name in ("neg", "abs"):
    setattr(Number, f"__{_name}__", _unary(getattr(operator, _name)))


def _following(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `math` whose result is an entry of the tape if a number is given; a test, if no float."""

    def followed(*operands: Any) -> Any:
        tape = next((x.tape for x in operands if isinstance(x, Number)), None)
        if tape is None:
            return function(*operands)
        result = tape.apply(function, *operands)
        return result if type(tape.values[-1]) is float else tape.test(function, *operands)

    return followed


_FOLLOWING = {function: _following(function) for function in vars(math).values() if callable(function)}
_MATH = types.SimpleNamespace(**{name: _FOLLOWING.get(x, x) for name, x in vars(math).items() if name[0] != "_"})


class _Names(dict[str, Any]):
    """Global names of copied functions: those of their module, and what the copies set."""

    def __init__(self, functions: FollowedFunctions, names: Mapping[str, Any]) -> None:
        super().__init__(__builtins__={**vars(builtins), "__import__": _import})
        self._functions, self._names = functions, names

    def __missing__(self, name: str) -> Any:
        value = self._names[name]
        if value is math:
            return _MATH
        if isinstance(value, types.BuiltinFunctionType):
            return _FOLLOWING.get(value, value)
        return self._functions.of(value) if isinstance(value, types.FunctionType) else value


def _import(name: str, *more: Any) -> Any:
    return _MATH if name == "math" else __import__(name, *more)


class FollowedFunctions:
    """Copies of the functions in the modules of an optimizer's own classes, in which `math` adds to the tape."""

    def __init__(self, kind: type) -> None:
        own = (each for each in kind.__mro__ if each.__module__.partition(".")[0] not in ("torch", "builtins"))
        self._kinds = list(own)
        self._modules = {each.__module__ for each in self._kinds}
        self._names: dict[int, _Names] = {}

    def of(self, function: Any) -> Any:
        """Return the copy of a function; itself if it is from elsewhere."""
        names = function.__globals__
        if names.get("__name__") not in self._modules:
            return function
        known = self._names.setdefault(id(names), _Names(self, names))
        made = types.FunctionType(
            function.__code__, known, function.__name__, function.__defaults__, function.__closure__
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made

    def give_to(self, made: Any) -> None:
        """Let the methods of an object be copies."""
        for kind in reversed(self._kinds):
            for name, method in vars(kind).items():
                if isinstance(method, types.FunctionType):
                    made.__dict__[name] = types.MethodType(self.of(method), made)

    def set_names(self) -> list[str]:
        """Return the global names that copies have set."""
        return [name for names in self._names.values() for name in names if name != "__builtins__"]


class NumbersOnDevice(TorchFunctionMode):
    """Lets functions of tensors read numbers from a vector. Where that is not possible, a number is a constant."""

    def __init__(self, tape: Tape, vector: torch.Tensor) -> None:
        super().__init__()
        self._tape, self._vector = tape, vector

    def _read(self, number: Any) -> Any:
        if not isinstance(number, Number):
            return number
        return self._vector[self._tape.slots.setdefault(number.at, len(self._tape.slots))]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__.strip("_")
        if name == "as_tensor" and isinstance(args[0], (int, float, Number)):
            return args[0]
        if name == "setitem" and isinstance(args[1], torch.Tensor) and args[1].shape == args[0].shape:
            return args[0].copy_(torch.where(args[1], self._read(args[2]), args[0]))
        numbers = any(isinstance(x, Number) for x in (*args, *kwargs.values()))
        if name in _PARTS and (numbers or name in _ALWAYS or "alpha" in kwargs) and isinstance(args[0], torch.Tensor):
            new = _rounded_once(name, self._read, args, kwargs)
            return args[0].copy_(new) if func.__name__.endswith("_") else new
        if not numbers:
            return func(*args, **kwargs)
        read: Any = self._read if name in COMBINED else lambda x: float(x) if isinstance(x, Number) else x
        return func(*map(read, args), **{key: read(value) for key, value in kwargs.items()})


Reader: TypeAlias = Callable[[Any], Any]


def _rounded_once(name: str, read: Reader, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Call one of `_PARTS`: with 16-bit tensors its parts are float32, and the result is rounded, as in ATen."""
    dtype = args[0].dtype
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if dtype not in _ROUNDED or name == "clamp" or any(x.dtype != dtype for x in tensors):
        return _PARTS[name](read, *args, **kwargs)
    if traits_of(args[0].device.type).aten.rounds_factors and isinstance(alpha := kwargs.get("alpha"), (float, Number)):
        nearest = _ROUNDED[dtype]
        kwargs["alpha"] = alpha.tape.apply(nearest, alpha) if isinstance(alpha, Number) else nearest(alpha)

    def wide(x: Any) -> Any:
        return x.to(torch.float32) if isinstance(x, torch.Tensor) else x

    given = {key: wide(x) for key, x in kwargs.items()}
    return _PARTS[name](read, *map(wide, args), **given).to(dtype)


def _fma(a: torch.Tensor, b: Any, x: torch.Tensor) -> torch.Tensor:
    """Add a product, rounded once, as ATen does wherever a factor is part of a sum."""
    result: torch.Tensor = torch.ops.dcompile_step.fma(a, b if isinstance(b, torch.Tensor) else _like(x, b), x)
    return result


def _add(read: Reader, x: torch.Tensor, y: Any, alpha: Any = 1) -> torch.Tensor:
    y = read(y)
    if not isinstance(alpha, Number) and alpha == 1:
        return torch.add(x, y)
    return _fma(y, read(alpha), x) if isinstance(y, torch.Tensor) else torch.add(x, y * read(alpha))


def _sub(read: Reader, x: torch.Tensor, y: Any, alpha: Any = 1) -> torch.Tensor:
    return _add(read, x, y, -alpha) if isinstance(y, torch.Tensor) else x - read(y) * read(alpha)


def _addcmul(read: Reader, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, value: Any = 1) -> torch.Tensor:
    return _fma(y * read(value), z, x)


def _addcdiv(read: Reader, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, value: Any = 1) -> torch.Tensor:
    return torch.add(x, y * read(value) / z)


def _lerp(read: Reader, start: torch.Tensor, end: torch.Tensor, weight: Any) -> torch.Tensor:
    """Interpolate from the nearer end, as torch does."""
    if isinstance(weight, torch.Tensor):
        return torch.lerp(start, end, weight)
    if abs(weight) < 0.5:
        return _fma(end - start, read(weight), start)
    nearest: Any = weight.tape.apply(_float32, weight) if isinstance(weight, Number) else _float32(weight)
    return _fma(end - start, read(nearest - 1), end)


def _clamp(read: Reader, x: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:
    low = x if min is None else torch.maximum(x, _like(x, read(min)))
    return low if max is None else torch.minimum(low, _like(x, read(max)))


def _like(x: torch.Tensor, number: Any) -> torch.Tensor:
    """Return a number, in memory or not, as a tensor without dimensions of the dtype of `x`."""
    if isinstance(number, torch.Tensor):
        return number.to(x.dtype)
    return torch.full((), number, dtype=x.dtype, device=x.device)


_PARTS: Mapping[str, Callable[..., torch.Tensor]] = {
    "add": _add, "sub": _sub, "addcmul": _addcmul, "addcdiv": _addcdiv, "lerp": _lerp, "clamp": _clamp,
}  # fmt: skip
"""Functions that torch cannot give a tensor in place of a number, or that it rounds in another way then."""
_ALWAYS = frozenset(("addcmul", "lerp"))
_ROUNDED = {torch.float16: _float16, torch.bfloat16: _bfloat16}
