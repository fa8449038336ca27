"""One rank's process without the other ranks: for precompiling a job, and for inspecting a model.

A precompiled job has process groups of absent ranks, and tensors without memory: torch's fake backend and patches of
torch stand in for them.

A model that is inspected and not trained has local results in place of collectives. Each gives the result that it would
have if all ranks held this rank's data. A gather repeats this rank's part, so that values have the usual size. Sums of
equal terms differ by a factor only, so they stay unscaled.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.nn.parallel.distributed as ddp
from torch._subclasses import FakeTensor
from torch._subclasses import fake_tensor as fakes
from torch.fx import Interpreter
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from dcompile.ir.collective_kinds import COLLECTIVES, KINDS, CollectiveKind

BACKEND = "fake"
"""torch's fake backend: collectives return at once, with this rank's values instead of other ranks'."""
FUNCTIONAL = "_c10d_functional"
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
    return bool(dist.get_backend(group) == BACKEND)


@contextlib.contextmanager
def for_all_groups(refuse: Callable[[str], Any]) -> Iterator[None]:
    """Make new process groups fake ones, and refuse collectives of Python objects.

    `refuse` is called with the name of the collective, and raises.
    """
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
            return refuse(name)

        return call

    def own_broadcast(object_list: Any, src: Any = None, *args: Any, **keywords: Any) -> Any:
        """Do nothing for this rank's own objects, which the others would receive."""
        own = src == dist.get_rank() if keywords.get("group_src") is None else False
        return None if own else refuse("broadcast_object_list")

    def rendezvous(*_: Any, **__: Any) -> Iterator[Any]:
        """Return the only rank at once."""
        yield LocalStore(), dist.get_rank(), dist.get_world_size()

    answers: dict[str, Any] = {name: refused(name) for name in _OBJECTS}
    answers |= dict.fromkeys(_QUIET, start) | {"broadcast_object_list": own_broadcast}
    answers |= {"init_process_group": start, "new_group": group, "rendezvous": rendezvous, "TCPStore": LocalStore}
    with contextlib.ExitStack() as patches:
        for name, answer in answers.items():
            own = getattr(dist, name)
            for module in _modules_with(name, own):
                patches.enter_context(unittest.mock.patch.object(module, name, answer))
        if hasattr(DistributedDataParallel, "_ddp_init_helper"):
            idle = _without_hooks(DistributedDataParallel._ddp_init_helper)
            patches.enter_context(unittest.mock.patch.object(DistributedDataParallel, "_ddp_init_helper", idle))
        yield


class LocalStore(dist.HashStore):  # type: ignore[misc, name-defined]
    """A store of this process alone."""

    def __init__(self, host_name: str = "127.0.0.1", port: int = 0, *_: Any, **__: Any) -> None:
        super().__init__()
        self.host, self.port = host_name, port


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

    def value(x: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(x, torch.Tensor):
            return own(x)
        return 1.0

    return value


def is_value_read(error: BaseException) -> bool:
    """Whether an error comes from a read of a value, or of a size, of a tensor without memory."""
    kinds = ("DataDependentOutputException", "DynamicOutputShapeException")
    known = tuple(kind for name in kinds if (kind := getattr(fakes, name, None)) is not None)
    return isinstance(error, known)


_NO_GPU = ("not linked with support for cuda", "not compiled with CUDA enabled", "no NVIDIA driver", "No CUDA GPUs")


def is_gpu_missing(error: BaseException) -> bool:
    """Whether an error comes from the use of a GPU on a host without one."""
    return any(text in str(error) for text in _NO_GPU)


class SingleRankCollectives:
    """Local replacements of torch.distributed's functions, in effect while `active`.

    They are removed while Dynamo traces, since it recognizes the functions that it can trace by identity.
    """

    def __init__(self) -> None:
        self._patches = contextlib.ExitStack()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Replace collectives of Python code in this context."""
        self._begin()
        try:
            yield
        finally:
            self._patches.close()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Restore torch's own functions in this context, inside `active`."""
        self._patches.close()
        try:
            yield
        finally:
            self._begin()

    def _begin(self) -> None:
        for name, answer in _LOCAL.items():
            for place in (dist, c10d):
                if hasattr(place, name):
                    self._patches.enter_context(unittest.mock.patch.object(place, name, answer))


@contextlib.contextmanager
def without_other_ranks() -> Iterator[None]:
    """Replace collectives by local ones in this context, also those that are operators."""

    class Local(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = _functional_name(func)
            return _local_result(name, args, kwargs or {}) if name else func(*args, **kwargs or {})

    local = Local()  # type: ignore[no-untyped-call, unused-ignore]
    with SingleRankCollectives().active(), local:
        yield


class _CompletedWork:
    """Work of a completed collective."""

    def wait(self, *_: Any, **__: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


def _completed_work(async_op: bool) -> Any:
    return _CompletedWork() if async_op else None


def _all_gather(output: torch.Tensor, value: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    output.view(-1).copy_(_repeat_part(value.reshape(-1), output.numel()))
    return _completed_work(async_op)


def _all_gather_list(outputs: Any, value: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    for output in outputs:
        output.copy_(value)
    return _completed_work(async_op)


def _reduce_scatter(
    output: torch.Tensor, value: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    output.view(-1).copy_(value.reshape(-1)[: output.numel()])
    return _completed_work(async_op)


def _all_to_all(
    output: torch.Tensor,
    value: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    output.view(-1).copy_(_repeat_part(value.reshape(-1), output.numel()))
    return _completed_work(async_op)


def _return_unchanged(tensor: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
    return _completed_work(async_op)


def _return_nothing(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    return _completed_work(async_op)


_LOCAL: dict[str, Callable[..., Any]] = {
    "all_gather_single": _all_gather,  # since torch 2.13; the next is its former name
    "all_gather_into_tensor": _all_gather,
    "all_gather": _all_gather_list,
    "reduce_scatter_single": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "all_reduce": _return_unchanged,
    "broadcast": _return_unchanged,
    "reduce": _return_unchanged,
    "barrier": _return_nothing,
}


def _repeat_part(part: torch.Tensor, count: int) -> torch.Tensor:
    """Repeat `part` to `count` elements; zeros if it is empty."""
    if not part.numel():
        return part.new_zeros(count)
    return part.repeat(-(-count // part.numel()))[:count]


def whole(shard: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Make a parameter in the shape, device and dtype of `like` from this rank's shard alone.

    `offset`: the parameter's beginning among all gathered elements. With one rank, the result is the parameter.
    """
    flat = shard.detach().reshape(-1).to(like.device, like.dtype)
    return _repeat_part(flat, offset + like.numel())[offset:].view(like.shape)


def run_alone(gm: Any, values: list[Any]) -> Any:
    """Run a graph with its own collectives replaced by local results. No gradients are computed."""
    exchanges = [node for node in gm.graph.nodes if node.op == "call_function" and _functional_name(node.target)]
    if not exchanges:
        return gm(*values)

    class Answering(Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            name = _functional_name(target)
            return _local_result(name, args, kwargs) if name else super().call_function(target, args, kwargs)

    return Answering(gm).run(*values)


def _functional_name(target: Any) -> str:
    """The name of a functional collective, or of a wait; empty for all other operators."""
    return target._schema.name.partition("::")[2] if getattr(target, "namespace", "") == FUNCTIONAL else ""


def _local_result(name: str, args: Any, kwargs: Any) -> Any:
    """Local result of a functional collective on a tensor or a list of tensors."""
    if isinstance(args[0], list | tuple):
        return [_local_result(name, (value, *args[1:]), kwargs) for value in args[0]]
    value, out = args[0], kwargs.get("out")
    kind = KINDS.get(name.removesuffix("_out"))
    # waits, and those in place, return what they are given
    made = value if kind is None else _of_this_rank(kind, value, args)
    return made if out is None else out.copy_(made)


def _of_this_rank(kind: CollectiveKind, value: torch.Tensor, args: Any) -> torch.Tensor:
    match COLLECTIVES[kind].result:
        case "same" | "copy":
            return value.clone()
        case "gathered":
            return value.repeat(args[1], *[1] * (value.dim() - 1))
        case "part":
            return value[: value.shape[0] // args[2]].clone()
        case "splits":
            rows = sum(args[1])
            return _repeat_part(value.reshape(-1), rows * value[:1].numel()).view(rows, *value.shape[1:])
