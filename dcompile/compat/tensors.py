"""What runs around a backward, who holds a tensor, and memory of CUDA graphs."""

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
    """Run `callback` when the backward that is now running is through."""
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(callback)


@contextlib.contextmanager
def record_autograd() -> Iterator[None]:
    """Record what autograd needs, also inside an operator, where it has been left behind."""
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
    """Inside a backward: whether it is going to add to this parameter's .grad (torch.autograd.grad does not)."""
    import torch
    from torch.autograd.graph import get_gradient_edge

    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:
        return False  # what torch answers for a leaf that torch.autograd.grad was asked for


def keep_for_backward(result: Any, thing: Any) -> None:
    """Keep `thing` alive for as long as a backward from `result`, or from what was made of it, may come."""
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves(result):
        node = getattr(leaf, "grad_fn", None)
        if node is not None:
            node.metadata["dcompile"] = thing


def fake_mode() -> Any:
    """A mode in which tensors have shapes and no memory; others are taken for fake ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """What is made meanwhile has memory, although a graph is being compiled, where tensors are fake."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield


def is_relabelled(value: Any) -> bool:
    """Whether this is a tensor of a class of the user's own that leaves every operator as it is."""
    import torch

    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or type(value) is torch.Tensor:
        return False
    return type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def backward_task() -> int:
    """Number of the backward that is now running; -1 outside."""
    import torch

    return int(torch._C._current_graph_task_id())


def is_compiled_backward(node: Any) -> bool:
    """Whether this node of the autograd graph runs a backward that AOTAutograd compiled."""
    return bool(type(node).__name__ == "CompiledFunctionBackward")


def has_flash_attention() -> bool:
    """Whether attention on GPUs may use the kernels that share heads of keys among queries: nobody has said no."""
    import torch

    return bool(torch.backends.cuda.flash_sdp_enabled())  # type: ignore[no-untyped-call, unused-ignore]


def raw_stream(device: int) -> int:
    """The current stream of a GPU, as the CUDA driver takes it."""
    import torch

    fast = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(fast(device) if fast is not None else torch.cuda.current_stream(device).cuda_stream)


def forget_blas_workspaces() -> None:
    """Give back the memory that torch keeps for cuBLAS, a piece for each stream; it is allocated again when needed."""
    import torch

    torch._C._cuda_clearCublasWorkspaces()


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Stop with `message` unless `condition` holds, without waiting for the GPU to find out."""
    import torch

    torch._assert_async(condition, message)


def storage_use_count(tensor: torch.Tensor) -> int:
    """How many tensors (and other holders) refer to this tensor's storage, `tensor` itself included.

    All Python code shares one storage object, which counts as one tensor does; its own reference count tells whether
    anybody else has it.
    """
    import torch

    storage = tensor.untyped_storage()
    others = sys.getrefcount(storage) - _lonely_storage_references()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1 + others  # `storage` itself is one


class KeptTensor:
    """A tensor that is kept, and whether anybody else has its storage: asked at every call, so in 0.4 us."""

    __slots__ = ("_address", "_memory", "_references", "_storage", "_uses", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        """`tensor` is new: nobody else has it."""
        import torch

        self.tensor = tensor
        self._storage = tensor.untyped_storage()  # kept: it is one object for all Python code
        self._address = self._storage._cdata
        self._memory = (self._storage.data_ptr(), self._storage.nbytes())
        self._uses = torch._C._storage_Use_Count(self._address)
        self._references = sys.getrefcount(self._storage)

    def alone(self) -> bool:
        """No other tensor, storage object or holder in C++ refers to the storage, and its memory is still its own.

        Whoever had it may have freed its memory (`resize_(0)`), or put it where other processes read it
        (`share_memory_`, `multiprocessing` queues): either gives the storage other memory.
        """
        import torch

        if (self._storage.data_ptr(), self._storage.nbytes()) != self._memory:
            return False
        same = torch._C._storage_Use_Count(self._address) == self._uses
        return bool(same and sys.getrefcount(self._storage) == self._references)


@functools.cache
def _lonely_storage_references() -> int:
    """The reference count of a storage object that one local variable has: 2 or 3, depending on torch and Python."""
    import torch

    tensor = torch.empty(1, device="cpu")  # kept: the reference that a living tensor has to it counts, in some versions
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


def is_only_reference(tensor: torch.Tensor) -> bool:
    """Whether one local variable of the caller's caller is all that refers to a tensor and its storage.

    Called as `is_only_reference(x)` by a function that got `x` as its one argument from that variable.
    """
    import torch

    if sys.getrefcount(tensor) != _references_of_one_variable() or not only_python_holds(tensor):
        return False
    storage = tensor.untyped_storage()
    lonely = sys.getrefcount(storage) == _lonely_storage_references()
    return lonely and int(torch._C._storage_Use_Count(storage._cdata)) == _uses_of_one_tensor()


def _references_of_one_variable() -> int:
    """What `sys.getrefcount` says two calls below the function that has the only reference.

    Pythons differ, and in one process a count kept from earlier was once not that of later calls, why is not known:
    what nobody else held was copied. So it is asked each time, of any object (0.2 us).
    """
    given = object()
    return _between(given)


def _between(given: object) -> int:
    return _count(given)


def _count(given: object) -> int:
    return sys.getrefcount(given)


@functools.cache
def _uses_of_one_tensor() -> int:
    """Holders of a storage that one tensor has, while Python looks at it."""
    import torch

    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


def storage_holders(storage: Any) -> int:
    """How many tensors and storages refer to one memory; all Python code together counts as one."""
    import torch

    return int(torch._C._storage_Use_Count(storage._cdata))


def storage_key(tensor: torch.Tensor) -> int:
    """The same number for tensors, fake ones too, that share memory."""
    return int(tensor.untyped_storage()._cdata)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own to ask about: no wrapper, be it a subclass's or `torch.func`'s."""
    from torch._C._functorch import is_functorch_wrapped_tensor

    return not (is_wrapper(tensor) or is_functorch_wrapped_tensor(tensor))


def storage_at(address: int, nbytes: int, device: Any) -> Any:
    """A storage over memory that somebody else owns."""
    import torch

    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


def addresses_are(args: list[Any], addresses: list[int], positions: list[int]) -> bool:
    """Whether the tensors at these positions lie where `addresses` has them: 20 us for 300 in Python, so in C++.

    `addresses` has a number for each argument. Lists, since the C++ function takes nothing else.
    """
    import torch

    quick = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # only in builds with CUDA
    if quick is not None:
        return bool(quick(args, addresses, positions))
    return all(args[position].data_ptr() == addresses[position] for position in positions)


def leaves(value: Any) -> list[Any]:
    """What nested lists, dictionaries and the like hold, as torch sees them."""
    from torch.utils._pytree import tree_leaves

    found: list[Any] = tree_leaves(value)
    return found


def is_static_input(tensor: torch.Tensor) -> bool:
    """Whether Dynamo or the user has said that this tensor stays where it is (buffers, caches)."""
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def only_python_holds(tensor: torch.Tensor) -> bool:
    """Whether no C++ code, such as an autograd graph that is retained, holds this tensor beside Python."""
    count = getattr(tensor, "_use_count", None)
    return count is not None and int(count()) <= 1


def quick_empty(device: str) -> Callable[..., torch.Tensor]:
    """(shape, strides, dtype) -> memory on the CPU or the current GPU, where torch has it without the dispatcher.

    0.3 for 0.7 us (torch 2.13, one core of an AMD EPYC).
    """
    import torch
    from torch._C._dynamo import guards

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return getattr(guards, f"_empty_strided_{device}", empty)


def quick_look() -> Callable[..., torch.Tensor]:
    """(tensor, shape, strides, offset) -> a tensor of its own over the same memory: 0.5 us, where as_strided takes 0.9.

    The offset is added to the tensor's. Shape and strides are tuples: torch 2.15 takes no torch.Size.
    """
    import torch
    from torch._C._dynamo import guards

    def look(tensor: torch.Tensor, shape: Any, strides: Any, more: int = 0) -> torch.Tensor:
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset() + more, shape, strides)

    return getattr(guards, "_reinterpret_tensor", look)


def quick_grad_mode() -> Callable[[bool], None]:
    """(whether) -> nothing: whether this thread records gradients from now on. torch.no_grad() takes five calls."""
    import torch

    set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
    return set_grad_enabled


def direct_call(overload: Any) -> Any:
    """What an OpOverload calls: its own `__call__`, in Python, takes 0.3 us."""
    return getattr(overload, "_op", overload)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class of its own that holds plain ones (a DTensor)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


def fake_memory(nbytes: int) -> Any:
    """Memory for fake tensors, of this many bytes. Not inside a mode of fake tensors."""
    import torch

    return torch.empty_strided((nbytes,), (1,), dtype=torch.uint8, device="meta").untyped_storage()


def fake_like(fake: Any, storage: Any) -> Any:
    """A fake tensor like `fake`, in other memory. Not inside a mode of fake tensors; their operators take longer."""
    return fake_tensor(
        fake.fake_mode, fake.dtype, fake.device, storage, fake.storage_offset(), fake.shape, fake.stride()
    )


def fake_tensor(
    mode: Any, dtype: torch.dtype, device: Any, storage: Any, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> Any:
    """A fake tensor of a mode, in memory of `fake_memory`, or of its own where `storage` is None.

    Not inside a mode of fake tensors.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    if storage is None:
        return FakeTensor(mode, torch.empty_strided(shape, strides, dtype=dtype, device="meta"), device)
    made = torch.empty_strided((0,), (1,), dtype=dtype, device="meta")
    with in_kernel_invocation_manager(mode):
        made.set_(storage, offset, shape, strides)  # type: ignore[call-overload, unused-ignore]
    return FakeTensor(mode, made, device)


@functools.cache
def slow_products() -> frozenset[torch.dtype]:
    """The 16-bit dtypes whose matrices ATen multiplies by plain loops on this processor, oneDNN having no kernels.

    Not float16, which is as slow: ATen's loops come to other roundings there than sums in float32 do, and a loss under
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
    """Whether ATen makes the largest number of float8_e4m3fn of larger ones, as from 2.13 on: NaN before."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        number = torch.full((), 1000.0, dtype=torch.float32, device="cpu").to(torch.float8_e4m3fn)
        return bool(number.float().isfinite())


def is_number(value: Any) -> bool:
    """Whether a value is kept as numbers in the program text are: a tensor of no dimensions on the CPU."""
    import torch

    return isinstance(value, torch.Tensor) and not value.dim() and value.device.type == "cpu"


def multiply_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply each in place, on a GPU many in a launch."""
    import torch

    torch._foreach_mul_(tensors, factor)


def zero_all(tensors: list[torch.Tensor]) -> None:
    """Fill each with zeros, on a GPU many in a launch."""
    import torch

    torch._foreach_zero_(tensors)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, converting it: on GPUs in one kernel. Targets have one dtype, sources another."""
    import torch

    torch._foreach_copy_(targets, sources)
