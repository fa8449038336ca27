"""Who holds a tensor or its storage: checks before memory is reused."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch


def storage_use_count(tensor: torch.Tensor) -> int:
    """Number of tensors (and other holders) that refer to this tensor's storage, `tensor` itself included.

    All Python code shares one storage object, which counts like one tensor. The object's own reference count shows
    whether other code holds it.
    """
    storage = tensor.untyped_storage()
    others = sys.getrefcount(storage) - _lonely_storage_references()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1 + others  # `storage` itself is one


class KeptTensor:
    """A kept tensor, with a check for other holders of its storage. Each call runs the check, so it takes 0.4 us."""

    __slots__ = ("_address", "_memory", "_references", "_storage", "_uses", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        """`tensor` is new: nothing else holds it."""
        self.tensor = tensor
        self._storage = tensor.untyped_storage()  # kept: it is one object for all Python code
        self._address = self._storage._cdata
        self._memory = (self._storage.data_ptr(), self._storage.nbytes())
        self._uses = torch._C._storage_Use_Count(self._address)
        self._references = sys.getrefcount(self._storage)

    def alone(self) -> bool:
        """Whether no other tensor, storage object or holder in C++ refers to the storage, and its memory is unchanged.

        A former holder may have freed its memory (`resize_(0)`), or moved it to shared memory (`share_memory_`,
        `multiprocessing` queues). Both give the storage other memory.
        """
        if (self._storage.data_ptr(), self._storage.nbytes()) != self._memory:
            return False
        same = torch._C._storage_Use_Count(self._address) == self._uses
        return bool(same and sys.getrefcount(self._storage) == self._references)


@functools.cache
def _lonely_storage_references() -> int:
    """Reference count of a storage object with one local variable: 2 or 3, depending on torch and Python."""
    tensor = torch.empty(1, device="cpu")  # kept: a living tensor's reference counts in some versions
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


def is_only_reference(tensor: torch.Tensor) -> bool:
    """Whether one local variable of the caller's caller is the only reference to a tensor and its storage.

    Call it as `is_only_reference(x)` in a function that got `x` as its only argument from that variable.
    """
    if sys.getrefcount(tensor) != _references_of_one_variable() or not only_python_holds(tensor):
        return False
    storage = tensor.untyped_storage()
    lonely = sys.getrefcount(storage) == _lonely_storage_references()
    return lonely and int(torch._C._storage_Use_Count(storage._cdata)) == _uses_of_one_tensor()


def _references_of_one_variable() -> int:
    """`sys.getrefcount` as seen two calls below the function with the only reference.

    It differs between Python versions. In one process, an earlier count once differed from that of later calls for
    unknown reasons, so that unshared tensors were copied. So it is measured each time, with any object (0.2 us).
    """
    given = object()
    return _count_one_deeper(given)


def _count_one_deeper(given: object) -> int:
    return _count(given)


def _count(given: object) -> int:
    return sys.getrefcount(given)


@functools.cache
def _uses_of_one_tensor() -> int:
    """Holders of a storage with one tensor, while Python holds the storage object."""
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


def use_counter() -> Callable[[int], int]:
    """Function from a storage's `_cdata` to the number of tensors and storages that refer to the memory.

    All Python code together counts as one. It is asked of each saved tensor in each call, so callers keep it.
    """
    return torch._C._storage_Use_Count


def only_python_holds(tensor: torch.Tensor) -> bool:
    """Whether no C++ code, such as a retained autograd graph, holds this tensor besides Python."""
    count = getattr(tensor, "_use_count", None)
    return count is not None and int(count()) <= 1
