"""Tensors: work around a backward, holders of a tensor, and memory of CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the backward that runs now."""
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(callback)


@contextlib.contextmanager
def record_autograd() -> Iterator[None]:
    """Record autograd information, also inside an operator, where recording is disabled."""
    import torch

    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    kinds = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)
    for kind in kinds:
        exclude = exclude.remove(kind)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.inference_mode(False), torch.enable_grad():
        yield


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks may change its gradient."""
    return bool(tensor._backward_hooks)


def on_gradient(tensor: torch.Tensor, callback: Callable[[], None]) -> None:
    """Run `callback` inside each backward that reaches this result."""
    tensor.register_hook(lambda _: callback())  # type: ignore[no-untyped-call, unused-ignore]


def will_accumulate(parameter: torch.Tensor) -> bool:
    """Whether the current backward will add to this parameter's .grad (torch.autograd.grad does not)."""
    import torch
    from torch.autograd.graph import get_gradient_edge

    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:
        return False  # torch raises it for a leaf that torch.autograd.grad was asked for


def keep_for_backward(result: Any, thing: Any) -> None:
    """Keep `thing` alive as long as a backward from `result`, or from a tensor computed from it, is possible."""
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves(result):
        node = getattr(leaf, "grad_fn", None)
        if node is not None:
            node.metadata["dcompile"] = thing


def fake_mode() -> Any:
    """Mode in which tensors have shapes and no memory; real tensors are converted to fake ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Allocate real tensors in this context, although a graph is being compiled with fake ones."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield


def is_relabelled(value: Any) -> bool:
    """Whether this is a tensor of a user's subclass that changes no operator."""
    import torch

    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or type(value) is torch.Tensor:
        return False
    return type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def is_received_later(value: Any) -> bool:
    """Whether this is the result of a collective that an eager operator waits for (AsyncCollectiveTensor)."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(value, module.AsyncCollectiveTensor)


def as_if_received(value: Any) -> Any:
    """Return the plain tensor that is inside, without waiting; for fake tensors."""
    return value.elem.detach().requires_grad_(value.requires_grad)


def received(value: Any) -> Any:
    """Wait for a tensor that is received later; return it as a plain tensor, also for autograd."""
    import torch

    if not (value.requires_grad and torch.is_grad_enabled()):
        return value.trigger_wait()
    return _receive().apply(value)


@functools.cache
def _receive() -> Any:
    import torch

    class Receive(torch.autograd.Function):
        """torch's own wait returns the tensor inside, which requires no gradient."""

        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value.trigger_wait().detach()  # a new tensor: autograd writes into it

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0]

    return Receive


def backward_task() -> int:
    """Number of the backward that runs now; -1 outside."""
    import torch

    return int(torch._C._current_graph_task_id())


def is_compiled_backward(node: Any) -> bool:
    """Whether this node of the autograd graph runs a backward that AOTAutograd compiled."""
    return bool(type(node).__name__ == "CompiledFunctionBackward")


def has_flash_attention() -> bool:
    """Whether attention on GPUs may use the kernels that share key heads among queries: they are not disabled."""
    import torch

    return bool(torch.backends.cuda.flash_sdp_enabled())  # type: ignore[no-untyped-call, unused-ignore]


def raw_stream(device: int) -> int:
    """Current stream of a GPU, as the CUDA driver's handle."""
    import torch

    fast = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(fast(device) if fast is not None else torch.cuda.current_stream(device).cuda_stream)


def forget_blas_workspaces() -> None:
    """Free torch's cuBLAS workspaces, one for each stream; they are allocated again when needed."""
    import torch

    torch._C._cuda_clearCublasWorkspaces()


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Fail with `message` unless `condition` holds, without waiting for the GPU."""
    import torch

    torch._assert_async(condition, message)


def storage_use_count(tensor: torch.Tensor) -> int:
    """Number of tensors (and other holders) that refer to this tensor's storage, `tensor` itself included.

    All Python code shares one storage object, which counts like one tensor. The object's own reference count shows
    whether other code holds it.
    """
    import torch

    storage = tensor.untyped_storage()
    others = sys.getrefcount(storage) - _lonely_storage_references()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1 + others  # `storage` itself is one


class KeptTensor:
    """A kept tensor, with a check for other holders of its storage. Each call runs the check, so it takes 0.4 us."""

    __slots__ = ("_address", "_memory", "_references", "_storage", "_uses", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        """`tensor` is new: nothing else holds it."""
        import torch

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
        import torch

        if (self._storage.data_ptr(), self._storage.nbytes()) != self._memory:
            return False
        same = torch._C._storage_Use_Count(self._address) == self._uses
        return bool(same and sys.getrefcount(self._storage) == self._references)


@functools.cache
def _lonely_storage_references() -> int:
    """Reference count of a storage object with one local variable: 2 or 3, depending on torch and Python."""
    import torch

    tensor = torch.empty(1, device="cpu")  # kept: a living tensor's reference counts in some versions
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


def is_only_reference(tensor: torch.Tensor) -> bool:
    """Whether one local variable of the caller's caller is the only reference to a tensor and its storage.

    Call it as `is_only_reference(x)` in a function that got `x` as its only argument from that variable.
    """
    import torch

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
    return _between(given)


def _between(given: object) -> int:
    return _count(given)


def _count(given: object) -> int:
    return sys.getrefcount(given)


@functools.cache
def _uses_of_one_tensor() -> int:
    """Holders of a storage with one tensor, while Python holds the storage object."""
    import torch

    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


def storage_holders(storage: Any) -> int:
    """Number of tensors and storages that refer to one memory; all Python code together counts as one."""
    import torch

    return int(torch._C._storage_Use_Count(storage._cdata))


def storage_key(tensor: torch.Tensor) -> int:
    """Number that is equal for tensors, including fake ones, that share memory."""
    return int(tensor.untyped_storage()._cdata)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has accessible memory of its own: it is no wrapper of a subclass or of `torch.func`."""
    from torch._C._functorch import is_functorch_wrapped_tensor

    return not (is_wrapper(tensor) or is_functorch_wrapped_tensor(tensor))


def storage_at(address: int, nbytes: int, device: Any) -> Any:
    """Storage over memory that somebody else owns."""
    import torch

    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


def addresses_are(args: list[Any], addresses: list[int], positions: list[int]) -> bool:
    """Whether the tensors at these positions have the given addresses.

    In Python it takes 20 us for 300, so it is done in C++. `addresses` has a number for each argument. Both are lists,
    since the C++ function takes nothing else.
    """
    import torch

    quick = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # only in builds with CUDA
    if quick is not None:
        return bool(quick(args, addresses, positions))
    return all(args[position].data_ptr() == addresses[position] for position in positions)


def leaves(value: Any) -> list[Any]:
    """Leaves of nested lists, dictionaries and the like, as torch flattens them."""
    from torch.utils._pytree import tree_leaves

    found: list[Any] = tree_leaves(value)
    return found


def is_static_input(tensor: torch.Tensor) -> bool:
    """Whether Dynamo or the user has marked this tensor's address as static (buffers, caches)."""
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def only_python_holds(tensor: torch.Tensor) -> bool:
    """Whether no C++ code, such as a retained autograd graph, holds this tensor besides Python."""
    count = getattr(tensor, "_use_count", None)
    return count is not None and int(count()) <= 1


def quick_empty(device: str) -> Callable[..., torch.Tensor]:
    """Allocator (shape, strides, dtype) -> tensor on the CPU or current GPU, if possible without the dispatcher.

    It takes 0.3 us instead of 0.7 (torch 2.13, one core of an AMD EPYC).
    """
    import torch
    from torch._C._dynamo import guards

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return getattr(guards, f"_empty_strided_{device}", empty)


def quick_look() -> Callable[..., torch.Tensor]:
    """Function (tensor, shape, strides, offset) -> new tensor over the same memory: 0.5 us, while as_strided takes 0.9.

    The offset is added to the tensor's. Shape and strides are tuples: torch 2.15 takes no torch.Size.
    """
    import torch
    from torch._C._dynamo import guards

    def look(tensor: torch.Tensor, shape: Any, strides: Any, more: int = 0) -> torch.Tensor:
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset() + more, shape, strides)

    return getattr(guards, "_reinterpret_tensor", look)


def quick_grad_mode() -> Callable[[bool], None]:
    """Setter of this thread's grad mode. torch.no_grad() takes five calls."""
    import torch

    set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
    return set_grad_enabled


def direct_call(overload: Any) -> Any:
    """Callable of an OpOverload: its own `__call__`, in Python, takes 0.3 us."""
    return getattr(overload, "_op", overload)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class wraps plain tensors (a DTensor)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


def fake_memory(nbytes: int) -> Any:
    """Memory for fake tensors, of this many bytes. Not to be called inside a fake mode."""
    import torch

    return torch.empty_strided((nbytes,), (1,), dtype=torch.uint8, device="meta").untyped_storage()


def fake_like(fake: Any, storage: Any) -> Any:
    """Fake tensor like `fake`, in other memory.

    Not to be called inside a fake mode; a mode's operators would take longer.
    """
    return fake_tensor(
        fake.fake_mode, fake.dtype, fake.device, storage, fake.storage_offset(), fake.shape, fake.stride()
    )


def fake_tensor(
    mode: Any, dtype: torch.dtype, device: Any, storage: Any, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> Any:
    """A fake tensor of a mode, in memory of `fake_memory`, or of its own where `storage` is None.

    Not inside a mode of fake tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    if storage is None:
        return FakeTensor(mode, meta_tensor(dtype, None, offset, shape, strides), device)
    with in_kernel_invocation_manager(mode):
        made = meta_tensor(dtype, storage, offset, shape, strides)
    return FakeTensor(mode, made, device)


def meta_tensor(
    dtype: torch.dtype, storage: Any, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """A meta tensor in memory of `fake_memory`, or of its own where `storage` is None."""
    import torch

    if storage is None:
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    made = torch.empty_strided((0,), (1,), dtype=dtype, device="meta")
    return made.set_(storage, offset, shape, strides)  # type: ignore[call-overload, no-any-return, unused-ignore]


def fake_copy(mode: Any, prototype: torch.Tensor, device: Any) -> Any:
    """A fake tensor with the layout of a meta tensor, in its storage."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor(mode, prototype, device)


@functools.cache
def slow_products() -> frozenset[torch.dtype]:
    """16-bit dtypes whose matrices ATen multiplies by plain loops on this processor, since oneDNN has no kernels.

    float16 is not among them, though it is as slow. ATen's loops round differently than sums in float32: a loss under
    FSDP was 5e-4 off stock's.
    """
    import torch

    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        has = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except (AttributeError, RuntimeError):  # torch was built without oneDNN
        has = False
    return frozenset() if has else frozenset([torch.bfloat16])


@functools.cache
def saturates_float8() -> bool:
    """Whether ATen converts larger numbers to the largest float8_e4m3fn, as from 2.13 on; before, they become NaN."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        number = torch.full((), 1000.0, dtype=torch.float32, device="cpu").to(torch.float8_e4m3fn)
        return bool(number.float().isfinite())


def is_number(value: Any) -> bool:
    """Whether a value is stored like numbers in the program text: a CPU tensor without dimensions."""
    import torch

    return isinstance(value, torch.Tensor) and not value.dim() and value.device.type == "cpu"


def multiply_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply each in place; on a GPU, many per launch."""
    import torch

    torch._foreach_mul_(tensors, factor)


def zero_all(tensors: list[torch.Tensor]) -> None:
    """Fill each with zeros; on a GPU, many per launch."""
    import torch

    torch._foreach_zero_(tensors)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target and convert it, on GPUs in one kernel. Targets have one dtype, sources another."""
    import torch

    torch._foreach_copy_(targets, sources)
