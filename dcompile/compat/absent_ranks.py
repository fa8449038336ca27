"""Process groups of absent ranks in one process, and patches of torch for tensors without memory."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

BACKEND = "fake"
"""torch's fake backend: collectives return at once, with this rank's values instead of other ranks'."""
_MESHES = ("__init__", "__getitem__", "_flatten", "_unflatten")
_MESHES_STATIC = ("from_group", "_concatenate")
_OBJECTS = (
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list",
    "send_object_list",
)  # fmt: skip
"""Collectives of Python objects, whose results come from other ranks."""
_QUIET = ("barrier", "monitored_barrier")


@contextlib.contextmanager
def process_group(rank: int, world_size: int) -> Iterator[None]:
    """Set up a default process group of `world_size` ranks, where only this process, `rank`, exists."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    hook = sys.excepthook  # torch replaces the hook by one that names the rank, and leaves it there
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        sys.excepthook = hook
        if dist.is_initialized():
            dist.destroy_process_group()


def is_of_absent_ranks(group: Any) -> bool:
    """Whether a process group's other ranks are absent."""
    import torch.distributed as dist

    return bool(dist.get_backend(group) == BACKEND)


@contextlib.contextmanager
def for_all_groups(refuse: Callable[[str], Any]) -> Iterator[None]:
    """Make new process groups fake ones, and refuse collectives of Python objects.

    `refuse` is called with the name of the collective, and raises.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    new_group = dist.new_group

    def start(*_: Any, **__: Any) -> None:
        """Do nothing: the process group exists."""

    @functools.wraps(new_group)
    def group(*args: Any, **keywords: Any) -> Any:
        given = list(args)
        given[2:3] = [None] if len(given) > 2 else []
        return new_group(*given, **keywords | ({"backend": None} if "backend" in keywords else {}))

    def refused(name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            del args, keywords
            return refuse(name)

        return call

    def own_broadcast(object_list: Any, src: Any = None, *args: Any, **keywords: Any) -> Any:
        """Do nothing for this rank's own objects, which the others would receive."""
        own = src == dist.get_rank() if keywords.get("group_src") is None else False
        return None if own else refuse("broadcast_object_list")

    def rendezvous(*_: Any, **__: Any) -> Iterator[Any]:
        """Return the only rank at once."""
        yield _store_class()(), dist.get_rank(), dist.get_world_size()

    answers: dict[str, Any] = {name: refused(name) for name in _OBJECTS}
    answers |= dict.fromkeys(_QUIET, start) | {"broadcast_object_list": own_broadcast}
    answers |= {"init_process_group": start, "new_group": group, "rendezvous": rendezvous, "TCPStore": _store_class()}
    with contextlib.ExitStack() as patches:
        for name, answer in answers.items():
            own = getattr(dist, name)
            for module in _modules_with(name, own):
                patches.enter_context(unittest.mock.patch.object(module, name, answer))
        if hasattr(DistributedDataParallel, "_ddp_init_helper"):
            idle = _without_hooks(DistributedDataParallel._ddp_init_helper)
            patches.enter_context(unittest.mock.patch.object(DistributedDataParallel, "_ddp_init_helper", idle))
        yield


@functools.cache
def _store_class() -> Any:
    """Return a local store instead of a TCP store, which would wait for other ranks."""
    import torch.distributed as dist

    base: Any = dist.HashStore  # type: ignore[attr-defined]

    class LocalStore(base):  # type: ignore[misc]
        """A store of this process alone."""

        def __init__(self, host_name: str = "127.0.0.1", port: int = 0, *_: Any, **__: Any) -> None:
            super().__init__()
            self.host, self.port = host_name, port

    return LocalStore


def _modules_with(name: str, function: Any) -> list[Any]:
    """Return modules, of users too, that have imported a function of torch under its own name."""
    loaded = [module for module in sys.modules.values() if isinstance(module, types.ModuleType)]
    return [module for module in loaded if vars(module).get(name) is function]


@contextlib.contextmanager
def without_data() -> Iterator[None]:
    """Make tensors without memory, and let wrappers and optimizers work with them.

    Raises torch's error where a value is read (`is_value_read`).
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    from dcompile.compat.tensors import fake_mode

    with contextlib.ExitStack() as patches:
        for module in _modules_with("init_device_mesh", init_device_mesh):
            made = _with_memory(init_device_mesh)
            patches.enter_context(unittest.mock.patch.object(module, "init_device_mesh", made))
        for name in (*_MESHES, *_MESHES_STATIC):
            own = vars(DeviceMesh).get(name)
            if own is not None:
                real: Any = _with_memory(getattr(own, "__func__", own))
                kept = staticmethod(real) if isinstance(own, staticmethod) else real
                patches.enter_context(unittest.mock.patch.object(DeviceMesh, name, kept))
        for module, name, answer in _answers():
            patches.enter_context(unittest.mock.patch.object(module, name, answer))
        patches.enter_context(fake_mode())
        yield


def _with_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function`, which computes with rank numbers, so that it uses tensors with memory."""
    from dcompile.compat.tensors import real_tensors

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        with real_tensors():
            return function(*args, **keywords)

    return call


def _without_hooks(init_helper: Callable[..., Any]) -> Callable[..., Any]:
    """Remove the hooks of DDP's new reducer: it would read memory, and reject the results of this backend."""

    @functools.wraps(init_helper)
    def call(ddp: Any, *args: Any, **keywords: Any) -> Any:
        made = init_helper(ddp, *args, **keywords)
        ddp._remove_autograd_hooks()
        return made

    return call


def _answers() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Return functions of torch that read memory or known values, or are slow: (module, name, replacement)."""
    import torch
    import torch.nn.parallel.distributed as ddp

    for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
        if hasattr(ddp, name):
            yield ddp, name, lambda *_, **__: None
    if hasattr(torch.utils, "swap_tensors"):
        yield torch.utils, "swap_tensors", _taken_over(torch.utils.swap_tensors)
    with contextlib.suppress(ImportError):  # another torch version: only slower
        fsdp = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
        if hasattr(fsdp, "_chunk_with_empty"):
            yield fsdp, "_chunk_with_empty", _Chunks
    for key, module in list(sys.modules.items()):
        own = vars(module).get("_get_value") if key.startswith("torch.optim.") else None
        if own is not None:
            yield module, "_get_value", _first_step(own)


def _taken_over(swap_tensors: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Replace a parameter in `Module.to`; torch's own way refuses tensors with weak references."""
    import torch
    from torch._subclasses import FakeTensor

    def swap(parameter: Any, converted: Any) -> None:
        both = isinstance(parameter, FakeTensor) and isinstance(converted, FakeTensor)
        if both and parameter.device == converted.device:
            parameter.data = converted.detach()
        elif both and converted.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"No CUDA GPUs are available for {converted.device}")  # as torch says of real tensors
        else:
            swap_tensors(parameter, converted)

    return swap


class _Chunks:
    """Lazy chunks of a parameter, as of `torch.chunk`: of 1024, FSDP reads two.

    Making one tensor without memory takes 0.3 ms.
    """

    def __init__(self, tensor: Any, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim
        self._size = -(-tensor.shape[dim] // num_chunks)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        number += self._count if number < 0 else 0
        if not 0 <= number < self._count:
            raise IndexError(number)
        begin, end = number * self._size, self._tensor.shape[self._dim]
        if begin >= end and number:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(self._size, end - begin))


def _first_step(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return an optimizer's step count; 1 for a tensor, as in the first step."""
    import torch

    def value(x: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(x, torch.Tensor):
            return own(x)
        return 1.0

    return value


def is_value_read(error: BaseException) -> bool:
    """Whether an error comes from a read of a value, or of a size, of a tensor without memory."""
    from torch._subclasses import fake_tensor as fakes

    kinds = ("DataDependentOutputException", "DynamicOutputShapeException")
    known = tuple(kind for name in kinds if (kind := getattr(fakes, name, None)) is not None)
    return isinstance(error, known)


_NO_GPU = ("not linked with support for cuda", "not compiled with CUDA enabled", "no NVIDIA driver", "No CUDA GPUs")


def is_gpu_missing(error: BaseException) -> bool:
    """Whether an error comes from the use of a GPU on a host without one."""
    return any(text in str(error) for text in _NO_GPU)
