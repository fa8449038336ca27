"""Tensors: fake ones, storages, fast entry points of ATen, DTensors, and what this build of torch does with dtypes.

Below, torch's own cross-entropy of a linear layer in chunks, by its private operators.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C._dynamo import guards
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.fx.node import map_aggregate
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from dcompile.compat.storage_holders import storage_use_count


def fake_mode() -> Any:
    """Mode in which tensors have shapes and no memory; real tensors are converted to fake ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Allocate real tensors in this context, although a graph is being compiled with fake ones."""
    with unset_fake_temporarily():
        yield


def is_relabelled(value: Any) -> bool:
    """Whether this is a tensor of a user's subclass that changes no operator."""
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
    if not (value.requires_grad and torch.is_grad_enabled()):
        return value.trigger_wait()
    return _Receive.apply(value)  # type: ignore[no-untyped-call, unused-ignore]


class _Receive(torch.autograd.Function):
    """torch's own wait returns the tensor inside, which requires no gradient."""

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        return value.trigger_wait().detach()  # a new tensor: autograd writes into it

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def has_flash_attention() -> bool:
    """Whether attention on GPUs may use the kernels that share key heads among queries: they are not disabled."""
    return bool(torch.backends.cuda.flash_sdp_enabled())  # type: ignore[no-untyped-call, unused-ignore]


def raw_stream(device: int) -> int:
    """Current stream of a GPU, as the CUDA driver's handle."""
    fast = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(fast(device) if fast is not None else torch.cuda.current_stream(device).cuda_stream)


def forget_blas_workspaces() -> None:
    """Free torch's cuBLAS workspaces, one for each stream; they are allocated again when needed."""
    torch._C._cuda_clearCublasWorkspaces()


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Fail with `message` unless `condition` holds, without waiting for the GPU."""
    torch._assert_async(condition, message)


def storage_key(tensor: torch.Tensor) -> int:
    """Number that is equal for tensors, including fake ones, that share memory."""
    return int(tensor.untyped_storage()._cdata)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has accessible memory of its own: it is no wrapper of a subclass or of `torch.func`."""
    return not (is_wrapper(tensor) or is_functorch_wrapped_tensor(tensor))


def storage_at(address: int, nbytes: int, device: Any) -> Any:
    """Storage over memory that somebody else owns."""
    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


def addresses_are(args: list[Any], addresses: list[int], positions: list[int]) -> bool:
    """Whether the tensors at these positions have the given addresses.

    In Python it takes 20 us for 300, so it is done in C++. `addresses` has a number for each argument. Both are lists,
    since the C++ function takes nothing else.
    """
    quick = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # only in builds with CUDA
    if quick is not None:
        return bool(quick(args, addresses, positions))
    found = map(torch.Tensor.data_ptr, map(args.__getitem__, positions))
    return all(map(operator.eq, found, map(addresses.__getitem__, positions)))


def leaves(value: Any) -> list[Any]:
    """Leaves of nested lists, dictionaries and the like, as torch flattens them."""
    found: list[Any] = tree_leaves(value)
    return found


def is_static_input(tensor: torch.Tensor) -> bool:
    """Whether Dynamo or the user has marked this tensor's address as static (buffers, caches)."""
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def quick_empty(device: str) -> Callable[..., torch.Tensor]:
    """Allocator (shape, strides, dtype) -> tensor on the CPU or current GPU, if possible without the dispatcher.

    It takes 0.3 us instead of 0.7 (torch 2.13, one core of an AMD EPYC).
    """

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return getattr(guards, f"_empty_strided_{device}", empty)


def quick_view_function() -> Callable[..., torch.Tensor]:
    """Function (tensor, shape, strides, offset) -> new tensor over the same memory: 0.5 us, while as_strided takes 0.9.

    The offset is added to the tensor's. Shape and strides are tuples: torch 2.15 takes no torch.Size.
    """

    def strided_view(tensor: torch.Tensor, shape: Any, strides: Any, more: int = 0) -> torch.Tensor:
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset() + more, shape, strides)

    return getattr(guards, "_reinterpret_tensor", strided_view)


def direct_call(overload: Any) -> Any:
    """Callable of an OpOverload: its own `__call__`, in Python, takes 0.3 us."""
    return getattr(overload, "_op", overload)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class wraps plain tensors (a DTensor)."""
    return is_traceable_wrapper_subclass(tensor)


def fake_memory(nbytes: int) -> Any:
    """Memory for fake tensors, of this many bytes. Not to be called inside a fake mode."""
    return torch.empty_strided((nbytes,), (1,), dtype=torch.uint8, device="meta").untyped_storage()


def fake_like(fake: Any, storage: Any) -> Any:
    """Fake tensor like `fake`, in other memory, or in memory of its own where `storage` is None.

    Not to be called inside a fake mode; a mode's operators would take longer.
    """
    return fake_tensor(
        fake.fake_mode, fake.dtype, fake.device, storage, fake.storage_offset(), fake.shape, fake.stride()
    )


def in_memory_of_their_own(fakes: Sequence[Any]) -> list[Any]:
    """Fake tensors of these layouts, none in the memory of another; other values as they are. Outside of fake modes.

    Inside a graph from the cache one tensor may stand for all of a layout. Other compilers may ask which are the same.
    """
    found, known = list[Any](), set[int]()
    for fake in fakes:
        made = fake
        if isinstance(fake, torch.Tensor) and fake.layout is torch.strided:
            if storage_key(fake) in known:
                made = fake_like(fake, fake_memory(fake.untyped_storage().nbytes()))
            known.add(storage_key(made))
        found.append(made)
    return found


def fake_tensor(
    mode: Any, dtype: torch.dtype, device: Any, storage: Any, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> Any:
    """A fake tensor of a mode, in memory of `fake_memory`, or of its own where `storage` is None.

    Not inside a mode of fake tensors.
    """
    if storage is None:
        return FakeTensor(mode, meta_tensor(dtype, None, offset, shape, strides), device)
    with in_kernel_invocation_manager(mode):
        made = meta_tensor(dtype, storage, offset, shape, strides)
    return FakeTensor(mode, made, device)


def meta_tensor(
    dtype: torch.dtype, storage: Any, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """A meta tensor in memory of `fake_memory`, or of its own where `storage` is None."""
    if storage is None:
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    made = torch.empty_strided((0,), (1,), dtype=dtype, device="meta")
    return made.set_(storage, offset, shape, strides)  # type: ignore[call-overload, no-any-return, unused-ignore]


def fake_copy(mode: Any, prototype: torch.Tensor, device: Any) -> Any:
    """A fake tensor with the layout of a meta tensor, in its storage."""
    return FakeTensor(mode, prototype, device)


def fake_tensor_type() -> type:
    """Type of fake tensors."""
    return FakeTensor


def plain_tensor_types() -> tuple[type, ...]:
    """Types of tensors without dispatch of their own."""
    return torch.Tensor, torch.nn.Parameter, fake_tensor_type()


def viewed_tensor(value: torch.Tensor) -> tuple[torch.Tensor, Any] | None:
    """The tensor of which autograd knows this one as a view, and in which mode the view was made; None for others."""
    if not value._is_view() or value.is_inference():
        return None
    return value._base, torch._C._autograd._get_creation_meta(value)  # type: ignore[return-value, arg-type, unused-ignore]


def is_overload(value: Any) -> bool:
    """Whether a value is an operator with an overload's name, such as `aten.add.Tensor`."""
    return isinstance(value, torch._ops.OpOverload)


def converts(op: Any) -> bool:
    """Whether an operation is ATen's own conversion to another dtype, layout or device."""
    return op is torch.ops.aten._to_copy.default


def is_operator(value: Any) -> bool:
    """The same, also for an operator without an overload's name."""
    return isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket)


def fake_parameter(mode: Any, value: Any) -> Any:
    """A mode's own fake tensor of a plain parameter, as it is found later; None for other values.

    The mode would copy all metadata, and remember the storage for tensors that share it. Hold the result: the mode has
    a weak reference. Use it for parameters of fixed sizes, outside of modes of fake tensors.
    """
    if type(value) is not torch.nn.Parameter or not _is_plain(value):
        return None
    grad = value.grad
    if grad is not None and not (type(grad) is torch.Tensor and _is_plain(grad) and not grad.requires_grad):
        return None
    made = _plain_fake(mode, value)
    made._is_param = True
    made.requires_grad_(value.requires_grad)
    if grad is not None:
        made.grad = _plain_fake(mode, grad)
    mode.fake_tensor_converter.set_tensor_memo(value, made)
    return made


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is a strided leaf without marks, which has all of a storage that no other tensor shares."""
    if value.layout is not torch.strided or value.is_quantized or value.is_neg() or value.is_conj():
        return False
    if value._is_view() or value.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return False
    if not value.is_leaf or (value.requires_grad and getattr(value, "grad_dtype", value.dtype) != value.dtype):
        return False
    if value.storage_offset() or value.untyped_storage().nbytes() != value.nbytes:
        return False
    return storage_use_count(value) == 1  # asked while no variable here holds the storage


def _plain_fake(mode: Any, value: torch.Tensor) -> Any:
    return fake_tensor(mode, value.dtype, value.device, None, 0, value.shape, value.stride())


@functools.cache
def slow_products() -> frozenset[torch.dtype]:
    """16-bit dtypes whose matrices ATen multiplies by plain loops on this processor, since oneDNN has no kernels.

    float16 is not among them, though it is as slow. ATen's loops round differently than sums in float32: a loss under
    FSDP was 5e-4 off stock's.
    """
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
    with unset_fake_temporarily():
        number = torch.full((), 1000.0, dtype=torch.float32, device="cpu").to(torch.float8_e4m3fn)
        return bool(number.float().isfinite())


def is_number(value: Any) -> bool:
    """Whether a value is stored like numbers in the program text: a CPU tensor without dimensions."""
    return isinstance(value, torch.Tensor) and not value.dim() and value.device.type == "cpu"


def multiply_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply each in place; on a GPU, many per launch."""
    torch._foreach_mul_(tensors, factor)


def zero_all(tensors: list[torch.Tensor]) -> None:
    """Fill each with zeros; on a GPU, many per launch."""
    torch._foreach_zero_(tensors)


class StepCounters:
    """Counters that are tensors, one for each parameter, to all of which 1 is added in each step.

    On a GPU that is a launch or two. On a CPU, float32 is counted in memory itself: for 147 counters, 75 us where ATen
    takes 670 (a busy core).
    """

    def __init__(self, steps: list[torch.Tensor]) -> None:
        import ctypes

        self.steps = steps
        self._places = [*map(torch.Tensor.data_ptr, steps)]
        plain = all(x.is_cpu and x.dtype is torch.float32 and x.numel() == 1 for x in steps)
        self._cells = [*map(ctypes.c_float.from_address, self._places)] if plain else []

    def are(self, steps: list[torch.Tensor]) -> bool:
        """Are these the same tensors, in the same memory?"""
        if len(steps) != len(self.steps) or not all(map(operator.is_, steps, self.steps)):
            return False
        return [*map(torch.Tensor.data_ptr, steps)] == self._places

    def count(self) -> None:
        """Add 1 to each, if `are` has found them."""
        if not self._cells:  # a number would become a tensor for each of them on a CPU
            torch._foreach_add_(self.steps, torch.ones((), device="cpu") if self.steps[0].is_cpu else 1)
            return
        for cell in self._cells:
            cell.value += 1
        torch.autograd.graph.increment_version(self.steps)


def lazy_functions() -> dict[str, Any]:
    """Return torch's functions on lists of tensors that pending gradients understand, by what they do."""
    return {
        "norms": torch._foreach_norm,
        "multiply": torch._foreach_mul_,
        "zero": torch._foreach_zero_,
        "unscale": torch._amp_foreach_non_finite_check_and_unscale_,
    }


def in_layout_of(gradient: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Give a gradient its parameter's layout, as autograd does. Copies only if the parameter is not contiguous."""
    return gradient if param.is_contiguous() else torch.empty_like(param, requires_grad=False).copy_(gradient)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target and convert it, on GPUs in one kernel. Targets have one dtype, sources another."""
    torch._foreach_copy_(targets, sources)


def largest_magnitudes(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Largest magnitude of each tensor, as a tensor of shape (number,), on GPUs by few kernels."""
    return torch.stack(torch._foreach_norm(tensors, float("inf")))


def scaled_cast(source: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast float32 products with a scale to an 8-bit float; what is too large becomes the largest number."""
    limit = torch.finfo(dtype).max
    return (source.float() * scale).clamp(-limit, limit).to(dtype)


def is_dtensor(value: Any) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_mesh(value: Any) -> bool:
    """Whether this is a device mesh, which newer versions of Dynamo make an input of the graph."""
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(value, module.DeviceMesh)


def is_opaque(value: Any) -> bool:
    """Whether traced graphs pass this on without reading it: a mesh, a process group, or a fake object for one.

    It compares classes only: `isinstance` of a mesh calls a function of torch's. In a step compiled as a whole, the
    backward is compiled while it runs, and Dynamo would trace that function.
    """
    named = (
        ("torch._library.fake_class_registry", "FakeScriptObject"),
        ("torch.distributed.device_mesh", "DeviceMesh"),
        ("torch.distributed", "ProcessGroup"),
    )
    opaque = [getattr(sys.modules.get(module), name, None) for module, name in named]
    return any(kind is not None and kind in type(value).__mro__ for kind in opaque)


def dtensor_like(example: Any) -> Callable[[Any], Any]:
    """Function that makes a DTensor like `example` (size, placements) from this rank's part, also for autograd.

    `example` may be one that Dynamo traces with: newer versions have a fake object for the mesh there.
    """
    mesh, placements = example.device_mesh, example.placements
    mesh = getattr(mesh, "real_obj", mesh)
    shape, stride = example.shape, example.stride()

    def as_dtensor(local: Any) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    return as_dtensor


def move_graph_to_gpu(gm: Any) -> None:
    """Move a functional graph from the CPU to a GPU: devices among arguments, and the traced values of all nodes.

    Values keep the strides that they were traced with on the CPU. A library call that returns others on the GPU is
    copied at run time, as everywhere (`HostProgramServices.fit`).
    """
    gpu = torch.device("cuda")

    def device(argument: Any) -> Any:
        return gpu if isinstance(argument, torch.device) and argument.type == "cpu" else argument

    def value(traced: Any) -> Any:
        with traced.fake_mode:
            return torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype, device=gpu)

    for node in gm.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, device), map_aggregate(node.kwargs, device)
        if "val" in node.meta:
            node.meta["val"] = _pytree.tree_map_only(torch.Tensor, value, node.meta["val"])
    gm.recompile()


def without_memory(
    kind: type[torch.Tensor], like: torch.Tensor, device: torch.device | None = None, learns: bool = False
) -> Any:
    """Return a tensor of a subclass with another one's shape, strides and dtype, and no memory.

    `device`: its device, if it is not the other one's. `learns`: whether it requires a gradient.
    """
    return torch.Tensor._make_wrapper_subclass(
        kind,
        like.shape,
        strides=like.stride(),
        dtype=like.dtype,
        device=device or like.device,
        layout=like.layout,
        requires_grad=learns,
    )


def as_plain() -> Any:
    """Return a context in which functions of tensor subclasses are not asked (`__torch_function__`)."""
    return torch._C.DisableTorchFunctionSubclass()


def local_part(tensor: Any) -> torch.Tensor:
    """Return the part of a DTensor that this rank holds, outside of autograd; another tensor as it is."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[no-any-return]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor as a plain tensor with all its elements; another tensor as it is."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def mark_static(tensor: torch.Tensor) -> None:
    """Tell recordings that a tensor's address stays."""
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


# --- the loss of a linear layer in chunks -----------------------------------------------------------------------------


_OPERATORS = (
    "torch_nn._linear_cross_entropy_batch_chunked.default",
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default",
)
"""What `torch.nn.functional.linear_cross_entropy` calls where it is given `options`. The second has one loss a row."""
_DEFAULTS = {"reduction": "none", "label_smoothing": 0.0}


def chunked_arguments(node: Any) -> dict[str, Any] | None:
    """Return the arguments of a call of such an operator by name; None for other nodes.

    So it is where gradients that the first operator returns beside the loss have readers, where dtypes are mixed, and
    where targets are probabilities, as torch 2.15 has them.
    """
    if node.op != "call_function" or str(node.target) not in _OPERATORS:
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**_DEFAULTS, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    hidden, weight, target = (given[name].meta["example_value"] for name in ("input", "linear_weight", "target"))
    reads_loss = given["reduction"] == "none" or all(user.args[1:] == (0,) for user in node.users)
    is_known = hidden.dtype == weight.dtype and not target.is_floating_point()
    return given if node.users and reads_loss and is_known else None
