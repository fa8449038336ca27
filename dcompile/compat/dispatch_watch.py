"""Watch the operations of eager code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import _tensor_str
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves


class Watch:
    """Dispatch mode of one thread that reports each operation with a tensor in one of the given storages."""

    def __init__(self, storages: Mapping[int, int], touched: Callable[[int, str], None]) -> None:
        """`storages`: `tensors.storage_key` -> a number.

        `touched` is called with the number and the operation; it may raise.
        """
        watch_tensor_texts()
        self._mode = _Looking(storages, touched)

    def begin(self) -> None:
        self._mode.__enter__()  # type: ignore[no-untyped-call, unused-ignore]

    def end(self) -> None:
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call, unused-ignore]

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Suspend the watch in this context. The mode is removed, unless another mode is above it on the stack."""
        stack = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is self._mode:
            self.end()
            try:
                yield
            finally:
                self.begin()
            return
        self._mode.rests += 1
        try:
            yield
        finally:
            self._mode.rests -= 1


STANDS_IN = "_dcompile_stands_in"
"""Attribute that marks tensors without memory, in whose place a compiled graph gathers parameters."""


def watch_tensor_texts() -> None:
    """Make a mode see when a marked tensor is printed: torch switches modes off for that."""
    original = _tensor_str._str
    if hasattr(original, "_dcompile"):
        return

    @functools.wraps(original)
    def text(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, STANDS_IN):
            return original(self, *args, **kwargs)  # type: ignore[no-untyped-call, unused-ignore]
        self.detach()
        return f"{type(self).__name__}(gathered where it is used, size={tuple(self.shape)}, dtype={self.dtype})"

    text._dcompile = True  # type: ignore[attr-defined]
    _tensor_str._str = text


class _Looking(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Mode beneath which Dynamo compiles frames as usual; operators on graphs are passed through."""

    supports_higher_order_operators = True

    def __init__(self, storages: Mapping[int, int], touched: Callable[[int, str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.rests = 0
        self._storages, self._touched = storages, touched

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.rests and not str(func).startswith(_METADATA):
            for leaf in tree_leaves((args, kwargs)):
                number = self._storages.get(_key(leaf))
                if number is not None:
                    self._touched(number, str(func))
        return func(*args, **(kwargs or {}))


def _key(value: Any) -> int:
    """`tensors.storage_key` of a value; 0 for values without one."""
    if not isinstance(value, torch.Tensor):
        return 0
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, and custom classes
        return 0


_METADATA = ("prim.", "aten.sym_", "aten.is_")
"""What guards ask a tensor of a class of its own, such as one without memory: nobody reads an element. Errors of a mode
end the process there."""

NO_MEMORY = "Cannot access data pointer"
"""Begin of torch's error about a tensor that `forbid_memory` was called with."""


def forbid_memory(tensor: torch.Tensor) -> None:
    """Make every access to this tensor's address raise (NumPy, the user's own kernels), from now on."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)


def saved_tensor_hooks() -> Any:
    """Innermost pair of default hooks for saved tensors, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def random_states(device: torch.device) -> Callable[[], None]:
    """Note the states of torch's generators of the CPU and this device. Return a function that restores them."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    states = torch.get_rng_state(), None if module is None else module.get_rng_state(device)

    def put_back() -> None:
        torch.set_rng_state(states[0])
        if module is not None:
            module.set_rng_state(states[1], device)

    return put_back


def computing(compute: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> contextlib.AbstractContextManager[Any]:
    """Operators of ATen inside are computed by `compute(operator, args, kwargs)`; it runs outside of this mode."""
    return _Computing(compute)


class _Computing(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Mode with a function for all operators."""

    def __init__(self, compute: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._compute = compute

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(_METADATA):
            return func(*args, **(kwargs or {}))
        return self._compute(func, args, kwargs or {})
